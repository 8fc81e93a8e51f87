"""Lower quantized products to integer arithmetic: operators that multiply 8-bit codes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from cpt_fx.formats import Format, Range, Rounding, Scheme
from cpt_fx.integer.ops import INTEGER_CONV, INTEGER_LINEAR, INTEGER_MATMUL, INTEGER_PRODUCTS, TO_INTEGER
from cpt_fx.ir.meta import (
    DECISION,
    PASS,
    QUANTIZER,
    SIMULATED,
    Decision,
    Operand,
    get_attribute,
    read_before,
    source_of,
)
from cpt_fx.ir.pass_base import Pass, Report, unique
from cpt_fx.ir.state import Precision
from cpt_fx.ir.subgraphs import free_name, given_quantized, nodes_of, outermost, state_of
from cpt_fx.operators import MULTIPLY, row_for
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, QUANTIZE_GRADIENT

LEFT, RIGHT, ADDED = 0, 2, 3
"""Argument positions of the two operands and the addend of an integer product; the gradient's bit-width is at 1."""
WIDTH = 1

_FORMS: dict[str, Any] = {"linear": INTEGER_LINEAR, "matmul": INTEGER_MATMUL, "conv": INTEGER_CONV}
"""Integer operators, by `Row.integer`."""


class _StaysError(Exception):
    """A product stays simulated; the message says why."""


@dataclass(frozen=True)
class Lower(Pass):
    """Lower linear layers, matrix products and convolutions to integers where their formats allow it.

    A product of codes is correct only if the scales factor out of its sum and zero needs no offset: symmetric grids
    with one range per tensor. The bit-widths decide at run time: up to 8 bits on integers, above that in floating
    point. The report gives a reason for every product that is not lowered, or only in part.
    """

    name: ClassVar[str] = "lower"
    requires: ClassVar[str] = "bound"
    reaches: ClassVar[str | None] = "lowered"

    def run(self, module: fx.GraphModule) -> Report:
        """Plan all products of a graph, then rewrite them."""
        decisions = [node for node in module.graph.nodes if DECISION in node.meta]
        products = [node for node in decisions if node.meta[DECISION].family in MULTIPLY]
        plans, notes = [], []
        for node in decisions:
            node.meta.pop(SIMULATED, None)
            if node.target in INTEGER_PRODUCTS:
                continue
            try:
                plans.append(_plan(module, node))
            except _StaysError as reason:
                node.meta[SIMULATED] = str(reason)
            if SIMULATED in node.meta and node in products:
                notes.append(f"{node.meta[DECISION].layer}: {node.meta[DECISION].op}: {node.meta[SIMULATED]}")
        editor = _Editor(module, plans)
        for plan in plans:
            editor.lower(plan)
        count = f"{len(plans)} of {len(products)} products on integers"
        return Report(self.name, len(plans), (count, *notes))


@dataclass(frozen=True)
class _Plan:
    """How one product is lowered."""

    node: fx.Node
    target: Callable[..., Any]
    places: dict[int, int]
    geometry: tuple[list[int], ...]
    gradient: fx.Node | None
    """The gradient quantizer that the integer product replaces, if any."""


def _plan(module: fx.GraphModule, node: fx.Node) -> _Plan:
    """Return how a product is lowered; raise `_StaysError` with the reason if it is not."""
    decision: Decision = node.meta[DECISION]
    if decision.family not in MULTIPLY:
        raise _StaysError("no product of two tensors")
    row = row_for(node.target)
    if row is None or not row.integer:
        raise _StaysError(f"{decision.op} has no integer form")
    target, factors = _FORMS[row.integer], iter((LEFT, RIGHT))
    places = {index: ADDED if kind == "bias" else next(factors) for index, kind in row.operands}
    operands = {operand.index: operand for operand in decision.operands}
    for index, place in places.items():
        if place == ADDED:
            continue
        operand = operands.get(index)
        if operand is None:
            raise _StaysError("one of its operands is not quantized")
        _check_operand(module, node, operand)
    geometry = _geometry(module, node, row.arguments) if target is INTEGER_CONV else ()
    if target is not INTEGER_CONV and node.kwargs:
        raise _StaysError(f"{decision.op} is called with {', '.join(node.kwargs)}")
    gradient, why = _gradient(node, decision)
    if why:
        node.meta[SIMULATED] = f"backward in floating point: {why}"
    return _Plan(node, target, places, geometry, gradient)


def _check_operand(module: fx.GraphModule, node: fx.Node, operand: Operand) -> None:
    """Raise if an operand cannot be multiplied as integer codes."""
    value: Any = node.args[operand.index]  # type: ignore[index]
    if value in given_quantized(module):
        raise _StaysError(f"operand {operand.name} is quantized once, outside of the loop that multiplies it")
    why = _why_not(operand.format)
    if why:
        raise _StaysError(f"operand {operand.name}: {why}")
    if value.target is not FAKE_QUANTIZE:
        raise _StaysError(f"operand {operand.name} does not come from a quantizer of this graph")
    others = [user for user in value.users if user is not node]
    if others and operand.format.rounding is Rounding.STOCHASTIC:
        raise _StaysError(f"operand {operand.name} is rounded stochastically, and {others[0].name} reads it, too")


def _why_not(format: Format) -> str:
    """Return why codes of a format cannot be multiplied, or an empty string."""
    if format.scheme in (Scheme.AFFINE, Scheme.AFFINE_INTEGER):
        return f"format {format} is not symmetric: its zero point does not factor out of a product"
    if format.scheme is not Scheme.SYMMETRIC:
        return f"format {format} has no integer codes"
    if format.block:
        return f"format {format} has a scale per block, which does not factor out of a product"
    if format.range is not Range.DYNAMIC:
        return f"format {format} has a range that is {format.range.value}, not that of the tensor"
    return ""


def _gradient(node: fx.Node, decision: Decision) -> tuple[fx.Node | None, str]:
    """Return the gradient quantizer that the product replaces, or why there is none."""
    if decision.gradient is None:
        return None, "its gradient is not quantized"
    if decision.gradient_name != node.name:
        return None, "its gradient is quantized after the bias that is added to it"
    why = _why_not(decision.gradient)
    if why:
        return None, f"gradient: {why}"
    return next(user for user in node.users if user.target is QUANTIZE_GRADIENT), ""


def _geometry(module: fx.GraphModule, node: fx.Node, names: tuple[str, ...]) -> tuple[list[int], ...]:
    """Return stride, padding and dilation of a convolution, whose arguments have these names."""
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.pop("groups", 1) != 1:
        raise _StaysError("a grouped convolution has no integer form")
    found = []
    for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
        value = given.get(name, default)
        if isinstance(value, str):
            value = _named_padding(module, node, value, given)
        numbers = list(value) if isinstance(value, (tuple, list)) else [value]
        if not all(isinstance(number, int) for number in numbers):
            raise _StaysError(f"{name} is known only when the graph runs")
        found.append(numbers)
    return tuple(found)


def _named_padding(module: fx.GraphModule, node: fx.Node, name: str, given: dict[str, Any]) -> list[int]:
    """Return the padding that "valid" or "same" stands for, if it is equal on both sides."""
    if name == "valid":
        return [0]
    read: Any = node.args[1].args[0]  # type: ignore[union-attr]
    weight = get_attribute(module, str(read.target)) if read.op == "get_attr" else None
    if not isinstance(weight, torch.Tensor):
        raise _StaysError("padding='same' around a filter whose size only the run knows")
    sizes = weight.shape[2:]
    dilation = given.get("dilation", 1)
    steps = list(dilation) if isinstance(dilation, (tuple, list)) else [dilation]
    total = [step * (size - 1) for step, size in zip(steps * (len(sizes) // len(steps)), sizes, strict=True)]
    if any(amount % 2 for amount in total):
        raise _StaysError("padding='same' that differs between two sides has no integer form")
    return [amount // 2 for amount in total]


class _Editor:
    """Rewrites the products of one graph."""

    def __init__(self, module: fx.GraphModule, plans: list[_Plan]) -> None:
        self.graph = module.graph
        self.state: Precision = state_of(module)
        self.products = {plan.node for plan in plans}
        self.added = {plan.node.args[index] for plan in plans for index, place in plan.places.items()
                      if place == ADDED and index < len(plan.node.args)}  # fmt: skip
        self._codes: dict[fx.Node, fx.Node] = {}
        lowered = [node for node in nodes_of(outermost(module)) if node.target in INTEGER_PRODUCTS]
        self._counts = {str(getattr(node.kwargs["counts"], "target", "")).rpartition(".")[2] for node in lowered}

    def lower(self, plan: _Plan) -> None:
        """Replace a product, its quantizers and its gradient quantizer by integer operators."""
        node, decision = plan.node, plan.node.meta[DECISION]
        arguments: list[Any] = [None, None, None, None]
        for index, place in plan.places.items():
            value = node.args[index] if index < len(node.args) else None
            arguments[place] = value if place == ADDED else self._quantizer(value)  # type: ignore[arg-type]
        options: dict[str, Any] = {}
        if plan.gradient is not None:
            arguments[WIDTH], options = self._absorb(node, plan.gradient)
        name = free_name(re.sub(r"\W", "_", decision.layer) or "root", self._counts.__contains__)
        self._counts.add(name)
        options["counts"] = read_before(node, self.state.add_counts(name, decision.layer))
        node.target = plan.target
        node.args = (*arguments, *plan.geometry)
        node.kwargs = options
        moved = (replace(item, index=plan.places[item.index]) for item in decision.operands if not item.node)
        rest = (item for item in decision.operands if item.node)
        node.meta[DECISION] = replace(decision, operands=(*moved, *rest))
        node.meta[PASS] = Lower.name

    def _quantizer(self, value: fx.Node) -> fx.Node:
        """Return the node for the codes of a quantized value; its other users keep the floating point values."""
        if value in self._codes or value.target is TO_INTEGER:
            return self._codes.get(value, value)
        quantizer = value.meta[QUANTIZER]
        shared = ("keep", "over", "rounding", "counters")
        options = {key: option for key, option in value.kwargs.items() if key in shared}
        if value not in self.added and all(user in self.products for user in value.users):
            value.target, value.kwargs = TO_INTEGER, options
            value.meta[PASS] = Lower.name
            value.meta.pop("val", None)
            return value
        with self.graph.inserting_after(value):
            made = self.graph.create_node("call_function", TO_INTEGER, value.args, name=f"{value.name}_codes")
        counters = self.state.add_counters(made.name, quantizer.layers[0])
        made.kwargs = {**options, "counters": read_before(made, counters)}
        readers = unique(user.meta[DECISION].layer for user in value.users if user in self.products)
        made.meta |= {**source_of(value), QUANTIZER: replace(quantizer, layers=readers, counters=counters)}
        kept = tuple(layer for layer in quantizer.layers if layer not in readers)
        value.meta[QUANTIZER] = replace(quantizer, layers=kept or quantizer.layers)
        self._codes[value] = made
        return made

    def _absorb(self, node: fx.Node, gradient: fx.Node) -> tuple[Any, dict[str, Any]]:
        """Remove the gradient quantizer that a product replaces; return its bit-width and its options."""
        width, counters = gradient.args[1], gradient.kwargs["counters"]
        options = {key: option for key, option in gradient.kwargs.items() if key != "scheme"}
        for read in (width, counters):
            assert isinstance(read, fx.Node)
            if read > node:
                node.prepend(read)
        node.meta[QUANTIZER] = gradient.meta[QUANTIZER]
        gradient.replace_all_uses_with(node)
        self.graph.erase_node(gradient)
        return width, options
