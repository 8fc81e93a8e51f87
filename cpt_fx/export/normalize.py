"""Simplification of the ONNX graphs that torch's exporter writes."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnx_ir.tape import Tape
from onnxscript import optimizer


def normalize(model: ir.Model) -> ir.Model:
    """Simplify a traced model in place, and return it."""
    returned = [(value.type, value.shape) for value in model.graph.outputs]
    optimizer.fold_constants(model)
    _drop_straight_transposes(model)
    _make_columns(model)
    common.IdentityEliminationPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.NameFixPass()(model)
    for value, (kind, shape) in zip(model.graph.outputs, returned, strict=True):
        # Of two equal values, the one that was kept may have no type or shape.
        value.type, value.shape = kind, shape
    return model


def _drop_straight_transposes(model: ir.Model) -> None:
    """Remove transposes that keep the order of the dims: ONNX Runtime would fuse them into Gemm as real ones."""
    for node in model.graph:
        if node.op_type == "Transpose" and node.domain == "" and "perm" in node.attributes:
            perm = node.attributes["perm"].as_ints()
            if list(perm) == sorted(perm):
                node.op_type = "Identity"
                node.attributes.clear()


def _make_columns(model: ir.Model) -> None:
    """Multiply by a column instead of a vector: before a vector, ONNX Runtime drops the transpose of the matrix."""
    for node in list(model.graph):
        if node.op_type != "MatMul" or node.domain or node.inputs[1] is None or node.inputs[1].shape is None:
            continue
        left, right = node.inputs
        if len(node.inputs[1].shape) == 1:
            tape = Tape()
            last = tape.op("Constant", [], {"value_ints": [-1]})
            product = tape.op("MatMul", [left, tape.op("Unsqueeze", [right, last])])
            made = tape.op("Squeeze", [product, last], name=node.name)
            made.type, made.shape = node.outputs[0].type, node.outputs[0].shape
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], tape.nodes, node.outputs, [made])


def strip(model: ir.Model) -> None:
    """Remove metadata such as source paths: two exports of a model are equal, byte for byte."""
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
