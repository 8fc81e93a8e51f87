"""The graph that passes read and write: its metadata, its stages, its state, and the module tree that runs it."""
