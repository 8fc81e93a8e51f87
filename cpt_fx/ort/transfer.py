"""Trained values and PyTorch: copied into a model or a state_dict, or parameters that both have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cpt_fx.errors import nearest
from cpt_fx.export.manifest import Manifest, Parameter
from cpt_fx.layer_state import is_range
from cpt_fx.ort.memory import Memory

Array = NDArray[Any]


def state_dict(manifest: Manifest, values: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return copies of all values by their names in PyTorch; those of one tensor share theirs."""
    found: dict[str, Tensor] = {}
    for parameter in manifest.parameters:
        tensor = torch.from_numpy(values[parameter.tensor.name]).clone()
        found |= dict.fromkeys(_names(parameter), tensor)
    for state in manifest.states:
        found[state.tensor.name] = torch.from_numpy(values[state.tensor.name]).clone()
    return found


def to_torch(manifest: Manifest, values: Mapping[str, Array], model: nn.Module, *, strict: bool) -> None:
    """Write all values into a model, or none where the model is another one."""
    with torch.no_grad():
        for target, value in list(_pairs(manifest, values, model, strict)):
            target.copy_(value)


def _pairs(
    manifest: Manifest, values: Mapping[str, Array], model: nn.Module, strict: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Find what goes where; refuse whatever does not fit, by name."""
    kind = type(model).__name__
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    known: set[str] = set()
    for parameter in manifest.parameters:
        names = _names(parameter)
        known |= set(names)
        there = [name for name in names if name in parameters]
        if not there:
            raise ValueError(f"{kind} has no parameter {names[0]!r}.{nearest(names[0], parameters)}")
        value = torch.from_numpy(values[names[0]])
        # Names of one tensor in the exported model may be those of several in this one.
        for name in there:
            yield _fitting(kind, name, parameters[name], value), value
    missing = [name for name in parameters if name not in known]
    if strict and missing:
        raise ValueError(
            f"the training knows nothing of {missing[0]!r}, a parameter of {kind}: it is another model, or does not "
            "use that parameter (pass strict=False to leave it as it is)"
        )
    transformed = any(_is_ours(name) for name in buffers)
    for state in manifest.states:
        name = state.tensor.name
        if _is_ours(name) and not transformed:
            continue  # A plain model has no running ranges.
        if name not in buffers:
            raise ValueError(f"{kind} has no buffer {name!r}.{nearest(name, buffers)}")
        value = torch.from_numpy(values[name])
        yield _fitting(kind, name, buffers[name], value), value


def _is_ours(name: str) -> bool:
    return is_range(name.rpartition(".")[2])


def _fitting(kind: str, name: str, target: Tensor, value: Tensor) -> Tensor:
    if target.shape != value.shape or target.dtype != value.dtype:
        raise ValueError(
            f"{name} of {kind} is {_shown(target)}, and was trained as {_shown(value)}: this is another model"
        )
    return target


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _names(parameter: Parameter) -> tuple[str, ...]:
    return (parameter.tensor.name, *parameter.also)


class SharedParameters:
    """Torch parameters on the memory of a training run; their gradients lie where the backward pass writes them."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.parameters = {name: nn.Parameter(memory.parameters[name].tensor) for name in memory.gradients}

    def before_backward(self, *, fresh: bool) -> None:
        """Bring gradients to where they belong; those that torch set to None start from zero.

        `fresh`: the backward pass writes over them, whatever they are.
        """
        for name, parameter in self.parameters.items():
            if parameter.data_ptr() != self._memory.parameters[name].tensor.data_ptr():
                raise RuntimeError(
                    f"the parameter {name} was given other memory (parameter.data = ...), which is not trained here: "
                    "write into it instead (parameter.copy_ under torch.no_grad())"
                )
            place = self._memory.gradients[name].tensor
            if parameter.grad is None or parameter.grad.data_ptr() != place.data_ptr():
                if not fresh:
                    place.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad.detach())
                parameter.grad = place
