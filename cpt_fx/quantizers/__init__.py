"""Quantize-dequantize: the arithmetic, the operators, recomputation for the backward pass, and counters."""
