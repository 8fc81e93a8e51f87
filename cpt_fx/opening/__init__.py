"""Fused operators, opened: the functions that stand around their products once these are nodes of the graph."""
