"""A program that torch.export made, as a module of torch.fx: the form in which a user could have handed it in."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import fx

from cpt_fx.aten import name_of, to_torch
from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.program_interface import fixed_size, restore_interface
from cpt_fx.capture.program_regions import inline_regions
from cpt_fx.capture.program_switches import restore_switches
from cpt_fx.graph_module import blank, take_tensors

_DEAD = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default",
         "aten.sym_constrain_range_for_size.default")  # fmt: skip
"""What an export asserts of values inside the graph: the dtype under another autocast, the sizes that are checked."""


def program_module(program: torch.export.ExportedProgram) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return a module that does what a program does, in the program's tensors, and what to know about it.

    It calls functions of torch, follows `train()` and `eval()`, takes the arguments that the program was exported with
    and refuses those it was not made for.
    """
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, program.constants.values())):
        raise CaptureError("the program holds values of torch.func's, frozen when it was exported: capture the module")
    exported: Any = program.module(check_guards=False)
    graph: fx.Graph = exported.graph
    inline_regions(exported)
    for node in list(graph.nodes):
        _convert_stack(node)
        if name_of(node) in _DEAD and not node.users:
            graph.erase_node(node)
    notes = (*restore_switches(exported), *_fixed_sizes(graph))
    restore_interface(program, exported)
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)
    to_torch(graph)
    # Inputs and outputs are nodes now, not something that happens around the graph.
    graph.set_codegen(fx.graph.CodeGen())
    return _owning(graph, exported), notes


def _owning(graph: fx.Graph, exported: fx.GraphModule) -> fx.GraphModule:
    """Move a graph to a module that can be copied, pickled and switched, which those of torch.export cannot."""
    module = blank()
    take_tensors(module, exported)
    module._modules.update(exported._modules)
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target).partition(".")[0]
        if not hasattr(module, name):
            object.__setattr__(module, name, getattr(exported, name))
    module.graph = graph
    return module


def _convert_stack(node: fx.Node) -> None:
    """Write the modules that an operator comes from as tracers do: call -> (path, class)."""
    stack = node.meta.pop("nn_module_stack", None) or {}
    converted = {}
    for key, (path, kind) in stack.items():
        # Operators that the export made on its own carry a name that is no path.
        if path and not path.startswith("_empty_nn_module_stack"):
            call = str(key).partition("@")[2]
            converted[f"{path}@{call}" if call else path] = (path, _class_of(kind))
    if converted:
        node.meta["nn_module_stack"] = converted


def _class_of(kind: Any) -> type | None:
    """Return a class by its full name, if its module is loaded: a name out of a file must not import anything."""
    if isinstance(kind, type):
        return kind
    module, _, name = str(kind).rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _fixed_sizes(graph: fx.Graph) -> tuple[str, ...]:
    """Say which sizes a program holds for alone."""
    found = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = map(fixed_size, value.shape) if isinstance(value, torch.Tensor) else ()
        fixed = [f"{size} in dim {dim}" for dim, size in enumerate(sizes) if size is not None]
        if fixed:
            found.append(f"exported for {node.target} of size {', '.join(fixed)}")
    return tuple(found)
