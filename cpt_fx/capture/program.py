"""Convert an `ExportedProgram` to a `torch.fx.GraphModule`, in the form in which a user could have passed one.

Regions under `torch.no_grad` or `torch.autocast`, which torch.export keeps as subgraphs, are inlined. Training flags
frozen in one mode follow `train()` and `eval()` again; where they cannot, the program is refused, or a note says so.
Inputs and outputs, flat in the program's graph, become the model's own.
"""

from __future__ import annotations

import inspect
import operator
import sys
from typing import Any

import torch
from torch import fx

from cpt_fx.capture.base import CaptureError, drop_unread, holder_at
from cpt_fx.capture.input_checks import EntryBuilder, Fact, Required, bounds_of, expression_of, formed, said
from cpt_fx.capture.torch_private import HigherOrderOperator
from cpt_fx.common.torch_private import OpOverload, enter_autocast, exit_autocast, functorch, pytree, set_grad_enabled
from cpt_fx.ir.meta import get_attribute, module_path, module_stack, read_before
from cpt_fx.ir.module import blank, take_tensors
from cpt_fx.operators.around import FLAGS, ONE_MODE
from cpt_fx.operators.aten import arguments_of, name_of, take_first, to_torch

_DEAD = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default",
         "aten.sym_constrain_range_for_size.default")  # fmt: skip
"""Assertions that an export adds: on dtypes, which another autocast changes, and on sizes, which our checks cover."""


def program_module(program: torch.export.ExportedProgram) -> tuple[fx.GraphModule, tuple[str, ...]]:
    """Return a module equivalent to a program, with the program's tensors, and notes for the user."""
    if any(map(functorch.is_functorch_wrapped_tensor, program.constants.values())):
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
    drop_unread(graph)
    to_torch(graph)
    # Inputs and outputs are converted by nodes now, not by the code generator.
    graph.set_codegen(fx.graph.CodeGen())
    return _owning(graph, exported), notes


def _owning(graph: fx.Graph, exported: fx.GraphModule) -> fx.GraphModule:
    """Move a graph to a module that can be copied, pickled and switched between modes, unlike torch.export's."""
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
    """Convert the module stack of a node to the form that tracers use: call -> (path, class)."""
    stack = node.meta.pop("nn_module_stack", None) or {}
    converted = {}
    for key, (path, kind) in stack.items():
        # Operators that the export added itself carry a name that is not a path.
        if path and not path.startswith("_empty_nn_module_stack"):
            call = str(key).partition("@")[2]
            converted[f"{path}@{call}" if call else path] = (path, _class_of(kind))
    if converted:
        node.meta["nn_module_stack"] = converted


def _class_of(kind: Any) -> type | None:
    """Return a class by its full name, if its module is loaded: a name read from a file must not import anything."""
    if isinstance(kind, type):
        return kind
    module, _, name = str(kind).rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def _fixed_sizes(graph: fx.Graph) -> tuple[str, ...]:
    """Return notes on the input sizes that the export fixed."""
    found = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = map(fixed_size, value.shape) if isinstance(value, torch.Tensor) else ()
        fixed = [f"{size} in dim {dim}" for dim, size in enumerate(sizes) if size is not None]
        if fixed:
            found.append(f"exported for {node.target} of size {', '.join(fixed)}")
    return tuple(found)


_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(module: fx.GraphModule) -> None:
    """Inline every region, between nodes that enter and leave it; refuse all other subgraphs."""
    for node in list(module.graph.nodes):
        if isinstance(node.target, HigherOrderOperator):
            _inline(module, node)
    drop_unread(module.graph)
    for name, child in list(module._modules.items()):
        if isinstance(child, fx.GraphModule):
            del module._modules[name]


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    graph = module.graph
    if node.target is _GRAD:
        enabled, subgraph, *inputs = node.args
        with graph.inserting_before(node):
            before = graph.call_function(torch.is_grad_enabled)
            graph.call_function(set_grad_enabled, (enabled,))
            results = _copy(module, node, subgraph, inputs)
            # Restore the mode at run time, not that of the capture: the model may run under no_grad itself.
            graph.call_function(set_grad_enabled, (before,))
    elif node.target is _AUTOCAST:
        device, dtype, enabled, cache, subgraph, *inputs = node.args
        with graph.inserting_before(node):
            region = graph.call_function(enter_autocast, (device, dtype, enabled, cache))
            results = _copy(module, node, subgraph, inputs)
            graph.call_function(exit_autocast, (region,))
    else:
        name = getattr(node.target, "__name__", str(node.target))
        stack = [path for path, _ in module_stack(node) if path]
        raise CaptureError(
            f"{f'module {stack[-1]!r}' if stack else 'the model'} calls {name}, which holds graphs inside the graph: "
            "what they multiply could not be quantized here"
        )
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"{user.format_node()} reads a region as a whole")
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _copy(module: fx.GraphModule, node: fx.Node, subgraph: Any, inputs: list[Any]) -> Any:
    """Copy the nodes of a region's subgraph in front of it and return its results."""
    inner = get_attribute(module, str(subgraph.target))
    inline_regions(inner)
    tensor = next((item.target for item in inner.graph.nodes if item.op == "get_attr"), None)
    if tensor is not None:
        raise CaptureError(f"a region of the graph holds a tensor of its own, {tensor}")
    return module.graph.graph_copy(
        inner.graph, dict(zip(inner.graph.find_nodes(op="placeholder"), inputs, strict=True))
    )


_EVALUATED = "aten._native_batch_norm_legit_no_training.default"
_NORM = ("input", "weight", "bias", "running_mean", "running_var")
_ATTENTION = "aten.scaled_dot_product_attention.default"
_COUNT = "aten.add_.Tensor"
_COUNTER = "num_batches_tracked"


def restore_switches(module: fx.GraphModule) -> tuple[str, ...]:
    """Make the training flags of a program follow the mode, and set the exported mode; return notes for the user."""
    switches = _Switches(module)
    for node in list(module.graph.nodes):
        name = name_of(node)
        if name.startswith("aten.") and name.split(".")[1] in ONE_MODE and "no_stats" not in name:
            raise CaptureError(
                f"this program was decomposed: {name} holds the batch norm of one mode. Pass the program as "
                "torch.export.export returned it, before run_decompositions"
            )
        if name == _EVALUATED and take_first(module.graph, node):
            given = arguments_of(node)
            node.target = torch.ops.aten.batch_norm.default
            node.args = (*(given[argument] for argument in _NORM), False, given["momentum"], given["eps"], False)
        if name_of(node) in FLAGS:
            switches.restore(node)
        elif name == _ATTENTION and arguments_of(node)["dropout_p"]:
            probability = arguments_of(node)["dropout_p"]
            switches.note(node, True)
            flag = switches.read(node)
            with module.graph.inserting_before(node):
                _set(node, "dropout_p", module.graph.call_function(operator.mul, (probability, flag)))
        elif _counts_batches(node):
            # The operator adds the flag as a number: one in training.
            _set(node, "other", switches.read(node))
    training = any(switches.modes.values())
    for path, child in module.named_modules():
        child.training = switches.modes.get(path, training)
    if training:
        return ()
    return ("the program was exported in evaluation mode: dropout that its code left out then stays out in training",)


class _Switches:
    """Creates one node for each module that reads its mode, and records the mode it was exported in."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self.modes: dict[str, bool] = {}
        self._made: dict[str, fx.Node] = {}

    def read(self, node: fx.Node) -> fx.Node:
        """Return the node that reads the mode of the module that `node` belongs to."""
        path, _ = module_path(node)
        if path not in self._made:
            holder_at(self.module, path)  # a program has no modules without tensors, but these have a mode
            first = next(item for item in self.graph.nodes if item.op not in ("placeholder", "get_attr"))
            self._made[path] = read_before(first, f"{path}.training" if path else "training")
        return self._made[path]

    def note(self, node: fx.Node, value: bool) -> None:
        """Record the exported mode of a module; refuse a module that is in both modes."""
        path, _ = module_path(node)
        if self.modes.setdefault(path, value) is not value:
            raise CaptureError(
                f"in this program {f'module {path!r}' if path else 'the model'} is in training for one operator and in "
                f"evaluation for another ({node.format_node()}): one switch cannot be both"
            )

    def restore(self, node: fx.Node) -> None:
        """Make the training flag of an operator follow the mode of its module."""
        given = arguments_of(node)
        name = FLAGS[name_of(node)]
        value = given[name]
        normalises = "norm" in name_of(node)
        if not isinstance(value, bool) or (normalises and given["running_mean"] is None):
            # Without running statistics a norm does the same in both modes.
            return
        self.note(node, value)
        _set(node, name, self.read(node))
        if normalises and not value:
            self._count_batches(node, given["running_mean"])

    def _count_batches(self, node: fx.Node, mean: Any) -> None:
        """Add the count of batches in training, which a program exported in evaluation mode lacks."""
        path = str(mean.target).rpartition(".")[0] if isinstance(mean, fx.Node) and mean.op == "get_attr" else None
        counter = f"{path}.{_COUNTER}" if path else _COUNTER
        if path is None or counter not in dict(self.module.named_buffers()):
            return
        flag = self.read(node)
        with self.graph.inserting_before(node):
            count = self.graph.call_function(torch.ops.aten.add_.Tensor, (self.graph.get_attr(counter), flag))
        if "nn_module_stack" in node.meta:
            count.meta["nn_module_stack"] = node.meta["nn_module_stack"]


def _set(node: fx.Node, name: str, value: Any) -> None:
    """Set an argument of an ATen call by its name in the schema."""
    assert isinstance(node.target, OpOverload)
    place = [argument.name for argument in node.target._schema.arguments].index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def _counts_batches(node: fx.Node) -> bool:
    """Return whether a node adds one to the counter of a batch norm."""
    source: Any = node
    while isinstance(source, fx.Node) and name_of(source) == _COUNT:
        source = source.args[0]
    counts = isinstance(source, fx.Node) and str(source.target).rpartition(".")[2] == _COUNTER
    return source is not node and counts and bool(node.args[1] == 1)


def restore_interface(program: torch.export.ExportedProgram, module: fx.GraphModule) -> None:
    """Replace the flat inputs and outputs of a program's module by the structures it was exported with."""
    graph = module.graph
    flat = graph.find_nodes(op="placeholder")
    values = pytree.tree_unflatten([node.meta.get("val") for node in flat], program.call_spec.in_spec)
    entry = EntryBuilder(graph, _arguments(program))
    given = dict(zip(entry.arguments, (*values[0], *values[1].values()), strict=True))
    entry.check_forms(given)
    tensors: dict[str, fx.Node] = {}
    """By the name of an input in the export's guards: `L['x']`."""
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
    """Return the arguments that a program was exported with, under the names it keeps."""
    signature = program.module_call_graph[0].signature
    args, kwargs = program.call_spec.in_spec.children()
    known = list(signature.forward_arg_names or ()) if signature is not None else []
    names = [known[place] if place < len(known) else f"arg_{place}" for place in range(len(args.children()))]
    return [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (*names, *kwargs.context)]


def _input(program: torch.export.ExportedProgram, name: str, value: Any) -> Required:
    """Return what a program requires of one input tensor: its name, its dtype, and the sizes it holds for."""
    sizes: list[tuple[int, int] | int] = []
    for size in value.shape:
        fixed = fixed_size(size)
        sizes.append(bounds_of(program.range_constraints.get(size.node.expr)) if fixed is None else fixed)
    return name, str(value.dtype), tuple(sizes)


def fixed_size(size: Any) -> int | None:
    """Return the value of a fixed size, None for a dynamic one."""
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_number else None


def _facts(program: torch.export.ExportedProgram, tensors: list[str]) -> tuple[Fact, ...]:
    """Return the guards of a program, as conditions to check."""
    found = []
    for text in dict.fromkeys(program._guards_code):
        places = {name: place for place, name in enumerate(tensors)}
        expression = expression_of(text, places, f"the export holds only where {text}")
        kind, *sides = expression
        # The check of the input itself covers dims of one fixed size.
        says_one_size = kind == "Eq" and any(isinstance(side, int) for side in sides)
        if not (says_one_size and any(isinstance(side, tuple) and side[0] == "size" for side in sides)):
            short = text.count("L[") == 1
            found.append((text.replace("L['", "").replace("'].size()", ".size()", 1) if short else text, expression))
    return tuple(found)
