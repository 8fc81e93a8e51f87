"""What is decided about calls of operators, in each frontend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import export
from torch.utils import _pytree as pytree

import cpt_fx
from cpt_fx.ir.meta import DECISION

FRONTENDS = ("symbolic", "dynamo", "between", "program")
SCHEDULE = cpt_fx.schedules.Static(4, total_steps=8)


class Call(nn.Module):
    """Calls one function: its first tensor is the input, the others are parameters and buffers."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function = function
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        # A tensor without storage cannot be a parameter here.
        sparse = [place for place in places if leaves[place].layout is not torch.strided]
        first = next((place for place in (*sparse, *places) if leaves[place].is_floating_point()), places[0])
        self.slots: list[Any] = []
        for place, leaf in enumerate(leaves):
            name = f"w{place}"
            if place == first:
                self.slots.append("x")
            elif not isinstance(leaf, Tensor):
                self.slots.append((leaf,))
            else:
                if leaf.is_floating_point():
                    self.register_parameter(name, nn.Parameter(leaf.clone()))
                else:
                    self.register_buffer(name, leaf)
                self.slots.append(name)
        self.example: Tensor = leaves[first]

    def forward(self, x: Tensor) -> Any:
        """Call it."""
        held = [
            slot[0] if isinstance(slot, tuple) else x if slot == "x" else getattr(self, slot) for slot in self.slots
        ]
        args, kwargs = pytree.tree_unflatten(held, self.spec)
        return self.function(*args, **kwargs)


class Calls(nn.Module):
    """Calls several, each on an input of its own, and a layer: a program with nothing to quantize is refused."""

    def __init__(self, calls: Mapping[str, Call], *, unseen: bool = False) -> None:
        super().__init__()
        self.calls = nn.ModuleDict(calls)
        self.beside = nn.Linear(1, 1)
        self.register_buffer("one", torch.ones(1, 1))
        self.unseen = unseen

    def forward(self, inputs: list[Tensor]) -> list[Any]:
        """Call each."""
        run = _unseen if self.unseen else _seen
        results = [run(call, inputs[place]) for place, call in enumerate(self.calls.values())]
        return [*results, self.beside(self.one)]


def _seen(call: nn.Module, x: Tensor) -> Any:
    return call(x)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def _unseen(call: nn.Module, x: Tensor) -> Any:
    """Call where Dynamo does not look: between two graphs."""
    return call.forward(x)


def transformed(calls: Call | Mapping[str, Call], frontend: str, **options: Any) -> nn.Module:
    """Transform calls and run them once."""
    calls = {"call": calls} if isinstance(calls, Call) else calls
    inputs = [call.example for call in calls.values()]
    model: Any = Calls(calls, unseen=frontend == "between")
    capture = "dynamo" if frontend == "between" else frontend
    if frontend == "program":
        model, capture = export(model, ([x.clone() for x in inputs],)), "auto"
    result = cpt_fx.transform(model, SCHEDULE, capture=capture, **options)
    with torch.no_grad():
        result([x.clone() for x in inputs])
    return result


def verdicts(result: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Return by name what was decided: operators with operands and gradients, and what stays as it is, and why."""
    found: dict[str, list[Any]] = {}
    for graph in cpt_fx.graphs(result):
        for decision in (node.meta[DECISION] for node in graph.graph.nodes if DECISION in node.meta):
            operands = ((item.name, item.role, str(item.format), item.keep, item.over) for item in decision.operands)
            note = (decision.op, decision.family, decision.gradient is not None, *operands)
            found.setdefault(_name(decision.layer), []).append(note)
    for item in cpt_fx.inspect(result).uncovered:
        found.setdefault(_name(item.layer), []).append((item.op, item.reason, item.operand))
    return {name: tuple(sorted(notes, key=repr)) for name, notes in found.items() if name}


def verdict(result: nn.Module) -> Any:
    """Return what was decided about a single call: one note where there is one, or several."""
    return verdicts(result).get("call", ())


def _name(layer: str) -> str:
    parts = layer.split(".")
    return parts[1] if parts[0] == "calls" else ""
