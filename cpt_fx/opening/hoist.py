"""Quantizers that a loop would run again and again on the same tensor, taken out of it."""

from __future__ import annotations

from typing import Any

from torch import fx

from cpt_fx.bodies import CONSTANTS, OUTER, Call, calls_of
from cpt_fx.formats import Range, Rounding
from cpt_fx.meta import QUANTIZER, Quantizer


def hoist(module: fx.GraphModule) -> int:
    """Move quantizers of what every step of a loop gets from the body of the loop to the graph around it.

    Only those that would return the same at every step: they draw no noise and keep no state. Their gradient is the
    identity, so that the sum over all steps arrives at the weight either way. Returns how many were moved.
    """
    moved = 0
    reads: dict[str, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            reads.setdefault(str(node.target), node)
        for call in calls_of(module, node):
            if call.repeats:
                moved += sum(_move(module.graph, call, inner, reads) for inner in list(call.body.graph.nodes))
    return moved


def _move(graph: fx.Graph, call: Call, inner: fx.Node, reads: dict[str, fx.Node]) -> bool:
    """Move one quantizer, if it can be."""
    quantizer: Quantizer | None = inner.meta.get(QUANTIZER)
    value = inner.args[0] if inner.args else None
    if quantizer is None or quantizer.role == "gradient" or not isinstance(value, fx.Node):
        return False
    alone = value in call.given and list(value.users) == [inner]
    if not alone or quantizer.format.range is not Range.DYNAMIC or quantizer.format.rounding is Rounding.STOCHASTIC:
        return False

    def outside(used: fx.Node) -> fx.Node:
        if used in call.given:
            return call.given[used]
        path = str(used.target).removeprefix(f"{OUTER}.")
        if path not in reads:
            reads[path] = graph.create_node("get_attr", path)
            reads[path].meta = dict(used.meta)
        return reads[path]

    with graph.inserting_before(call.node):
        args, kwargs = fx.map_arg((inner.args, inner.kwargs), outside)
        made = graph.create_node("call_function", inner.target, args, kwargs, name=inner.name)
    made.meta = dict(inner.meta)
    _pass_on(call, value, made)
    used = inner.all_input_nodes
    inner.replace_all_uses_with(value)
    call.body.graph.erase_node(inner)
    for read in used:
        if read.op == "get_attr" and not read.users:
            call.body.graph.erase_node(read)
    return True


def _pass_on(call: Call, given: fx.Node, value: fx.Node) -> None:
    """Let the loop give its body another value for one of its inputs."""
    inputs = [node for node in call.body.graph.nodes if node.op == "placeholder"]
    constants: list[Any] = list(call.node.args[CONSTANTS])  # type: ignore[arg-type]
    constants[inputs.index(given) - len(inputs)] = value
    call.node.update_arg(CONSTANTS, tuple(constants))
    call.given[given] = value
