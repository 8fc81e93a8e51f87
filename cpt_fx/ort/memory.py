"""The tensors of a training run: each in one place that sessions read and write, and that PyTorch can share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpt_fx.errors import ExportError
from cpt_fx.export.manifest import VALUES, Manifest
from cpt_fx.export.program import GRADIENT, NEXT
from cpt_fx.ort.engine import CPU

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

    def __init__(self, manifest: Manifest, directory: Path, device: str) -> None:
        values = initial_values(manifest, directory / VALUES)

        def blocks(names: Iterable[str]) -> dict[str, Block]:
            return {name: Block(values[name], device) for name in names}

        remembered = manifest.optimizer.remembered
        self.parameters = blocks(parameter.tensor.name for parameter in manifest.parameters)
        trained = [parameter.tensor.name for parameter in manifest.parameters if parameter.trainable]
        self.gradients = {name: Block(np.zeros_like(values[name]), device) for name in trained}
        self._states = tuple(blocks(state.tensor.name for state in manifest.states) for _ in range(2))
        once = blocks(state.tensor.name for state in remembered if not state.swaps)
        swapping = [blocks(state.tensor.name for state in remembered if state.swaps) for _ in range(2)]
        self._moments = tuple(once | both for both in swapping)
        self.side = self.update_side = 0
        """Which of the two places holds the running state now, and what the optimizer remembers."""

    @property
    def moments(self) -> dict[str, Block]:
        """What the optimizer remembers, as it is now."""
        return self._moments[self.update_side]

    @property
    def states(self) -> dict[str, Block]:
        """The running state as it is now."""
        return self._states[self.side]

    def swap(self) -> None:
        """Make what the last step wrote the running state."""
        self.side = 1 - self.side

    def places(self, side: int, update_side: int) -> dict[str, Block]:
        """Return all blocks by the names that graphs have for them, on given sides."""
        gradients = {name + GRADIENT: block for name, block in self.gradients.items()}
        return self.parameters | gradients | self._moments[update_side] | self._states[side]

    def targets(self, side: int, update_side: int) -> dict[str, Block]:
        """Return the blocks that take new values, by the names of the outputs."""
        gradients = {name + GRADIENT: block for name, block in self.gradients.items()}
        kept = self.parameters | gradients | self._moments[1 - update_side] | self._states[1 - side]
        return {name + NEXT: block for name, block in kept.items()}


def initial_values(manifest: Manifest, path: Path) -> dict[str, Array]:
    """Read the values that a training starts with; what an optimizer remembers, and has none, starts with zeros."""
    import onnx_ir as ir

    try:
        held = ir.load(path).graph.initializers
        read = {name: np.array(one.const_value.numpy()) for name, one in held.items() if one.const_value is not None}
    except Exception as error:  # of whatever reads it: protobuf, numpy, the file system
        raise ExportError(f"{path} and its data cannot be read ({error}): export again") from error
    values: dict[str, Array] = {}
    remembered = [state.tensor for state in manifest.optimizer.remembered]
    optional = {tensor.name for tensor in remembered}
    for tensor in (*manifest.held, *remembered):
        if tensor.name not in read and tensor.name not in optional:
            raise ExportError(f"{path} has no value for {tensor.name}: export again")
        sizes = tuple(size for size in tensor.shape if isinstance(size, int))
        value = read.get(tensor.name, np.zeros(sizes, tensor.dtype))
        if value.shape != tensor.shape or str(value.dtype) != tensor.dtype:
            raise ExportError(
                f"{path} has {tensor.name} of {value.dtype} {value.shape}, the manifest says {tensor.dtype} "
                f"{tensor.shape}: export again"
            )
        values[tensor.name] = value
    return values
