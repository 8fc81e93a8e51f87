"""Dynamic sizes of a traced graph: their names, which of them the model supports, and examples of other sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from cpt_fx.errors import ExportError
from cpt_fx.export.capture_modes import accepts
from cpt_fx.export.program import Call, Graph

BATCH = "batch"


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


def open_sizes(graph: Graph, call: Call) -> dict[str, int]:
    """Return the names of the dynamic sizes, each with the size in the examples; the batch comes first."""
    shapes = {name: tensor.shape for name, tensor in zip(_names(graph), tensors_of(call), strict=True)}
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


def name_sizes(graph: Graph) -> None:
    """Name each dynamic size after its input and dim; the first one that is a dim 0 is the batch."""
    names: dict[str, str] = {}
    for name, dim, symbol in _symbols(graph):
        plain = re.sub(r"\W", "_", name)
        names.setdefault(symbol, f"{plain}_{dim}" if dim or BATCH in names.values() else BATCH)
    _substitute(graph, names)


def settle_sizes(graphs: Sequence[Graph], call: Call, model: fx.GraphModule) -> tuple[list[Call], dict[str, int]]:
    """Name the dynamic sizes of graphs of one model, and fix those that the model itself does not leave open.

    Returns calls with other sizes that the model accepts, to verify the graphs with, and the smallest valid sizes. A
    batch of one is tried, too; a model that refuses it keeps its dynamic batch, of at least two.
    """
    for graph in graphs:
        name_sizes(graph)
    first, *_ = graphs
    working = []
    still = {symbol for graph in graphs for name, dim, symbol in _symbols(graph) if (name, dim) in graph.still}
    for name, size in open_sizes(first, call).items():
        larger = resized(first, call, {name: size + 1})
        if name not in still and accepts(model, larger):
            working.append(larger)
        else:
            for graph in graphs:
                _substitute(graph, {name: str(size)})
    least = {symbol: first.least[name, dim] for name, dim, symbol in _symbols(first) if (name, dim) in first.least}
    if BATCH in open_sizes(first, call) and BATCH not in least:
        single = resized(first, call, {BATCH: 1})
        if accepts(model, single):
            working.append(single)
        else:
            least[BATCH] = 2
    return working, least


def resized(graph: Graph, call: Call, sizes: Mapping[str, int]) -> Call:
    """Return the examples with other sizes: truncated, or repeated from the start."""
    wanted = {**open_sizes(graph, call), **sizes}
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
    return [by_name[name] for name in _names(graph)]


def _names(graph: Graph) -> tuple[str, ...]:
    return (*graph.inputs, *graph.targets)


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
