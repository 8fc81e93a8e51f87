"""A census of products at two bits: what reaches ATen, and whether its operands lie on four levels.

It shares nothing with the package's own proof: a dispatch mode sees operators
from below, and values are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_fx.quantizers.widths import LOOKS_ON

BITS = 2

OPERANDS: dict[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "addmv_": (1, 2),
    "dot": (0, 1),
    "vdot": (0, 1),
    "addbmm": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    "_grouped_mm": (0, 1),
    "_addmm_activation": (1, 2),
    "addbmm_": (1, 2),
    "conv_tbc": (0, 1),
    "_trilinear": (0, 1, 2),
    "mkldnn_rnn_layer": (0,),
    "matrix_exp": (0,),
    "linalg_matrix_exp": (0,),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1),
    "_scaled_dot_product_attention_math": (0, 1),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1),
    "_transformer_encoder_layer_fwd": (0,),
    "_native_multi_head_attention": (0,),
    "_thnn_fused_lstm_cell": (),
    "_cdist_forward": (),
    "linear": (0, 1),
    "mkldnn_linear": (0, 1),
    "conv_tbc_backward": (0, 1),
    "linear_backward": (0, 1),
    "_mkldnn_transformer": (0,),
}
"""Operators of ATen that multiply, and which of their arguments. The others are made of these, or multiply nothing."""


@dataclass
class Product:
    """One product that ran with an operand on too many levels."""

    name: str
    operand: int
    levels: int
    shape: tuple[int, ...]
    backward: bool

    def __str__(self) -> str:
        where = "backward" if self.backward else "forward"
        return f"{self.name} ({where}), operand {self.operand} of {self.shape}: {self.levels} levels in one range"


@dataclass(eq=False)
class Census(TorchDispatchMode):
    """Look at every operator that runs inside, for ranges of some groups, each with the length of its blocks or 0."""

    ranges: frozenset[tuple[str, int]]
    largest: int
    backward: bool = False
    products: int = 0
    undecided: int = 0
    unquantized: list[Product] = field(default_factory=list)
    seen: dict[int, dict[Any, Tensor]] = field(default_factory=dict)
    """By memory, the tensors that held all of it. They live as long as this, so that no memory is used again."""
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By memory, a tensor that was copied to it, and the copy: a reshape copies where it cannot view."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        setattr(self, LOOKS_ON, True)  # quantizers run as they do without it, not operator by operator
        self.groups = {group for group, _ in self.ranges} | {"vector" for _, block in self.ranges if block}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch's compiler goes on underneath: it is its graphs that are to be looked at."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        for value in args:
            self._remember(value)
        if name in OPERANDS and func.namespace == "aten":
            self._look(name, args)
        result = func(*args, **(kwargs or {}))
        if name == "clone":
            self.copies[result.untyped_storage()._cdata] = args[0].detach(), result.detach()
        return result

    def _remember(self, x: Any) -> None:
        if type(x) not in (Tensor, Parameter) or x.layout is not torch.strided or not x.is_floating_point():
            return
        memory = x.untyped_storage()
        if x.numel() * x.itemsize == memory.nbytes() and not torch._debug_has_internal_overlap(x):
            self.seen.setdefault(memory._cdata, {})[x.shape, x.stride()] = x.detach()

    def _was_quantized(self, operand: Tensor) -> bool | None:
        """Whether what an operand views is on levels as a whole: a view folds dims, and cuts through ranges.

        None where its ranges may have been too short to show anything: then the operand does not show it either.
        """
        memory = operand.untyped_storage()._cdata
        tensors = self.seen.get(memory, {}).values()
        found = [is_on_levels(x, group, block, self.largest) for x in tensors for group, block in self.ranges]
        if True not in found and memory in self.copies:
            source, copy = self.copies[memory]
            found.append(torch.equal(source, copy) and self._was_quantized(source))
        return True if True in found else None if None in found else False

    def _look(self, name: str, args: Any) -> None:
        self.products += 1
        for place in OPERANDS[name]:
            operand = args[place] if place < len(args) else None
            if (
                not isinstance(operand, Tensor)
                or not operand.is_floating_point()
                or operand.layout is not torch.strided
            ):
                continue
            levels = fewest_levels(operand, self.groups, self.largest)
            if levels is None:
                self.undecided += 1
            elif levels > self.largest:
                quantized = self._was_quantized(operand)
                self.undecided += quantized is None
                if quantized is False:
                    self.unquantized.append(Product(name, place, levels, tuple(operand.shape), self.backward))


def fewest_levels(x: Tensor, groups: Iterable[str], allowed: int) -> int | None:
    """Return the levels of one range at most, in the grouping that shows fewest; None where that shows nothing."""
    x = x.detach().double()
    if x.numel() <= allowed + 1 or not bool(x.isfinite().all()):
        return None
    found: list[int | None] = []
    for group in groups:
        found += _levels(x, group, allowed)
    if any(count is not None and count <= allowed for count in found):
        return allowed
    return None if None in found or not found else min(count for count in found if count is not None)


def _levels(x: Tensor, group: str, allowed: int) -> list[int | None]:
    if group == "tensor" or x.ndim < 2:
        return [_most(x.reshape(1, -1), allowed)]
    found: list[int | None] = []
    if group in ("channel", "row"):
        found = [
            _most(x.movedim(dim, 0).reshape(x.shape[dim], -1), allowed) for dim in range(x.ndim) if x.shape[dim] > 1
        ]
        if x.ndim < 3:
            return found
        # Of a batch of weights each has channels of its own.
    # Along the last dim, or all but the middle ones: what is left after views is a line in some direction.
    return found + [_most(x.movedim(dim, -1).reshape(-1, x.shape[dim]), allowed) for dim in range(x.ndim)]


def is_on_levels(x: Tensor, group: str, block: int, allowed: int) -> bool | None:
    """Whether a tensor has few levels in each of the very ranges, or their blocks, that a group makes of it.

    None where a range has no more elements than levels.
    """
    x = x.double()
    found: list[bool | None] = []
    for rows in _ranges(x, group):
        parts = rows.split(block, dim=1) if block else (rows,)
        counts = [_most(part, allowed) for part in parts]
        # The last block may be too short to show anything, but not all of them.
        few = all(count is None or count <= allowed for count in counts)
        found.append(None if counts[0] is None else few)
    return True if True in found else None if None in found else False


def _ranges(x: Tensor, group: str) -> list[Tensor]:
    """Return the ranges of a group as rows. Any dim may be the one of channels."""
    if group == "tensor" or x.ndim < 2:
        return [x.reshape(1, -1)]
    if group == "vector":
        return [x.reshape(-1, x.shape[-1])]
    if group == "inner":
        return [x.movedim(0, -2).reshape(-1, x.shape[0] * x.shape[-1])]
    return [x.movedim(dim, 0).flatten(1) for dim in range(1 if group == "row" else x.ndim)]


def _most(rows: Tensor, allowed: int) -> int | None:
    """Return how many values the fullest row has besides zero; None where rows are too short to show anything."""
    if rows.shape[1] <= allowed:
        return None
    ordered = rows.sort(dim=1).values
    values = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
    return int((values - (rows == 0).any(1).long()).max())
