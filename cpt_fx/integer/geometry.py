"""How a filter moves over images, and where the pixels of a convolution lie for `native/integer_convolutions.cpp`.

A plane holds every n-th row and column of an image with its padding. In it, what one tap of the filter sees at
neighbouring places are neighbouring pixels: places and pixels differ by an offset, one for every tap.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

Pair = tuple[int, ...]
"""One number for the height, one for the width."""


class Geometry(NamedTuple):
    """How the filter of a convolution moves."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> Pair:
        """Return how many places a filter has along the height and the width of images."""
        along = zip(size, kernel, *self, strict=True)
        places = tuple((s + 2 * pad - gap * (k - 1) - 1) // step + 1 for s, k, step, pad, gap in along)
        if places[0] < 1 or places[1] < 1:
            raise RuntimeError(
                f"a filter of {tuple(kernel)} with dilation {self.dilation} does not fit into images of {tuple(size)} "
                f"with padding {self.padding}: Kernel size can't be greater than actual input size"
            )
        return places


class Plan(NamedTuple):
    """Arrays for the kernels, see there."""

    planes: ctypes.Array[ctypes.c_int64]
    phases: ctypes.Array[ctypes.c_int64]
    jobs: ctypes.Array[ctypes.c_int64]
    taps: ctypes.Array[ctypes.c_int64]
    job_count: int
    out: Pair


def _array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(1, len(numbers)))(*numbers)


@lru_cache(maxsize=1024)
def forward(channels: int, size: Pair, kernel: Pair, out: Pair, geometry: Geometry, *, by_plane: bool = False) -> Plan:
    """Describe a convolution. `by_plane` gives taps as (plane, offset in it) for gradients of filters."""
    stride, padding, dilation = geometry
    if kernel == stride == (1, 1) and padding == (0, 0):
        # Without neighbours an image is one long row.
        size = out = (1, size[0] * size[1])
    along = [_taps_along(kernel[i], stride[i], dilation[i]) for i in (0, 1)]
    rows, columns = (out[i] + max(shift for _, shift in along[i]) for i in (0, 1))
    phases = sorted({(p, q) for p, _ in along[0] for q, _ in along[1]})
    taps = []
    for i, (p, row) in enumerate(along[0]):
        for j, (q, column) in enumerate(along[1]):
            plane, offset = phases.index((p, q)), row * columns + column
            taps += [plane, offset] if by_plane else [i * kernel[1] + j, plane * rows * columns + offset]
    planes = [channels, *size, *stride, *padding, rows, columns, len(phases), *out]
    jobs = [0, len(taps) // 2, *out, 0, 1, 0, 1]
    return Plan(_array(planes), _array(sum(phases, ())), _array(jobs), _array(taps), 1, out)


@lru_cache(maxsize=1024)
def backward(channels: int, size: Pair, kernel: Pair, out: Pair, geometry: Geometry) -> Plan:
    """Describe the gradient of the images, of size `out`, from one of size `size`.

    With a stride, every n-th row and column of the result is a convolution with some of the taps.
    """
    stride, padding, dilation = geometry
    if kernel == stride == (1, 1) and padding == (0, 0):
        size = out = (1, size[0] * size[1])
    along = [_taps_back(kernel[i], stride[i], padding[i], dilation[i]) for i in (0, 1)]
    shifts = [[shift for phase in along[i] for _, shift in phase] or [0] for i in (0, 1)]
    before = [max(0, -min(shifts[i])) for i in (0, 1)]
    places = [-(-out[i] // stride[i]) for i in (0, 1)]
    rows, columns = (before[i] + places[i] + max(0, *shifts[i]) for i in (0, 1))
    taps: list[int] = []
    jobs: list[int] = []
    for p, of_rows in enumerate(along[0]):
        for q, of_columns in enumerate(along[1]):
            first = len(taps) // 2
            for i, row in of_rows:
                for j, column in of_columns:
                    taps += [i * kernel[1] + j, (row + before[0]) * columns + column + before[1]]
            high, wide = -(-(out[0] - p) // stride[0]), -(-(out[1] - q) // stride[1])
            if high > 0 and wide > 0:
                jobs += [first, len(taps) // 2 - first, high, wide, p, stride[0], q, stride[1]]
    planes = [channels, *size, 1, 1, *before, rows, columns, 1]
    return Plan(_array(planes), _array([0, 0]), _array(jobs), _array(taps), len(jobs) // 8, out)


def _taps_along(kernel: int, stride: int, dilation: int) -> list[tuple[int, int]]:
    """Return for every tap its phase, and its shift in the plane of that phase."""
    return [(tap * dilation % stride, tap * dilation // stride) for tap in range(kernel)]


def _taps_back(kernel: int, stride: int, padding: int, dilation: int) -> list[list[tuple[int, int]]]:
    """Return for every phase of the result the taps that reach it, each with its shift in the gradient."""
    return [
        [
            (tap, (phase + padding - tap * dilation) // stride)
            for tap in range(kernel)
            if (phase + padding - tap * dilation) % stride == 0
        ]
        for phase in range(stride)
    ]
