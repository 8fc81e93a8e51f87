"""Reductions, sorting and running sums whose gradients ORT lacks, with torch's rules where elements are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cpt_fx.errors import ExportError
from cpt_fx.export.rewrite_elementwise import logaddexp
from cpt_fx.export.rewriting import Rewrite, Run, aten, fixed, stopped, valued


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    listed = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    return [place % x.ndim for place in listed]


def _extreme(op: Any) -> Rewrite:
    """Return the largest or smallest along dims; equal ones share the gradient evenly."""

    def rewrite(run: Run, x: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
        return _shared(op, x, _dims(x, dim), keepdim) if x.is_floating_point() else NotImplemented

    return rewrite


def _shared(op: Any, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    at = stopped(x)
    chosen = (at == op(at, dims, True)).to(at.dtype)
    return valued((x * (chosen / chosen.sum(dims, keepdim=True))).sum(dims, keepdim=keepdim), op(at, dims, keepdim))


def _of_all(op: Any) -> Rewrite:
    def rewrite(run: Run, x: Tensor) -> Any:
        return _shared(op, x, list(range(x.ndim)), False) if x.is_floating_point() else NotImplemented

    return rewrite


def _aminmax(run: Run, x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = _dims(x, dim)
    return _shared(torch.amin, x, dims, keepdim), _shared(torch.amax, x, dims, keepdim)


def _with_place(find: Any) -> Rewrite:
    """Return the largest or smallest along one dim, and its place: the first of equal ones takes the gradient."""

    def rewrite(run: Run, x: Tensor, dim: int, keepdim: bool = False) -> Any:
        return _at(x, find(stopped(x), dim, True), dim, keepdim)

    return rewrite


def _at(x: Tensor, places: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    values = torch.gather(x, dim, places)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _order(x: Tensor, dim: int, descending: bool = False) -> Tensor:
    """Return where the elements are, in their order: ORT keeps equal ones as they stand."""
    return aten.sort.default(stopped(x), dim, descending)[1]  # type: ignore[no-any-return]


def _nth(x: Tensor, n: int, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    return _at(x, _order(x, dim).narrow(dim, n, 1), dim, keepdim)


def _median(run: Run, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None:
        flat = x.reshape(-1)
        return _nth(flat, (fixed(flat.shape[0], "the tensor of a median") - 1) // 2, 0, False)[0]
    return _nth(x, (fixed(x.shape[dim], "the dim of a median") - 1) // 2, dim, keepdim)


def _sort(run: Run, x: Tensor, dim: int = -1, descending: bool = False) -> Any:
    places = _order(x, dim, descending)
    return torch.gather(x, dim, places), places


def _topk(run: Run, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    places = torch.topk(stopped(x), k, dim, largest, sorted)[1]
    return torch.gather(x, dim, places), places


def _product(run: Run, x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Multiply halves with each other until one element is left: the gradient is right where elements are 0, too."""
    if not x.is_floating_point():
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    while (size := fixed(x.shape[dim], "the dim of a product")) > 1:
        half = size // 2
        rest = x.narrow(dim, 2 * half, size - 2 * half)
        x = x.narrow(dim, 0, half) * x.narrow(dim, half, half)
        x = torch.cat([x, rest], dim) if size % 2 else x
    return x if keepdim else x.squeeze(dim)


def _scan(combine: Callable[[Tensor, Tensor], Tensor]) -> Rewrite:
    """Return what runs along a dim, in steps that double: every step is an operator that ORT differentiates."""

    def rewrite(run: Run, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        if not x.is_floating_point():
            return NotImplemented
        x = x if dtype is None else x.to(dtype)
        size, step = fixed(x.shape[dim], "the dim of a running sum or product") if x.ndim else 1, 1
        while step < size:
            both = combine(x.narrow(dim, 0, size - step), x.narrow(dim, step, size - step))
            x = torch.cat([x.narrow(dim, 0, step), both], dim)
            step *= 2
        return x

    return rewrite


def _norm(
    run: Run, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """Return a norm; where it is 0, so is its gradient."""
    x = x if dtype is None else x.to(dtype)
    dims, at = _dims(x, dim), stopped(x)
    size = torch.abs(at)
    if ord == 0:
        raise ExportError(
            "torch.linalg.vector_norm of order 0 has no gradient: count the elements under torch.no_grad()"
        )
    if ord in (float("inf"), float("-inf")):
        op = torch.amax if ord > 0 else torch.amin
        return _shared(op, valued(x * torch.sign(at), size), dims, keepdim)
    power = size if ord == 1 else at * at if ord == 2 else torch.pow(size, ord)
    total = power.sum(dims, keepdim=True)
    value = total if ord == 1 else torch.sqrt(total) if ord == 2 else torch.pow(total, 1 / ord)
    if ord == 1:
        slope = torch.sign(at)
    else:
        safe = torch.where(value == 0, torch.ones_like(value), value)
        some = torch.where(size == 0, torch.ones_like(size), size)
        slope = at / safe if ord == 2 else torch.sign(at) * torch.pow(some, ord - 1) / torch.pow(safe, ord - 1)
    held = value if keepdim else value.reshape([n for place, n in enumerate(value.shape) if place not in dims])
    return valued((x * slope).sum(dims, keepdim=keepdim), held)


REDUCTIONS: dict[Any, Rewrite] = {
    aten.amax.default: _extreme(torch.amax),
    aten.amin.default: _extreme(torch.amin),
    aten.max.default: _of_all(torch.amax),
    aten.min.default: _of_all(torch.amin),
    aten.max.dim: _with_place(torch.argmax),
    aten.min.dim: _with_place(torch.argmin),
    aten.aminmax.default: _aminmax,
    aten.median.default: _median,
    aten.median.dim: _median,
    aten.kthvalue.default: lambda run, x, k, dim=-1, keepdim=False: _nth(x, k - 1, dim, keepdim),
    aten.sort.default: _sort,
    aten.sort.stable: lambda run, x, *, stable=None, dim=-1, descending=False: _sort(run, x, dim, descending),
    aten.topk.default: _topk,
    aten.prod.default: lambda run, x, *, dtype=None: _product(run, x.reshape(-1), 0, dtype=dtype),
    aten.prod.dim_int: _product,
    aten.cumsum.default: _scan(torch.add),
    aten.cumprod.default: _scan(torch.mul),
    aten.logcumsumexp.default: _scan(lambda x, y: logaddexp(None, x, y)),
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys(
        (aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dim_dtype, aten.norm.Scalar),
        lambda run, x, p=2, dim=None, keepdim=False, **options: _norm(
            run, x, 2 if p is None else p, dim, keepdim, **options
        ),
    ),
}
