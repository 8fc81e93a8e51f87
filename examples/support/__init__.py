"""Shared by the example scripts: tasks, the training loop, options, data."""
