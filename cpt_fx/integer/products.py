"""Products of codes: linear, matmul and convolution, forward and for both gradients.

Each sums in integers and multiplies by the scales once. The result is the product of the dequantized operands up to
the rounding of its own type, and exactly `scale * integer` where the integer is below 2**24.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpt_fx.integer import kernels, reference
from cpt_fx.integer.codes import Codes

FLOAT = torch.float32


def linear_forward(x: Codes, w: Codes, bias: Tensor | None = None, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return x @ w.T + bias."""
    check_factors("linear_forward", x, (-1,), w, (-1,))
    return _multiplied(x, Codes(w.values.t(), _turned(w.scale)), bias, dtype)


def linear_grad_input(g: Codes, w: Codes, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of x: g @ w."""
    check_factors("linear_grad_input", g, (-1,), w, (0,))
    return _multiplied(g, w, None, dtype)


def linear_grad_weight(g: Codes, x: Codes, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of w: the sum over all rows of the outer products of g and x."""
    summed = tuple(range(g.values.ndim - 1))
    check_factors("linear_grad_weight", g, summed, x, summed)
    g, x = _flat(g), _flat(x)
    return _multiplied(Codes(g.values.t(), _turned(g.scale)), x, None, dtype)


def bias_grad(g: Codes, channel: int = -1, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of a bias: the sum of a gradient over every dim but the channels'."""
    dims = [dim for dim in range(g.values.ndim) if dim != channel % g.values.ndim]
    if not _is_constant(g.scale, tuple(dims)):
        return g.dequantized().sum(dims).to(dtype)
    sums = kernels.sums(g.values, channel % g.values.ndim)
    if sums is None:
        sums = g.values.sum(dims, dtype=torch.int64) if dims else g.values.to(torch.int64)
    return (sums.to(g.scale.dtype) * (g.scale if g.scale.ndim == 0 else g.scale.reshape(-1))).to(dtype)


def matmul_forward(a: Codes, b: Codes, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return a @ b, batches broadcast as torch.matmul does."""
    check_factors("matmul_forward", a, (-1,), b, (-2 if b.values.ndim > 1 else -1,))
    left = _as_matrix(a, 0)
    right = _as_matrix(b, -1)
    result = _multiplied(left, right, None, dtype)
    if a.values.ndim == 1:
        result = result.squeeze(-2)
    return result.squeeze(-1) if b.values.ndim == 1 else result


def matmul_grad_left(g: Codes, b: Codes, shape: Sequence[int], dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of a, of its shape: g @ b.T, summed over the batches that a was broadcast to."""
    g, b = _gradient_as_matrix(g, len(shape) == 1, b.values.ndim == 1), _as_matrix(b, -1)
    result = matmul_forward(g, Codes(b.values.mT, _turned(b.scale)), dtype)
    return result.sum_to_size(*([1] if len(shape) == 1 else []), *shape).reshape(tuple(shape))


def matmul_grad_right(g: Codes, a: Codes, shape: Sequence[int], dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of b, of its shape: a.T @ g, summed over the batches that b was broadcast to."""
    g, a = _gradient_as_matrix(g, a.values.ndim == 1, len(shape) == 1), _as_matrix(a, 0)
    if len(shape) <= 2 and factors(a, tuple(range(a.values.ndim - 1))) and factors(g, tuple(range(g.values.ndim - 1))):
        # One product over the rows of all batches.
        g, a = _flat(g), _flat(a)
    result = matmul_forward(Codes(a.values.mT, _turned(a.scale)), g, dtype)
    return result.sum_to_size(*shape, *([1] if len(shape) == 1 else [])).reshape(tuple(shape))


def conv2d_forward(
    x: Codes,
    w: Codes,
    bias: Tensor | None = None,
    dtype: torch.dtype = FLOAT,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """Return the convolution of images x with filters w. In one dim: give both a height of 1."""
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
    g: Codes,
    w: Codes,
    shape: Sequence[int],
    dtype: torch.dtype = FLOAT,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """Return the gradient of x, of its shape."""
    check_factors("conv2d_grad_input", g, (1, 2, 3), w, (0, 2, 3))
    if _suits(g, w, w.values[:, 0].numel()):
        how = (stride, padding, dilation)
        done = kernels.convolution(g.values, w.values, (g.scale, w.scale), None, shape[2:], *how, turned=True)
        if done is not None:
            return done.to(dtype)
    sums = reference.conv2d_grad_input(g.values, w.values, shape, stride, padding, dilation)
    return _finished(sums, g.scale, w.scale if w.scale.ndim == 0 else w.scale.reshape(-1, 1, 1), None, dtype)


def conv2d_grad_weight(
    g: Codes,
    x: Codes,
    shape: Sequence[int],
    dtype: torch.dtype = FLOAT,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """Return the gradient of w, of its shape."""
    check_factors("conv2d_grad_weight", g, (0, 2, 3), x, (0, 2, 3))
    if _suits(g, x, 0):
        done = kernels.filters(g.values, x.values, (g.scale, x.scale), shape[2:], stride, padding, dilation)
        if done is not None:
            return done.to(dtype)
    sums = reference.conv2d_grad_weight(g.values, x.values, shape, stride, padding, dilation)
    of_g = g.scale if g.scale.ndim == 0 else g.scale.reshape(-1, 1, 1, 1)
    return _finished(sums, of_g, x.scale, None, dtype)


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


def _multiplied(left: Codes, right: Codes, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply matrices, or batches of them; a single matrix on the right takes the rows of all batches at once."""
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


def _flat(codes: Codes) -> Codes:
    """Take all dims but the last as rows of one matrix."""
    return Codes(_rows(codes.values), codes.scale if codes.scale.ndim == 0 else _rows(codes.scale))


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def _finished(sums: Tensor, first: Tensor, second: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply sums by both scales, add the bias."""
    scale = first * second
    result = sums.to(scale.dtype).mul_(scale)
    if bias is not None:
        result = result.add_(bias)
    return result.to(dtype)


def _as_matrix(codes: Codes, dim: int) -> Codes:
    """Give a vector a second dim of size 1."""
    if codes.values.ndim > 1:
        return codes
    return Codes(codes.values.unsqueeze(dim), codes.scale if codes.scale.ndim == 0 else codes.scale.unsqueeze(dim))


def _gradient_as_matrix(g: Codes, no_rows: bool, no_columns: bool) -> Codes:
    """Put back the dims that a product with a vector dropped."""
    values, scale = g
    for dim in [-1] * no_columns + [-2] * no_rows:
        # Columns first: then -2 is where the rows were.
        values = values.unsqueeze(dim)
        scale = scale if scale.ndim == 0 else scale.unsqueeze(dim)
    return Codes(values, scale)


def _turned(scale: Tensor) -> Tensor:
    return scale if scale.ndim == 0 else scale.mT
