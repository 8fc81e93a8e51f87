"""Every key that passes write to `node.meta`, and what stands there; where a node comes from."""

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

SITE = "cpt_fx_site"
"""On an operator: the `Site` that annotate decided."""
LEFT = "cpt_fx_left"
"""On an operator of the table that stays as it is: why. One that has neither was never looked at."""
BY_DECISION = "annotate left it as it is"
"""What stands there where the reason is in the report of annotate alone."""
QUANTIZER = "cpt_fx_quantizer"
"""On a quantize node: the `Quantizer` it is."""
PASS = "cpt_fx_pass"
"""On a node that a pass made: the name of that pass."""
SIMULATED = "cpt_fx_simulated"
"""On a product of a lowered graph: why it does not, or not wholly, run on integers."""
FAMILY = "cpt_fx_family"
"""On a product that opening made: the family it belongs to, where that is not the one of its operator."""
NAME = "cpt_fx_name"
"""On a product that opening made: what its layer is called below the module it belongs to."""
WEIGHT = "cpt_fx_weight"
"""On an input of a graph: True where what is passed in is a parameter, or computed from parameters alone."""
CALLED = "cpt_fx_called"
"""On the call of a module: it is to be called as one, and has a graph of its own."""
ENTRY = "cpt_fx_entry"
"""Key in `GraphModule.meta`: the path of the module whose forward the graph is."""
VIEW = "cpt_fx_view"
"""Key in `GraphModule.meta`: the graph is one of several that look at a running model, whose layers must stay."""
STATE = "_cpt_fx"
"""Name of the submodule that holds bits, ranges and records; the prefix of their state_dict keys."""


@dataclass(frozen=True)
class Operand:
    """One tensor that an operator multiplies: where it stands, what it is, and how it is quantized.

    `node` names the node that takes it, where that is not the operator itself: a bias added after a product.
    """

    index: Index
    name: str
    role: str
    format: Format
    keep: tuple[int, ...]
    over: tuple[int, ...] | None
    node: str = ""

    def value(self, node: fx.Node) -> Any:
        """Return what stands there among the arguments of a node."""
        return argument(node, self.index)


@dataclass(frozen=True)
class Dial:
    """Which width a quantizer follows: a role of the schedule, shifted or fixed for its layer.

    `with_forward` switches the gradient off where the forward width is 0, as published convolutions do. `schedule`, if
    there is one, is followed instead of the model's: it is asked at the model's position, and its own is never read.
    """

    role: str
    offset: int = 0
    fixed: int | None = None
    with_forward: bool = False
    schedule: Schedule | None = None
    label: str = ""
    """What tells `schedule` from others in a name."""

    def __post_init__(self) -> None:
        """Label the schedule by what it says of itself, unless a label is given."""
        if self.schedule is not None and not self.label:
            object.__setattr__(self, "label", label_of(self.schedule))

    def __deepcopy__(self, memo: dict[int, Any]) -> Dial:
        """Stay what it is: a copy of the schedule need not be equal to it."""
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
    """Return what tells a schedule from others that say something else of themselves, in any process."""
    said = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(schedule))
    return hashlib.sha256(said.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Site:
    """The decision for one operator: its layer, its operands, the format of its gradient, and its dials."""

    layer: str
    op: str
    family: str
    operands: tuple[Operand, ...]
    gradient: Format | None
    dials: tuple[tuple[str, Dial], ...]
    gradient_name: str = ""
    """Name of the node that carries the gradient quantizer, where it is not the operator itself."""
    return_quantized: bool = False
    in_turn: bool = False
    """Whether it multiplies more than two operands, one after the other: what it makes in between is listed."""

    def dial(self, role: str) -> Dial:
        """Return the dial of a role: biases without one of their own follow the weights."""
        dials = dict(self.dials)
        return dials["weight"] if role == "bias" and role not in dials else dials[role]


@dataclass(frozen=True)
class Quantizer:
    """What a quantize node is: written by insert, completed by share and bind, read by everyone else."""

    layers: tuple[str, ...]
    op: str
    operand: str
    role: str
    format: Format
    dial: Dial
    record: str
    ranges: str = ""
    """Path of the running range below the state module, for formats with an observer."""


@dataclass(frozen=True)
class Uncovered:
    """A matmul-like operator, or one operand of it, that stays in full precision, and why."""

    layer: str
    op: str
    reason: str
    operand: str = ""
    by_choice: bool = False
    """The user excluded it: nothing that `strict=True` would complain about."""

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.layer or '(root)'}: {self.op}{f' operand {self.operand}' if self.operand else ''}: {self.reason}"


def argument(node: fx.Node, index: Index) -> Any:
    """Return what stands at a place among the arguments of a node."""
    args: Any = node.args
    return args[index] if isinstance(index, int) else args[index[0]][index[1]]


def example_of(node: fx.Node) -> Any:
    """Return a value like that of a node, if its frontend kept one: Dynamo and torch.export do, under two keys."""
    return node.meta.get("example_value", node.meta.get("val"))


def module_path(node: fx.Node) -> tuple[str, str]:
    """Return `(path, call)`: the innermost module a node came from, and which call of it (path, path@1, ...)."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    call, (path, _) = next(reversed(stack.items()))
    return path, call


def source_of(node: fx.Node) -> dict[str, Any]:
    """Return what of a node's meta tells where it comes from: a node made for it has the same."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def module_stack(node: fx.Node) -> list[tuple[str, type[nn.Module] | None]]:
    """Return the modules a node came from, outermost first, as (path, class)."""
    stack = node.meta.get("nn_module_stack") or {}
    return [(path, kind if isinstance(kind, type) else None) for path, kind in stack.values()]


def around(node: fx.Node) -> list[tuple[str, type[nn.Module] | None]]:
    """Return the modules a node came from, and the containers they stand in, which are never called themselves."""
    stack = module_stack(node)
    path = stack[-1][0] if stack else ""
    known = {name for name, _ in stack}
    above = (path[:place] for place, character in enumerate(path) if character == ".")
    return [*((name, None) for name in above if name not in known), *stack]


def get_attribute(root: nn.Module, path: str) -> Any:
    """Follow a dotted path from a module to whatever stands at its end."""
    value: Any = root
    for name in path.split("."):
        # Past nn.Module.__getattr__, which is slow: passes look at every node of a graph many times.
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
    """Follow a dotted path to whatever stands at its end; None where it leads nowhere."""
    try:
        return get_attribute(root, path)
    except AttributeError:
        return None


def read_before(node: fx.Node, path: str) -> fx.Node:
    """Make a node in front of another that reads something of the module: `Graph.get_attr` warns of all but tensors."""
    with node.graph.inserting_before(node):
        return node.graph.create_node("get_attr", path)


def is_transposed(value: Any) -> bool:
    """Whether a tensor looks at a stored matrix with its two dims exchanged."""
    base = value._base if isinstance(value, torch.Tensor) else None
    return base is not None and base.ndim == value.ndim == 2 and value.stride() == base.stride()[::-1]
