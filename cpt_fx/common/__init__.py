"""Helpers for all packages: lazy names, files, and detection of compilers and torch.func around a call."""
