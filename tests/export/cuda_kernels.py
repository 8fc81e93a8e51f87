"""Which operators of a graph ONNX Runtime has no CUDA kernel for, by its own lists: they would run on the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from onnx import inliner, shape_inference

DATA = Path(__file__).parent / "data"
RELEASES = ("1.19.2", "1.30")
Kernels = Mapping[str, Mapping[str, frozenset[str]]]
"""Operator -> its type parameters -> the types that there are kernels for."""
_TYPES = {"float32": "float", "float64": "double"}


def kernels(release: str, opset: int) -> Kernels:
    """Return the kernels of a release for an operator set."""
    found = {}
    for line in (DATA / f"cuda-{release}.tsv").read_text().splitlines():
        if line.startswith("#"):
            continue
        operator, versions, types = line.split("\t")
        last = re.fullmatch(r"\[\d+, (\d+)\]|(\d+)", versions)
        if last is None or int(last[1] or last[2]) >= opset:
            parts = (part.split(" = ") for part in types.split("  "))
            found[operator.removeprefix("ai.onnx ")] = {name: frozenset(given.split(", ")) for name, given in parts}
    return found


def missing(model: onnx.ModelProto, known: Kernels) -> set[str]:
    """Return the operators that have no kernel, or none for the types at hand. Constants need none."""
    opset = next(one.version for one in model.opset_import if one.domain == "")
    whole = shape_inference.infer_shapes(inliner.inline_local_functions(model), strict_mode=True)
    return {said for node, types in _nodes(whole.graph, {}) for said in _without_kernel(node, types, known, opset)}


def _nodes(graph: onnx.GraphProto, outer: Mapping[str, str]) -> Iterator[tuple[onnx.NodeProto, Mapping[str, str]]]:
    """Give all nodes, those of subgraphs too, with the types of the values that they may read."""
    types = dict(outer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = _type(value.type.tensor_type.elem_type)
    types |= {held.name: _type(held.data_type) for held in graph.initializer}
    for node in graph.node:
        yield node, types
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g, types)


def _type(number: int) -> str:
    name = str(onnx.helper.tensor_dtype_to_np_dtype(number).name)
    return _TYPES.get(name, name)


def _without_kernel(node: onnx.NodeProto, types: Mapping[str, str], known: Kernels, opset: int) -> Iterator[str]:
    if node.op_type == "Constant":
        return
    if node.domain or node.op_type not in known:
        yield node.op_type
        return
    schema = onnx.defs.get_schema(node.op_type, opset)
    for formal, values in ((schema.inputs, node.input), (schema.outputs, node.output)):
        for index, value in enumerate(values):
            parameter = formal[min(index, len(formal) - 1)].type_str
            served = known[node.op_type].get(parameter)
            if value and served is not None and types[value] not in served:
                yield f"{node.op_type} of {types[value]}"
