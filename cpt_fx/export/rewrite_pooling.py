"""Pooling and resizing: where ORT's gradient is wrong for another batch, or lacking, as products and choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cpt_fx.export.rewrite_reductions import REDUCTIONS
from cpt_fx.export.rewriting import Rewrite, Run, aten, computed, fixed, pair

_WHAT = "what is pooled or resized"


def along(x: Tensor, dim: int, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a linear map along one dim: `make` computes it, on rows, and is asked once, for the unit vectors."""
    size = fixed(x.shape[dim], _WHAT)
    matrix = computed(lambda: make(torch.eye(size)))
    if size == matrix.shape[1] and bool(computed(lambda: (make(torch.eye(size)) == torch.eye(size)).all())):
        return x
    return torch.matmul(x.transpose(dim, -1), matrix.to(x.dtype)).transpose(dim, -1)


def _average_pool(
    run: Run, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    """Average by a convolution: ORT's own gradient takes the batch of the example for that of every step.

    In 3-d, whose grouped convolutions have wrong gradients, and with windows that are cut off, dim by dim.
    """
    dims = len(kernel_size)
    stride = pair(stride or kernel_size, dims)
    kernel_size, padding = pair(kernel_size, dims), pair(padding, dims)
    if ceil_mode or dims == 3:
        for place in range(dims):
            options = (kernel_size[place], stride[place], padding[place], ceil_mode, count_include_pad)
            x = along(x, place - dims, lambda rows, options=options: F.avg_pool1d(rows, *options))  # type: ignore[misc]
        if divisor_override:
            # Valid where windows are whole, which is what a divisor of one's own is for.
            x = x * (math.prod(kernel_size) / divisor_override)
        return x
    batched = x if x.ndim == dims + 2 else x[None]
    channels = batched.shape[1]
    convolve = (torch.conv1d, torch.conv2d)[dims - 1]
    kernel = torch.full((channels, 1, *kernel_size), 1 / (divisor_override or math.prod(kernel_size)), dtype=x.dtype)
    y = convolve(batched, kernel, None, stride, padding, 1, channels)
    if any(padding) and not count_include_pad and not divisor_override:
        ones = torch.ones((1, 1, *batched.shape[2:]), dtype=x.dtype)
        y = y / convolve(ones, kernel[:1], None, stride, padding)
    return y if x.ndim == dims + 2 else y[0]


def _adaptive_average(run: Run, x: Tensor, output_size: Sequence[int]) -> Tensor:
    dims = len(output_size)
    if all(size == 1 for size in output_size):
        return x.mean(tuple(range(-dims, 0)), keepdim=True)
    for place, size in enumerate(output_size):
        x = along(x, place - dims, lambda rows, size=size: F.adaptive_avg_pool1d(rows, size))  # type: ignore[misc]
    return x


def _adaptive_maximum(run: Run, x: Tensor, output_size: Sequence[int]) -> Any:
    """Return the largest of each window; the first of equal ones takes the gradient, in the order of the memory."""
    dims = len(output_size)
    sizes = [fixed(size, _WHAT) for size in x.shape[-dims:]]
    windows = []
    for places in product(*map(range, output_size)):
        part = x
        for dim, (place, out, size) in enumerate(zip(places, output_size, sizes, strict=True)):
            start, end = place * size // out, -(-(place + 1) * size // out)
            part = part.narrow(dim - dims, start, end - start)
        windows.append(REDUCTIONS[aten.max.dim](run, part.flatten(-dims), -1)[0])
    largest = torch.stack(windows, -1).reshape(*x.shape[:-dims], *output_size)
    # Places are not computed: whoever reads them is refused.
    return largest, None


def _resized(target: Any, dims: int) -> Rewrite:
    """Return a resizing as one linear map for each dim, whose numbers are those of the torch operator."""

    def rewrite(run: Run, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in target._schema.arguments][1:]
        given = dict(zip(names, args)) | kwargs  # noqa: B905 - what is not given has defaults
        size = given.get("output_size")
        scales = given.get("scale_factors")
        if "scales" in given or any(name.startswith("scales_") for name in given):
            ordered = ("scales",) if dims == 1 else ("scales_d", "scales_h", "scales_w")[3 - dims :]
            listed = [given.get(name) for name in ordered]
            scales = None if None in listed else listed
        aligned = {name: value for name, value in given.items() if name == "align_corners"}
        for place in range(dims):

            def resize(rows: Tensor, place: int = place) -> Tensor:
                # The other dims stay as they are; they are not of one element only, which some kernels mistake.
                shape = (1, rows.shape[0], rows.shape[-1], *(4,) * (dims - 1))
                lines = rows.reshape(*shape[:3], *(1,) * (dims - 1)).expand(shape).contiguous()
                wanted = None if size is None else [size[place], *shape[3:]]
                factors = None if scales is None else [scales[place], *(1.0,) * (dims - 1)]
                made = _by_target(target, lines, wanted, factors, aligned)
                return made.flatten(3)[0, :, :, 0] if dims > 1 else made[0]

            x = along(x, place - dims, resize)
        return x

    return rewrite


def _by_target(
    target: Any, lines: Tensor, size: list[int] | None, factors: list[float] | None, aligned: dict[str, Any]
) -> Tensor:
    packet = target.overloadpacket
    if size is None or factors is None:
        result: Tensor = packet.vec(lines, size, scale_factors=factors, **aligned)
        return result
    # Both are given: the size says how much comes out, the factors from where it is taken.
    names = ("scales",) if len(size) == 1 else ("scales_d", "scales_h", "scales_w")[3 - len(size) :]
    result = packet.default(lines, size, **aligned, **dict(zip(names, factors, strict=True)))
    return result


def _pixel_shuffle(run: Run, x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    x = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    first = len(batch) + 1
    order = (*range(first), first + 2, first, first + 3, first + 1)
    return x.permute(order).reshape(*batch, channels // factor**2, height * factor, width * factor)


def _pixel_unshuffle(run: Run, x: Tensor, factor: int) -> Tensor:
    *batch, channels, height, width = x.shape
    x = x.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    first = len(batch) + 1
    order = (*range(first), first + 1, first + 3, first, first + 2)
    return x.permute(order).reshape(*batch, channels * factor**2, height // factor, width // factor)


def _pad(run: Run, x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pad by choosing: ORT has the gradient of constant padding only."""
    return NotImplemented if mode == "constant" else _padded(x, pad, mode)


def _padded(x: Tensor, pad: Sequence[int], mode: str) -> Tensor:
    for place in range(len(pad) // 2):
        before, after = pad[2 * place], pad[2 * place + 1]
        size = fixed(x.shape[-1 - place], "what is padded")
        if before or after:
            places = computed(lambda: F.pad(torch.arange(float(size))[None], (before, after), mode)[0])  # noqa: B023
            x = x.index_select(x.ndim - 1 - place, places.to(torch.int64))
    return x


_RESIZINGS = {
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3, "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2, "_upsample_nearest_exact3d": 3, "upsample_linear1d": 1, "upsample_bilinear2d": 2,
    "upsample_trilinear3d": 3, "upsample_bicubic2d": 2, "_upsample_bilinear2d_aa": 2, "_upsample_bicubic2d_aa": 2,
}  # fmt: skip

POOLING: dict[Any, Rewrite] = {
    aten.avg_pool1d.default: _average_pool,
    aten.avg_pool2d.default: _average_pool,
    aten.avg_pool3d.default: _average_pool,
    aten.adaptive_avg_pool1d.default: _adaptive_average,
    aten.adaptive_avg_pool2d.default: _adaptive_average,
    aten.adaptive_avg_pool3d.default: _adaptive_average,
    aten.adaptive_max_pool1d.default: _adaptive_maximum,
    aten.adaptive_max_pool2d.default: _adaptive_maximum,
    aten.adaptive_max_pool3d.default: _adaptive_maximum,
    aten.pixel_shuffle.default: _pixel_shuffle,
    aten.pixel_unshuffle.default: _pixel_unshuffle,
    aten.pad.default: _pad,
    **{
        getattr(aten, f"{kind}_pad{dims}d").default: lambda run, x, pad, mode=mode: _padded(x, pad, mode)
        for kind, mode in (("reflection", "reflect"), ("replication", "replicate"))
        for dims in (1, 2, 3)
    },
    aten._pad_circular.default: lambda run, x, pad: _padded(x, pad, "circular"),
    **{
        overload: _resized(overload, dims)
        for name, dims in _RESIZINGS.items()
        for overload in (getattr(aten, name).default, getattr(aten, name).vec)
    },
}
