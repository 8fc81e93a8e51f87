"""Subgraphs: GraphModules that a node of another graph runs once, many times, or conditionally.

A node reads its subgraph through a `get_attr` node. Passes treat subgraphs like the graph around them (`pass_base`),
and the same invariants hold (`verifier`). Subgraphs use the state of the outermost graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.common.torch_private import OpOverload, OpOverloadPacket
from cpt_fx.ir.layer_state import place_for_widths
from cpt_fx.ir.meta import QUANTIZER, STATE, get_attribute
from cpt_fx.ir.module import QuantizedGraphModule, blank
from cpt_fx.ir.recurrence import scan
from cpt_fx.ir.state import Held, Precision
from cpt_fx.operators import form_of

OUTER = "_cpt_fx_outer"
"""Attribute of a subgraph: the module around it, through which it reads that module's attributes."""

_STATE = f"{STATE}."
"""Prefix of the paths of our own state, which are all tensors."""

AUTHORS_OWN: frozenset[Any] = frozenset({torch.ops.higher_order.autograd_function_apply})
"""Operators whose subgraphs are a forward pass and the author's own backward pass: passes leave them unchanged."""

_ON_TENSORS = (BuiltinFunctionType, OpOverload, OpOverloadPacket)
"""Types of targets that take no subgraph: a shortcut, since most get_attr nodes read tensors for such targets."""

CONSTANTS = 3
"""Position of the argument of `scan` that is passed to every step unchanged."""


@dataclass(frozen=True)
class SubgraphCall:
    """A node that runs a subgraph; `given` maps inputs of the subgraph to the value of the outer graph they receive."""

    node: fx.Node
    read: fx.Node
    subgraph: fx.GraphModule
    given: dict[fx.Node, fx.Node]

    @property
    def repeats(self) -> bool:
        """Whether the subgraph runs many times on the same given values."""
        return self.node.target is scan


def subgraph_of(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """Return the subgraph that a node reads, if it is one that passes may change."""
    if node.op != "get_attr" or str(node.target).startswith(_STATE):
        return None
    for user in node.users:
        if type(user.target) in _ON_TENSORS:
            return None
    # Looks up modules and plain attributes only, bypassing nn.Module.__getattr__, which is slow.
    value: Any = module
    for name in str(node.target).split("."):
        if not isinstance(value, nn.Module):  # not a well-formed graph: left to the verifier
            return None
        value = value._modules.get(name, value.__dict__.get(name))
    if not isinstance(value, fx.GraphModule):
        return None
    return None if node.users and all(user.target in AUTHORS_OWN for user in node.users) else value


def subgraphs(module: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    """Return the subgraphs that nodes of this graph itself run, each once, with the path it is read from."""
    found: dict[int, tuple[str, fx.GraphModule]] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        subgraph = subgraph_of(module, node)
        if subgraph is not None:
            found.setdefault(id(subgraph), (str(node.target), subgraph))
    return list(found.values())


def graphs_of(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return a graph and all subgraphs inside it, at any depth: itself first, each once."""
    found: dict[int, fx.GraphModule] = {id(module): module}
    _collect(module, found)
    return list(found.values())


def _collect(module: fx.GraphModule, found: dict[int, fx.GraphModule]) -> None:
    for _, subgraph in subgraphs(module):
        if id(subgraph) not in found:
            # Not as a submodule: the two modules would contain each other.
            subgraph.__dict__[OUTER] = module
            found[id(subgraph)] = subgraph
            _collect(subgraph, found)


def nodes_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Iterate over the nodes of a graph and of its subgraphs."""
    for graph in graphs_of(module):
        yield from graph.graph.nodes


def multiplies(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether anything is multiplied in the subgraphs a node reads, including those that passes skip."""
    for read in node.all_input_nodes:
        inner = get_attribute(module, str(read.target)) if read.op == "get_attr" else None
        if not isinstance(inner, fx.GraphModule):
            continue
        for item in inner.graph.nodes:
            if form_of(item.target) or multiplies(inner, item):
                return True
    return False


def calls_of(module: fx.GraphModule, node: fx.Node) -> list[SubgraphCall]:
    """Return the subgraphs that a node runs, with what it passes to them."""
    if node.op != "call_function":
        return []
    found = []
    for read in node.all_input_nodes:
        subgraph = subgraph_of(module, read)
        if subgraph is not None:
            inputs = [item for item in subgraph.graph.nodes if item.op == "placeholder"]
            found.append(SubgraphCall(node, read, subgraph, _given(node, read, inputs)))
    return found


def _given(node: fx.Node, read: fx.Node, inputs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    if node.target is scan:
        constants: Any = node.args[CONSTANTS]
        pairs = list(zip(inputs[len(inputs) - len(constants) :], constants, strict=True))
    else:
        # wrap(subgraph, *operands) in all its forms, or cond(predicate, subgraph, subgraph, operands).
        last = node.args[-1] if node.args else None
        operands: Any = last if isinstance(last, (tuple, list)) else node.args[node.args.index(read) + 1 :]
        operands = [value for value in operands if value is not read]
        if len(operands) > len(inputs):
            operands = operands[len(operands) - len(inputs) :]
        pairs = list(zip(inputs, operands, strict=True)) if len(operands) == len(inputs) else []
    return {given: value for given, value in pairs if isinstance(value, fx.Node)}


def given_quantized(subgraph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Map each input of a subgraph that every call passes a quantized value to its quantizer in the outer graph."""
    outer = subgraph.__dict__.get(OUTER)
    calls = [] if outer is None else [call for node in outer.graph.nodes for call in calls_of(outer, node)]
    first, *others = [call.given for call in calls if call.subgraph is subgraph] or [{}]
    return {
        given: value
        for given, value in first.items()
        if all(given in each and QUANTIZER in each[given].meta for each in (first, *others))
    }


def has_quantizers(node: fx.Node, given: dict[fx.Node, fx.Node]) -> bool:
    """Return whether an operand of an operator is quantized, here or in the graph around (`given`)."""
    inputs = [given.get(used, used).meta.get(QUANTIZER) for used in node.all_input_nodes]
    # A gradient quantizer in front of the operator belongs to the layer before.
    return any(item is not None and item.role != "gradient" for item in inputs)


def outermost(module: fx.GraphModule) -> fx.GraphModule:
    """Return the outermost graph around a graph."""
    while OUTER in module.__dict__:
        module = module.__dict__[OUTER]
    return module


def state_of(module: fx.GraphModule) -> Precision:
    """Return the state module of a graph, which is that of the outermost graph; add an empty one if there is none."""
    outer = outermost(module)
    state = outer.__dict__.get(STATE) or outer._modules.get(STATE)
    if state is None:
        state = Held()
        state.move_to(place_for_widths(outer, state.device))
        outer.add_module(STATE, state)
    assert isinstance(state, Precision)
    if OUTER in module.__dict__:
        module.__dict__[STATE] = state
    return state


def new_subgraph(graph: fx.Graph) -> QuantizedGraphModule:
    """Return a module for a subgraph that a pass creates; it holds no attributes, so all it needs is passed in."""
    subgraph = blank()
    subgraph.graph = graph
    return subgraph


def add_subgraph(module: fx.GraphModule, name: str, subgraph: fx.GraphModule) -> str:
    """Attach a subgraph as a plain attribute, outside the module's submodules and state_dict; return its name."""
    free = free_name(name, module)
    module.__dict__[free] = subgraph
    subgraph.__dict__[OUTER] = module
    return free


def free_name(name: str, taken: nn.Module | Callable[[str], bool]) -> str:
    """Return a name, with a number appended if it is taken, as an attribute of a module or according to a predicate."""
    is_taken = partial(hasattr, taken) if isinstance(taken, nn.Module) else taken
    free, number = name, 0
    while is_taken(free):
        number += 1
        free = f"{name}_{number}"
    return free
