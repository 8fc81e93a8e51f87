"""What the example scripts share: tasks, the training loop, options, data."""
