"""Decompose recurrent layers: one product for the inputs of all time steps, and a loop over the state's products."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from cpt_fx.decompose.building import Builder, Decomposer, StaysFusedError, arguments, static
from cpt_fx.ir import recurrence as recurrent
from cpt_fx.ir.meta import FAMILY, NAME, PASS, source_of
from cpt_fx.ir.subgraphs import add_subgraph, new_subgraph

_PRODUCTS = tuple((name, "recurrent") for name in ("ih_l*", "hh_l*", "hr_l*"))
_CELL_PRODUCTS = (("ih", "recurrent"), ("hh", "recurrent"))


@dataclass(frozen=True)
class _Kind:
    """What distinguishes recurrent layers: their step, the number of state tensors, and which of them the step reads.

    The step takes the product of the input, that of the last output, and the state tensors at the indices `reads`.
    With `autocasts_on_cpu`, torch's kernel for padded input without projections is autocast on CPUs, too.
    """

    step: Callable[..., Any]
    states: int = 1
    reads: tuple[int, ...] = ()
    autocasts_on_cpu: bool = False


_KINDS = {
    "lstm": _Kind(recurrent.lstm_step, states=2, reads=(1,), autocasts_on_cpu=True),
    "gru": _Kind(recurrent.gru_step, reads=(0,)),
    "rnn_tanh": _Kind(recurrent.tanh_step),
    "rnn_relu": _Kind(recurrent.relu_step),
}


def _layers(params: Sequence[Any], has_biases: bool, has_projection: bool, count: int) -> list[dict[str, Any]]:
    """Split torch's flat list of parameters into one dict for each direction of each layer."""
    names = ("input", "hidden", *(("input_bias", "hidden_bias") if has_biases else ()),
             *(("projection",) if has_projection else ()))  # fmt: skip
    each = len(names)
    if len(params) != each * count:
        raise StaysFusedError(f"fused recurrent kernel with {len(params)} parameters, not {each * count}")
    return [dict(zip(names, params[start:], strict=False)) for start in range(0, len(params), each)]


def _sequence(builder: Builder, kind: _Kind) -> None:
    """Decompose a call of `torch.lstm` or the like, on padded or on packed sequences."""
    packed = len(builder.node.args) > 3 and isinstance(builder.node.args[3], (tuple, list))
    given = arguments(builder.node, "data" if packed else "input")
    static(given, "params", "has_biases", "num_layers", "bidirectional", *(() if packed else ("batch_first",)))
    if isinstance(given["hx"], fx.Node) != (kind.states == 1):
        raise StaysFusedError("fused recurrent kernel: its first state is known only when the graph runs")
    directions = 2 if given["bidirectional"] else 1
    count = given["num_layers"] * directions
    has_projection = len(given["params"]) == count * (3 + 2 * given["has_biases"])
    layers = _layers(given["params"], given["has_biases"], has_projection, count)
    starts = [given["hx"]] if kind.states == 1 else list(given["hx"])
    x = given["data"] if packed else given["input"]
    if not packed and given["batch_first"]:
        x = builder.call(torch.transpose, x, 0, 1)
    ends: list[list[fx.Node]] = [[] for _ in range(kind.states)]
    for depth in range(given["num_layers"]):
        outputs = []
        for direction in range(directions):
            index = depth * directions + direction
            state = tuple(builder.item(start, index) for start in starts)
            options = {"batch_sizes": given["batch_sizes"]} if packed else {}
            if kind.autocasts_on_cpu and not packed and not has_projection:
                options["autocasts_on_cpu"] = True
            if direction:
                options["reverse"] = True
            name = f"l{depth}{'_reverse' if direction else ''}"
            run = _direction(builder, kind, layers[index], x, state, name, options)
            outputs.append(builder.item(run, 0))
            for place, part in enumerate(ends):
                part.append(builder.item(run, place + 1))
        x = outputs[0] if directions == 1 else builder.call(torch.cat, outputs, -1)
        if depth < given["num_layers"] - 1 and given["dropout"] != 0 and given["train"] is not False:
            x = builder.call(F.dropout, x, given["dropout"], given["train"])
    if not packed and given["batch_first"]:
        x = builder.call(torch.transpose, x, 0, 1)
    builder.replace(x, *(builder.call(torch.stack, part) for part in ends))


def _direction(
    builder: Builder, kind: _Kind, layer: dict[str, Any], x: fx.Node, state: tuple[fx.Node, ...], name: str,
    options: dict[str, Any],
) -> fx.Node:  # fmt: skip
    """Add one direction of one layer: the product of all inputs, then the loop."""
    bias = layer.get("input_bias")
    inputs = builder.product(F.linear, x, layer["input"], bias, name=f"ih_{name}", family="recurrent")
    parts = {"weight": layer["hidden"], "bias": layer.get("hidden_bias"), "projection": layer.get("projection")}
    constants = {part: value for part, value in parts.items() if value is not None}
    subgraph = new_subgraph(_step(builder, kind, name, list(constants)))
    path = add_subgraph(builder.module, f"_cpt_fx_step_{name}", subgraph)
    with builder.node.graph.inserting_before(builder.node):
        read = builder.node.graph.create_node("get_attr", path)
    builder.products += 1 + ("projection" in layer)
    return builder.call(recurrent.scan, read, inputs, state, tuple(constants.values()), **options)


def _step(builder: Builder, kind: _Kind, name: str, constants: list[str]) -> fx.Graph:
    """Return the graph of one time step: the product of the last output, then the step and a projection, if any."""
    graph = fx.Graph()
    inputs = graph.placeholder("inputs")
    state = [graph.placeholder(part) for part in ("hidden", "cell")[: kind.states]]
    given = {part: graph.placeholder(part) for part in constants}

    def product(x: fx.Node, weight: fx.Node, bias: fx.Node | None, which: str) -> fx.Node:
        made = graph.call_function(F.linear, (x, weight, bias))
        made.meta.update({NAME: f"{which}_{name}", FAMILY: "recurrent"})
        return made

    hidden = product(state[0], given["weight"], given.get("bias"), "hh")
    new: Any = graph.call_function(kind.step, (inputs, hidden, *(state[part] for part in kind.reads)))
    several = range(kind.states if kind.states > 1 else 0)
    results = [graph.call_function(operator.getitem, (new, index)) for index in several] or [new]
    if "projection" in given:
        results[0] = product(results[0], given["projection"], None, "hr")
    graph.output(tuple(results))
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta |= {**source_of(builder.node), PASS: "decompose"}
    return graph


def _cell(builder: Builder, kind: _Kind) -> None:
    """Decompose a call of `torch.lstm_cell` or the like."""
    given = arguments(builder.node)
    if isinstance(given["hx"], fx.Node) != (kind.states == 1):
        raise StaysFusedError("fused recurrent cell: its state is known only when the graph runs")
    state = [given["hx"]] if kind.states == 1 else list(given["hx"])

    def product(x: fx.Node, which: str) -> fx.Node:
        weight, bias = given[f"w_{which}"], given[f"b_{which}"]
        return builder.product(F.linear, x, weight, bias, name=which, family="recurrent")

    inputs, hidden = product(given["input"], "ih"), product(state[0], "hh")
    new = builder.call(kind.step, inputs, hidden, *(state[part] for part in kind.reads))
    builder.replace(*([new] if kind.states == 1 else [builder.item(new, index) for index in range(kind.states)]))


DECOMPOSERS = {
    getattr(torch, f"{name}{end}"): Decomposer(products, partial(function, kind=kind))
    for end, products, function in (("", _PRODUCTS, _sequence), ("_cell", _CELL_PRODUCTS, _cell))
    for name, kind in _KINDS.items()
}
"""The recurrent operators, and how to decompose them."""
