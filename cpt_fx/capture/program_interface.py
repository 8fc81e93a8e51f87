"""The way into and out of a program that torch.export made: flat in its graph, as the model's own afterwards."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo

from cpt_fx.capture.arguments import Entry, formed, said
from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.input_checks import Fact, Input, expression_of


def restore_interface(program: torch.export.ExportedProgram, module: fx.GraphModule) -> None:
    """Replace the flat inputs and outputs of a program's module by those it was exported with."""
    graph = module.graph
    flat = graph.find_nodes(op="placeholder")
    values = pytree.tree_unflatten([node.meta.get("val") for node in flat], program.call_spec.in_spec)
    entry = Entry(graph, _arguments(program))
    given = dict(zip(entry.arguments, (*values[0], *values[1].values()), strict=True))
    entry.check_forms(given)
    tensors: dict[str, fx.Node] = {}
    """By the name that the guards of an export have for an input: `L['x']`."""
    inputs = []
    for node, (way, value) in zip(flat, pytree.tree_flatten_with_path(given)[0], strict=True):
        read = entry.value(value, way)
        if isinstance(value, torch.Tensor):
            read.meta.update({key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta})
            tensors[f"L{pytree.keystr(way)}"] = read
            inputs.append(_input(program, said(way), value))
        node.replace_all_uses_with(read)
        graph.erase_node(node)
    entry.check_tensors(list(tensors.values()), inputs, _facts(program, list(tensors)))
    entry.finish()
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = (formed(program.call_spec.out_spec, output.args[0], module, graph),)  # type: ignore[arg-type]


def _arguments(program: torch.export.ExportedProgram) -> list[inspect.Parameter]:
    """Return the arguments that a program was exported with, by the names it keeps."""
    signature = program.module_call_graph[0].signature
    args, kwargs = program.call_spec.in_spec.children()
    known = list(signature.forward_arg_names or ()) if signature is not None else []
    names = [known[place] if place < len(known) else f"arg_{place}" for place in range(len(args.children()))]
    return [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (*names, *kwargs.context)]


def _input(program: torch.export.ExportedProgram, name: str, value: Any) -> Input:
    """Return what a program says of one tensor: its name, its dtype, and the sizes it holds for."""
    sizes: list[tuple[int, int] | int] = []
    for size in value.shape:
        fixed = fixed_size(size)
        bounds = None if fixed is not None else program.range_constraints.get(size.node.expr)
        if fixed is not None:
            sizes.append(fixed)
        elif bounds is None:
            sizes.append((0, -1))
        else:
            sizes.append((int(bounds.lower), -1 if bounds.upper is int_oo else int(bounds.upper)))
    return name, str(value.dtype), tuple(sizes)


def fixed_size(size: Any) -> int | None:
    """Return a size that a program holds for alone, or None for one that is open."""
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_number else None


def _facts(program: torch.export.ExportedProgram, tensors: list[str]) -> tuple[Fact, ...]:
    """Return the conditions under which a program holds."""
    found = []
    for text in dict.fromkeys(program._guards_code):
        try:
            expression = expression_of(text, {name: place for place, name in enumerate(tensors)})
        except (KeyError, ValueError) as error:
            raise CaptureError(f"the export holds only where {text}, which cannot be checked: {error}") from None
        kind, *sides = expression
        # That one dim has one size is what the check of the input itself says.
        says_one_size = kind == "Eq" and any(isinstance(side, int) for side in sides)
        if not (says_one_size and any(isinstance(side, tuple) and side[0] == "size" for side in sides)):
            short = text.count("L[") == 1
            found.append((text.replace("L['", "").replace("'].size()", ".size()", 1) if short else text, expression))
    return tuple(found)
