"""The invariants of a graph at each stage; a later stage keeps those of the earlier ones.

A graph that is only captured satisfies what `torch.fx` checks in `Graph.lint`: values are defined before they are used,
and every module, parameter and attribute that is read exists. That check is reimplemented here because it runs after
every pass, and the general attribute lookup of `Graph.lint` would take most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.errors import TransformError
from cpt_fx.integer.ops import INTEGER_PRODUCTS, TO_INTEGER
from cpt_fx.ir.meta import (
    CALLED,
    DECISION,
    LEFT,
    QUANTIZER,
    SIMULATED,
    STATE,
    Decision,
    Operand,
    Quantizer,
    attribute_or_none,
    get_attribute,
)
from cpt_fx.ir.pass_base import STAGES
from cpt_fx.ir.state import Precision
from cpt_fx.ir.subgraphs import given_quantized, graphs_of
from cpt_fx.operators import INLINED, form_of, row_of
from cpt_fx.operators.groups import gradient_groups
from cpt_fx.operators.table import writes
from cpt_fx.quantizers.numerics import Grid, keywords_of
from cpt_fx.quantizers.ops import OP_OF_RANGE, QUANTIZE_GRADIENT, QUANTIZERS

Violations = Iterator[str]

_GRID = frozenset({*Grid._fields})
_VERBS = {"get_attr": "reads", "call_module": "calls"}
"""Verbs for error messages, by the op of a node that names a part of the model."""


class SpecError(TransformError):
    """A graph violates an invariant of its stage: the pass that ran last has a bug."""


def check(module: fx.GraphModule, stage: str, after: str = "") -> int:
    """Raise `SpecError` with the violations found; return the number of nodes checked, those of subgraphs included."""
    reached = STAGES[: STAGES.index(stage) + 1]
    graphs = graphs_of(module)
    found = [item for graph in graphs for item in _captured(graph)]
    if not found:
        found = [item for name in reached if name in _SPECS for graph in graphs for item in _SPECS[name](graph)]
        found += _one_record_each(graphs) if "bound" in reached else []
    if found:
        shown = "\n  ".join(found[:10]) + (f"\n  ... and {len(found) - 10} more" if len(found) > 10 else "")
        blame = f"after pass {after!r} " if after else ""
        raise SpecError(f"{blame}the graph breaks the promises of a graph that is {stage}:\n  {shown}")
    return sum(len(graph.graph.nodes) for graph in graphs)


def _captured(module: fx.GraphModule) -> Violations:
    """Check that values are defined before use, names are unique, and what is called or read exists."""
    made: set[fx.Node] = set()
    names: set[str] = set()
    for node in module.graph.nodes:
        if not made.issuperset(node.all_input_nodes):
            late = next(used for used in node.all_input_nodes if used not in made)
            yield f"not a well-formed graph: {node.name} uses {late.name} before it is made, or from another graph"
        if node.name in names:
            yield f"not a well-formed graph: two values are called {node.name}"
        if node.op == "call_function" and not callable(node.target):
            yield f"not a well-formed graph: {node.name} calls {node.target!r}, which is no function"
        if node.op in _VERBS:
            found = attribute_or_none(module, str(node.target))
            if found is None or (node.op == "call_module" and not isinstance(found, nn.Module)):
                yield f"not a well-formed graph: {node.name} {_VERBS[node.op]} {node.target}, which does not exist"
        made.add(node)
        names.add(node.name)


def _normalized(module: fx.GraphModule) -> Violations:
    """Check that no layer of the table or alias is called, operands are positional, and each parameter has one node."""
    read: dict[int, str] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            if isinstance(layer, INLINED) and CALLED not in node.meta:
                yield f"{node.name} still calls the layer {node.target} ({type(layer).__name__})"
        elif node.op in ("call_function", "call_method") and (form := form_of(node.target)) is not None:
            stays = form.first or writes(form, node.kwargs)
            if form.target not in (None, node.target) and not stays:
                kind = "the method " if node.op == "call_method" else ""
                yield f"{node.name} still calls {kind}{node.target}, another name of {form.target}"
            for name in {form.row.arguments[index] for index, _ in form.row.operands} & node.kwargs.keys():
                yield f"{node.name} takes its operand {name} by keyword, where no decision can reach it"
        elif node.op == "get_attr" and not str(node.target).startswith(f"{STATE}."):
            value = get_attribute(module, str(node.target))
            if isinstance(value, nn.Parameter) and read.setdefault(id(value), node.name) != node.name:
                yield f"{node.name} and {read[id(value)]} read the same parameter"


def _annotated(module: fx.GraphModule) -> Violations:
    """Check that every operator of the table has a decision or a reason, and that decided operands exist."""
    nodes = {node.name: node for node in module.graph.nodes}
    for node in module.graph.nodes:
        decision: Decision | None = node.meta.get(DECISION)
        if decision is None and LEFT not in node.meta and row_of(node):
            yield f"{node.name} came after annotate: nobody decided about it, it would stay in full precision unnoticed"
        for operand in decision.operands if decision else ():
            if _value(nodes.get(operand.node, node), operand) is None:
                yield f"{node.name} ({decision.layer if decision else ''}) has no operand {operand.name}"


def _inserted(module: fx.GraphModule) -> Violations:
    """Check that decided operands come from their quantizers, and decided outputs go through gradient quantizers."""
    nodes = {node.name: node for node in module.graph.nodes}
    # Inputs of a subgraph may have been quantized in the graph around it.
    given = given_quantized(module)
    for node in module.graph.nodes:
        decision: Decision | None = node.meta.get(DECISION)
        if decision is not None:
            yield from _check_decision(node, decision, nodes, given)
        quantizer: Quantizer | None = node.meta.get(QUANTIZER)
        if quantizer is None and node.op == "call_function" and node.target in QUANTIZERS:
            yield f"{node.name} is a quantize op that no pass accounts for"
        if quantizer is not None and not node.users and quantizer.role != "gradient":
            yield f"{node.name} quantizes the {quantizer.role} of {quantizer.layers[0]}, but nothing reads it"


def _check_decision(
    node: fx.Node, decision: Decision, nodes: dict[str, fx.Node], given: dict[fx.Node, fx.Node]
) -> Violations:
    for operand in decision.operands:
        value = _value(nodes.get(operand.node, node), operand)
        value = given.get(value, value) if value is not None else None
        quantizer = value.meta.get(QUANTIZER) if value is not None else None
        if value is None or quantizer is None or not _makes(value, operand, node):
            yield f"{decision.layer}: operand {operand.name} of {node.name} is not quantized"
        elif quantizer.format != operand.format:
            yield f"{decision.layer}: operand {operand.name} has format {quantizer.format}, not {operand.format}"
        elif quantizer.width_source != decision.width_source(operand.role):
            wanted = decision.width_source(operand.role)
            yield f"{decision.layer}: operand {operand.name} follows {quantizer.width_source.name}, not {wanted.name}"
        elif value.target is not TO_INTEGER and not _is_grid(
            value, keywords_of(operand.format, (operand.keep, operand.over))
        ):
            yield f"{decision.layer}: operand {operand.name} is rounded on another grid than that of {operand.format}"
    quantizer = node.meta.get(QUANTIZER)
    if decision.gradient is None or (node.target in INTEGER_PRODUCTS and quantizer and quantizer.role == "gradient"):
        return
    output = nodes.get(decision.gradient_name)
    users = [user for user in output.users if user.target is QUANTIZE_GRADIENT] if output is not None else []
    if not users or output is None:
        yield f"{decision.layer}: the gradient of {decision.gradient_name} is not quantized"
    elif len(output.users) > 1:
        others = [user.name for user in output.users if user not in users]
        who = ", ".join(others) or "a second quantizer"
        yield f"{decision.layer}: {who} bypasses the gradient quantizer of {output.name}"
    elif not _is_grid(users[0], keywords_of(decision.gradient, gradient_groups(decision.gradient))):
        what = f"{decision.layer}: the gradient of {output.name}"
        yield f"{what} is rounded on another grid than that of {decision.gradient}"


def _makes(quantizer: fx.Node, operand: Operand, product: fx.Node) -> bool:
    """Return whether a quantizer is of the kind that an operand of a product needs."""
    target = quantizer.target
    return target is OP_OF_RANGE[operand.format.range] or (target is TO_INTEGER and product.target in INTEGER_PRODUCTS)


def _is_grid(node: fx.Node, keywords: dict[str, Any]) -> bool:
    """Return whether a quantizer is called with the arguments of its format; `to_integer` takes only some of them."""
    given = {name: value for name, value in node.kwargs.items() if name in _GRID}
    wanted = {name: keywords[name] for name in given if name in keywords} if node.target is TO_INTEGER else keywords
    return given == wanted


def _bound(module: fx.GraphModule) -> Violations:
    """Check that every quantizer reads its bit-width source."""
    state = module.__dict__.get(STATE) or module._modules.get(STATE)
    quantizers = [node for node in module.graph.nodes if QUANTIZER in node.meta]
    known: set[str] = set()
    if not isinstance(state, Precision):
        if quantizers:
            yield f"there are {len(quantizers)} quantizers, but no state module {STATE}"
        return
    for node in quantizers:
        quantizer: Quantizer = node.meta[QUANTIZER]
        path = f"{STATE}.bits.{quantizer.width_source.name}"
        width = node.args[1]
        if not isinstance(width, fx.Node) or width.op != "get_attr" or width.target != path:
            yield f"{node.name} reads its width from {width}, not from {path}"
        elif path not in known and not isinstance(get_attribute(module, path), torch.Tensor):
            yield f"{path} is not a tensor"
        known.add(path)


def _lowered(module: fx.GraphModule) -> Violations:
    """Check that every operator with a decision runs on integers, or has a reason why it does not."""
    for node in module.graph.nodes:
        if DECISION in node.meta and node.target not in INTEGER_PRODUCTS and SIMULATED not in node.meta:
            yield f"{node.name} came after lower: it is simulated, and nothing says why"


def _one_record_each(graphs: list[fx.GraphModule]) -> list[str]:
    """Check that every quantizer has counters of its own; return the violations."""
    writers: dict[str, str] = {}
    found = []
    for node in (node for graph in graphs for node in graph.graph.nodes if QUANTIZER in node.meta):
        counters = str(getattr(node.kwargs.get("counters"), "target", None))
        if counters in writers:
            found.append(f"{node.name} and {writers[counters]} write the same counters, {counters}")
        writers[counters] = node.name
    return found


def _value(node: fx.Node, operand: Operand) -> fx.Node | None:
    try:
        value = operand.value(node)
    except IndexError:
        return None
    return value if isinstance(value, fx.Node) else None


_SPECS: dict[str, Callable[[fx.GraphModule], Violations]] = {
    "normalized": _normalized,
    "annotated": _annotated,
    "inserted": _inserted,
    "bound": _bound,
    "lowered": _lowered,
}
