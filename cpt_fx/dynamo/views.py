"""A graph that Dynamo found, as a module the passes understand: a view of the model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.bodies import add_body, free_name
from cpt_fx.capture.base import copy_graph, over
from cpt_fx.capture.tree import Places
from cpt_fx.dynamo.checkpoint import checkpointed
from cpt_fx.dynamo.control import RUN_AS
from cpt_fx.graph_module import ROOT, QuantizedGraphModule, blank
from cpt_fx.meta import WEIGHT
from cpt_fx.names import Names
from cpt_fx.result import plain_class
from cpt_fx.runtime import Precision

# Run as it is, the mark of a checkpoint would not restore the random state for the second forward pass.
_RUN_AS: dict[Any, Callable[..., Any]] = {**RUN_AS, torch.ops.higher_order.tag_activation_checkpoint: checkpointed}


class Frame:
    """Whose code a graph comes from: a module's path, and the lines that lead from its forward to the code."""

    def __init__(self, places: Places, path: str, lines: str) -> None:
        self.places = places
        self.path = path
        self.lines = lines
        self._stacks: dict[tuple[Any, ...], dict[str, tuple[str, Any]]] = {}

    def stack(self, node: fx.Node) -> dict[str, tuple[str, Any]]:
        """Turn Dynamo's module stack into ours: `{call: (path, class)}`, outermost first, without the root."""
        theirs: dict[Any, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        calls = tuple(theirs)
        if calls not in self._stacks:
            self._stacks[calls] = self._converted(theirs)
        return dict(self._stacks[calls])

    def convert(self, node: fx.Node) -> None:
        """Say of a node where it comes from in our terms."""
        node.meta["nn_module_stack"] = self.stack(node)
        if self.lines and "stack_trace" in node.meta:
            node.meta["stack_trace"] = self.lines + node.meta["stack_trace"]

    def _converted(self, theirs: dict[Any, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        stack: dict[str, tuple[str, Any]] = {path: (path, kind) for path, kind in self.places.ancestors(self.path)}
        for key, (_, kind) in theirs.items():
            identity, _, call = str(key).partition("@")
            path = self.places.modules.get(int(identity), "") if identity.isdigit() else ""
            if not path:
                continue
            for above, its_kind in self.places.ancestors(path)[:-1]:
                stack.setdefault(above, (above, its_kind))
            name = f"{path}@{call}" if call else path
            # Innermost last, also where the path stands in the stack already.
            stack.pop(name, None)
            stack[name] = (path, plain_class(kind) if isinstance(kind, type) else kind)
        return stack


def view_of(
    graph_module: fx.GraphModule, inputs: Sequence[Any], frame: Frame, root: nn.Module, state: Precision, names: Names
) -> QuantizedGraphModule:
    """Return the graph as a module whose parameters and buffers are read from the model by name.

    It has the model's own containers of tensors, so that whatever is put in there (a cast, a checkpoint) is seen.
    """
    view = over(root, state, names)
    graph = copy_graph(graph_module.graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node, value in zip(placeholders, inputs, strict=True):
        frame.convert(node)
        _name_tensor(graph, node, value, first, frame)
    _adopt(view, graph, graph_module, frame)
    return view


def _adopt(view: QuantizedGraphModule, graph: fx.Graph, source: fx.GraphModule, frame: Frame) -> None:
    """Put a graph into a module: module stacks by path, constants and graphs inside the graph taken along."""
    for node in list(graph.nodes):
        frame.convert(node)
        if node.op == "call_function" and node.target in _RUN_AS:
            node.target = _RUN_AS[node.target]
        if node.op != "get_attr":
            continue
        value = getattr(source, str(node.target), None)
        if isinstance(value, fx.GraphModule):
            body = blank()
            body.__dict__[ROOT], body.meta = view.__dict__[ROOT], dict(view.meta)
            _adopt(body, copy_graph(value.graph), value, frame)
            node.target = add_body(view, str(node.target), body)
        elif value is not None:
            # A constant: in nobody's state_dict, and not in the model's own containers.
            node.target = free_name(str(node.target), view)
            object.__setattr__(view, node.target, value)
    # Not by its setter, which compiles: the passes change the graph first.
    view._graph = graph
    graph.owning_module = view


def _name_tensor(graph: fx.Graph, node: fx.Node, value: Any, first: fx.Node, frame: Frame) -> None:
    """Read a parameter or buffer by its name, instead of taking it as an input."""
    name = frame.places.tensor(value)
    if name is None:
        if isinstance(value, nn.Parameter):
            node.meta[WEIGHT] = True
        return
    with graph.inserting_before(first):
        read = graph.create_node("get_attr", name)
    read.meta = {**node.meta}
    node.replace_all_uses_with(read)
