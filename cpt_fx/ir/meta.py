"""The keys that passes write to `node.meta`, the values under them, and where a node comes from."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.formats import Format
from cpt_fx.operators.row import Index
from cpt_fx.schedules.base import Schedule

DECISION = "cpt_fx_decision"
"""On an operator: the quantization decision of annotate, a `Decision`."""
LEFT = "cpt_fx_left"
"""On an operator of the table that is not quantized: the reason. One with neither key has not been annotated."""
BY_DECISION = "annotate left it as it is"
"""The value of `LEFT` if only the report of annotate gives the reason."""
QUANTIZER = "cpt_fx_quantizer"
"""On a quantize node: its `Quantizer`."""
PASS = "cpt_fx_pass"
"""On a node that a pass made: the name of that pass."""
SIMULATED = "cpt_fx_simulated"
"""On a product of a lowered graph: why it does not run on integers, or not entirely."""
FAMILY = "cpt_fx_family"
"""On a product of a decomposed operator: its family, if that is not the one of its own operator."""
NAME = "cpt_fx_name"
"""On a product of a decomposed operator: the name of its layer below its module."""
WEIGHT = "cpt_fx_weight"
"""On an input of a graph: True where what is passed in is a parameter, or computed from parameters alone."""
CALLED = "cpt_fx_called"
"""On the call of a module: it stays a call, and the module has its own graph."""
ENTRY = "cpt_fx_entry"
"""Key in `GraphModule.meta`: the `Entry` of a traced graph, which names the module whose forward it is."""
VIEW = "cpt_fx_view"
"""Key in `GraphModule.meta`: the graph is one of several of a live model, and shares its modules and tensors."""
STATE = "_cpt_fx"
"""Name of the state module, which holds bit-widths and counters."""


@dataclass(frozen=True)
class Operand:
    """One operand of an operator: its position, its role, and how it is quantized.

    `node` names the node that takes it, if that is not the operator itself: a bias added after a product.
    """

    index: Index
    name: str
    role: str
    format: Format
    keep: tuple[int, ...]
    over: tuple[int, ...] | None
    node: str = ""

    def value(self, node: fx.Node) -> Any:
        """Return the operand among the arguments of a node."""
        return argument(node, self.index)


@dataclass(frozen=True)
class WidthSource:
    """A bit-width source: the role of the schedule that a quantizer follows, with an offset or a fixed width.

    `with_forward` switches the gradient quantizer off while the forward width is 0, as published convolutions do.
    `schedule`, if given, replaces the model's; it is read at the model's position, and its own position is ignored.
    """

    role: str
    offset: int = 0
    fixed: int | None = None
    with_forward: bool = False
    schedule: Schedule | None = None
    label: str = ""
    """Distinguishes `schedule` from others in `name`."""

    def __post_init__(self) -> None:
        """Label the schedule by a hash of its repr, unless a label is given."""
        if self.schedule is not None and not self.label:
            object.__setattr__(self, "label", label_of(self.schedule))

    def __deepcopy__(self, memo: dict[int, Any]) -> WidthSource:
        """Return this object itself: a copy of the schedule need not equal the original."""
        return self

    @property
    def name(self) -> str:
        """The name of the tensor that holds this width."""
        name = f"{self.role}_with_forward" if self.with_forward else self.role
        if self.fixed is not None:
            name += f"_fixed_{self.fixed}"
        if self.offset:
            name += f"_{'plus' if self.offset > 0 else 'minus'}_{abs(self.offset)}"
        return f"{name}_own_{self.label}" if self.label else name


def label_of(schedule: Schedule) -> str:
    """Return a short hash of a schedule's repr, the same in every process."""
    said = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(schedule))
    return hashlib.sha256(said.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Decision:
    """A quantization decision for one operator: its layer, operands, gradient format and bit-width sources."""

    layer: str
    op: str
    family: str
    operands: tuple[Operand, ...]
    gradient: Format | None
    width_sources: tuple[tuple[str, WidthSource], ...]
    gradient_name: str = ""
    """Name of the node whose output gradient is quantized: the operator, or what completes it (a bias, a sum)."""
    return_quantized: bool = False
    in_turn: bool = False
    """Whether it multiplies more than two operands one after the other: its intermediate products are not quantized."""

    def width_source(self, role: str) -> WidthSource:
        """Return the bit-width source of a role; a bias without its own follows the weight."""
        sources = dict(self.width_sources)
        return sources["weight"] if role == "bias" and role not in sources else sources[role]


@dataclass(frozen=True)
class Quantizer:
    """Description of a quantize node: written by insert, updated by share and lower."""

    layers: tuple[str, ...]
    op: str
    operand: str
    role: str
    format: Format
    width_source: WidthSource
    counters: str
    ranges: str = ""
    """Path of the running or learned range from the root of the model, for formats that have one."""


@dataclass(frozen=True)
class Uncovered:
    """An operator that multiplies, or one operand of it, that stays in full precision, and why."""

    layer: str
    op: str
    reason: str
    operand: str = ""
    by_choice: bool = False
    """Whether it is left on purpose, which `strict=True` accepts."""

    def __str__(self) -> str:
        """Return a description in one line."""
        return f"{self.layer or '(root)'}: {self.op}{f' operand {self.operand}' if self.operand else ''}: {self.reason}"


def argument(node: fx.Node, index: Index) -> Any:
    """Return the argument of a node at an index."""
    args: Any = node.args
    return args[index] if isinstance(index, int) else args[index[0]][index[1]]


def example_of(node: fx.Node) -> Any:
    """Return a value like that of a node, if its frontend kept one: Dynamo and torch.export do, under two keys."""
    return node.meta.get("example_value", node.meta.get("val"))


def asks_for_size(node: fx.Node) -> bool:
    """Return whether a node asks a tensor for its shape, dtype or device, not for its values."""
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.target in ("size", "dim", "numel")


def module_path(node: fx.Node) -> tuple[str, str]:
    """Return `(path, call)`: the innermost module a node came from, and which call of it (path, path@1, ...)."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    call, (path, _) = next(reversed(stack.items()))
    return path, call


def source_of(node: fx.Node) -> dict[str, Any]:
    """Return the part of a node's meta that says where it comes from, to copy to nodes made for it."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def module_stack(node: fx.Node) -> list[tuple[str, type[nn.Module] | None]]:
    """Return the modules a node came from, outermost first, as (path, class)."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(path, kind if isinstance(kind, type) else None) for path, kind in stack.values()]


def around(node: fx.Node) -> list[tuple[str, type[nn.Module] | None]]:
    """Return the modules a node came from, and the containers around them, which are never called themselves."""
    stack = module_stack(node)
    path = stack[-1][0] if stack else ""
    known = {name for name, _ in stack}
    return [*((name, None) for name in above_of(path) if name not in known), *stack]


def above_of(path: str) -> list[str]:
    """Return the dotted paths of the modules above a path, outermost first."""
    return [path[:place] for place, character in enumerate(path) if character == "."]


def get_attribute(root: nn.Module, path: str) -> Any:
    """Return the attribute at a dotted path from a module."""
    value: Any = root
    for name in path.split("."):
        # Bypasses nn.Module.__getattr__, which is slow: passes visit every node of a graph many times.
        own = value.__dict__ if isinstance(value, nn.Module) else {}
        if name in own:
            value = own[name]
            continue
        for place in _HELD_IN:
            if name in own.get(place, ()):
                value = own[place][name]
                break
        else:
            value = getattr(value, name)
    return value


_HELD_IN = ("_modules", "_parameters", "_buffers")


def attribute_or_none(root: nn.Module, path: str) -> Any:
    """Return the attribute at a dotted path from a module, or None if there is none."""
    try:
        return get_attribute(root, path)
    except AttributeError:
        return None


def read_before(node: fx.Node, path: str) -> fx.Node:
    """Insert a get_attr node before another; `Graph.get_attr` would warn about anything but tensors."""
    with node.graph.inserting_before(node):
        return node.graph.create_node("get_attr", path)


def is_transposed(value: Any) -> bool:
    """Return whether a tensor is a transposed view of a stored matrix."""
    base = value._base if isinstance(value, torch.Tensor) else None
    return base is not None and base.ndim == value.ndim == 2 and value.stride() == base.stride()[::-1]
