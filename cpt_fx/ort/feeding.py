"""What a user passes to a step, checked against what the graph takes, and converted where nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpt_fx.errors import nearest
from cpt_fx.export.manifest import Manifest, Tensor

Array = NDArray[Any]


def arrays_of(manifest: Manifest, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """Return arrays by the names of the graph's inputs: the model's inputs first, then the targets."""
    expected = {tensor.name: tensor for tensor in (*manifest.inputs, *manifest.targets)}
    given = _named(tuple(expected), args, kwargs)
    arrays = {name: _array(expected[name], given[name]) for name in expected}
    if manifest.dynamic_batch:
        _check_batch(expected, arrays)
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
        wanted in (None, size) for wanted, size in zip(expected.shape, array.shape, strict=True)
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


def _check_batch(expected: Mapping[str, Tensor], arrays: Mapping[str, Array]) -> None:
    sizes = {name: len(arrays[name]) for name, tensor in expected.items() if tensor.shape[:1] == (None,)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} holds {size}" for name, size in sizes.items())
        raise ValueError(f"all inputs and targets must hold the same number of examples: {listed}")


def _shown(shape: tuple[int | None, ...]) -> str:
    sizes = ["any" if size is None else str(size) for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
