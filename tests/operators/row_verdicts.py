"""What is decided about one call of an operator, in each frontend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import export
from torch.utils import _pytree as pytree

import cpt_fx
from cpt_fx.meta import SITE

FRONTENDS = ("symbolic", "dynamo", "between", "program")
SCHEDULE = cpt_fx.schedules.Static(4, total_steps=8)


class Call(nn.Module):
    """Calls one function: its first tensor is the input, the others are parameters and buffers."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function = function
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        first = next((place for place in places if leaves[place].is_floating_point()), places[0])
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
        self.example = leaves[first]
        self.beside = nn.Linear(1, 1)
        self.register_buffer("one", torch.ones(1, 1))

    def forward(self, x: Tensor) -> Any:
        """Call it."""
        held = [
            x if slot == "x" else slot[0] if isinstance(slot, tuple) else getattr(self, slot) for slot in self.slots
        ]
        args, kwargs = pytree.tree_unflatten(held, self.spec)
        # Beside it a layer, since a program in which there is nothing to quantize is refused.
        return self.function(*args, **kwargs), self.beside(self.one)


class Between(nn.Module):
    """Calls it where Dynamo does not look."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        """Call it between two graphs."""
        return _unseen(self.call, x + 0)


@torch._dynamo.disable
def _unseen(call: Call, x: Tensor) -> Any:
    return call.forward(x)


def transformed(call: Call, frontend: str, **options: Any) -> nn.Module:
    """Transform a call and run it once."""
    model: Any = call.train()
    capture = "dynamo" if frontend == "between" else frontend
    if frontend == "between":
        model = Between(call)
    if frontend == "program":
        model, capture = export(call, (call.example.clone(),)), "auto"
    result = cpt_fx.transform(model, SCHEDULE, capture=capture, **options)
    with torch.no_grad():
        result(call.example.clone())
    return result


def verdict(result: nn.Module) -> dict[str, Any]:
    """Return what was decided: operators with their operands and gradients, and what stays as it is, and why."""
    sites = [
        node.meta[SITE] for graph in cpt_fx.graphs(result) for node in graph.graph.nodes
        if SITE in node.meta and "beside" not in node.meta[SITE].layer
    ]  # fmt: skip
    decided = [
        (site.op, site.family, site.gradient is not None,
         tuple((item.name, item.role, str(item.format), item.keep, item.over) for item in site.operands))
        for site in sites
    ]  # fmt: skip
    left = {(item.op, item.operand, item.reason) for item in cpt_fx.inspect(result).uncovered}
    return {"quantized": sorted(decided, key=repr), "left": sorted(left)}
