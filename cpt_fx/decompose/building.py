"""Tools to replace an operator by its parts: nodes that keep its provenance, or a reason why it stays fused."""

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

from cpt_fx.ir.meta import FAMILY, NAME, module_path, source_of


class StaysFusedError(Exception):
    """An operator cannot be decomposed; the message says why."""


@dataclass(frozen=True)
class Decomposer:
    """How one operator is decomposed: its products, as (name, family), and the function that does it."""

    products: tuple[tuple[str, str], ...]
    decompose: Callable[[Builder], None]


class Builder:
    """Inserts the parts of one operator in front of it."""

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
        """Add a product with the name of its layer; without `family` it has the family of its operator."""
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
        """Add a `getitem` of an element of a tuple, or of an index in the first dim of a tensor."""
        return self.call(operator.getitem, value, index)

    def inside(self, weight: Any, kind: type[nn.Module]) -> Builder:
        """Return a builder whose nodes belong to the layer that owns a parameter, if the graph tells which."""
        path = str(weight.target).rpartition(".")[0] if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
        inner = Builder(self.module, self.node)
        if path and path != module_path(self.node)[0]:
            _, number, count = module_path(self.node)[1].partition("@")
            stack = self.node.meta.get("nn_module_stack") or {}
            inner._meta["nn_module_stack"] = {**stack, f"{path}{number}{count}": (path, kind)}
        return inner

    def replace(self, *results: Any) -> None:
        """Replace the operator by its result: one value, or the elements of a tuple."""
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
            whole.meta |= {key: self.node.meta[key] for key in ("val", "example_value") if key in self.node.meta}
            self.node.replace_all_uses_with(whole)
        self.node.graph.erase_node(self.node)


def together(*values: Any) -> tuple[Any, ...]:
    """Return the values as a tuple: the result of an operator that has several."""
    return values


def arguments(node: fx.Node, first: str = "") -> dict[str, Any]:
    """Return a node's arguments by name, with defaults; `first` selects the overload with that first argument."""
    known = get_signature_for_torch_op(node.target) or (inspect.signature(node.target),)  # type: ignore[arg-type]
    signature = next(each for each in known if next(iter(each.parameters)) == first or not first)
    try:
        bound = signature.bind(*node.args, **node.kwargs)
    except TypeError as error:
        raise StaysFusedError(f"called with other arguments than expected: {error}") from None
    bound.apply_defaults()
    return bound.arguments


def static(values: dict[str, Any], *names: str) -> None:
    """Raise for arguments that are known only at run time; replace symbolic integers by their value.

    An integer that differed between two models with the same code comes as a symbol. Reading its value adds a guard,
    so that a model with another value gets its own graph.
    """
    for name in names:
        value = values[name]
        if isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), torch.SymInt):
            values[name] = int(value.meta["example_value"])
        elif isinstance(value, fx.Node):
            raise StaysFusedError(f"its argument {name} is known only when the graph runs")
