"""What a user passes to a step, checked against what the graph takes, and converted where nothing is lost.

What torch refuses in a batch and ONNX Runtime computes with is refused here, too; the graph says what that is. With
labels and words that are out of range it counts from the end, or reads foreign memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from cpt_fx.export.manifest import Manifest, Tensor

Array = NDArray[Any]
_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_MOVES = {
    "Cast", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
"""Operators whose numbers are those of their first input."""


def arrays_of(manifest: Manifest, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """Return arrays by the names of the graph's inputs: the model's inputs first, then the targets."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(tensor.name, kind) for tensor in manifest.taken])
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{error}; this model takes {', '.join(signature.parameters)}") from None
    arrays = {tensor.name: _array(tensor, given[tensor.name]) for tensor in manifest.taken}
    found: dict[str, tuple[str, int]] = {}
    for name, size, length in _named_sizes(manifest, arrays):
        first, other = found.setdefault(size, (name, length))
        if other != length:
            raise ValueError(f"{size} must be one size: {first} has {other}, {name} has {length}")
    return arrays


def check_least(manifest: Manifest, arrays: Mapping[str, Array]) -> None:
    """Refuse sizes that the model itself does not train with."""
    for name, size, length in _named_sizes(manifest, arrays):
        least = manifest.least.get(size, 0)
        if length < least:
            raise ValueError(
                f"{name} holds a {size} of {length}, and the model trains with {least} or more: leave out what is "
                "left of an epoch (DataLoader(drop_last=True))"
            )


def _named_sizes(manifest: Manifest, arrays: Mapping[str, Array]) -> Iterator[tuple[str, str, int]]:
    """Give all sizes that vary: the input, what the size is called, and how long it is."""
    for tensor in manifest.taken:
        for size, length in zip(tensor.shape, arrays[tensor.name].shape, strict=True):
            if isinstance(size, str):
                yield tensor.name, size, length


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


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


class Range(NamedTuple):
    """What an input may hold: integers from 0 to below `size`, and `ignored`."""

    size: int
    ignored: int | None = None

    def both(self, other: Range) -> Range:
        """Return what is allowed by both."""
        return Range(min(self.size, other.size), self.ignored if self.ignored == other.ignored else None)


def ranges_of(path: Path, inputs: Iterable[str]) -> dict[str, Range]:
    """Look for operators that choose by an index, and return what the inputs may hold that are such."""
    names = set(inputs)
    found: dict[str, Range] = {}
    for node in ir.load(path).graph:
        axis = _axis_of(node)
        sizes = node.inputs[0].shape if axis is not None and node.inputs[0] is not None else None
        size = sizes[axis] if axis is not None and sizes is not None else None
        if not isinstance(size, int):
            continue
        name, ignored = _source(node.inputs[1], names)
        if name:
            range = Range(size, node.attributes.get_int("ignore_index", ignored))
            found[name] = range.both(found[name]) if name in found else range
    return found


def _axis_of(node: ir.Node) -> int | None:
    """Return the axis of its first input that a node's second one chooses from; None for all other nodes.

    Where a user's code indexes a tensor, negative numbers count from the end in torch, too: that is not looked at.
    """
    if node.op_type in _LOSSES:
        return 1
    if node.op_type == "GatherElements":
        return int(node.attributes.get_int("axis", 0) or 0)
    # The exporter names nodes after the operators of torch.
    return 0 if node.op_type == "Gather" and str(node.name).startswith("node_embedding") else None


def _source(value: ir.Value | None, inputs: set[str]) -> tuple[str, int | None]:
    """Return the input that a value's numbers come from, or nothing, and the number that is left out on the way."""
    ignored = None
    while value is not None and value.name not in inputs:
        node = value.producer()
        if node is not None and node.op_type in _MOVES:
            value = node.inputs[0]
        elif node is not None and node.op_type == "Where":
            condition, _, value = node.inputs
            test = condition.producer() if condition is not None else None
            if test is None or test.op_type != "Equal" or test.inputs[0] is not value:
                return "", None
            ignored = _number(test.inputs[1])
        else:
            return "", None
    return ("", None) if value is None else (str(value.name), ignored)


def _number(value: ir.Value | None) -> int | None:
    """Return a constant number."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return int(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


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
