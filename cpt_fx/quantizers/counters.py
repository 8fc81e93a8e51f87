"""Counters that prove that a quantizer ran: a small integer tensor per quantizer, written while the model runs.

`counters[0]` counts runs. `counters[b]`, b = 1..32, holds the number of distinct levels seen at bit-width b, and
`counters[32 + b]` the relative rounding error seen there, in parts per billion. Levels and error are measured on a
sample, the first time a quantizer runs at a bit-width, and only where that needs no synchronization with a device.
At 32 bits there is no error; its place, `counters[ARMED]`, holds the state of a gradient quantizer: 0 before its first
forward pass, then 1 if no gradient is expected, 2 if one is, `DIFFERENTIATED` after one with a graph of its own.
`counters[SKIPPED]` counts batches that were not finite, which running ranges ignore; it is negative where a sparse
tensor was passed on unquantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpt_fx.common.arrays import array_of
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.quantizers.numerics import Grid, reduced_dims
from cpt_fx.quantizers.widths import is_free

COUNTER_LENGTH = 2 + 2 * FULL_PRECISION
ARMED = 2 * FULL_PRECISION
SKIPPED = ARMED + 1
DIFFERENTIATED = 3
SPARSE = -(2**32)
"""Added to `counters[SKIPPED]` for each sparse tensor: more than batches will ever be counted."""
SAMPLE = 8192
"""Size of the sample: far more than 2**8 levels, so an unquantized tensor cannot pass for an 8-bit one."""

_Sample = np.ndarray[Any, np.dtype[np.float64]]
Look = Callable[[Tensor, int | None, Grid, Tensor | None], None]
LOOKING: list[Look] = []
"""Functions that get each result of a quantizer, with its bit-width if known, grid and counters: a census adds one."""


def new_counters() -> Tensor:
    """Return counters that are all zero."""
    return torch.zeros(COUNTER_LENGTH, dtype=torch.int64)


def sample_group(x: Tensor, grid: Grid) -> _Sample:
    """Return up to `SAMPLE` elements that share one range, the first ones of the tensor.

    NumPy is faster on small arrays, and a census does not see it. It has no bfloat16, so the bits are passed.
    """
    is_bfloat16 = x.dtype is torch.bfloat16
    values = array_of(x.view(torch.int16) if is_bfloat16 else x)
    dims = reduced_dims(x.ndim, grid.keep, grid.over)
    group = values[tuple(slice(None) if dim in dims else slice(1) for dim in range(x.ndim))]
    sample = group.reshape(-1)[: grid.block or SAMPLE]
    return torch.from_numpy(sample).view(x.dtype).double().numpy() if is_bfloat16 else sample.astype(np.float64)


def show(result: Tensor, bits: int | None, grid: Grid, counters: Tensor | None = None) -> None:
    """Pass the result of a quantizer to everything in `LOOKING`."""
    for look in LOOKING:
        look(result, bits, grid, counters)


def count_levels(counters: Tensor, x: Tensor, result: Tensor, bits: int, grid: Grid) -> None:
    """Count the levels of `result` and measure its distance from `x`, unless that was done at this bit-width before."""
    if not 0 < bits < FULL_PRECISION or not (is_free(counters) and is_free(x)):
        return
    notes = counters.numpy()
    if notes[bits]:
        return
    seen = _measured(sample_group(x, grid), sample_group(result, grid))
    if seen is not None:
        notes[bits], notes[FULL_PRECISION + bits] = seen


def _measured(was: _Sample, now: _Sample) -> tuple[int, int] | None:
    """Return the number of levels and the error in parts per billion; None if a value is not finite."""
    if not np.isfinite(now).all():
        return None
    ordered, largest = np.sort(now), np.abs(was).max(initial=0.0)
    levels = int(np.count_nonzero(ordered[1:] != ordered[:-1])) + min(ordered.size, 1)
    if not largest > 0:
        return levels, 0
    # Scaled first: the squares of very large numbers would overflow.
    was, now = was / largest, now / largest
    return levels, round(float(np.linalg.norm(now - was) / np.linalg.norm(was)) * 10**9)
