"""Quantization to 8-bit codes: what the symmetric quantizer computes before it multiplies by its scale again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cpt_fx.formats import Rounding
from cpt_fx.quantizers import kernels as simulate
from cpt_fx.quantizers.numerics import Grid, range_of, reduced_dims, symmetric_codes, working_dtype

_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default
WIDEST = 8
"""The largest bit-width whose codes fit in int8."""


class Codes(NamedTuple):
    """A quantized tensor, `values * scale`: int8 codes, and one scale, or one per range, broadcastable to the codes.

    A range that is not finite makes the scale NaN, and with it every product: codes cannot hold a NaN, scales can.
    """

    values: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """Return the tensor as floating point numbers, bit for bit what the simulated quantizer returns."""
        return self.values.to(self.scale.dtype) * self.scale

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self.values.ndim

    @property
    def mT(self) -> Codes:  # noqa: N802
        """The matrix transpose; a vector stays as it is."""
        return self._moved(lambda part: part.mT) if self.ndim > 1 else self

    def unsqueeze(self, dim: int) -> Codes:
        """Insert a dim of size 1."""
        return self._moved(lambda part: part.unsqueeze(dim))

    def flatten(self, first: int, last: int) -> Codes:
        """Flatten several dims into one."""
        return self._moved(lambda part: part.flatten(first, last))

    def _moved(self, move: Callable[[Tensor], Tensor]) -> Codes:
        return Codes(move(self.values), move(self.scale) if self.scale.ndim else self.scale)


@torch.no_grad()
def quantize_codes(x: Tensor, bits: int, grid: Grid, seed: Tensor | None = None) -> Codes:
    """Quantize to codes of a symmetric grid of 1 to 8 bits. Noise is drawn from `seed`, or from a new one."""
    if not 1 <= bits <= WIDEST:
        raise ValueError(f"codes of int8 have 1 to {WIDEST} bits, got bits={bits}")
    if not x.numel():
        return Codes(torch.empty_like(x, dtype=torch.int8), torch.zeros((), dtype=working_dtype(x), device=x.device))
    x = x.detach()
    scales = torch.empty(scale_shape(grid, x.shape), dtype=torch.float32, device=x.device)
    if not (x.is_contiguous() or (grid.rounding is Rounding.NEAREST and not scales.ndim and _is_dense(x))):
        # Noise and ranges depend on the index of an element in the tensor, not on its place in memory.
        x = x.contiguous()
    if simulate.serves(x, grid, as_stored=True):
        return Codes(simulate.quantize(x, bits, grid, seed=seed, scales=scales).values, scales)
    width, values = torch.tensor(bits, device=x.device), x.to(working_dtype(x))
    value_range = range_of(x, grid.keep, grid.over)
    codes, half, scale = symmetric_codes(values, width, grid.rounding, value_range, seed)
    if bits == 1:
        # The values are half a step off the codes: double the codes, add one, and halve the scale.
        codes, scale = codes.mul_(2).add_(1), scale * half
    # Over an infinite scale the simulated quantizer returns NaN for finite numbers, too (0 * inf).
    finite = scale.isfinite()
    return Codes(codes.where(finite, 0.0).to(torch.int8), scale.where(finite, torch.nan))


def scale_shape(grid: Grid, shape: torch.Size) -> list[int]:
    """Return the shape of the scales of a tensor."""
    dims = reduced_dims(len(shape), grid.keep, grid.over)
    return [] if len(dims) == len(shape) else [1 if dim in dims else size for dim, size in enumerate(shape)]
