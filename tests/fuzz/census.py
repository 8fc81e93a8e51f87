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
from torch.utils._python_dispatch import TorchDispatchMode

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
    """Look at every operator that runs inside."""

    groups: frozenset[str]
    largest: int
    backward: bool = False
    products: int = 0
    undecided: int = 0
    unquantized: list[Product] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether torch's compiler goes on underneath: it is its graphs that are to be looked at."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in OPERANDS and func.namespace == "aten":
            self._look(name, args)
        return func(*args, **(kwargs or {}))

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


def _most(rows: Tensor, allowed: int) -> int | None:
    """Return how many values the fullest row has besides zero; None where rows are too short to show anything."""
    if rows.shape[1] <= allowed:
        return None
    return max(int((row[row != 0]).unique().numel()) for row in rows)
