"""A graph as text: one line per node, with the decision it carries or the quantizer it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from cpt_fx.ir.layer_state import is_range
from cpt_fx.ir.meta import DECISION, QUANTIZER, STATE, Decision, Operand, Quantizer, WidthSource
from cpt_fx.ir.subgraphs import OUTER, subgraphs


def graph_text(module: fx.GraphModule) -> str:
    """Print a graph for people: `name = call(arguments)  # what it is for`.

    Reads of the state (widths, running ranges, modes) are shown where they are used, as `$bits.weight`; records are
    left out, they are the same for every quantizer.
    """
    inline = {node: _state_name(node) for node in module.graph.nodes if _state_name(node)}
    carried_out = any(QUANTIZER in node.meta for node in module.graph.nodes)
    lines = []
    for node in module.graph.nodes:
        if node in inline:
            continue
        call = _call(module, node, inline)
        note = _note(node, brief=carried_out)
        lines.append(f"{call}  # {note}" if note else call)
    text = "\n".join(lines) + "\n"
    for name, subgraph in subgraphs(module):
        text += f"\n{name}:\n" + "".join(f"    {line}\n" for line in graph_text(subgraph).splitlines())
    return text


def _state_name(node: fx.Node) -> str:
    """Return how a read of the state is shown, or nothing where a node is no such read."""
    path = str(node.target).removeprefix(f"{OUTER}.")
    if node.op != "get_attr":
        return ""
    if path.startswith(f"{STATE}."):
        return f"${path.removeprefix(f'{STATE}.')}"
    if is_range(path.rpartition(".")[2]):
        return f"${path}"
    return f"${path}" if path.rpartition(".")[2] == "training" else ""


def _call(module: fx.GraphModule, node: fx.Node, inline: dict[fx.Node, str]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, fx.Node):
            return inline.get(value, value.name)
        if isinstance(value, (tuple, list)):
            left, right = "()" if isinstance(value, tuple) else "[]"
            comma = "," if len(value) == 1 and left == "(" else ""
            return left + ", ".join(map(show, value)) + comma + right
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({show(value.start)}, {show(value.stop)}, {show(value.step)})"
        return repr(value)

    if node.op == "output":
        return f"return {show(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name} = input" + (f" or {show(node.args[0])}" if node.args else "")
    if node.op == "get_attr":
        return f"{node.name} = {node.target}"
    shown = [show(value) for value in node.args]
    # The three buffers of a running range are one thing.
    ranges = [text for text in shown if text.startswith("$") and is_range(text[1:].rpartition(".")[2])]
    if ranges:
        place = shown.index(ranges[0])
        shown[place : place + len(ranges)] = [f"{ranges[0].rpartition('_')[0]}_*"]
    shown += [f"{key}={show(value)}" for key, value in node.kwargs.items() if key != "counters"]
    if node.op == "call_method":
        return f"{node.name} = {shown[0]}.{node.target}({', '.join(shown[1:])})"
    if node.op == "call_module":
        kind = type(module.get_submodule(str(node.target))).__name__
        return f"{node.name} = {kind}[{node.target}]({', '.join(shown)})"
    return f"{node.name} = {_short(node.target)}({', '.join(shown)})"


def _short(target: Any) -> str:
    """Name a function without the module it lives in, our own ops with theirs."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).replace("::", ".")
    return str(getattr(target, "__name__", target))


def _note(node: fx.Node, brief: bool) -> str:
    quantizer: Quantizer | None = node.meta.get(QUANTIZER)
    if quantizer is not None:
        layers = ", ".join(layer or "(root)" for layer in quantizer.layers)
        operand = "" if quantizer.role == quantizer.operand else f" {quantizer.operand}"
        return f"{quantizer.role}{operand} of {layers}{_dial(quantizer.role, quantizer.width_source)}"
    decision: Decision | None = node.meta.get(DECISION)
    if decision is None:
        return ""
    if brief:
        return f"{decision.layer} ({decision.family})"
    parts = [
        f"{operand.name} {_role(operand)}{operand.format}{_dial(operand.role, decision.width_source(operand.role))}"
        for operand in decision.operands
    ]
    if decision.gradient is not None:
        at = "" if decision.gradient_name == node.name else f" at {decision.gradient_name}"
        parts.append(f"gradient{at} {decision.gradient}{_dial('gradient', decision.width_source('gradient'))}")
    return f"{decision.layer} ({decision.family}): {', '.join(parts)}"


def _role(operand: Operand) -> str:
    """Name the role where the operand's own name does not say it."""
    return "" if operand.name == operand.role or operand.name == "input" else f"as {operand.role} "


def _dial(role: str, width_source: WidthSource) -> str:
    """Show a width that is not simply the one of its role."""
    return "" if width_source.name == ("weight" if role == "bias" else role) else f" by {width_source.name}"
