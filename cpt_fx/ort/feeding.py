"""The inputs of a step, checked against what the graph takes, and converted to its dtypes.

Batches that torch refuses are refused here too: with labels or token ids that are out of range, ONNX Runtime counts
from the end, or reads memory out of bounds.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cpt_fx.common.arrays import Array, array_of
from cpt_fx.ort.manifest import Manifest, Tensor


def arrays_of(
    manifest: Manifest, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool = False
) -> dict[str, Array]:
    """Return the inputs of a graph as arrays, by name: the model's inputs first, then the targets."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(tensor.name, kind) for tensor in manifest.taken])
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{error}; this model takes {', '.join(signature.parameters)}") from None
    arrays = {tensor.name: _array(tensor, given[tensor.name]) for tensor in manifest.taken}
    found: dict[str, tuple[str, int]] = {}
    for tensor in manifest.taken:
        for size, length in zip(tensor.shape, arrays[tensor.name].shape, strict=True):
            if isinstance(size, int):
                continue
            first, other = found.setdefault(size, (tensor.name, length))
            if other != length:
                raise ValueError(f"{size} must be one size: {first} has {other}, {tensor.name} has {length}")
            least = manifest.least.get(size, 0) if training else 0
            if length < least:
                raise ValueError(
                    f"{tensor.name} holds a {size} of {length}, and the model trains with {least} or more: leave out "
                    "what is left of an epoch (DataLoader(drop_last=True))"
                )
    for name, (count, *ignored) in manifest.choices.items():
        values = arrays[name]
        wrong = ((values < 0) | (values >= count)) & ~np.isin(values, ignored)
        if wrong.any():
            place = tuple(int(index) for index in np.argwhere(wrong)[0])
            besides = "".join(f", or {number}, which is ignored" for number in ignored)
            raise ValueError(f"{name} holds {values[place]} at {place}: it must be from 0 to {count - 1}{besides}")
    return arrays


def _array(expected: Tensor, value: Any) -> Array:
    """Return one input as an array of the dtype and the shape that the graph takes."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            value = value.float()
        value = array_of(value)
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"{expected.name} must be a numpy array or a torch tensor, got {type(value).__name__}")
    array = np.asarray(value)
    _check_shape(expected, array)
    # Unlike ascontiguousarray, this keeps a 0-dim array 0-dim.
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
    """Convert between dtypes of one kind: any float to the one expected, integers if every value fits."""
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
