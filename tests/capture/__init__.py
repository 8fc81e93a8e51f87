"""From code to graphs."""
