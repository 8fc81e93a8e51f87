"""Which nodes may share memory, and when that memory is overwritten."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import fx, nn

from cpt_fx.common.torch_private import OpOverload, OpOverloadPacket
from cpt_fx.ir.meta import CALLED
from cpt_fx.ir.subgraphs import calls_of, graphs_of
from cpt_fx.ir.torch_private import schemas_of
from cpt_fx.operators import form_of, is_opaque, row_for
from cpt_fx.operators.around import FRESH, UPDATES, VIEWS
from cpt_fx.quantizers.ops import QUANTIZE_GRADIENT, QUANTIZERS

_ALWAYS = ("out", "running_mean", "running_var")
"""Arguments that are always overwritten: the schema of batch norm does not say so."""


def overwritten(node: fx.Node, modules: Mapping[str, nn.Module]) -> list[fx.Node]:
    """Return the values that a node overwrites, according to its name, schema and signature."""
    if node.op not in ("call_module", "call_function", "call_method"):
        return []
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    if node.op == "call_module":
        return _nodes([first] if getattr(modules.get(str(node.target)), "inplace", False) else [])
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    updates = name.strip("_") in UPDATES or (name.endswith("_") and not name.endswith("__"))
    found = [node.kwargs.get("out"), first if updates else None]
    for place, argument in _written_by(target if isinstance(target, _OPERATORS) else f"aten::{name}"):
        found.append(node.args[place] if place < len(node.args) else node.kwargs.get(argument))
    row = row_for(target)
    found += [node.args[place] for place in (row.mutates if row is not None else ()) if place < len(node.args)]
    return _nodes(found + (_by_signature(target, node) if isinstance(target, FunctionType) else []))


_OPERATORS = (OpOverload, OpOverloadPacket)


@cache
def _written_by(operator: Any) -> list[tuple[int, str]]:
    """Return the arguments that an operator, or the ATen operator of a name, overwrites, as (position, name)."""
    if isinstance(operator, OpOverload):
        schemas = [] if operator.namespace == "cpt_fx" else [operator._schema]  # ours write only ranges and counters
    else:
        schemas = schemas_of(getattr(operator, "_qualified_op_name", operator))
    return [
        (sys.maxsize if argument.kwarg_only else place, argument.name)
        for schema in schemas
        for place, argument in enumerate(schema.arguments)
        if argument.name in _ALWAYS or (argument.alias_info is not None and argument.alias_info.is_write)
    ]


_signature = cache(inspect.signature)


def _by_signature(function: FunctionType, node: fx.Node) -> list[Any]:
    try:
        given = _signature(function).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return []
    found = [given.get(name) for name in _ALWAYS]
    if given.get("inplace", False) is not False:
        found.append(next(iter(given.values())))
    if given.get("max_norm") is not None:
        found.append(given.get("weight"))  # an embedding renormalizes rows of its table in place
    return found


def _nodes(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(values, found.append)
    return found


def _is_fresh(target: Any) -> bool:
    """Return whether an operator's result is always a new tensor or a number, unless told to write in place."""
    form = form_of(target)
    return form.row.fresh if form is not None else target in FRESH or (target in QUANTIZERS and not _is_view(target))


def _is_view(target: Any) -> bool:
    """Return whether an operator's result may share memory with its first argument, and with no other."""
    return target in VIEWS or target is QUANTIZE_GRADIENT


class Versions:
    """Walks a graph in order and tracks how often the memory of each value has been overwritten so far.

    Two reads of a node see the same numbers only if its version is the same. A result is assumed to share memory with
    all inputs, unless its operator is known to return a new tensor (`Row.fresh`, `FRESH`) or a view of its first
    argument (`VIEWS`). This is conservative: it may cost a redundant quantizer, never a wrong number.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._modules = dict(module.named_modules())
        self._parents: dict[fx.Node, fx.Node] = {}
        self._writes: dict[fx.Node, int] = {}

    def visit(self, node: fx.Node) -> None:
        """Process the next node of the graph."""
        if not node.op.startswith("call_"):
            return
        written = self._overwritten(node)
        inputs = written or node.all_input_nodes
        if not written and _is_view(node.target) and node.args and isinstance(node.args[0], fx.Node):
            inputs = [node.args[0]]
        # The target of a call_module is a path, which may equal the name of a method in the tables.
        if written or node.op == "call_module" or not _is_fresh(node.target):
            for value in inputs:
                self._join(node, value)
        if written:
            self._writes[self._root(node)] = self.of(node) + 1

    def _overwritten(self, node: fx.Node) -> list[fx.Node]:
        """Return what a node overwrites; opaque code, and a subgraph that writes, overwrite all their inputs."""
        subgraphs = [graph for call in calls_of(self._module, node) for graph in graphs_of(call.subgraph)]
        unseen = CALLED in node.meta or (node.op == "call_function" and not subgraphs and is_opaque(node.target))
        if unseen or any(overwritten(inner, {}) for subgraph in subgraphs for inner in subgraph.graph.nodes):
            return node.all_input_nodes
        return overwritten(node, self._modules)

    def of(self, node: fx.Node) -> int:
        """Return how often the memory behind a node has been overwritten up to here."""
        return self._writes.get(self._root(node), 0)

    def _join(self, node: fx.Node, value: fx.Node) -> None:
        one, other = self._root(node), self._root(value)
        if one is not other:
            # The sum: versions never decrease, and increase with every write to either of the two.
            writes = self._writes.pop(one, 0) + self._writes.get(other, 0)
            self._parents[one] = other
            if writes:
                self._writes[other] = writes

    def _root(self, node: fx.Node) -> fx.Node:
        path = []
        while node in self._parents:
            path.append(node)
            node = self._parents[node]
        for seen in path:
            self._parents[seen] = node
        return node
