"""The torch.export frontend: one graph of a model, or of a program that a user exported."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from cpt_fx.aten import name_of, to_torch
from cpt_fx.capture.base import Captured, CaptureError, assemble, clone_tree
from cpt_fx.capture.export_checks import fixed_size
from cpt_fx.capture.export_interface import (
    arguments_of_forward,
    arguments_of_program,
    restore_interface,
)
from cpt_fx.capture.export_modes import merge, set_argument
from cpt_fx.capture.export_program import restore_switches
from cpt_fx.capture.export_trace import Exported, check_backward_hooks, export, opened
from cpt_fx.graph_module import CALL_HOOKS, QuantizedGraphModule
from cpt_fx.meta import get_attribute, module_path

_DEAD = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default",
         "aten.sym_constrain_range_for_size.default")  # fmt: skip
"""What an export asserts of values inside the graph: the dtype under another autocast, the sizes that are checked."""


def capture_export(
    model: nn.Module, example_inputs: tuple[Any, ...] | None = None, example_kwargs: dict[str, Any] | None = None
) -> Captured:
    """Capture with torch.export in both modes, or raise `CaptureError` where one graph would not do what both do."""
    if example_inputs is None and example_kwargs is None:
        raise CaptureError(
            f"torch.export runs the code of {type(model).__name__} on examples of its inputs: pass example_inputs, a "
            "tuple of the arguments the model is called with, or example_kwargs"
        )
    args, kwargs = example_inputs or (), example_kwargs or {}
    check_backward_hooks(model)
    training, evaluation = (export(model, args, kwargs, training=mode) for mode in (True, False))
    first = {id(module): name for name, module in model.named_modules()}
    known = {name: (first[id(module)], type(module)) for name, module in model.named_modules(remove_duplicate=False)}
    for exported in (training, evaluation):
        _convert_stacks(exported.graph, known)
    root = clone_tree(model)
    merge(training.graph, evaluation.graph, lambda path: _same_constant(root, training, evaluation, path))
    _restore_momentum(training.graph, model)
    notes = _finish(training, root, arguments_of_forward(model), (args, kwargs))
    return Captured(assemble(root, training.graph), "export", notes)


def capture_program(program: torch.export.ExportedProgram) -> Captured:
    """Capture a program that torch.export made earlier. Its parameters and buffers are shared."""
    exported = opened(program)
    _convert_stacks(exported.graph, {})
    modes, notes = restore_switches(exported)
    root = clone_tree(exported.module)
    for hooks in CALL_HOOKS:
        # A program checks its inputs in a hook; our graph does it itself.
        getattr(root, hooks).clear()
    spec = program.call_spec.in_spec
    values = pytree.tree_unflatten([_example(node) for node in exported.graph.nodes if node.op == "placeholder"], spec)
    more = _finish(exported, root, arguments_of_program(program), values)
    module = assemble(root, exported.graph)
    _set_modes(module, modes)
    return Captured(module, "export", (*notes, *more))


def _finish(exported: Exported, root: nn.Module, arguments: Any, values: Any) -> tuple[str, ...]:
    """Bring a graph of ATen calls with switches into the form of the other frontends."""
    graph = exported.graph
    notes = _notes(exported)
    for node in list(graph.nodes):
        if name_of(node) in _DEAD and not node.users:
            graph.erase_node(node)
    restore_interface(exported, arguments, values)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
        elif node.op == "get_attr":
            _adopt(root, exported.module, str(node.target))
    to_torch(graph)
    # Inputs and outputs are nodes now, not something that happens around the graph.
    graph.set_codegen(fx.graph.CodeGen())
    return notes


def _adopt(root: nn.Module, source: nn.Module, path: str) -> None:
    """Let a value that only the export has, a constant, stand at its path below `root`."""
    *holders, name = path.split(".")
    holder = root
    for part in holders:
        if not isinstance(getattr(holder, part, None), nn.Module):
            holder.add_module(part, nn.Module())
        holder = holder.get_submodule(part)
    if name != "training" and not hasattr(holder, name):
        object.__setattr__(holder, name, get_attribute(source, path))


def _convert_stacks(graph: fx.Graph, known: dict[str, tuple[str, type[nn.Module]]]) -> None:
    """Write the modules that operators come from as the other frontends do: call -> (first path, class)."""
    for node in graph.nodes:
        stack = node.meta.pop("nn_module_stack", None) or {}
        converted = {}
        for key, (name, kind) in stack.items():
            # Operators that the export made on its own carry a name that is no path.
            if name and not name.startswith("_empty_nn_module_stack"):
                path, found = known.get(name) or (name, _class_of(kind))
                call = str(key).partition("@")[2] or (name if name != path else "")
                converted[f"{path}@{call}" if call else path] = (path, found)
        if converted:
            node.meta["nn_module_stack"] = converted


def _class_of(kind: Any) -> type | None:
    """Return a class by its full name, if it can be imported."""
    if isinstance(kind, type):
        return kind
    module, _, name = str(kind).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        return None
    return found if isinstance(found, type) else None


def _same_constant(root: nn.Module, training: Exported, evaluation: Exported, path: str) -> bool:
    """Whether a tensor that only the exports hold is the same in both."""
    first, second = (get_attribute(exported.module, path) for exported in (training, evaluation))
    return first is second or (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
                               and first.shape == second.shape and torch.equal(first, second))  # fmt: skip


def _restore_momentum(graph: fx.Graph, model: nn.Module) -> None:
    """Let a batch norm without a momentum average over all batches it has seen."""
    for node in list(graph.nodes):
        if name_of(node) != "aten.batch_norm.default":
            continue
        path, _ = module_path(node)
        layer = model.get_submodule(path)
        if isinstance(layer, _BatchNorm) and layer.momentum is None and layer.num_batches_tracked is not None:
            with graph.inserting_before(node):
                seen = graph.get_attr(f"{path}.num_batches_tracked")
                set_argument(node, "momentum", graph.call_function(cumulative_momentum, (seen,)))


def cumulative_momentum(seen: torch.Tensor) -> float:
    """Return what a batch weighs in the average over all `seen` batches."""
    return 1.0 / float(seen) if seen else 0.0


def _example(node: fx.Node) -> Any:
    """Return what a flat input of a program was: a tensor of its size, or the constant."""
    return node.meta.get("val")


def _notes(exported: Exported) -> tuple[str, ...]:
    """Say which sizes a graph holds for that were left open but could not stay so."""
    found = []
    for node in exported.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor):
            sizes = [size for size in map(fixed_size, value.shape)]
            fixed = [f"{size} in dim {dim}" for dim, size in enumerate(sizes) if size is not None]
            if fixed:
                found.append(f"exported for {node.target} of size {', '.join(fixed)}")
    if exported.dropped_checkpoints:
        found.append("torch.utils.checkpoint inside forward is not kept: activations stay in memory for backward")
    return tuple(found)


def _set_modes(module: QuantizedGraphModule, modes: dict[str, bool]) -> None:
    """Let every module be in the mode it was exported in."""
    training = any(modes.values())
    for path, child in module.named_modules():
        child.training = modes.get(path, training)
