"""Pieces of tensors: what ORT's gradients forget, or cannot be asked for."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cpt_fx.errors import ExportError
from cpt_fx.export.rewriting import Rewrite, Run, aten, fixed, indices, scattered


def _split(run: Run, x: Tensor, size: Any, dim: int = 0) -> Any:
    """Split by slices: with an output that nobody reads, ORT's gradient of a split is wrong, silently."""
    whole = fixed(x.shape[dim], "what is split")
    sizes = list(size) if not isinstance(size, int) else [min(size, whole - start) for start in range(0, whole, size)]
    return _pieces(x, sizes, dim)


def _pieces(x: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(x.narrow(dim, start, size))
        start += size
    return pieces


def _chunk(run: Run, x: Tensor, count: int, dim: int = 0) -> Any:
    whole = fixed(x.shape[dim], "what is split")
    return _split(run, x, -(-whole // count), dim)


def _unbind(run: Run, x: Tensor, dim: int = 0) -> Any:
    return [x.select(dim, place) for place in range(fixed(x.shape[dim], "what is taken apart"))]


def _tensor_split(run: Run, x: Tensor, sections: int, dim: int = 0) -> Any:
    whole = fixed(x.shape[dim], "what is split")
    return _pieces(x, [whole // sections + (place < whole % sections) for place in range(sections)], dim)


def _tensor_split_at(run: Run, x: Tensor, places: list[int], dim: int = 0) -> Any:
    whole = fixed(x.shape[dim], "what is split")
    edges = [0, *(min(place, whole) for place in places), whole]
    return _pieces(x, [end - start for start, end in pairwise(edges)], dim)


def _roll(run: Run, x: Tensor, shifts: Any, dims: Any = ()) -> Any:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        return _rolled(x.reshape(-1), shifts[0], 0).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(x, shift, dim)
    return x


def _rolled(x: Tensor, shift: int, dim: int) -> Tensor:
    size = fixed(x.shape[dim], "what is rolled")
    places = [(place - shift) % size for place in range(size)]
    return x.index_select(dim, indices(places))


def _scatter_add(run: Run, x: Tensor, dim: int, index: Tensor, parts: Tensor) -> Tensor:
    """Add to places, by a function of ours: to ORT, the gradient is that of a scatter that overwrites."""
    if not x.ndim:
        return x + parts.sum()
    parts = parts[tuple(slice(0, size) for size in index.shape)]
    given = (tensor.transpose(dim, -1) for tensor in (x, index, parts))
    return x + scattered(*given).transpose(dim, -1)


def _scatter_reduce(
    run: Run, x: Tensor, dim: int, index: Tensor, parts: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    if reduce in ("amax", "amin"):
        # A softmax over neighbours takes the largest score away, detached; on the way of a gradient it is refused.
        return NotImplemented
    if reduce not in ("sum", "add"):
        raise ExportError(f"scatters with reduce={reduce!r} have no gradient in ONNX Runtime: scatter_add has")
    if not include_self:
        mark = torch.zeros_like(x).scatter(dim, index, torch.ones_like(parts))
        x = x * (1 - mark)
    return _scatter_add(run, x, dim, index, parts)


def _index_add(run: Run, x: Tensor, dim: int, index: Tensor, parts: Tensor, *, alpha: float = 1) -> Tensor:
    shape = [1] * parts.ndim
    shape[dim] = -1
    return _scatter_add(run, x, dim, index.reshape(shape).expand(parts.shape), parts if alpha == 1 else parts * alpha)


def _index_put(run: Run, x: Tensor, places: Any, parts: Tensor, accumulate: bool = False) -> Any:
    if not accumulate:
        return NotImplemented
    dims = [dim for dim, place in enumerate(places) if place is not None]
    if len(dims) > 1 or places[dims[0]].ndim != 1 or places[dims[0]].dtype == torch.bool:
        raise ExportError("index_put with accumulate=True and several indices, or masks: use scatter_add or index_add")
    shape = list(x.shape)
    shape[dims[0]] = places[dims[0]].shape[0]
    return _index_add(run, x, dims[0], places[dims[0]], parts.expand(shape))


def _rot90(run: Run, x: Tensor, k: int = 1, dims: Any = (0, 1)) -> Tensor:
    first, second = dims
    if k % 4 == 0:
        return x
    if k % 4 == 2:
        return _reversed(_reversed(x, first), second)
    return _reversed(x.transpose(first, second), first if k % 4 == 1 else second)


def _reversed(x: Tensor, dim: int) -> Tensor:
    """Reverse by choosing: ORT's gradient of a slice with a negative step fails at run time."""
    size = x.shape[dim]
    places = indices(range(size - 1, -1, -1)) if isinstance(size, int) else torch.arange(size - 1, -1, -1)
    return x.index_select(dim, places)


def _flip(run: Run, x: Tensor, dims: Any) -> Tensor:
    for dim in dims:
        x = _reversed(x, dim)
    return x


def _diag_embed(run: Run, x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    if offset or (dim1 % (x.ndim + 1), dim2 % (x.ndim + 1)) != (x.ndim - 1, x.ndim):
        raise ExportError("diag_embed with an offset or dims of its own: use the last two dims, and roll or permute")
    return x.unsqueeze(-1) * torch.eye(fixed(x.shape[-1], "a diagonal"), dtype=x.dtype)


def _raised(x: Tensor, dims: int) -> Tensor:
    if x.ndim >= dims:
        return x
    return x.unsqueeze(2) if dims == 3 and x.ndim == 2 else x.reshape({1: (-1,), 2: (1, -1), 3: (1, -1, 1)}[dims])


def _at_least(dims: int) -> Rewrite:
    """Return tensors with at least so many dims: the exporter writes a loop over a sequence."""
    return lambda run, x: _raised(x, dims) if isinstance(x, Tensor) else [_raised(part, dims) for part in x]


def _stacked(dims: int, dim: int) -> Rewrite:
    """Return what puts tensors side by side, in rows or in depth."""

    def rewrite(run: Run, tensors: list[Tensor]) -> Tensor:
        parts = [_raised(x, dims) for x in tensors]
        return torch.cat(parts, min(dim, parts[0].ndim - 1))

    return rewrite


def _glu(run: Run, x: Tensor, dim: int = -1) -> Tensor:
    half = fixed(x.shape[dim], "what is split") // 2
    return x.narrow(dim, 0, half) * torch.sigmoid(x.narrow(dim, half, half))


INDEXING: dict[Any, Rewrite] = {
    aten.split.Tensor: _split,
    aten.split.sizes: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _chunk,
    aten.unbind.int: _unbind,
    aten.tensor_split.sections: _tensor_split,
    aten.tensor_split.indices: _tensor_split_at,
    aten.roll.default: _roll,
    **{
        overload: _at_least(dims)
        for dims in (1, 2, 3)
        for overload in (getattr(aten, f"atleast_{dims}d").default, getattr(aten, f"atleast_{dims}d").Sequence)
    },
    aten.flip.default: _flip,
    aten.fliplr.default: lambda run, x: _flip(run, x, [1]),
    aten.flipud.default: lambda run, x: _flip(run, x, [0]),
    aten.hstack.default: _stacked(1, 1),
    aten.vstack.default: _stacked(2, 0),
    aten.dstack.default: _stacked(3, 2),
    aten.scatter_add.default: _scatter_add,
    aten.scatter_reduce.two: _scatter_reduce,
    aten.scatter.reduce: lambda run, x, dim, index, parts, *, reduce: _scatter_reduce(
        run, x, dim, index, parts, reduce
    ),
    aten.index_add.default: _index_add,
    aten.index_put.default: _index_put,
    aten.rot90.default: _rot90,
    aten.diag_embed.default: _diag_embed,
    aten.glu.default: _glu,
}
