"""The module of a rewritten graph: a GraphModule whose copies and pickles keep everything."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.common.torch_private import OpOverload, OpOverloadPacket
from cpt_fx.ir.meta import DECISION, FAMILY, LEFT, NAME, PASS, QUANTIZER, SIMULATED, WEIGHT
from cpt_fx.ir.torch_private import get_qualified_name

_GRAPH_ATTRIBUTES = ("_graph", "_code", "_lineno_map", "_prologue_start", "_codegen")
STATE_DICT_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
ROOT = "_cpt_fx_root"
"""Attribute of a graph that is part of a result: the root module of the model, whose tensors it reads."""
_KEPT_META = (DECISION, LEFT, QUANTIZER, SIMULATED, PASS, FAMILY, NAME, WEIGHT)


def take_tensors(target: nn.Module, source: nn.Module) -> None:
    """Let `target` share the parameters and buffers of `source`: same names, same order, same state_dict hooks."""
    target._parameters = source._parameters.copy()
    target._buffers = source._buffers.copy()
    target._non_persistent_buffers_set = source._non_persistent_buffers_set.copy()
    for hooks in STATE_DICT_HOOKS:
        getattr(target, hooks).update(getattr(source, hooks))
    target.training = source.training


class QuantizedGraphModule(fx.GraphModule):
    """A rewritten graph, which `torch.fx` tools can use like any GraphModule.

    `torch.fx.GraphModule` copies only what its graph mentions and pickles by tracing its own code again, which loses
    unused parameters, module classes and node metadata; here both keep the whole module and the graph as it is.
    """

    @property
    def training(self) -> bool:
        """The training mode; that of the model, if this is one of its graphs."""
        root: nn.Module | None = self.__dict__.get(ROOT)
        mode: bool = self.__dict__.get("_training", True) if root is None else root.training
        return mode

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_training"] = mode

    def note_edits(self) -> None:
        """Take a snapshot of the graph; later changes count as edits by the user."""
        self.__dict__[_AS_MADE] = _outline(self._graph)

    def is_edited(self) -> bool:
        """Return whether the graph changed since `note_edits`."""
        return self.__dict__.get(_AS_MADE) != _outline(self._graph)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedGraphModule:
        """Copy modules, tensors and graph."""
        new = blank()
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(_without_graph(self), memo))
        new.graph = copy.deepcopy(self._graph)
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the state, and the graph as a flat list of nodes."""
        return blank, (), {"state": _without_graph(self), "nodes": _flatten(self._graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__reduce__` stored."""
        self.__dict__.update(state["state"])
        self.graph = _unflatten(state["nodes"])


_AS_MADE = "_cpt_fx_as_made"


def _outline(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return a summary of a graph that is the same in every process."""
    return [
        (node.op, getattr(node.target, "__qualname__", None) or str(node.target), list(map(str, node.all_input_nodes)))
        for node in graph.nodes
    ]


def blank() -> QuantizedGraphModule:
    """Return an empty module to fill in; `GraphModule.__init__` would copy only what the graph mentions."""
    module: QuantizedGraphModule = QuantizedGraphModule.__new__(QuantizedGraphModule)
    nn.Module.__init__(module)
    module.meta = {}
    return module


def _without_graph(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if key not in _GRAPH_ATTRIBUTES}


class _NodeRef:
    """Stands for a node in pickled arguments, by its position in the graph."""

    def __init__(self, position: int) -> None:
        self.position = position


class _FunctionRef:
    """Stands for a function that cannot be pickled, by the name that torch.fx prints for it.

    These are operator overloads, and functions like `F.max_pool2d` that torch defines inside another function.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def load(self) -> Any:
        return attrgetter(self.path.removeprefix("torch."))(torch)


def _reference(target: Any) -> Any:
    """Return a form of a node's target that can be pickled."""
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return _FunctionRef(f"torch.ops.{target}")
    if "<locals>" in getattr(target, "__qualname__", ""):
        path = get_qualified_name(target)
        if path.startswith("torch.") and _FunctionRef(path).load() is target:
            return _FunctionRef(path)
    return target


def _flatten(graph: fx.Graph) -> list[tuple[Any, ...]]:
    positions = {node: position for position, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: _NodeRef(positions[used]))  # type: ignore[arg-type, return-value]
        meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        if "nn_module_stack" in node.meta:
            # Paths without classes: a class need not be importable where the pickle is loaded.
            meta["nn_module_stack"] = {call: (path, None) for call, (path, _) in node.meta["nn_module_stack"].items()}
        rows.append((node.op, node.name, _reference(node.target), args, kwargs, node.type, meta))
    return rows


def _unflatten(rows: list[tuple[Any, ...]]) -> fx.Graph:
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def resolve(value: Any) -> Any:
        return nodes[value.position] if isinstance(value, _NodeRef) else value

    for op, name, target, args, kwargs, kind, meta in rows:
        loaded = target.load() if isinstance(target, _FunctionRef) else target
        args, kwargs = fx.node.map_aggregate((args, kwargs), resolve)
        node = graph.create_node(op, loaded, args, kwargs, name, kind)
        node.meta.update(meta)
        nodes.append(node)
    return graph
