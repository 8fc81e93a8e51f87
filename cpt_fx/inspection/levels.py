"""Which tensors are quantized: the levels in every range of a quantizer's result, and tensors that hold only these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cpt_fx.common.arrays import array_of
from cpt_fx.common.functorch import plain
from cpt_fx.common.torch_private import FakeTensor, functorch, pytree
from cpt_fx.formats import most_levels
from cpt_fx.quantizers.numerics import Grid, reduced_dims

_FITS = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
"""Types whose values are exact in single precision."""
_HALF = (torch.float16, torch.bfloat16)
_FEW = 64
"""The most levels that a half-precision tensor is compared with at once: with more, almost any value is a level."""
_RECENT = 8
"""The number of recent quantizers that a copy is compared with one by one, before all at once."""


def ranges_of(x: Tensor, grid: Grid) -> Tensor:
    """Return a tensor as a matrix with one row per range."""
    dims = reduced_dims(x.ndim, grid.keep, grid.over)
    kept = tuple(dim for dim in range(x.ndim) if dim not in dims)
    count = torch.Size(x.shape[dim] for dim in kept).numel()
    rows = x.permute((*kept, *dims)).reshape(count, -1)
    if not grid.block:
        return rows
    rows = torch.cat((rows, rows[:, -1:].expand(-1, -rows.shape[1] % grid.block)), 1)
    return rows.reshape(-1, grid.block)


def levels_in(rows: Tensor, most: int) -> tuple[int, Tensor]:
    """Return the largest number of levels in a row, at most `most` + 1, and the levels of all rows."""
    # NumPy sorts and compares several times as fast as torch does on a CPU.
    ordered = np.sort(array_of(_exact(rows)), 1)
    is_new = np.isfinite(ordered)
    is_new[:, 1:] &= ordered[:, 1:] > ordered[:, :-1]
    places = np.flatnonzero(is_new)
    counts = np.bincount(places // ordered.shape[1], minlength=1)
    return min(int(counts.max()), most + 1), torch.from_numpy(ordered.reshape(-1)[places])


def holds(x: Tensor, levels: Tensor) -> bool:
    """Whether every element of a tensor is one of the levels, or NaN."""
    levels = levels.to(x.device, x.dtype)
    if x.is_cpu:
        is_level = torch.from_numpy(np.isin(array_of(_exact(x)), array_of(_exact(levels))))
    else:
        is_level = torch.isin(x, levels)
    return bool((is_level | x.isnan()).all())


def _exact(x: Tensor) -> Tensor:
    """Return the same values in a type that NumPy supports."""
    return x.float() if x.dtype in _FITS else x


@dataclass
class Grids:
    """The results of quantizers in a run: their levels, and the storages that hold them."""

    unread: set[str] = field(default_factory=set)
    """Kinds of tensors whose values cannot be read."""
    single: int = 0
    """How many results had ranges of a single element."""
    _grids: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages of quantizer results and copies of these, by address; a weak reference keeps the address from reuse."""
    _levels: list[Tensor] = field(default_factory=list)
    _all: Tensor | None = None

    def add(self, result: Tensor, bits: int | None, grid: Grid) -> bool:
        """Register the result of a quantizer; return whether no range has more levels than its width allows."""
        if self._is_unread(result):
            return True
        self._keep(result)
        self._all = None
        if bits is None:
            self._levels.append(result.unique())
            return True
        rows = ranges_of(result.detach(), grid)
        self.single += rows.shape[1] == 1
        allowed = most_levels(grid.scheme, bits)
        most, levels = levels_in(rows, allowed)
        self._levels.append(levels)
        return most <= allowed

    def _is_unread(self, value: Tensor) -> bool:
        if value.is_meta or isinstance(value, FakeTensor):
            self.unread.add("meta")
        elif functorch.is_functorch_wrapped_tensor(value):
            self.unread.add("functorch")
        else:
            return not value.numel()
        return True

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._grids[storage._cdata] = StorageWeakRef(storage)

    def forget(self, written: Any) -> None:
        """Forget the tensors that an operator wrote to: they are no quantizer results any more."""
        for tensor in pytree.tree_leaves(written) if isinstance(written, (list, tuple)) else (written,):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._grids.pop(tensor.untyped_storage()._cdata, None)

    def hold(self, value: Any) -> bool:
        """Whether an operand is the result of a quantizer, or holds nothing but such values."""
        if isinstance(value, (list, tuple)):  # an operand of integer execution: codes with their scale
            return len(value) > 1 or all(map(self.hold, value))
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return True
        value = plain(value).detach()
        if self._is_unread(value):
            return True
        if value.layout is not torch.strided or value.is_nested:
            return False
        if value.untyped_storage()._cdata in self._grids:
            return True
        numbers = value.float() if value.dtype.itemsize == 1 else value
        found = self._holds_levels(torch.view_as_real(value.resolve_conj()) if value.is_complex() else numbers)
        if found and value.untyped_storage().nbytes() == value.numel() * value.element_size():
            self._keep(value)
        return found

    def _holds_levels(self, value: Tensor) -> bool:
        """Whether a tensor holds nothing but zeros and levels that quantizers have produced."""
        zero = value.new_zeros(1)
        if not self._levels:
            return holds(value, zero)
        for levels in self._levels[: -_RECENT - 1 : -1]:
            if holds(value, _with(levels, zero)):
                return True
        if self._all is None:
            self._all = _with(torch.cat([levels.to("cpu", torch.float64) for levels in self._levels]), zero)
        if value.dtype not in _HALF or self._all.numel() <= _FEW:
            return holds(value, self._all)
        return any(holds(value, _with(levels, zero)) for levels in self._levels)


def _with(levels: Tensor, zero: Tensor) -> Tensor:
    every: Tensor = torch.cat((levels, zero.to(levels))).unique()
    return every
