"""What a user passes to a step, checked against what the graph takes, and converted where nothing is lost.

What torch refuses in a batch and ONNX Runtime computes with is refused here, too; the graph says what that is. With
labels and words that are out of range it counts from the end, or reads foreign memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from cpt_fx.errors import nearest
from cpt_fx.export.manifest import Manifest, Tensor

Array = NDArray[Any]
_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_MOVES = {
    "Cast", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators whose numbers are those of their first input."""


def arrays_of(manifest: Manifest, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """Return arrays by the names of the graph's inputs: the model's inputs first, then the targets."""
    expected = {tensor.name: tensor for tensor in (*manifest.inputs, *manifest.targets)}
    given = _named(tuple(expected), args, kwargs)
    arrays = {name: _array(expected[name], given[name]) for name in expected}
    _check_sizes(expected, arrays)
    return arrays


def _named(expected: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    listed = ", ".join(expected)
    if len(args) > len(expected):
        raise TypeError(f"{len(args)} arguments were passed, this model takes {len(expected)}: {listed}")
    given = dict(zip(expected, args, strict=False))
    for name, value in kwargs.items():
        if name not in expected:
            raise TypeError(f"there is no input {name!r}; this model takes {listed}.{nearest(name, expected)}")
        if name in given:
            raise TypeError(f"{name} was passed twice, by place and by name")
        given[name] = value
    missing = [name for name in expected if name not in given]
    if missing:
        raise TypeError(f"{', '.join(missing)} is missing; this model takes {listed}")
    return given


def _array(expected: Tensor, value: Any) -> Array:
    """Return one input as the graph takes it."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            value = value.float()
        value = value.detach().cpu().numpy()
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{expected.name} must be a numpy array or a torch tensor, got {type(value).__name__}")
    array = np.asarray(value)
    _check_shape(expected, array)
    # Unlike ascontiguousarray, this leaves an array without dims as it is.
    return np.asarray(_converted(expected, array), order="C")


def _check_shape(expected: Tensor, array: Array) -> None:
    fits = len(array.shape) == len(expected.shape) and all(
        isinstance(wanted, str) or wanted == size for wanted, size in zip(expected.shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{expected.name} must have the shape {_shown(expected.shape)}, got {_shown(array.shape)}")
    if 0 in array.shape:
        raise ValueError(f"{expected.name} is empty: its shape is {_shown(array.shape)}")


def _converted(expected: Tensor, array: Array) -> Array:
    """Convert numbers of one kind: any float to the one expected, integers where each one fits."""
    wanted = np.dtype(expected.dtype)
    if array.dtype == wanted:
        return array
    kinds = {array.dtype.kind, wanted.kind}
    if kinds == {"f"}:
        with np.errstate(over="ignore"):
            return array.astype(wanted)
    if kinds <= {"i", "u"}:
        converted = array.astype(wanted)
        if np.array_equal(converted, array):
            return converted
        raise ValueError(f"{expected.name} holds integers that do not fit into {wanted}, which the model takes")
    raise TypeError(f"{expected.name} must be of {wanted}, got {array.dtype}")


def _check_sizes(expected: Mapping[str, Tensor], arrays: Mapping[str, Array]) -> None:
    """Refuse sizes that differ where the graph has one name for them."""
    found: dict[str, tuple[str, int]] = {}
    for name, tensor in expected.items():
        for size, given in zip(tensor.shape, arrays[name].shape, strict=True):
            if isinstance(size, str) and found.setdefault(size, (name, given))[1] != given:
                first, other = found[size]
                raise ValueError(f"{size} must be one size: {first} has {other}, {name} has {given}")


def check_least(manifest: Manifest, arrays: Mapping[str, Array]) -> None:
    """Refuse sizes that the model itself does not train with."""
    for tensor in (*manifest.inputs, *manifest.targets):
        for size, given in zip(tensor.shape, arrays[tensor.name].shape, strict=True):
            least = manifest.least.get(size, 0) if isinstance(size, str) else 0
            if given < least:
                raise ValueError(
                    f"{tensor.name} holds a {size} of {given}, and the model trains with {least} or more: leave out "
                    "what is left of an epoch (DataLoader(drop_last=True))"
                )


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


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


def check_ranges(ranges: Mapping[str, Range], arrays: Mapping[str, Array]) -> None:
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
