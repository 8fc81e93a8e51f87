"""Products of two factors: linear, matmul and convolution, forward and for both gradients.

Factors are codes, or the floating point numbers that simulated execution multiplies. Products of codes sum in integers
and multiply by the scales once. The result is the product of the dequantized operands up to the rounding of its own
type, and exactly `scale * integer` where the integer is below 2**24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cpt_fx.integer import kernels, reference
from cpt_fx.integer.codes import Codes

FLOAT = torch.float32
Factor = TypeVar("Factor", Codes, Tensor)
Pair = Sequence[int]


def linear_forward(x: Factor, w: Factor, bias: Tensor | None = None, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return x @ w.T + bias."""
    if isinstance(x, Tensor):
        return F.linear(x, w, None if bias is None else bias.to(x.dtype)).to(dtype)
    return _matmul("linear_forward", x, w.mT, dtype, bias)


def linear_grad_input(g: Factor, w: Factor, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of x: g @ w."""
    return _matmul("linear_grad_input", g, w, dtype).to(dtype)


def linear_grad_weight(g: Factor, x: Factor, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of w: the sum over all rows of the outer products of g and x."""
    return _matmul("linear_grad_weight", _rows(g).mT, _rows(x), dtype).to(dtype)


def matmul_forward(a: Factor, b: Factor, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return a @ b, batches broadcast as torch.matmul does."""
    return _matmul("matmul_forward", a, b, dtype).to(dtype)


def matmul_grad_left(g: Factor, b: Factor, shape: Sequence[int], dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of a, of its shape: g @ b.T, summed over the batches that a was broadcast to."""
    vector = len(shape) == 1
    g, b = _gradient_as_matrix(g, vector, b.ndim == 1), _as_matrix(b, -1)
    result = _matmul("matmul_grad_left", g, b.mT, dtype)
    return result.sum_to_size(*[1] * vector, *shape).reshape(tuple(shape)).to(dtype)


def matmul_grad_right(g: Factor, a: Factor, shape: Sequence[int], dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of b, of its shape: a.T @ g, summed over the batches that b was broadcast to."""
    vector = len(shape) == 1
    g, a = _gradient_as_matrix(g, a.ndim == 1, vector), _as_matrix(a, 0)
    if isinstance(a, Codes) and len(shape) <= 2 and all(factors(x, range(x.ndim - 1)) for x in (a, g)):
        # One product over the rows of all batches.
        g, a = _rows(g), _rows(a)
    result = _matmul("matmul_grad_right", a.mT, g, dtype)
    return result.sum_to_size(*shape, *[1] * vector).reshape(tuple(shape)).to(dtype)


def conv2d_forward(
    x: Factor, w: Factor, bias: Tensor | None = None, dtype: torch.dtype = FLOAT, *,
    stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1),
) -> Tensor:  # fmt: skip
    """Return the convolution of images x with filters w. In one dim: give both a height of 1."""
    if isinstance(x, Tensor):
        return torch.conv2d(x, w, None if bias is None else bias.to(x.dtype), stride, padding, dilation).to(dtype)
    check_factors("conv2d_forward", x, (1, 2, 3), w, (1, 2, 3))
    out = reference.output_sizes(x.values.shape[2:], w.values.shape[2:], stride, padding, dilation)
    if _suits(x, w, w.values[0].numel()) and min(out) > 0:
        done = kernels.convolution(x.values, w.values, (x.scale, w.scale), bias, out, stride, padding, dilation)
        if done is not None:
            return done.to(dtype)
    sums = reference.conv2d(x.values, w.values, stride, padding, dilation)
    of_w = w.scale if w.scale.ndim == 0 else w.scale.reshape(-1, 1, 1)
    return _finished(sums, x.scale, of_w, None if bias is None else bias[:, None, None], dtype)


def conv2d_grad_input(
    g: Factor, w: Factor, shape: Sequence[int], dtype: torch.dtype = FLOAT, *,
    stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1),
) -> Tensor:  # fmt: skip
    """Return the gradient of x, of its shape."""
    if isinstance(g, Tensor):
        return _gradient(0, g, g.new_empty(tuple(shape)), w, stride, padding, dilation).to(dtype)
    check_factors("conv2d_grad_input", g, (1, 2, 3), w, (0, 2, 3))
    if _suits(g, w, w.values[:, 0].numel()):
        how = (stride, padding, dilation)
        done = kernels.convolution(g.values, w.values, (g.scale, w.scale), None, shape[2:], *how, turned=True)
        if done is not None:
            return done.to(dtype)
    sums = reference.conv2d_grad_input(g.values, w.values, shape, stride, padding, dilation)
    return _finished(sums, g.scale, w.scale if w.scale.ndim == 0 else w.scale.reshape(-1, 1, 1), None, dtype)


def conv2d_grad_weight(
    g: Factor, x: Factor, shape: Sequence[int], dtype: torch.dtype = FLOAT, *,
    stride: Pair = (1, 1), padding: Pair = (0, 0), dilation: Pair = (1, 1),
) -> Tensor:  # fmt: skip
    """Return the gradient of w, of its shape."""
    if isinstance(g, Tensor):
        return _gradient(1, g, x, g.new_empty(tuple(shape)), stride, padding, dilation).to(dtype)
    check_factors("conv2d_grad_weight", g, (0, 2, 3), x, (0, 2, 3))
    if _suits(g, x, 0):
        done = kernels.filters(g.values, x.values, (g.scale, x.scale), shape[2:], stride, padding, dilation)
        if done is not None:
            return done.to(dtype)
    sums = reference.conv2d_grad_weight(g.values, x.values, shape, stride, padding, dilation)
    of_g = g.scale if g.scale.ndim == 0 else g.scale.reshape(-1, 1, 1, 1)
    return _finished(sums, of_g, x.scale, None, dtype)


def _gradient(which: int, g: Tensor, x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Ask torch for one of the two gradients; the values of the tensor it is for do not matter."""
    mask = [which == 0, which == 1, False]
    found = torch.ops.aten.convolution_backward(g, x, w, None, stride, padding, dilation, False, [0, 0], 1, mask)
    result: Tensor = found[which]
    return result


def bias_grad(g: Codes, channel: int = -1, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of a bias: the sum of a gradient over every dim but the channels'."""
    dims = [dim for dim in range(g.values.ndim) if dim != channel % g.values.ndim]
    if not _is_constant(g.scale, tuple(dims)):
        return g.dequantized().sum(dims).to(dtype)
    sums = kernels.sums(g.values, channel % g.values.ndim)
    if sums is None:
        sums = g.values.sum(dims, dtype=torch.int64) if dims else g.values.to(torch.int64)
    return (sums.to(g.scale.dtype) * (g.scale if g.scale.ndim == 0 else g.scale.reshape(-1))).to(dtype)


def factors(codes: Codes, summed: Sequence[int]) -> bool:
    """Whether a scale is the same along dims that a product sums over, so that it can be multiplied in afterwards."""
    return _is_constant(codes.scale, summed)


def check_factors(product: str, a: Codes, dims_a: Sequence[int], b: Codes, dims_b: Sequence[int]) -> None:
    """Refuse operands whose scales differ inside of one sum."""
    for which, codes, dims in (("first", a, dims_a), ("second", b, dims_b)):
        if not factors(codes, dims):
            raise ValueError(
                f"{product} sums over dims {tuple(dims)} of its {which} operand, along which the scales differ: shape "
                f"{tuple(codes.scale.shape)}. Such a product cannot run on integers."
            )


def _is_constant(scale: Tensor, dims: Sequence[int]) -> bool:
    return scale.ndim == 0 or all(scale.shape[dim] == 1 for dim in dims)


def _matmul(product: str, a: Factor, b: Factor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a @ b; of codes in the type that is given, and with a bias."""
    if isinstance(a, Tensor):
        return torch.matmul(a, b)
    result = _multiplied(product, _as_matrix(a, 0), _as_matrix(b, -1), bias, dtype)
    result = result.squeeze(-2) if a.ndim == 1 else result
    return result.squeeze(-1) if b.ndim == 1 else result


def _multiplied(product: str, left: Codes, right: Codes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply matrices, or batches of them; a single matrix on the right takes the rows of all batches at once."""
    check_factors(product, left, (-1,), right, (-2,))
    (a, first), (b, second) = left, right
    inner, many = a.shape[-1], b.ndim == 2 and a.ndim != 2
    a = _rows(a) if many else a
    result = None
    if a.numel() and b.numel() and inner <= reference.LONGEST_SUM:
        plain = first.ndim == second.ndim == 0 and first.dtype == second.dtype == torch.float32
        result = kernels.product(a, b, (first, second) if plain else None, bias if plain else None)
        if result is not None and plain:
            return (result.view(*left.values.shape[:-1], b.shape[-1]) if many else result).to(dtype)
    sums = reference.integer_bmm(a, b) if result is None else result
    sums = sums.view(*left.values.shape[:-1], b.shape[-1]) if many else sums
    return _finished(sums, first, second, bias, dtype)


def _suits(a: Codes, b: Codes, longest: int) -> bool:
    """Whether the kernels of convolutions take two operands: one scale each, nothing empty, sums that fit."""
    plain = a.scale.ndim == b.scale.ndim == 0 and a.scale.dtype == b.scale.dtype == torch.float32
    return plain and bool(a.values.numel() and b.values.numel()) and longest <= reference.LONGEST_SUM


def _rows(x: Factor) -> Factor:
    """Take all dims but the last as rows of one matrix."""
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def _finished(sums: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply sums by both scales, add the bias."""
    scale = first * second
    result = sums.to(scale.dtype).mul_(scale)
    if bias is not None:
        result = result.add_(bias)
    return result.to(dtype)


def _as_matrix(x: Factor, dim: int) -> Factor:
    """Give a vector a second dim of size 1."""
    return x if x.ndim > 1 else x.unsqueeze(dim)


def _gradient_as_matrix(g: Factor, no_rows: bool, no_columns: bool) -> Factor:
    """Put back the dims that a product with a vector dropped."""
    # Columns first: then -2 is where the rows were.
    g = g.unsqueeze(-1) if no_columns else g
    return g.unsqueeze(-2) if no_rows else g
