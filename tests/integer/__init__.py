"""Products on integers."""
