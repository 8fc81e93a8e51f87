"""Labels and words that are out of range: torch refuses them, ONNX Runtime counts from the end or reads foreign memory.

So what an input may hold is read from the graph, and looked at before each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_MOVES = {
    "Cast", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators whose numbers are those of their first input."""


class Range(NamedTuple):
    """What an input may hold: integers from 0 to below `size`, and `ignored`."""

    size: int
    ignored: int | None = None

    def both(self, other: Range) -> Range:
        """Return what is allowed by both."""
        return Range(min(self.size, other.size), self.ignored if self.ignored == other.ignored else None)


class _Graph:
    """A graph, to be walked from values back to inputs."""

    def __init__(self, path: Path) -> None:
        graph = onnx.load(str(path), load_external_data=False).graph
        self.nodes = list(graph.node)
        self.makers = {output: node for node in self.nodes for output in node.output}
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.shapes: dict[str, list[int]] = {}
        for value in (*graph.value_info, *graph.input, *graph.output):
            self.shapes[value.name] = [dim.dim_value for dim in value.type.tensor_type.shape.dim]

    def source(self, value: str, inputs: set[str]) -> tuple[str, int | None]:
        """Return the input that a value's numbers come from, or nothing, and the number that is left out on the way."""
        ignored = None
        while value not in inputs:
            node = self.makers.get(value)
            if node is not None and node.op_type in _MOVES:
                value = node.input[0]
            elif node is not None and node.op_type == "Where":
                condition = self.makers.get(node.input[0])
                if condition is None or condition.op_type != "Equal" or condition.input[0] != node.input[2]:
                    return "", None
                ignored = self.constant(condition.input[1])
                value = node.input[2]
            else:
                return "", None
        return value, ignored

    def constant(self, name: str) -> int | None:
        """Return a constant number."""
        node = self.makers.get(name)
        tensor = self.constants.get(name)
        if node is not None and node.op_type == "Constant":
            tensor = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
        array = None if tensor is None else numpy_helper.to_array(tensor)
        return int(array.item()) if array is not None and array.size == 1 else None


def ranges_of(path: Path, inputs: Iterable[str]) -> dict[str, Range]:
    """Look for operators that choose by an index, and return what the inputs may hold that are such."""
    graph, names = _Graph(path), set(inputs)
    found: dict[str, Range] = {}
    for node in graph.nodes:
        axis = _axis_of(node)
        sizes = graph.shapes.get(node.input[0], []) if axis is not None else []
        if axis is None or not sizes or not sizes[axis]:
            continue
        name, ignored = graph.source(node.input[1], names)
        if name:
            attribute = next((item.i for item in node.attribute if item.name == "ignore_index"), ignored)
            range = Range(sizes[axis], attribute)
            found[name] = range.both(found[name]) if name in found else range
    return found


def _axis_of(node: onnx.NodeProto) -> int | None:
    """Return the axis of its first input that a node's second one chooses from; None for all other nodes.

    Where a user's code indexes a tensor, negative numbers count from the end in torch, too: that is not looked at.
    """
    if node.domain:
        return None
    if node.op_type in _LOSSES:
        return 1
    if node.op_type == "GatherElements":
        return next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    # The exporter names nodes after the operators of torch.
    return 0 if node.op_type == "Gather" and node.name.startswith("node_embedding") else None


def check_ranges(ranges: Mapping[str, Range], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Refuse numbers that are out of range."""
    for name, (size, ignored) in ranges.items():
        values = arrays[name]
        wrong = (values < 0) | (values >= size)
        if ignored is not None:
            wrong &= values != ignored
        if wrong.any():
            place = tuple(int(index) for index in np.argwhere(wrong)[0])
            besides = "" if ignored is None else f", or {ignored}, which is ignored"
            raise ValueError(f"{name} holds {values[place]} at {place}: it must be from 0 to {size - 1}{besides}")
