"""Integer sums of products by torch's operators: what runs without kernels of our own, and what those must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cpt_fx.integer.geometry import Geometry

LONGEST_SUM = (2**31 - 1) // (127 * 127)
"""How many products of two codes an int32 holds for sure: 133,144. Longer sums are made of several."""


def integer_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices of int8: int32, or int64 where the sums are too long for that."""
    rows, inner, columns = a.shape[0], a.shape[1], b.shape[1]
    if not rows or not inner or not columns:
        return torch.zeros(rows, columns, dtype=torch.int32, device=a.device)
    if inner <= LONGEST_SUM:
        return _int_mm(a, b)
    pieces = zip(a.split(LONGEST_SUM, 1), b.split(LONGEST_SUM, 0), strict=True)
    total = torch.zeros(rows, columns, dtype=torch.int64, device=a.device)
    for left, right in pieces:
        total += _int_mm(left, right)
    return total


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cpu":
        return torch._int_mm(_with_plain_strides(a), _with_plain_strides(b))
    # CUDA's kernel wants more than 16 rows, the other sizes in eights, and the second matrix stored by columns.
    rows, columns = a.shape[0], b.shape[1]
    a = F.pad(a, (0, -a.shape[1] % 8, 0, max(17 - rows, 0)))
    b = F.pad(b, (0, -columns % 8, 0, -b.shape[0] % 8))
    return torch._int_mm(a.contiguous(), b.t().contiguous().t())[:rows, :columns]


def _with_plain_strides(x: Tensor) -> Tensor:
    """Give a matrix of one row or column the strides of a contiguous one: torch 2.13 misreads others, without an error.

    The stride of a dim of size 1 means nothing, but `_int_mm` tells by it which way round the matrix is stored.
    """
    if 1 not in x.shape:
        return x
    return x.contiguous().as_strided(x.shape, (x.shape[1], 1))


def integer_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two batches of int8 matrices, batches broadcast."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if not batch:
        return integer_mm(a, b)
    lefts, rights = (x.expand(*batch, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    if not len(lefts):
        return torch.zeros(*batch, a.shape[-2], b.shape[-1], dtype=torch.int32, device=a.device)
    products = [integer_mm(left, right) for left, right in zip(lefts, rights, strict=True)]
    return torch.stack(products).view(*batch, a.shape[-2], b.shape[-1])


def _patches(x: Tensor, kernel: Sequence[int], geometry: Geometry) -> Tensor:
    """Return what the filter sees at every place: a matrix of (image, row, column) by (channel, row, column)."""
    stride, (top, left), dilation = geometry
    padded = F.pad(x, (left, left, top, top)).contiguous()
    high, wide = geometry.output_size(x.shape[2:], kernel)
    images, channels, rows, columns = padded.stride()
    seen = padded.as_strided(
        (x.shape[0], high, wide, x.shape[1], kernel[0], kernel[1]),
        (images, rows * stride[0], columns * stride[1], channels, rows * dilation[0], columns * dilation[1]),
    )
    # A copy even where a view would do: the rows of that view overlap, which a product of matrices does not expect.
    return seen.contiguous().view(x.shape[0] * high * wide, x.shape[1] * kernel[0] * kernel[1])


def conv2d(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Return the convolution of int8 images and filters."""
    sums = integer_mm(_patches(x, w.shape[2:], geometry), w.flatten(1).t())
    out = geometry.output_size(x.shape[2:], w.shape[2:])
    return sums.view(x.shape[0], *out, w.shape[0]).permute(0, 3, 1, 2).contiguous()


def conv2d_grad_input(g: Tensor, w: Tensor, shape: Sequence[int], geometry: Geometry) -> Tensor:
    """Return the gradient of the images: every place of the filter adds its share."""
    stride, (top, left), dilation = geometry
    shares = integer_mm(_pixels(g), w.flatten(1))
    shares = shares.view(g.shape[0], g.shape[2], g.shape[3], *w.shape[1:]).permute(4, 5, 0, 3, 1, 2)
    high, wide = g.shape[2:]
    total = shares.new_zeros(shape[0], shape[1], shape[2] + 2 * top, shape[3] + 2 * left)
    for i in range(w.shape[2]):
        for j in range(w.shape[3]):
            row, column = i * dilation[0], j * dilation[1]
            total[
                :, :, row : row + (high - 1) * stride[0] + 1 : stride[0],
                column : column + (wide - 1) * stride[1] + 1 : stride[1],
            ] += shares[i, j]  # fmt: skip
    return total[:, :, top : top + shape[2], left : left + shape[3]].contiguous()


def conv2d_grad_weight(g: Tensor, x: Tensor, shape: Sequence[int], geometry: Geometry) -> Tensor:
    """Return the gradient of the filters."""
    return integer_mm(_pixels(g).t(), _patches(x, shape[2:], geometry)).view(tuple(shape))


def _pixels(g: Tensor) -> Tensor:
    """Return a matrix of places by channels."""
    return g.permute(0, 2, 3, 1).reshape(-1, g.shape[1])
