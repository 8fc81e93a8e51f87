"""The kernels of `native/` for integer execution, as functions of tensors. Each returns None if it cannot run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cpt_fx import native

if TYPE_CHECKING:
    from cpt_fx.integer.codes import Codes

_LONG = ctypes.c_int64
LONGEST_SUM = (2**31 - 1) // (127 * 127)
"""Maximum number of products of two codes whose sum is certain to fit in an int32: 133,144."""
Pair = tuple[int, ...]
"""One number for the height, one for the width."""


class Geometry(NamedTuple):
    """Stride, padding and dilation of a convolution."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def output_size(self, size: Sequence[int], kernel: Sequence[int]) -> Pair:
        """Return the height and the width of the result of a convolution."""
        along = zip(size, kernel, *self, strict=True)
        places = tuple((s + 2 * pad - gap * (k - 1) - 1) // step + 1 for s, k, step, pad, gap in along)
        if places[0] < 1 or places[1] < 1:
            raise RuntimeError(
                f"a filter of {tuple(kernel)} with dilation {self.dilation} does not fit into images of {tuple(size)} "
                f"with padding {self.padding}: Kernel size can't be greater than actual input size"
            )
        return places


def product(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None = None
) -> Tensor | None:
    """Multiply matrices, or batches of them: float32 with scales, int32 sums without."""
    library = native.load("integer_products.cpp")
    if library is None:
        return None
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    result = _new((*batch, rows, columns), torch.int32 if scales is None else torch.float32)
    left, right = _in_two_batches(left, batch), _in_two_batches(right, batch)
    steps = (_LONG * 4)(*left.stride()), (_LONG * 4)(right.stride(0), right.stride(1), right.stride(3), right.stride(2))
    floats = _in_single(*(scales or (None, None)), bias)
    library.cpt_fx_product(
        left.data_ptr(), right.data_ptr(), result.data_ptr(), *left.shape[:2], rows, inner, columns, *steps,
        *map(native.address, floats), scales is None,
        native.threads(rows * columns * batch.numel() * max(1, inner // 64)),
    )  # fmt: skip
    return result


def _in_two_batches(x: Tensor, batch: torch.Size) -> Tensor:
    """Reshape batches of matrices to two batch dims, without a copy if the strides allow."""
    x = (x if 1 in x.stride()[-2:] else x.contiguous()).expand(*batch, *x.shape[-2:])
    if len(batch) > 2:
        return x.reshape(batch[0], -1, *x.shape[-2:])
    return x[(None,) * (2 - len(batch))]


def convolution(
    x: Codes, w: Codes, bias: Tensor | None, out: Pair, geometry: Geometry, *, turned: bool = False
) -> Tensor | None:
    """Convolve images, or, if `turned`, return the gradient of images. The result has the height and width `out`."""
    library = native.load("integer_convolutions.cpp")
    taps = w.values.shape[2:].numel()
    if library is None or not _suit(x, w) or x.values.shape[1] * taps > LONGEST_SUM or min(out) <= 0:
        return None
    images, filters = x.values.contiguous(), w.values.contiguous()
    first, second = filters.shape[:2]
    plan = (_plan_turned if turned else _plan)(images.shape[1], images.shape[2:], filters.shape[2:], out, geometry)
    # The number of output channels, and the strides of output channels and of input channels in the filters.
    rows = (second, taps, second * taps) if turned else (first, second * taps, taps)
    result = _new((images.shape[0], rows[0], *out))
    floats = _in_single(x.scale, w.scale, bias)
    library.cpt_fx_convolve(
        images.data_ptr(), filters.data_ptr(), result.data_ptr(), images.shape[0], plan.planes, plan.phases,
        (_LONG * 3)(*rows), plan.jobs, plan.job_count, plan.taps, *plan.out, *map(native.address, floats),
        native.threads(result.numel() * max(1, images.shape[1] * taps // 64)),
    )  # fmt: skip
    return result


def filters(g: Codes, x: Codes, kernel: Pair, geometry: Geometry) -> Tensor | None:
    """Return the gradient of filters from the gradient of the output and from the images."""
    library = native.load("integer_filters.cpp")
    if library is None or not _suit(g, x):
        return None
    gradient, images = g.values.contiguous(), x.values.contiguous()
    plan = _plan(images.shape[1], images.shape[2:], kernel, gradient.shape[2:], geometry, by_plane=True)
    result = _new((gradient.shape[1], images.shape[1], *kernel))
    floats = _in_single(g.scale, x.scale)
    library.cpt_fx_filters(
        gradient.data_ptr(), images.data_ptr(), result.data_ptr(), images.shape[0], gradient.shape[1], plan.planes,
        plan.phases, plan.taps, kernel[0] * kernel[1], *map(native.address, floats),
        native.threads(result.numel() * gradient[:, 0].numel() // 64),
    )  # fmt: skip
    return result


def _suit(a: Codes, b: Codes) -> bool:
    """Return whether the kernels of convolutions take two operands: one float32 scale each, nothing empty."""
    plain = a.scale.ndim == b.scale.ndim == 0 and a.scale.dtype == b.scale.dtype == torch.float32
    return plain and bool(a.values.numel() and b.values.numel())


def _in_single(*parts: Tensor | None) -> list[Tensor | None]:
    """Return scales and biases as kernels read them; the caller has to hold them until the call is over."""
    return [None if part is None else part.to(torch.float32).contiguous() for part in parts]


def _new(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the memory for the result of a kernel. torch's default dtype, which users may change, is not used."""
    return torch.empty(tuple(shape), dtype=dtype)


class _Plan(NamedTuple):
    """Memory layout of a convolution: arrays for `native/integer_convolutions.cpp`, see there.

    A plane holds every n-th row and column of a padded image, n the stride. In it, one tap of the filter reads
    neighbouring pixels for neighbouring outputs: outputs and pixels differ by one offset per tap.
    """

    planes: ctypes.Array[ctypes.c_int64]
    phases: ctypes.Array[ctypes.c_int64]
    jobs: ctypes.Array[ctypes.c_int64]
    taps: ctypes.Array[ctypes.c_int64]
    job_count: int
    out: Pair


def _array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * max(1, len(numbers)))(*numbers)


@lru_cache(maxsize=1024)
def _plan(channels: int, size: Pair, kernel: Pair, out: Pair, geometry: Geometry, *, by_plane: bool = False) -> _Plan:
    """Return the plan of a convolution. `by_plane` gives taps as (plane, offset in it), for gradients of filters."""
    stride, padding, dilation = geometry
    if kernel == stride == (1, 1) and padding == (0, 0):
        # A filter of one pixel has no neighbours: an image is one long row.
        size = out = (1, size[0] * size[1])
    # The phase of every tap, and its shift in the plane of that phase.
    along = [[divmod(tap * dilation[i], stride[i])[::-1] for tap in range(kernel[i])] for i in (0, 1)]
    rows, columns = (out[i] + max(shift for _, shift in along[i]) for i in (0, 1))
    phases = sorted({(p, q) for p, _ in along[0] for q, _ in along[1]})
    taps = []
    for i, (p, row) in enumerate(along[0]):
        for j, (q, column) in enumerate(along[1]):
            plane, offset = phases.index((p, q)), row * columns + column
            taps += [plane, offset] if by_plane else [i * kernel[1] + j, plane * rows * columns + offset]
    planes = [channels, *size, *stride, *padding, rows, columns, len(phases), *out]
    jobs = [0, len(taps) // 2, *out, 0, 1, 0, 1]
    return _Plan(_array(planes), _array(sum(phases, ())), _array(jobs), _array(taps), 1, out)


@lru_cache(maxsize=1024)
def _plan_turned(channels: int, size: Pair, kernel: Pair, out: Pair, geometry: Geometry) -> _Plan:
    """Return the plan for the gradient of images of size `out`, from an output gradient of size `size`.

    With a stride n, every n-th row and column of the result is a convolution with some of the taps.
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
    return _Plan(_array(planes), _array([0, 0]), _array(jobs), _array(taps), len(jobs) // 8, out)


def _taps_back(kernel: int, stride: int, padding: int, dilation: int) -> list[list[tuple[int, int]]]:
    """Return, for every phase of the result, the taps that reach it, each with its shift in the gradient."""
    return [
        [
            (tap, (phase + padding - tap * dilation) // stride)
            for tap in range(kernel)
            if (phase + padding - tap * dilation) % stride == 0
        ]
        for phase in range(stride)
    ]
