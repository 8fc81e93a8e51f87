"""The kernels of `native/` for integer execution, as functions of tensors. Each returns None where it cannot run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cpt_fx import native
from cpt_fx.integer.geometry import Geometry, Pair, backward, forward

if TYPE_CHECKING:
    from cpt_fx.integer.codes import Codes

_LONG = ctypes.c_int64
LONGEST_SUM = (2**31 - 1) // (127 * 127)
"""How many products of two codes an int32 holds for sure: 133,144."""


def product(
    left: Tensor, right: Tensor, scales: tuple[Tensor, Tensor] | None, bias: Tensor | None = None
) -> Tensor | None:
    """Multiply matrices, or batches of them in one or two dims: float32 with scales, int32 sums without."""
    library = _library("integer_products.cpp", left)
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
    """Bring the batches of matrices into two dims, without a copy where strides allow."""
    x = x.expand(*batch, *x.shape[-2:])
    if len(batch) > 2:
        return x.reshape(batch[0], -1, *x.shape[-2:])
    return x[(None,) * (2 - len(batch))]


def convolution(
    x: Codes, w: Codes, bias: Tensor | None, out: Pair, geometry: Geometry, *, turned: bool = False
) -> Tensor | None:
    """Convolve images; or, `turned`, carry a gradient back to images. The result has the height and width `out`."""
    library = _library("integer_convolutions.cpp", x.values)
    taps = w.values.shape[2:].numel()
    if library is None or not _suit(x, w) or x.values.shape[1] * taps > LONGEST_SUM or min(out) <= 0:
        return None
    images, filters = x.values.contiguous(), w.values.contiguous()
    first, second = filters.shape[:2]
    plan = (backward if turned else forward)(images.shape[1], images.shape[2:], filters.shape[2:], out, geometry)
    # How many channels come out, and how far apart those that come out and those that go in are in the filters.
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
    """Return the gradient of filters from that of the output and from the images."""
    library = _library("integer_filters.cpp", g.values)
    if library is None or not _suit(g, x):
        return None
    gradient, images = g.values.contiguous(), x.values.contiguous()
    plan = forward(images.shape[1], images.shape[2:], kernel, gradient.shape[2:], geometry, by_plane=True)
    result = _new((gradient.shape[1], images.shape[1], *kernel))
    floats = _in_single(g.scale, x.scale)
    library.cpt_fx_filters(
        gradient.data_ptr(), images.data_ptr(), result.data_ptr(), images.shape[0], gradient.shape[1], plan.planes,
        plan.phases, plan.taps, kernel[0] * kernel[1], *map(native.address, floats),
        native.threads(result.numel() * gradient[:, 0].numel() // 64),
    )  # fmt: skip
    return result


def _suit(a: Codes, b: Codes) -> bool:
    """Whether the kernels of convolutions take two operands: one scale each, nothing empty."""
    plain = a.scale.ndim == b.scale.ndim == 0 and a.scale.dtype == b.scale.dtype == torch.float32
    return plain and bool(a.values.numel() and b.values.numel())


def _library(source: str, x: Tensor) -> ctypes.CDLL | None:
    """Return the kernels of a source, if there are any that can read a tensor."""
    return native.load(source) if x.device.type == "cpu" else None


def _in_single(*parts: Tensor | None) -> list[Tensor | None]:
    """Return scales and biases as kernels read them. Hold them until the call is over."""
    return [None if part is None else part.to(torch.float32).contiguous() for part in parts]


def _new(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Make what a kernel writes its result into. Not of the default dtype, which is the user's."""
    return torch.empty(tuple(shape), dtype=dtype)
