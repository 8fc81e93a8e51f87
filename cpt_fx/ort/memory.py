"""The tensors of a training run: each in one place that sessions read and write, and that PyTorch can share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpt_fx.errors import ExportError
from cpt_fx.export.manifest import CHECKPOINT, Manifest
from cpt_fx.export.optimizers import GRADIENT, NEXT
from cpt_fx.ort.engine import CPU, Engine, said

Array = NDArray[Any]


class Block:
    """A tensor in memory of its own, on the CPU or on a GPU."""

    def __init__(self, value: Array, device: str) -> None:
        import onnxruntime

        # In memory of torch's: it is aligned for vector instructions. A copy always, since others hold the original.
        self._host: torch.Tensor | None = torch.from_numpy(np.array(value)).clone()
        kind, _, index = device.partition(":")
        self.ort = onnxruntime.OrtValue.ortvalue_from_numpy(self._host.numpy(), kind, int(index or 0))
        self.shape, self.dtype = tuple(value.shape), str(value.dtype)
        if device != CPU:
            self._host = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory itself as a torch tensor; only on the CPU."""
        assert self._host is not None
        return self._host

    def read(self) -> Array:
        """Return the values: on the CPU the memory itself, from a GPU a copy."""
        values: Array = self.ort.numpy() if self._host is None else self._host.numpy()
        return values

    def write(self, values: Array) -> None:
        """Write values of the same shape and dtype."""
        if self._host is None:
            self.ort.update_inplace(np.array(values))
        else:
            self._host.numpy()[...] = values


class Memory:
    """Everything that lasts from step to step.

    Running state has two places, which swap after each step: a graph may read the old value after it has written the
    new one, and a step that fails leaves the old one as it was.
    """

    def __init__(self, manifest: Manifest, directory: Path, training: Engine, optimizer: Engine, device: str) -> None:
        values = _initial_values(manifest, directory / CHECKPOINT)
        names = [parameter.tensor.name for parameter in manifest.parameters]
        self.parameters = {name: Block(values[name], device) for name in names}
        self.gradients = {
            name: Block(np.zeros_like(values[name]), device) for name in names if name + GRADIENT in training.inputs
        }
        known = {*names, *(name + GRADIENT for name in names)}
        self.moments = {
            name.removesuffix(NEXT): Block(slot.zeros(), device)
            for name, slot in optimizer.outputs.items()
            if name.removesuffix(NEXT) not in known
        }
        self._states = tuple({state.tensor.name: Block(values[state.tensor.name], device) for state in manifest.states}
                             for _ in range(2))  # fmt: skip
        self.side = 0
        """Which of the two places holds the running state now."""

    @property
    def states(self) -> dict[str, Block]:
        """The running state as it is now."""
        return self._states[self.side]

    def swap(self) -> None:
        """Make what the last step wrote the running state."""
        self.side = 1 - self.side

    def places(self, side: int) -> dict[str, Block]:
        """Return all blocks by the names that graphs have for them, when the running state is at a side."""
        gradients = {name + GRADIENT: block for name, block in self.gradients.items()}
        return self.parameters | gradients | self.moments | self._states[side]

    def targets(self, side: int) -> dict[str, Block]:
        """Return the blocks that take new values, by the names of the outputs, when the state is at a side."""
        updated = {name + NEXT: block for name, block in (self.parameters | self.moments).items()}
        return updated | {name + NEXT: block for name, block in self._states[1 - side].items()}


def _initial_values(manifest: Manifest, path: Path) -> dict[str, Array]:
    """Read ONNX Runtime's checkpoint: floating point values are its parameters, whole numbers its properties."""
    from onnxruntime.training.api import CheckpointState

    try:
        checkpoint = CheckpointState.load_checkpoint(str(path))
    except Exception as error:
        raise ExportError(f"ONNX Runtime does not load {path}: {said(error)}") from error
    values: dict[str, Array] = {}
    for tensor in (*(item.tensor for item in manifest.parameters), *(item.tensor for item in manifest.states)):
        if tensor.name in checkpoint.parameters:
            value = checkpoint.parameters[tensor.name].data
        elif tensor.name in checkpoint.properties:
            value = np.array(checkpoint.properties[tensor.name], tensor.dtype)
        else:
            raise ExportError(f"{path} has no value for {tensor.name}: export again")
        if tuple(value.shape) != tensor.shape or str(value.dtype) != tensor.dtype:
            raise ExportError(
                f"{path} has {tensor.name} of {value.dtype} {tuple(value.shape)}, the manifest says {tensor.dtype} "
                f"{tensor.shape}: export again"
            )
        values[tensor.name] = value
    return values
