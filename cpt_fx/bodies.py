"""Graphs inside graphs: a body is a GraphModule that a node of another graph runs, once, many times, or perhaps.

A node takes a body through a `get_attr` node. Every pass treats bodies as it treats the graph around them
(`pass_base`), every promise holds in them too (`spec`). Bodies use the state of the outermost graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.graph_module import QuantizedGraphModule, blank
from cpt_fx.layer_state import place_for_widths
from cpt_fx.meta import QUANTIZER, STATE, get_attribute
from cpt_fx.opening.recurrent import scan
from cpt_fx.operators import form_of
from cpt_fx.runtime import Held, Precision

OUTER = "_cpt_fx_outer"
"""Attribute of a body that leads to the module around it: what a body reads there is read through it."""

_STATE = f"{STATE}."
"""What the paths of our own state begin with: tensors, all of them."""

AUTHORS_OWN: frozenset[Any] = frozenset({torch.ops.higher_order.autograd_function_apply})
"""Operators whose bodies are a forward pass and the backward pass its author wrote for it: they stay as they are."""

_ON_TENSORS = (BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""What takes no graphs. Every pass asks of everything that is read whether it is one, and nearly all are tensors."""

CONSTANTS = 3
"""Position of what `scan` passes to every step unchanged."""


@dataclass(frozen=True)
class Call:
    """A node that runs a body. `given`: what each input of the body is, where one value of the outer graph goes in."""

    node: fx.Node
    read: fx.Node
    body: fx.GraphModule
    given: dict[fx.Node, fx.Node]

    @property
    def repeats(self) -> bool:
        """Whether the body runs many times on the same given values."""
        return self.node.target is scan


def body_of(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a node reads, if it is one that passes may change."""
    if node.op != "get_attr" or str(node.target).startswith(_STATE):
        return None
    for user in node.users:
        if type(user.target) in _ON_TENSORS:
            return None
    # Looked up as modules and plain attributes only, past nn.Module.__getattr__, which is slow.
    value: Any = module
    for name in str(node.target).split("."):
        if not isinstance(value, nn.Module):  # not a well-formed graph, which is for others to say
            return None
        value = value._modules.get(name, value.__dict__.get(name))
    if not isinstance(value, fx.GraphModule):
        return None
    return None if node.users and all(user.target in AUTHORS_OWN for user in node.users) else value


def bodies(module: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    """Return the bodies that nodes of this very graph run, each once, by the name they are read under."""
    found: dict[int, tuple[str, fx.GraphModule]] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        body = body_of(module, node)
        if body is not None:
            found.setdefault(id(body), (str(node.target), body))
    return list(found.values())


def graphs_of(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return a graph and all that is inside it: itself first, then its bodies and theirs, each once."""
    found: dict[int, fx.GraphModule] = {id(module): module}
    _collect(module, found)
    return list(found.values())


def _collect(module: fx.GraphModule, found: dict[int, fx.GraphModule]) -> None:
    for _, body in bodies(module):
        if id(body) not in found:
            # Not as a submodule: outer and body would each be part of the other.
            body.__dict__[OUTER] = module
            found[id(body)] = body
            _collect(body, found)


def nodes_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Iterate over the nodes of a graph and of its bodies."""
    for graph in graphs_of(module):
        yield from graph.graph.nodes


def multiplies(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether anything is multiplied in the graphs a node reads, those included that passes leave alone."""
    for read in node.all_input_nodes:
        inner = get_attribute(module, str(read.target)) if read.op == "get_attr" else None
        if not isinstance(inner, fx.GraphModule):
            continue
        for item in inner.graph.nodes:
            if form_of(item.target) or multiplies(inner, item):
                return True
    return False


def calls_of(module: fx.GraphModule, node: fx.Node) -> list[Call]:
    """Return the bodies that a node runs, with what it passes to them."""
    if node.op != "call_function":
        return []
    found = []
    for read in node.all_input_nodes:
        body = body_of(module, read)
        if body is not None:
            inputs = [item for item in body.graph.nodes if item.op == "placeholder"]
            found.append(Call(node, read, body, _given(node, read, inputs)))
    return found


def _given(node: fx.Node, read: fx.Node, inputs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    if node.target is scan:
        constants: Any = node.args[CONSTANTS]
        pairs = list(zip(inputs[len(inputs) - len(constants) :], constants, strict=True))
    else:
        # wrap(body, *operands) in all its forms, cond(which, body, body, operands).
        last = node.args[-1] if node.args else None
        operands: Any = last if isinstance(last, (tuple, list)) else node.args[node.args.index(read) + 1 :]
        operands = [value for value in operands if value is not read]
        if len(operands) > len(inputs):
            operands = operands[len(operands) - len(inputs) :]
        pairs = list(zip(inputs, operands, strict=True)) if len(operands) == len(inputs) else []
    return {given: value for given, value in pairs if isinstance(value, fx.Node)}


def given_quantized(body: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Return the inputs of a body that are quantized in the graph around it, wherever it runs, with the quantizer."""
    outer = body.__dict__.get(OUTER)
    calls = [] if outer is None else [call for node in outer.graph.nodes for call in calls_of(outer, node)]
    first, *others = [call.given for call in calls if call.body is body] or [{}]
    return {
        given: value
        for given, value in first.items()
        if all(given in each and QUANTIZER in each[given].meta for each in (first, *others))
    }


def has_quantizers(node: fx.Node, given: dict[fx.Node, fx.Node]) -> bool:
    """Whether an operand of an operator is quantized; `given` are inputs of a body that are, outside of it."""
    inputs = [given.get(used, used).meta.get(QUANTIZER) for used in node.all_input_nodes]
    # A gradient quantizer in front of it belongs to the layer before.
    return any(item is not None and item.role != "gradient" for item in inputs)


def outermost(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph that no other graph runs."""
    while OUTER in module.__dict__:
        module = module.__dict__[OUTER]
    return module


def state_of(module: fx.GraphModule) -> Precision:
    """Return the state module that a graph uses, bodies that of the outermost; add an empty one where there is none."""
    outer = outermost(module)
    state = outer.__dict__.get(STATE) or outer._modules.get(STATE)
    if state is None:
        state = Held()
        state.stand_on(place_for_widths(outer, state.device))
        outer.add_module(STATE, state)
    assert isinstance(state, Precision)
    if OUTER in module.__dict__:
        module.__dict__[STATE] = state
    return state


def new_body(graph: fx.Graph) -> QuantizedGraphModule:
    """Return a module for a body that a pass makes. It reads nothing by itself: all it needs is passed in."""
    body = blank()
    body.graph = graph
    return body


def add_body(module: fx.GraphModule, name: str, body: fx.GraphModule) -> str:
    """Put a body where `get_attr` finds it, under a free name, outside of the module's parameters and state_dict."""
    free = free_name(name, module)
    module.__dict__[free] = body
    body.__dict__[OUTER] = module
    return free


def free_name(name: str, taken: nn.Module | Callable[[str], bool]) -> str:
    """Return a name, with a number where it is taken, as by an attribute of a module."""
    is_taken = partial(hasattr, taken) if isinstance(taken, nn.Module) else taken
    free, number = name, 0
    while is_taken(free):
        number += 1
        free = f"{name}_{number}"
    return free
