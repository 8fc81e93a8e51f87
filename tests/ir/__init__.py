"""The graph, its state, and the tree that runs it."""
