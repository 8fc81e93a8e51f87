"""How an operator is replaced by its parts: nodes that know where they come from, and a reason where it cannot be."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.operator_schemas import get_signature_for_torch_op

from cpt_fx.meta import FAMILY, NAME, module_path, source_of


class StaysFusedError(Exception):
    """An operator cannot be opened; the message says why."""


@dataclass(frozen=True)
class Opener:
    """How one operator is opened: the products in it, as (name, family), and the function that does it."""

    products: tuple[tuple[str, str], ...]
    open: Callable[[Builder], None]


class Builder:
    """Makes the parts of one operator, in front of it."""

    def __init__(self, module: fx.GraphModule, node: fx.Node) -> None:
        self.module = module
        self.node = node
        self.products = 0
        self._meta = source_of(node)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call."""
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.call_function(function, args, kwargs)
        made.meta.update(self._meta)
        return made

    def product(self, function: Callable[..., Any], *args: Any, name: str, family: str = "") -> fx.Node:
        """Add a call that multiplies, with the name of its layer; without a family it has that of its operator."""
        made = self.call(function, *args)
        if name:
            made.meta[NAME] = name
        if family:
            made.meta[FAMILY] = family
        self.products += 1
        return made

    def linear(self, x: fx.Node, weight: Any, bias: Any, name: str) -> fx.Node:
        """Add a linear layer."""
        return self.product(F.linear, x, weight, bias, name=name)

    def item(self, value: fx.Node, index: int) -> fx.Node:
        """Add a read of one part of a tuple or of the first dim of a tensor."""
        return self.call(operator.getitem, value, index)

    def inside(self, weight: Any, kind: type[nn.Module]) -> Builder:
        """Return a builder whose nodes belong to the layer that owns a parameter, where the graph tells which it is."""
        path = str(weight.target).rpartition(".")[0] if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
        inner = Builder(self.module, self.node)
        if path and path != module_path(self.node)[0]:
            _, number, count = module_path(self.node)[1].partition("@")
            stack = self.node.meta.get("nn_module_stack") or {}
            inner._meta["nn_module_stack"] = {**stack, f"{path}{number}{count}": (path, kind)}
        return inner

    def replace(self, *results: Any) -> None:
        """Let everything that read the operator read these instead: one value, or the parts of a tuple."""
        whole: fx.Node | None = results[0] if len(results) == 1 else None
        if whole is None:
            for user in list(self.node.users):
                part: Any = results[user.args[1]] if user.target is operator.getitem else None  # type: ignore[index]
                if isinstance(part, fx.Node):
                    part.meta |= {key: user.meta[key] for key in ("val", "example_value") if key in user.meta}
                    user.replace_all_uses_with(part)
                    self.node.graph.erase_node(user)
            if self.node.users:
                whole = self.call(together, *results)
        if whole is not None:
            for key in ("val", "example_value"):
                if key in self.node.meta:
                    whole.meta[key] = self.node.meta[key]
            self.node.replace_all_uses_with(whole)
        self.node.graph.erase_node(self.node)


def together(*values: Any) -> tuple[Any, ...]:
    """Return the values: the result of an operator that has several."""
    return values


def arguments(node: fx.Node, first: str = "") -> dict[str, Any]:
    """Return the arguments of a node by name, defaults included; of several overloads, the one that begins so."""
    known = get_signature_for_torch_op(node.target) or (inspect.signature(node.target),)  # type: ignore[arg-type]
    signature = next(each for each in known if next(iter(each.parameters)) == first or not first)
    try:
        bound = signature.bind(*node.args, **node.kwargs)
    except TypeError as error:
        raise StaysFusedError(f"called with other arguments than expected: {error}") from None
    bound.apply_defaults()
    return bound.arguments


def static(values: dict[str, Any], *names: str) -> None:
    """Refuse arguments that are known only when the graph runs.

    A whole number that differed between two models of the same code comes as a symbol: it gets the value it has here.
    Reading that value makes Dynamo guard it, so that a model with another one gets a graph of its own.
    """
    for name in names:
        value = values[name]
        if isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), torch.SymInt):
            values[name] = int(value.meta["example_value"])
        elif isinstance(value, fx.Node):
            raise StaysFusedError(f"its argument {name} is known only when the graph runs")
