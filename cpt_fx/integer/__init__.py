"""Products of quantized tensors on 8-bit integers: the codes, the products forward and backward, where they pay."""
