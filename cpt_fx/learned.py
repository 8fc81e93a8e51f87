"""Ranges that are trained: the gradient of quantize-dequantize with respect to its own range (LSQ, LSQ+)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_fx.formats import FULL_PRECISION
from cpt_fx.numerics import Extent, Grid, affine_scale, divisor, quantize_or_pass, working_dtype


class LearnedRange(torch.autograd.Function):
    """Quantize over a given range, with gradients to the tensor and to both ends of the range.

    With u = (x - z) / s, s = r / L and k the code, the result is k * s + z. Rounding passes the gradient through, so
    inside the range d/dx = 1, d/dr = (k - u) / L, d/dz = 0; outside d/dx = 0, d/dz = 1, and d/dr is 1 above, 0 below.
    The gradients of the range are divided by sqrt(N * L), N the number of elements: without that they grow with the
    size of the tensor, and one learning rate would not do for weights and ranges.
    """

    @staticmethod
    def forward(x: Tensor, zero_point: Tensor, range: Tensor, bits: Tensor, grid: Grid) -> Tensor:
        """Quantize."""
        return quantize_or_pass(x, bits.to(torch.int64), grid, Extent(zero_point, range))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the tensor: which elements were clamped is decided again in the backward pass."""
        x, zero_point, range, bits, grid = inputs
        ctx.floored = grid.floored
        # Copies: a layer that is called twice, or an optimizer, may write the range before the backward pass.
        ctx.save_for_backward(x, zero_point.clone(), range.clone(), bits.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensor, the zero point and the range."""
        x, zero_point, range, bits = ctx.saved_tensors
        dtype = working_dtype(x)
        width = bits.to(torch.int64)
        passes = (width >= FULL_PRECISION) | (width <= 0)
        levels = (torch.bitwise_left_shift(torch.ones_like(width), width.clamp(1, FULL_PRECISION)) - 1).to(dtype)
        u = (x.to(dtype) - zero_point) / divisor(affine_scale(range, levels, floored=ctx.floored))
        above, below = u > levels, u < 0
        inside = ~(above | below)
        upstream = gradient.to(dtype)
        to_x = torch.where(inside | passes, upstream, torch.zeros_like(upstream)).to(gradient.dtype)
        slope = torch.where(inside, (u.round() - u) / levels, above.to(dtype))
        share = torch.where(passes, torch.zeros_like(levels), torch.rsqrt(levels * max(x.numel(), 1)))
        to_range = ((upstream * slope).sum() * share).to(range.dtype).reshape(range.shape)
        to_zero = ((upstream * ~inside).sum() * share).to(zero_point.dtype).reshape(zero_point.shape)
        return to_x, to_zero, to_range, None, None
