"""Quantize-dequantize of one tensor by the native kernel in `simulate.cpp`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpt_fx import native
from cpt_fx.formats import Rounding, Scheme
from cpt_fx.native import address
from cpt_fx.quantizers.noise import new_seed
from cpt_fx.quantizers.numerics import Grid, ValueRange, reduced_dims
from cpt_fx.quantizers.torch_private import storage_use_count

_SCHEMES = {Scheme.AFFINE: 0, Scheme.AFFINE_INTEGER: 1, Scheme.SYMMETRIC: 2}
_AFFINE_FLOORED = 3
_SOURCE = "simulate.cpp"


class Running(NamedTuple):
    """A running range: averages of minimum and size, and the weight that they have accumulated (1 in the limit)."""

    zero_point: Tensor
    range: Tensor
    weight: Tensor
    momentum: float
    """Share of the old average that an update keeps; negative if the range is not to be updated."""

    def fits(self) -> bool:
        """Return whether a kernel can write to it."""
        return all(state.dtype == torch.float32 and state.device.type == "cpu" for state in self[:3])


class Quantized(NamedTuple):
    """The result of a kernel, and all that is needed to compute it again."""

    values: Tensor
    value_ranges: Tensor
    seed: Tensor | None
    is_new: bool
    """Whether the quantizer's counters have no levels for this bit-width yet."""


def serves(x: Tensor, grid: Grid, *, as_stored: bool = False) -> bool:
    """Return whether the kernel supports a tensor: it must be plain, neither traced nor batched by torch.func.

    `as_stored` states that its elements are dense in memory, and may be quantized in that order.
    """
    return (
        native.reads(x)
        and (as_stored or x.is_contiguous())
        and _layout(x.shape, grid) is not None
        and native.load(_SOURCE) is not None
    )


def quantize(
    x: Tensor, bits: int, grid: Grid, value_ranges: Tensor | None = None, seed: Tensor | None = None,
    learner: Running | None = None, counters: Tensor | None = None, scales: Tensor | None = None,
) -> Quantized:  # fmt: skip
    """Quantize a tensor that `serves` accepts, over given ranges (as `laid_out` returns them) or measured ones.

    With `scales`, which gets one scale for each range, the values are codes of the symmetric grid.
    """
    layout = _layout(x.shape, grid)
    assert layout is not None
    scheme, outer, groups, inner = layout
    if seed is None and grid.rounding is Rounding.STOCHASTIC:
        seed = new_seed(x.device)
    given = value_ranges is not None
    if value_ranges is None:
        value_ranges = torch.empty(3 * groups)
    out = new_like(x) if scales is None else torch.empty_like(x, dtype=torch.int8)
    running: tuple[int | None, int | None, int | None, float] = (None, None, None, -1.0)
    if learner is not None:
        running = (learner[0].data_ptr(), learner[1].data_ptr(), learner[2].data_ptr(), learner.momentum)
    library = native._built(_SOURCE)  # not `load`: backward repeats what forward did, even if kernels are off by then
    assert library is not None
    is_new = library.cpt_fx_quantize(
        x.data_ptr(), out.data_ptr(), address(scales), outer, groups, inner, scheme, bits, address(seed),
        value_ranges.data_ptr(), given, *running, address(counters), native.threads(outer * groups * inner),
    )  # fmt: skip
    return Quantized(out, value_ranges, seed, bool(is_new))


def laid_out(value_range: ValueRange) -> Tensor | None:
    """Return a given range of a whole tensor in the kernel's layout; None for any other range."""
    parts = (value_range.zero_point, value_range.range, value_range.maximum())
    if any(part.numel() != 1 or part.dtype != torch.float32 or part.device.type != "cpu" for part in parts):
        return None
    return torch.cat([part.reshape(1) for part in parts])


@lru_cache(4096)
def _layout(shape: torch.Size, grid: Grid) -> tuple[int, int, int, int] | None:
    """Return the kernel's number of a scheme, and the shape as [outer, groups, inner], with one range per middle index.

    None if the kernel does not have the scheme, or if the granularity does not fit this layout.
    """
    if grid.block or grid.scheme not in _SCHEMES or shape.numel() == 0:
        return None
    dims = reduced_dims(len(shape), grid.keep, grid.over)
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    if not dims or (kept and kept != list(range(kept[0], kept[-1] + 1))):
        return None
    first, last = (kept[0], kept[-1] + 1) if kept else (0, 0)
    scheme = _AFFINE_FLOORED if grid.floored and grid.scheme is Scheme.AFFINE else _SCHEMES[grid.scheme]
    return scheme, shape[:first].numel(), shape[first:last].numel(), shape[last:].numel()


_WORTH_IT = 1 << 17
"""Size in bytes from which the C library asks the system for new pages."""
_MOST = 4
"""Buffers kept per thread: the operands of a product, and a spare. More would take noticeable memory."""


class _ThreadBuffers(threading.local):
    """The buffers of one thread: two threads must not reuse the same one."""

    def __init__(self) -> None:
        self.buffers: OrderedDict[int, Any] = OrderedDict()


_LOCAL = _ThreadBuffers()


def new_like(x: Tensor) -> Tensor:
    """Return an uninitialized contiguous tensor like a contiguous one.

    Its memory is reused as soon as nothing else holds it: a quantized tensor lives for one product. Getting pages from
    the system each time, and returning them, takes longer than quantizing: the C library returns large blocks at once,
    and touching new ones is a page fault every 4 KiB.
    """
    size = x.numel() * x.element_size()
    if size < _WORTH_IT:
        return torch.empty_like(x)
    buffers = _LOCAL.buffers
    for key, storage in reversed(buffers.items()):
        # One use is the cache's own. Other processes that share the memory are not counted.
        unused = storage.nbytes() == size and storage_use_count(storage._cdata) == 1
        if unused and not storage.is_shared():
            buffers.move_to_end(key)
            return x.new_empty(0).set_(storage, 0, x.shape, x.stride())
    made = torch.empty_like(x)
    storage = made.untyped_storage()
    buffers[id(storage)] = storage
    if len(buffers) > _MOST:
        buffers.popitem(last=False)
    return made
