"""ONNX Runtime sessions on a device, which run on memory that is bound to inputs and outputs by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpt_fx.common.arrays import Array
from cpt_fx.errors import ExportError
from cpt_fx.ort import environment

if TYPE_CHECKING:
    from cpt_fx.ort.memory import Block

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
        # Spinning threads would take the cores away from torch, which usually prepares the next batch meanwhile.
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
        # Errors are raised as exceptions: they need not be logged, too.
        self._run_options.log_severity_level = _FATAL

    def run(
        self, given: Mapping[str, Array], held: Mapping[str, Block], targets: Mapping[str, Block]
    ) -> dict[str, Array]:
        """Run on arrays and on blocks of memory, without copying blocks; return the outputs that have no block.

        Everything is bound anew for each run: an input on another device than the node that reads it is copied when it
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
