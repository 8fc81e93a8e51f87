"""Trained values in PyTorch: copied into a model or a state_dict, or as parameters on shared memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from cpt_fx.common.arrays import Array
from cpt_fx.errors import nearest
from cpt_fx.ir.layer_state import is_range
from cpt_fx.ort.engine import Memory
from cpt_fx.ort.manifest import Manifest


def state_dict(manifest: Manifest, values: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return copies of all values by their names in PyTorch; names of one tensor share a copy."""
    found: dict[str, Tensor] = {}
    for tensor, names in _held(manifest):
        found |= dict.fromkeys(names, torch.from_numpy(values[tensor]).clone())
    return found


def to_torch(manifest: Manifest, values: Mapping[str, Array], model: nn.Module, *, strict: bool) -> None:
    """Write all values into a model; if something does not fit, raise an error that names it and write nothing."""
    kind = type(model).__name__
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets = parameters | dict(model.named_buffers(remove_duplicate=False))
    transformed = any(is_range(name) for name in targets)
    pairs: list[tuple[Tensor, Tensor]] = []
    known: set[str] = set()
    for tensor, names in _held(manifest):
        if is_range(tensor) and not transformed:
            continue  # A plain model has no running ranges.
        # Names of one tensor in the exported model may be separate tensors in this one.
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
    """Return the tensors that training changes: the name of each in the graphs, and all its names in PyTorch."""
    states = [(state.name, (state.name,)) for state in manifest.states]
    return [(parameter.name, parameter.names) for parameter in manifest.parameters] + states


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


class SharedParameters:
    """Torch parameters on the memory of a training run; `.grad` is where the backward pass writes."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.parameters = {name: nn.Parameter(memory.parameters[name].tensor) for name in memory.gradients}

    def before_backward(self, *, fresh: bool) -> None:
        """Point gradients to the shared memory and copy their values there, zeros where torch set them to None.

        `fresh`: the backward pass overwrites them, so nothing is copied.
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
