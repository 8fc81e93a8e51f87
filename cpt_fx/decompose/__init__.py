"""Decomposition of fused operators: their products become nodes, with functions for the code around them."""
