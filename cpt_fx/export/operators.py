"""Decompositions of operators that ONNX lacks or that torch's exporter translates wrongly.

They apply below autograd: gradients are still those of PyTorch's own backward passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from cpt_fx.common.torch_private import disable_current_modes, pytree
from cpt_fx.export.backward import adaptive_pooling, average_pooling, through, transposed_convolution
from cpt_fx.export.torch_private import decomposition_table

aten, prims = torch.ops.aten, torch.ops.prims
Sizes = Sequence[Any]
Uniform = Callable[[Tensor], Tensor]
"""Returns noise in [0, 1) in the shape of a tensor."""
_STEPS = 2**24
"""How many values the noise takes."""


def _product(x: Tensor, dims: Sizes, *, output_dtype: torch.dtype | None = None) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = aten.prod.dim_int(x, dim, dtype=output_dtype)
    return x


def _trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: Sizes, expand2: Sizes, expand3: Sizes, summed: Sizes, unroll: int = 1
) -> Tensor:
    dims = range(a.ndim + len(expand1))
    first, second, third = ([dim for dim in dims if dim not in absent] for absent in (expand1, expand2, expand3))
    made: Tensor = torch.einsum(a, first, b, second, c, third, [dim for dim in dims if dim not in summed])
    return made


def _average_pool(dims: int, x: Tensor, *options: Any) -> Any:
    """Apply `divisor_override`, which the exporter ignores."""
    given = options[5] if len(options) > 5 else None
    return NotImplemented if given is None else through(x, [m.T for m in average_pooling(x.shape[-dims:], *options)])


def _adaptive_max_pool(operator: Any, x: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Gather each window as a row: torch's own decomposition needs windows of equal size."""
    made = decomposition_table[operator](x, sizes)
    if made is not NotImplemented:
        return made  # type: ignore[no-any-return]
    with disable_current_modes():
        places = torch.zeros(1, 1, dtype=torch.int64)
        for size, out in zip(x.shape[-len(sizes) :], sizes, strict=True):
            window = adaptive_pooling(size, out) > 0
            first, length = window.int().argmax(1, keepdim=True), window.sum(1, keepdim=True)
            # A shorter window repeats its last element.
            own = first + torch.arange(int(length.max())).minimum(length - 1)
            places = (places[:, None, :, None] * int(size) + own[:, None, :]).flatten(2).flatten(0, 1)
    values, chosen = x.flatten(-len(sizes))[..., places].max(-1)
    indices = places.expand(*chosen.shape, -1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return values.unflatten(-1, tuple(sizes)), indices.unflatten(-1, tuple(sizes))


def _adaptive_average_pool(x: Tensor, sizes: Sizes) -> Tensor:
    matrices = [adaptive_pooling(size, out).T for size, out in zip(x.shape[-len(sizes) :], sizes, strict=True)]
    return through(x, matrices)


def _kth(x: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    indices = x.argsort(dim).narrow(dim, k - 1, 1)
    return _taken(x, indices, dim, keepdim)


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the lower median, or the first NaN if there is one."""
    missing = x.isnan()
    indices = x.argsort(dim).narrow(dim, (x.shape[dim] - 1) // 2, 1)
    first = missing.to(torch.int32).argmax(dim, keepdim=True)
    return _taken(x, torch.where(missing.any(dim, keepdim=True), first, indices), dim, keepdim)


def _taken(x: Tensor, indices: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    values = x.gather(dim, indices)
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    places = torch.where(index < 0, index + x.numel(), index).flatten()
    scatter = Tensor.scatter_add if accumulate else Tensor.scatter
    return scatter(x.flatten(), 0, places, source.flatten()).view(x.shape)


def _diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = x.shape[dim1], x.shape[dim2]
    above = min(max(-offset, 0), rows)
    column = aten.constant_pad_nd.default(source, [above, rows - above - source.shape[-1]]).unsqueeze(-1)
    on = torch.arange(columns) - torch.arange(rows).unsqueeze(-1) == offset
    return torch.where(on, column, x.movedim((dim1, dim2), (-2, -1))).movedim((-2, -1), (dim1, dim2))


def _by_places(operator: Any, x: Tensor, indices: Sequence[Tensor | None], *more: Any) -> Any:
    """Replace masks among other indices by the positions of their true elements, and cast indices to int64."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and len(indices) > 1:
            places += index.nonzero().unbind(1)
        else:
            places += [index if index is None or index.dtype == torch.bool else index.to(torch.int64)]
    if all(one is other for one, other in zip(places, indices, strict=False)):
        return NotImplemented
    return operator(x, places, *more)


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Add to elements along one dim, as ScatterElements.

    ScatterND loses sums in ONNX Runtime on CPU: its threads add to the same element at the same time.
    """
    if not accumulate:
        return _by_places(aten.index_put.default, x, indices, values)
    places: list[Tensor | None] = []
    for index in indices:
        places += index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else [index]
    dims = [dim for dim, index in enumerate(places) if index is not None]
    others = [dim for dim in range(x.ndim) if dim not in dims]
    found = torch.broadcast_tensors(*(index.to(torch.int64) for index in places if index is not None))
    # In `x[indices]` the dims of the indices replace the first indexed dim if they are adjacent, else they come first.
    first = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    sizes = [x.shape[dim] for dim in others]
    values = values.expand([*sizes[:first], *found[0].shape, *sizes[first:]])
    values = values.movedim(tuple(range(first, first + found[0].ndim)), tuple(range(found[0].ndim)))
    row = torch.zeros_like(found[0])
    for dim, index in zip(dims, found, strict=True):
        row = row * x.shape[dim] + torch.where(index < 0, index + x.shape[dim], index)
    moved = x.permute(*dims, *others)
    rows, columns = math.prod(x.shape[dim] for dim in dims), math.prod(sizes)
    values = values.reshape(row.numel(), columns)
    made = moved.reshape(rows, columns).scatter_add(0, row.reshape(-1, 1).expand(values.shape), values)
    return made.view(moved.shape).permute([[*dims, *others].index(dim) for dim in range(x.ndim)])


def _first(operator: Any, x: Tensor, *dim: Any, **options: Any) -> Any:
    """Compute a maximum or minimum of bools on int32: ONNX Runtime has no kernels for bools."""
    if x.dtype != torch.bool:
        return NotImplemented
    made = operator(x.to(torch.int32), *dim, **options)
    return (made[0].to(torch.bool), made[1]) if isinstance(made, tuple) else made


def _split(x: Tensor, size: Any, dim: int = 0) -> list[Tensor]:
    count = int((x.shape[dim] + size - 1) // size)
    return [aten.slice.Tensor(x, dim, part * size, (part + 1) * size) for part in range(count)]


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, transposed: bool,
    output_padding: Sizes, groups: int,
) -> Tensor:  # fmt: skip
    padding = [int(size) for size in padding]
    if not transposed:
        return aten.convolution.default(x, weight, bias, stride, padding, dilation, False, output_padding, groups)  # type: ignore[no-any-return]
    reach = [step * (size - 1) + 1 for step, size in zip(dilation, weight.shape[2:], strict=True)]
    sizes = [
        (x.shape[2 + dim] - 1) * stride[dim] - 2 * padding[dim] + reach[dim] + output_padding[dim]
        for dim in range(x.ndim - 2)
    ]
    made = transposed_convolution(x, weight, sizes, stride, padding, dilation, groups)
    return made if bias is None else made + bias.view(-1, *(1,) * (x.ndim - 2))


def _arange(start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Compute the length without rounding up if the step is known to divide the span: a ceiling is a new symbol."""
    if not statically_known_true((end - start) % step == 0):
        return NotImplemented
    return torch.arange((end - start) // step, dtype=dtype) * step + start


def _places_in_rows(rows: Tensor, size: int, *, out_int32: bool = False) -> Tensor:
    """Return where each row of a sparse matrix begins (CSR), from the sorted row index of each element (COO)."""
    counts = rows.new_zeros(size + 1).index_put((rows + 1,), torch.ones_like(rows), accumulate=True)
    return counts.cumsum(0, dtype=torch.int32 if out_int32 else torch.int64)


def _distances(x: Tensor, y: Tensor, p: float, mode: int | None) -> Tensor:
    apart = x.unsqueeze(-2) - y.unsqueeze(-3)
    return (apart * apart).sum(-1).sqrt() if p == 2 else torch.linalg.vector_norm(apart, p, -1)


def _distances_backward(gradient: Tensor, x: Tensor, y: Tensor, p: float, distance: Tensor) -> Tensor:
    """Return the gradient of `x`: zero where two points are equal, in one dim or in all."""
    apart, far = x.unsqueeze(-2) - y.unsqueeze(-3), distance.unsqueeze(-1)
    share = (apart.abs() == far).to(x.dtype) if p == math.inf else (apart.abs() / far) ** (p - 1)
    share = torch.where(apart == 0, 0.0, share * apart.sign()) if p else torch.zeros_like(apart)
    return (gradient.unsqueeze(-1) * share).sum(-2)


def _varying(written: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Decompose an operator if a scalar argument depends on a size: the exporter takes constants only."""
    leaves = pytree.tree_leaves((args, kwargs))
    return written(*args, **kwargs) if any(isinstance(leaf, _VARYING) for leaf in leaves) else NotImplemented


_VARYING = (torch.SymInt, torch.SymFloat)

_WRITTEN: dict[Any, Callable[..., Any]] = {
    aten.split.Tensor: _split,
    aten.arange.start_step: _arange,
    aten.repeat_interleave.self_int: aten.repeat_interleave.self_int.decompose,
    aten.convolution.default: _convolution,
    aten.pow.Tensor_Scalar: lambda x, power: torch.pow(x, torch.scalar_tensor(power, dtype=x.dtype)),
    **{name: decomposition_table[name] for name in (
        aten.roll.default, aten.addcmul.default, aten.addcdiv.default, aten.softplus.default, aten.leaky_relu.default,
        aten.elu.default, aten.celu.default, aten.hardtanh.default,
    )},
}  # fmt: skip
EVERYWHERE: dict[Any, Callable[..., Any]] = {
    **{name: partial(_varying, written) for name, written in _WRITTEN.items()},
    aten.avg_pool2d.default: partial(_average_pool, 2),
    aten.avg_pool3d.default: partial(_average_pool, 3),
    # Sorting in ONNX is always stable.
    aten.sort.stable: lambda x, *, stable, dim=-1, descending=False: aten.sort.default(x, dim, descending),
    aten._convert_indices_from_coo_to_csr.default: _places_in_rows,
    aten._cdist_forward.default: _distances,
    aten._cdist_backward.default: _distances_backward,
    **{name: partial(_first, name) for name in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)},
    aten.index.Tensor: partial(_by_places, aten.index.Tensor),
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: aten.index_put.default,
    aten.index_add.default: decomposition_table[aten.index_add.default],
    aten.argsort.stable: lambda x, *, stable, dim=-1, descending=False: aten.argsort.default(x, dim, descending),
}
"""For graphs with and without a backward pass."""


def _running(sign: int, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the running maximum or minimum along a dim, and the index of the latest element with that value."""
    if x.ndim == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    x = x.movedim(dim, -1) * sign
    places = torch.arange(x.shape[-1], device=x.device)
    is_past = places <= places.unsqueeze(1)
    so_far = torch.where(is_past, x.unsqueeze(-2), -math.inf)
    largest = so_far.amax(-1)
    latest = torch.where(is_past & (so_far == largest.unsqueeze(-1)), places, -1).amax(-1)
    return (largest * sign).movedim(-1, dim), latest.movedim(-1, dim)


OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.cummax.default: partial(_running, 1),
    aten.cummin.default: partial(_running, -1),
    # A scalar that depends on a size is a tensor in the graph.
    aten.mul.Scalar: lambda x, factor: aten.mul.Tensor(x, factor),
    aten.prod.default: lambda x, *, dtype=None: torch.prod(x.flatten(), 0, dtype=dtype),
    prims.prod.default: _product,
    aten.cumprod.default: decomposition_table[aten.cumprod.default],
    aten.hypot.default: lambda x, y: torch.sqrt(x * x + y * y),
    aten.fmin.default: lambda x, y: torch.where(torch.isnan(y) | (x <= y), x, y),
    aten.fmax.default: lambda x, y: torch.where(torch.isnan(y) | (x >= y), x, y),
    aten._trilinear.default: _trilinear,
    aten._adaptive_avg_pool3d.default: _adaptive_average_pool,
    aten.adaptive_max_pool2d.default: partial(_adaptive_max_pool, aten.adaptive_max_pool2d.default),
    aten.adaptive_max_pool3d.default: partial(_adaptive_max_pool, aten.adaptive_max_pool3d.default),
    aten.kthvalue.default: _kth,
    aten.median.dim: _median,
    aten.median.default: lambda x: _median(x.flatten(), 0)[0],
    # ONNX Runtime has no CUDA kernel of Col2Im.
    aten.col2im.default: decomposition_table[aten.col2im.default],
    aten.put.default: _put,
    aten.diagonal_scatter.default: _diagonal_scatter,
}


def drawing(uniform: Uniform) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of random operators, given a source of noise.

    An exported graph has no generator. All random numbers are computed from one kind of noise in [0, 1): a hash of a
    seed that is an input of the graph, the same in PyTorch and in every runtime.
    """

    def of(x: Tensor) -> Tensor:
        return uniform(x.detach().to(torch.float32))

    def normal(x: Tensor) -> Tensor:
        # Box-Muller: the noise may be 0, but one minus the noise cannot.
        return torch.sqrt(torch.log(1.0 - of(x)) * -2.0) * torch.cos(of(x) * (2 * math.pi))

    def shaped(size: Any, dtype: torch.dtype | None) -> Tensor:
        return torch.zeros(size, dtype=dtype or torch.get_default_dtype())

    def bernoulli(x: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
        return (of(x) < (x if p is None else p)).to(x.dtype)

    def dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        kept = of(x) < 1 - p if train is not False else torch.ones_like(x, dtype=torch.bool)
        scale = 1.0 if train is False else 0.0 if p == 1 else 1 / (1 - p)
        return x * kept.to(x.dtype) * scale, kept

    def between(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
        return of(x) * (high - low) + low

    def gauss(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
        return normal(x) * std + mean

    def whole(x: Tensor, low: Any, high: Any) -> Tensor:
        # The noise has 24 bits, and a sum in float32 no more.
        count = high - low
        if isinstance(count, int) and count > _STEPS:
            first, second = (of(torch.stack((x, x))) * _STEPS).to(torch.int64)
            place = (first * _STEPS + second) % count
        else:
            place = torch.floor(of(x) * count).to(torch.int64)
        made: Tensor = (place + low).to(x.dtype)
        return made

    def rrelu(
        x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any
    ) -> Tensor:
        if not training:
            return torch.where(x > 0, x, x * ((lower + upper) / 2))
        noise.copy_(torch.where(x <= 0, between(x, lower, upper), 1.0))
        return x * noise

    def like(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        return x if dtype is None else torch.zeros_like(x, dtype=dtype)

    return {
        aten.bernoulli.default: bernoulli,
        aten.bernoulli.p: bernoulli,
        aten.bernoulli_.float: lambda x, p=0.5, *, generator=None: x.copy_(bernoulli(x, p)),
        aten.bernoulli_.Tensor: lambda x, p, *, generator=None: x.copy_(bernoulli(x, p)),
        aten.native_dropout.default: dropout,
        aten.rrelu_with_noise.default: rrelu,
        aten.rand.default: lambda size, *, dtype=None, **_: of(shaped(size, dtype)).to(dtype or torch.float32),
        aten.randn.default: lambda size, *, dtype=None, **_: normal(shaped(size, dtype)).to(dtype or torch.float32),
        aten.rand_like.default: lambda x, *, dtype=None, **_: of(x).to(dtype or x.dtype),
        aten.randn_like.default: lambda x, *, dtype=None, **_: normal(x).to(dtype or x.dtype),
        aten.randint.default: lambda high, size, *, dtype=torch.int64, **_: whole(shaped(size, dtype), 0, high),
        aten.randint.low: lambda low, high, size, *, dtype=torch.int64, **_: whole(shaped(size, dtype), low, high),
        aten.randint_like.default: lambda x, high, *, dtype=None, **_: whole(like(x, dtype), 0, high),
        aten.randint_like.low_dtype: lambda x, low, high, *, dtype=None, **_: whole(like(x, dtype), low, high),
        aten.uniform_.default: lambda x, low=0.0, high=1.0, *, generator=None: x.copy_(between(x, low, high)),
        aten.uniform.default: between,
        aten.normal_.default: lambda x, mean=0.0, std=1.0, *, generator=None: x.copy_(gauss(x, mean, std)),
        aten.normal_functional.default: gauss,
        aten.exponential_.default: lambda x, lambd=1.0, *, generator=None: x.copy_(torch.log(1.0 - of(x)) / -lambd),
        aten.randperm.default: lambda n, *, dtype=torch.int64, **_: torch.argsort(of(torch.zeros(n))).to(dtype),
    }
