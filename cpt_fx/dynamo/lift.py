"""A rewritten graph in the form that another compiler takes: everything it reads is an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from cpt_fx.bodies import OUTER
from cpt_fx.capture.base import copy_graph
from cpt_fx.dynamo.checkpoint import checkpointed
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.meta import STATE, attribute_or_none, get_attribute

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

TAG_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def lifted(
    view: QuantizedGraphModule, placeholders: Sequence[fx.Node], inputs: Sequence[Any], compiler: Compiler
) -> Callable[..., Any]:
    """Compile a view. Its state arrives anew with every call: a cast, a checkpoint, a mode needs no other compilation.

    `placeholders` are Dynamo's own, which say where each input comes from, and `inputs` their example values.
    """
    given = {id(value): node.name for node, value in zip(placeholders, inputs, strict=True)}
    lift = _Lift(view, given)
    for node, original in zip(lift.graph.find_nodes(op="placeholder"), placeholders, strict=False):
        node._dynamo_source = original._dynamo_source  # type: ignore[attr-defined]
    values = [_read(view, path) for path in lift.reads]
    module = fx.GraphModule(lift.root, lift.graph)
    compiled = compiler(module, [*inputs, *values])

    def run(*args: Any) -> Any:
        return compiled(*args, *(_read(view, path) for path in lift.reads))

    return run


_RECORDS = f".{STATE}.records."
_MODES = (torch.tensor(False), torch.tensor(True))


def _read(view: nn.Module, path: str) -> Tensor:
    value = get_attribute(view, path)
    if isinstance(value, bool):
        return _MODES[value]
    assert isinstance(value, Tensor)
    # A record is written by the backward pass of one call and by the next forward pass: each call has its own handle.
    return value.data if _RECORDS in f".{path}" else value


class _Lift:
    """One graph and what it reads, turned into further placeholders, the graphs inside it likewise."""

    def __init__(self, view: QuantizedGraphModule, given: dict[int, str]) -> None:
        self.view = view
        self.root = nn.Module()
        self.graph = copy_graph(view.graph)
        self.reads: list[str] = []
        self._inputs: dict[str, fx.Node] = {node.name: node for node in self.graph.find_nodes(op="placeholder")}
        self._given = given
        self._made: dict[str, fx.Node] = {}
        bodies: dict[fx.Node, list[str]] = {}
        for node in list(self.graph.nodes):
            if node.op == "get_attr":
                value = get_attribute(view, str(node.target))
                if isinstance(value, QuantizedGraphModule):
                    bodies[node] = self._body(node, value)
                elif isinstance(value, bool):
                    self._read_mode(node)
                elif isinstance(value, Tensor):
                    self._replace(node, self.input_for(str(node.target), value))
            elif any(used in bodies for used in node.all_input_nodes):
                self._pass_on(node, bodies)

    def input_for(self, path: str, value: object) -> fx.Node:
        """Return the input that carries a value: one that Dynamo gave, else a new one."""
        name = self._given.get(id(value), "")
        if name in self._inputs:
            return self._inputs[name]
        if path not in self._made:
            first: fx.Node = next(node for node in self.graph.nodes if node.op != "placeholder")
            with self.graph.inserting_before(first):
                made = self.graph.placeholder(f"read_{path}".replace(".", "_"))
            made._dynamo_source = None
            self._made[path] = made
            self.reads.append(path)
        return self._made[path]

    def _replace(self, node: fx.Node, value: fx.Node) -> None:
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)

    def _read_mode(self, node: fx.Node) -> None:
        """Give observers their mode as a tensor: a Python bool would be a constant of the compiled code."""
        mode = self.input_for(str(node.target), None)
        for user in list(node.users):
            user.args = tuple(True if arg is node else arg for arg in user.args)
            user.kwargs = {**user.kwargs, "trains": mode}
        self.graph.erase_node(node)

    def _body(self, node: fx.Node, body: QuantizedGraphModule) -> list[str]:
        inner = _Lift(body, {})
        name = str(node.target).replace(".", "_")
        self.root.add_module(name, fx.GraphModule(inner.root, inner.graph))
        node.target = name
        # What a body reads through the graph around it, that graph reads itself.
        return [path.removeprefix(f"{OUTER}.") for path in inner.reads]

    def _pass_on(self, node: fx.Node, bodies: dict[fx.Node, list[str]]) -> None:
        """Hand the state that a body reads to the operator that runs it."""
        for used in [used for used in node.all_input_nodes if used in bodies]:
            state = tuple(self.input_for(path, attribute_or_none(self.view, path)) for path in bodies[used])
            if node.target is checkpointed:
                node.target = TAG_CHECKPOINT
                node.args = (*node.args, *state)
            elif state:
                with self.graph.inserting_before(node):
                    bound = self.graph.call_function(with_state, (used, state))
                node.replace_input_with(used, bound)


def with_state(body: Callable[..., Any], state: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a body that needs only its own arguments."""
    return partial(_called_with, body, state)


def _called_with(body: Callable[..., Any], state: tuple[Any, ...], *args: Any) -> Any:
    return body(*args, *state)
