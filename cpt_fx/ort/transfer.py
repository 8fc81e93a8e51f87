"""Trained values and PyTorch: copied into a model or a state_dict, or parameters that both have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cpt_fx.errors import nearest
from cpt_fx.export.manifest import Manifest
from cpt_fx.layer_state import is_range
from cpt_fx.ort.memory import Memory

Array = NDArray[Any]


def state_dict(manifest: Manifest, values: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return copies of all values by their names in PyTorch; those of one tensor share theirs."""
    found: dict[str, Tensor] = {}
    for tensor, names in _held(manifest):
        found |= dict.fromkeys(names, torch.from_numpy(values[tensor]).clone())
    return found


def to_torch(manifest: Manifest, values: Mapping[str, Array], model: nn.Module, *, strict: bool) -> None:
    """Write all values into a model, or none where the model is another one: that is said by name."""
    kind = type(model).__name__
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets = parameters | dict(model.named_buffers(remove_duplicate=False))
    transformed = any(_is_ours(name) for name in targets)
    pairs: list[tuple[Tensor, Tensor]] = []
    known: set[str] = set()
    for tensor, names in _held(manifest):
        if _is_ours(tensor) and not transformed:
            continue  # A plain model has no running ranges.
        # Names of one tensor in the exported model may be those of several in this one.
        there = [name for name in names if name in targets]
        if not there:
            raise ValueError(f"{kind} has no parameter or buffer {tensor!r}.{nearest(tensor, targets)}")
        value = torch.from_numpy(values[tensor])
        for name in there:
            if _shown(targets[name]) != _shown(value):
                raise ValueError(
                    f"{name} of {kind} is {_shown(targets[name])}, and was trained as {_shown(value)}: this is another "
                    "model"
                )
            pairs.append((targets[name], value))
        known |= set(names)
    missing = [name for name in parameters if name not in known]
    if strict and missing:
        raise ValueError(
            f"the training knows nothing of {missing[0]!r}, a parameter of {kind}: it is another model, or does not "
            "use that parameter (pass strict=False to leave it as it is)"
        )
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)


def _held(manifest: Manifest) -> list[tuple[str, tuple[str, ...]]]:
    """Return what a training changes: the name that a graph has for each tensor, and all that PyTorch has."""
    states = [(state.name, (state.name,)) for state in manifest.states]
    return [(parameter.name, parameter.names) for parameter in manifest.parameters] + states


def _is_ours(name: str) -> bool:
    return is_range(name.rpartition(".")[2])


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


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
