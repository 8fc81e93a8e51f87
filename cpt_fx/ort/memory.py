"""The tensors of a training run: each in one place that sessions read and write, and that PyTorch can share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from cpt_fx.export.manifest import VALUES, Manifest, State
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


Blocks = dict[str, Block]


class Memory:
    """Everything that lasts from step to step.

    What swaps has two places, which take turns: a graph may read the old value after it has written the new one, and a
    step that fails leaves the old one as it was.
    """

    def __init__(self, manifest: Manifest, directory: Path, device: str) -> None:
        values = initial_values(manifest, directory / VALUES)

        def blocks(names: Iterable[str]) -> Blocks:
            return {name: Block(values[name], device) for name in names}

        def turning(states: Iterable[State]) -> tuple[Blocks, Blocks]:
            once = blocks(state.name for state in states if not state.swaps)
            first, second = (blocks(state.name for state in states if state.swaps) for _ in range(2))
            return once | first, once | second

        self.parameters = blocks(parameter.name for parameter in manifest.parameters)
        trained = [parameter.name for parameter in manifest.parameters if parameter.trainable]
        self.gradients = {name: Block(np.zeros_like(values[name]), device) for name in trained}
        self.states, self._next_states = turning(manifest.states)
        """The running state as it is now, and where a step writes it."""
        self.moments, self._next_moments = turning(manifest.optimizer.remembered)
        """What the optimizer remembers, likewise."""

    def swap_states(self) -> None:
        """Make what the last step wrote the running state."""
        self.states, self._next_states = self._next_states, self.states

    def swap_moments(self) -> None:
        """Make what the last update wrote what the optimizer remembers."""
        self.moments, self._next_moments = self._next_moments, self.moments

    def held(self) -> Blocks:
        """Return what there is now, by the names of inputs."""
        gradients = {name + GRADIENT: block for name, block in self.gradients.items()}
        return self.parameters | gradients | self.moments | self.states

    def targets(self) -> Blocks:
        """Return the blocks that take new values, by the names of outputs."""
        return {name + NEXT: block for name, block in (self.held() | self._next_moments | self._next_states).items()}


def initial_values(manifest: Manifest, path: Path) -> dict[str, Array]:
    """Read the values that a training starts with; what an optimizer remembers, and has none, starts with zeros."""
    held = ir.load(path).graph.initializers
    values = {name: np.array(one.const_value.numpy()) for name, one in held.items() if one.const_value is not None}
    for tensor in manifest.optimizer.remembered:
        if tensor.name not in values:
            values[tensor.name] = np.zeros([int(size) for size in tensor.shape], tensor.dtype)
    return values
