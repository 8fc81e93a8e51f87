"""Products of quantized tensors on 8-bit integers: codes, products forward and backward, and where they are faster."""
