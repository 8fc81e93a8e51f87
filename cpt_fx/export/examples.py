"""The examples that a model is exported with: runs on them, and the sizes that a traced graph leaves dynamic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import Tensor, fx, nn

from cpt_fx.api import single_graph
from cpt_fx.capture.dry_run import dry_run
from cpt_fx.common.torch_private import pytree
from cpt_fx.errors import ExportError
from cpt_fx.export.program import Call, Graph

_BATCH = "batch"
_OLD_HOOKS = ("torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm")


def call_of(example_inputs: Any) -> Call:
    """Return the call for `example_inputs`: a tuple of the model's arguments, or a dict of them by name."""
    given = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    if not isinstance(given, (tuple, list, dict)):
        raise ExportError(
            "example_inputs must be a tuple of the model's arguments, or a dict of them by name, got "
            f"{type(given).__name__}"
        )
    seen: set[int] = set()

    def own(value: Any) -> Any:
        """Clone a tensor that is passed twice (as inputs and labels, say): the graph has two inputs for it."""
        again = isinstance(value, torch.Tensor) and id(value) in seen
        seen.add(id(value))
        return value.clone() if again else value

    values = pytree.tree_map(own, dict(given) if isinstance(given, dict) else tuple(given))
    return Call((), values) if isinstance(values, dict) else Call(values, {})


@contextmanager
def in_mode(result: nn.Module, training: bool, call: Call) -> Iterator[fx.GraphModule]:
    """Yield the graph of a model in training or evaluation mode; restore the mode of every module afterwards.

    A model that is already in training mode keeps the modes of its parts: a frozen batch norm stays frozen.
    """
    _check_hooks(result)
    modes = {module: module.training for module in result.modules()}
    if not training or not result.training:
        result.train(training)
    try:
        graph = single_graph(result, call.args, call.kwargs or None)
        # The graph may be newly captured, and not among the modules above.
        modes.setdefault(graph, graph.training)
        graph.training = training
        yield graph
    finally:
        for module, mode in modes.items():
            module.training = mode


def run(module: fx.GraphModule, call: Call) -> Any:
    """Return what a model returns on the examples, without side effects on the model."""
    try:
        with torch.no_grad(), dry_run(module):
            # Not by `__call__`, which prints the generated code when the model raises an error.
            return module.forward(*call.args, **call.kwargs)
    except Exception as error:
        raise ExportError(f"the model does not run on example_inputs: {type(error).__name__}: {error}") from error


def accepts(module: fx.GraphModule, call: Call) -> bool:
    """Return whether a model, and its loss if there is one, accept a call."""
    try:
        outputs = run(module, call)
        if call.loss is not None:
            call.loss(outputs, *call.targets)
    except Exception:  # of any type: the model's own code raises it
        return False
    return True


def _check_hooks(result: nn.Module) -> None:
    """Refuse torch's old hooks that set a layer's weight in each call: no graph contains them."""
    for name, module in result.named_modules():
        for hook in module._forward_pre_hooks.values():
            old = type(hook).__module__
            if old in _OLD_HOOKS:
                raise ExportError(
                    f"{name} has the hook {old}, which sets its weight in each call: use torch.nn.utils."
                    f"parametrizations.{old.rpartition('.')[2]} instead"
                )


def with_several(call: Call, model: fx.GraphModule) -> Call:
    """Repeat examples whose batch is one, since a trace would specialize a size of one."""
    leaves = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
    if not leaves or len(leaves[0]) != 1:
        return call

    def twice(value: Any) -> Any:
        return torch.cat((value, value)) if isinstance(value, Tensor) and value.ndim and len(value) == 1 else value

    args, kwargs, targets = pytree.tree_map(twice, (call.args, call.kwargs, call.targets))
    larger = replace(call, args=args, kwargs=kwargs, targets=targets)
    if not accepts(model, larger):
        raise ExportError(
            "example_inputs has a batch of one, and the model does not run on two of it: pass at least 2, or fix the "
            "batch with dynamic_batch=False"
        )
    return larger


def tensors_of(call: Call) -> list[Tensor]:
    """Return the tensors of a call, in the order of a graph's inputs and targets."""
    return [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs, call.targets)) if isinstance(leaf, Tensor)]


def _open_sizes(graph: Graph, call: Call) -> dict[str, int]:
    """Return the names of the dynamic sizes, each with the size in the examples; the batch comes first."""
    shapes = {value.name: tensor.shape for value, tensor in zip(_given(graph), tensors_of(call), strict=True)}
    found: dict[str, int] = {}
    for name, dim, symbol in _symbols(graph):
        found.setdefault(symbol, shapes[name][dim])
    return found


def _symbols(graph: Graph) -> Iterator[tuple[str, int, str]]:
    """Yield the dynamic sizes that have a name: the input, the dim, and the name."""
    for value in _given(graph):
        for dim, size in enumerate(value.shape or ()):
            if isinstance(size, ir.SymbolicDim) and str(size.value).isidentifier():
                yield str(value.name), dim, str(size.value)


def _name_sizes(graph: Graph) -> None:
    """Name each dynamic size after its input and dim; the first one that is a dim 0 is the batch."""
    names: dict[str, str] = {}
    for name, dim, symbol in _symbols(graph):
        plain = re.sub(r"\W", "_", name)
        names.setdefault(symbol, f"{plain}_{dim}" if dim or _BATCH in names.values() else _BATCH)
    _substitute(graph, names)


def settle_sizes(graphs: Sequence[Graph], call: Call, model: fx.GraphModule) -> tuple[list[Call], dict[str, int]]:
    """Name the dynamic sizes of graphs of one model, and fix those that the model itself does not leave dynamic.

    Return calls with other sizes that the model accepts, to verify the graphs with, and the smallest valid sizes. A
    batch of one is tried too; a model that refuses it keeps its dynamic batch, of at least two.
    """
    for graph in graphs:
        _name_sizes(graph)
    first, *_ = graphs
    working = []
    still = {symbol for graph in graphs for name, dim, symbol in _symbols(graph) if (name, dim) in graph.still}
    for name, size in _open_sizes(first, call).items():
        larger = _resized(first, call, {name: size + 1})
        if name not in still and accepts(model, larger):
            working.append(larger)
        else:
            for graph in graphs:
                _substitute(graph, {name: str(size)})
    least = {symbol: first.least[name, dim] for name, dim, symbol in _symbols(first) if (name, dim) in first.least}
    if _BATCH in _open_sizes(first, call) and _BATCH not in least:
        single = _resized(first, call, {_BATCH: 1})
        if accepts(model, single):
            working.append(single)
        else:
            least[_BATCH] = 2
    return working, least


def _resized(graph: Graph, call: Call, sizes: Mapping[str, int]) -> Call:
    """Return the examples with other sizes: truncated, or repeated from the start."""
    wanted = {**_open_sizes(graph, call), **sizes}
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs, call.targets))
    shapes = iter([value.shape for value in _given(graph)])
    made = [_fitted(leaf, next(shapes), wanted) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs, targets = pytree.tree_unflatten(made, structure)
    return replace(call, args=args, kwargs=kwargs, targets=targets)


def _fitted(tensor: Tensor, shape: ir.Shape | None, sizes: Mapping[str, int]) -> Tensor:
    assert shape is not None
    for dim, size in enumerate(shape):
        if isinstance(size, ir.SymbolicDim):
            length = int(sympy.sympify(str(size.value)).subs(sizes))
            copies = [tensor] * -(-length // max(tensor.shape[dim], 1))
            longer = torch.cat(copies, dim).narrow(dim, 0, length)
            # Sorted integers, such as the offsets of bags or the graph index of each node, stay sorted.
            in_order = not tensor.is_floating_point() and bool((tensor.diff(dim=dim) >= 0).all())
            tensor = longer.sort(dim).values if in_order else longer
    return tensor


def _given(graph: Graph) -> list[ir.Value]:
    by_name = {str(value.name): value for value in graph.model.graph.inputs}
    return [by_name[name] for name in (*graph.inputs, *graph.targets)]


def _substitute(graph: Graph, names: Mapping[str, str]) -> None:
    """Replace symbols by names or numbers in all shapes."""

    def new(size: Any) -> Any:
        if not isinstance(size, ir.SymbolicDim) or size.value is None:
            return size
        text = re.sub(r"\w+", lambda found: names.get(found[0], found[0]), str(size.value))
        known = sympy.sympify(text) if not text.isidentifier() else None
        return int(known) if known is not None and known.is_Integer else text

    for value in (*graph.model.graph.inputs, *(output for node in graph.model.graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([new(size) for size in value.shape])
