"""ONNX Runtime sessions on a device, and the tensors of a training run, bound to inputs and outputs by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpt_fx.common.arrays import Array
from cpt_fx.errors import ExportError
from cpt_fx.ort import environment
from cpt_fx.ort.manifest import GRADIENT, NEXT, VALUES, Manifest, State

CPU = "cpu"
_ERRORS, _FATAL = 3, 4


def session_providers(device: str) -> list[str | tuple[str, dict[str, str]]]:
    """Return the `providers` of an `InferenceSession` on a device; refuse one that is not available.

    ONNX Runtime itself would log a line and compute on the CPU.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if found is None:
        raise ExportError(f'device must be "cpu", "cuda" or "cuda:1", got {device!r}')
    if device == "cpu":
        return [environment.CPU]
    environment.require(environment.check_cuda())
    number = found[1] or "0"
    if int(number) >= environment.gpus():
        raise ExportError(f"device {device!r} is not there: the driver knows {environment.gpus()}, counted from 0")
    return [(environment.CUDA, {"device_id": number}), environment.CPU]


def check_session(session: Any, device: str) -> None:
    """Raise an error if a session runs on the CPU though a GPU was asked for."""
    if device != "cpu" and environment.CUDA not in session.get_providers():
        raise ExportError(
            f"device={device!r} was asked for, and ONNX Runtime fell back to {', '.join(session.get_providers())}: its "
            "log names the library of CUDA or cuDNN that it did not find; name its folder in LD_LIBRARY_PATH"
        )


class BoundSession:
    """One graph in an ONNX Runtime session."""

    def __init__(self, path: Path, device: str, threads: int | None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS
        options.use_deterministic_compute = True
        # Spinning threads would take cores away from torch, which usually prepares the next batch in the meantime.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if threads is not None:
            options.intra_op_num_threads = threads
        providers = session_providers(device)
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ExportError(f"ONNX Runtime does not load {path}: {said}") from error
        check_session(self._session, device)
        self.device = device
        self.inputs = [value.name for value in self._session.get_inputs()]
        self.outputs = [value.name for value in self._session.get_outputs()]
        self._run_options = onnxruntime.RunOptions()
        # Errors are raised as exceptions: they need not be logged as well.
        self._run_options.log_severity_level = _FATAL

    def run(
        self, given: Mapping[str, Array], held: Mapping[str, Block], targets: Mapping[str, Block]
    ) -> dict[str, Array]:
        """Run on arrays and on blocks of memory, without copying blocks; return the outputs that have no block.

        Everything is bound again for each run: an input on another device than the node that reads it is copied when it
        is bound, and memory that a run allocates for an output would be reused by the next, whose batch may be larger.
        """
        bindings = self._session.io_binding()
        for name in self.inputs:
            if name in held:
                bindings.bind_ortvalue_input(name, held[name].ort)
            else:
                bindings.bind_cpu_input(name, given[name])
        for name in self.outputs:
            if name in targets:
                bindings.bind_ortvalue_output(name, targets[name].ort)
            else:
                bindings.bind_output(name, CPU)
        self._session.run_with_iobinding(bindings, self._run_options)
        if self.device != CPU:
            bindings.synchronize_outputs()
        made = zip(self.outputs, bindings.get_outputs(), strict=True)
        return {name: value.numpy() for name, value in made if name not in targets}


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
    and a step that fails leaves the old value as it was.
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
        """The current running state; a step writes the next one to `_next_states`."""
        self.moments, self._next_moments = turning(manifest.optimizer.remembered)
        """The same for the optimizer's state."""

    def swap_states(self) -> None:
        """Make the state written by the last step the current one."""
        self.states, self._next_states = self._next_states, self.states

    def swap_moments(self) -> None:
        """Make the optimizer's state written by the last update the current one."""
        self.moments, self._next_moments = self._next_moments, self.moments

    def held(self) -> Blocks:
        """Return the blocks of current values, by input name."""
        gradients = {name + GRADIENT: block for name, block in self.gradients.items()}
        return self.parameters | gradients | self.moments | self.states

    def targets(self) -> Blocks:
        """Return the blocks for new values, by output name."""
        return {name + NEXT: block for name, block in (self.held() | self._next_moments | self._next_states).items()}


def initial_values(manifest: Manifest, path: Path) -> dict[str, Array]:
    """Read the values that training starts from; optimizer state without a value starts at zero."""
    import onnx_ir as ir

    held = ir.load(path).graph.initializers
    values = {name: np.array(one.const_value.numpy()) for name, one in held.items() if one.const_value is not None}
    for tensor in manifest.optimizer.remembered:
        if tensor.name not in values:
            values[tensor.name] = np.zeros([int(size) for size in tensor.shape], tensor.dtype)
    return values
