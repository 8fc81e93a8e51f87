"""The tensors of a training run, in memory that sessions read and write and that PyTorch can share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from cpt_fx.common.arrays import Array
from cpt_fx.ort.engine import CPU
from cpt_fx.ort.manifest import GRADIENT, NEXT, VALUES, Manifest, State


class Block:
    """A tensor with memory of its own, on the CPU or on a GPU."""

    def __init__(self, value: Array, device: str) -> None:
        import onnxruntime

        # In torch's memory, which is aligned for vector instructions. Always a copy, since others hold the original.
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
    """All tensors that persist from step to step.

    Tensors that swap have two blocks, which take turns: a graph may read the old value after it wrote the new one,
    and a step that fails leaves the old one as it was.
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
        """The present running state; a step writes the next one to `_next_states`."""
        self.moments, self._next_moments = turning(manifest.optimizer.remembered)
        """The optimizer's state, likewise."""

    def swap_states(self) -> None:
        """Make the state that the last step wrote the present one."""
        self.states, self._next_states = self._next_states, self.states

    def swap_moments(self) -> None:
        """Make the optimizer's state that the last update wrote the present one."""
        self.moments, self._next_moments = self._next_moments, self.moments

    def held(self) -> Blocks:
        """Return the blocks of present values, by input name."""
        gradients = {name + GRADIENT: block for name, block in self.gradients.items()}
        return self.parameters | gradients | self.moments | self.states

    def targets(self) -> Blocks:
        """Return the blocks for new values, by output name."""
        return {name + NEXT: block for name, block in (self.held() | self._next_moments | self._next_states).items()}


def initial_values(manifest: Manifest, path: Path) -> dict[str, Array]:
    """Read the values that a training starts with; optimizer state without a value starts with zeros."""
    held = ir.load(path).graph.initializers
    values = {name: np.array(one.const_value.numpy()) for name, one in held.items() if one.const_value is not None}
    for tensor in manifest.optimizer.remembered:
        if tensor.name not in values:
            values[tensor.name] = np.zeros([int(size) for size in tensor.shape], tensor.dtype)
    return values
