"""Tracing of tensor functions as ONNX local functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common
from torch import Tensor

from cpt_fx.export.normalize import normalize, strip
from cpt_fx.export.recording import Table, convert, record

DOMAIN = "cpt_fx"


def as_function(
    name: str, run: Callable[..., Any], given: tuple[Tensor, ...], table: Table, *, exact: bool = False
) -> ir.Function:
    """Trace a tensor function as an ONNX local function for tensors of the same rank or, if `exact`, sizes."""
    varying = tuple(value.ndim > 0 and not exact for value in given)
    recorded, *_ = record(run, given, varying, table)
    model = normalize(convert(recorded, given)[0])
    graph = model.graph
    for index, value in enumerate(graph.inputs):
        value.name = f"in_{index}"
    common.DeduplicateInitializersPass()(model)
    _write_constants(graph)
    common.CommonSubexpressionEliminationPass(size_limit=64)(model)
    common.RemoveUnusedNodesPass()(model)
    for node in graph:
        for value in node.outputs:
            value.type = value.shape = None  # they are those of the examples
    common.NameFixPass()(model)
    strip(model)
    return ir.Function(DOMAIN, name, graph=graph, attributes=[])


def _write_constants(graph: ir.Graph) -> None:
    """Replace initializers, which functions cannot have, by Constant nodes."""
    for value in list(graph.initializers.values()):
        node = ir.node("Constant", [], {"value": value.const_value})
        graph.insert_before(graph[0], node)
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        graph.initializers.pop(str(value.name))


@contextmanager
def in_place_of(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of modules inside a `with` block."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, other in changes:
            setattr(module, name, other)
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)
