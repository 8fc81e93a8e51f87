"""ONNX as the exporter writes it, made into what ONNX Runtime's gradient builders take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

_OUTPUTS = {"LayerNormalization": 3, "Dropout": 2, "SoftmaxCrossEntropyLoss": 2}
"""Operators whose gradient reads an optional output: how many outputs there must be."""


def normalize(model: ir.Model) -> ir.Model:
    """Simplify a traced model in place, and complete it."""
    # Constants are folded, and what nobody reads goes. Nothing else of what optimizers do: folding batch norm into
    # convolutions would change the gradients.
    with _not_constant(model):
        optimizer.fold_constants(model)
    _name_types(model)
    _drop_straight_transposes(model)
    _slice_splits(model)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    for node in model.graph:
        missing = _OUTPUTS.get(node.op_type, 0) - len(node.outputs) if node.domain == "" else 0
        if missing > 0:
            node.resize_outputs(len(node.outputs) + missing)
    common.NameFixPass()(model)
    return model


@contextmanager
def _not_constant(model: ir.Model) -> Iterator[None]:
    """Hide the values of parameters: what is computed from them alone is not constant, they learn."""
    graph = model.graph
    hidden = [(value, value.const_value) for value in graph.initializers.values()]
    inputs = list(graph.inputs)
    for value, _ in hidden:
        graph.initializers.pop(str(value.name))
        value.const_value = None
        if value not in inputs:
            graph.inputs.append(value)
    try:
        yield
    finally:
        for value, tensor in hidden:
            if value not in inputs:
                graph.inputs.remove(value)
            value.const_value = tensor
            graph.register_initializer(value)


def _name_types(model: ir.Model) -> None:
    """Let casts say what to cast to: ORT has no gradient of a cast to the type of another tensor."""
    for node in list(model.graph):
        if node.op_type != "CastLike" or node.domain:
            continue
        x, like = node.inputs
        assert x is not None and like is not None
        wanted = like.dtype or node.outputs[0].dtype
        assert wanted is not None, f"the type of {like.name} is not known"
        same = x.dtype == wanted
        made = ir.node("Identity" if same else "Cast", [x], {} if same else {"to": wanted.value}, name=node.name)
        made.outputs[0].type, made.outputs[0].shape = ir.TensorType(wanted), node.outputs[0].shape
        made.metadata_props.update(node.metadata_props)
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [made], node.outputs, made.outputs)


def _drop_straight_transposes(model: ir.Model) -> None:
    """Take away transposes that leave every dim where it is: ONNX Runtime fuses them into Gemm as if they did not."""
    for node in model.graph:
        if node.op_type == "Transpose" and node.domain == "" and "perm" in node.attributes:
            perm = node.attributes["perm"].as_ints()
            if list(perm) == sorted(perm):
                node.op_type = "Identity"
                node.attributes.clear()


def _slice_splits(model: ir.Model) -> None:
    """Make slices of splits: where nobody reads one of the outputs, ONNX Runtime's gradient is wrong, silently."""
    graph = model.graph
    for node in list(graph):
        if node.op_type != "Split" or node.domain:
            continue
        x, axis = node.inputs[0], node.attributes.get_int("axis", 0)
        sizes = _sizes(node, axis)
        if x is None or sizes is None:
            continue
        made, start = [], 0
        for output, size in zip(node.outputs, sizes, strict=True):
            bounds = [ir.node("Constant", [], {"value_ints": [value]}) for value in (start, start + size, axis)]
            piece = ir.node("Slice", [x, *(bound.outputs[0] for bound in bounds)])
            piece.outputs[0].type, piece.outputs[0].shape = output.type, output.shape
            piece.metadata_props.update(node.metadata_props)
            made += [*bounds, piece]
            start += size
        pieces = [piece.outputs[0] for piece in made if piece.op_type == "Slice"]
        ir.convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, pieces)


def _sizes(node: ir.Node, axis: int) -> list[int] | None:
    """Return how long the pieces of a split are, or None where this is not known."""
    given = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    if given is not None:
        return [int(size) for size in given.numpy()]
    x = node.inputs[0]
    whole = x.shape[axis] if x is not None and x.shape is not None else None
    if not isinstance(whole, int) or whole % len(node.outputs):
        return None
    return [whole // len(node.outputs)] * len(node.outputs)
