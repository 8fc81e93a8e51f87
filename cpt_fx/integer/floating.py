"""The products of `products.py` on floating point numbers, argument by argument: what runs where integers cannot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_forward(x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x @ w.T + bias."""
    return F.linear(x, w, None if bias is None else bias.to(x.dtype)).to(dtype)


def linear_grad_input(g: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x."""
    return (g @ w).to(dtype)


def linear_grad_weight(g: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of w."""
    return (g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])).to(dtype)


def matmul_forward(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b."""
    return torch.matmul(a, b).to(dtype)


def matmul_grad_left(g: Tensor, b: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the gradient of a, of its shape."""
    if b.ndim == 1:
        g, b = g.unsqueeze(-1), b.unsqueeze(-1)
    if len(shape) == 1:
        g = g.unsqueeze(-2)
    rows = [1] if len(shape) == 1 else []
    return (g @ b.mT).sum_to_size(*rows, *shape).reshape(tuple(shape)).to(dtype)


def matmul_grad_right(g: Tensor, a: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the gradient of b, of its shape."""
    if len(shape) == 1:
        g = g.unsqueeze(-1)
    if a.ndim == 1:
        g, a = g.unsqueeze(-2), a.unsqueeze(-2)
    columns = [1] if len(shape) == 1 else []
    return (a.mT @ g).sum_to_size(*shape, *columns).reshape(tuple(shape)).to(dtype)


def conv2d_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, dtype: torch.dtype, *, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the convolution of images x with filters w."""
    return torch.conv2d(x, w, None if bias is None else bias.to(x.dtype), stride, padding, dilation).to(dtype)


def conv2d_grad_input(
    g: Tensor, w: Tensor, shape: Sequence[int], dtype: torch.dtype, *, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the gradient of x, of its shape."""
    return _backward(g, g.new_empty(tuple(shape)), w, (stride, padding, dilation), 0).to(dtype)


def conv2d_grad_weight(
    g: Tensor, x: Tensor, shape: Sequence[int], dtype: torch.dtype, *, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the gradient of w, of its shape."""
    return _backward(g, x, g.new_empty(tuple(shape)), (stride, padding, dilation), 1).to(dtype)


def _backward(g: Tensor, x: Tensor, w: Tensor, how: tuple[Sequence[int], ...], which: int) -> Tensor:
    """Ask torch for one of the two gradients; the values of the tensor it is for do not matter."""
    stride, padding, dilation = how
    mask = [which == 0, which == 1, False]
    found = torch.ops.aten.convolution_backward(g, x, w, None, stride, padding, dilation, False, [0, 0], 1, mask)
    result: Tensor = found[which]
    return result
