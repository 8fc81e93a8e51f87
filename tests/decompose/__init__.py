"""Fused operators, taken apart."""
