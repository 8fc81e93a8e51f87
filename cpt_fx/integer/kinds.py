"""The kinds of products that integers do: their names, their shapes, and what simulated execution calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cpt_fx.integer.geometry import Geometry
from cpt_fx.integer.operands import Operand


class Kind(NamedTuple):
    """One kind of product."""

    names: tuple[str, str, str]
    """Its functions in `products`: forward, for the gradient of the left operand, for that of the right one."""
    simulated: Callable[[Tensor, Tensor, Tensor | None, Geometry], Tensor]
    shape: Callable[[Sequence[int], Sequence[int], Geometry], tuple[int, ...]]
    """Of the result, given those of the operands."""
    channel: int = -1
    """The dim of the result that a bias belongs to."""


def _add_product(a: Tensor, b: Tensor, addend: Tensor | None, geometry: Geometry) -> Tensor:
    return torch.matmul(a, b) if addend is None else torch.addmm(addend, a, b)


def _matmul_shape(a: Sequence[int], b: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    batch = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    if w.ndim == 4:
        return torch.conv2d(x, w, bias, *geometry)
    stride, padding, dilation = (pair[1:] for pair in geometry)
    return torch.conv1d(x, w, bias, stride, padding, dilation)


LINEAR = Kind(
    ("linear_forward", "linear_grad_input", "linear_grad_weight"),
    lambda x, w, bias, geometry: F.linear(x, w, bias),
    lambda x, w, geometry: (*x[:-1], w[0]),
)
MATMUL = Kind(("matmul_forward", "matmul_grad_left", "matmul_grad_right"), _add_product, _matmul_shape)
CONV = Kind(
    ("conv2d_forward", "conv2d_grad_input", "conv2d_grad_weight"),
    _convolve,
    lambda x, w, geometry: (x[0], w[0], *geometry.output_size(x[2:], w[2:])),
    channel=1,
)


def geometry_of(dims: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Geometry:
    """Return the geometry of a convolution in one or two dims: one in one dim has images of height 1."""
    given = (tuple(values) * dims if len(values) == 1 else tuple(values) for values in (stride, padding, dilation))
    return Geometry(*((*still[: 2 - dims], *moved) for still, moved in zip(Geometry(), given, strict=True)))


def as_images(operand: Operand, ndim: int, dims: int) -> Operand:
    """Give what a convolution multiplies four dims. `ndim` is how many it has, `dims` how many the filter moves in."""
    places = [0] * (ndim < dims + 2) + [2] * (dims == 1)
    for place in places:
        operand = Operand(*(part.unsqueeze(place) if part is not None and part.ndim else part for part in operand))
    return operand


def without_added(shape: tuple[int, ...], ndim: int, dims: int) -> tuple[int, ...]:
    """Return the shape of a result as it is without the dims that `as_images` added."""
    images, channels, *sizes = shape
    return (*((images,) if ndim == dims + 2 else ()), channels, *sizes[2 - dims :])
