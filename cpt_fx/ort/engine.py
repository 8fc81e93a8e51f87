"""Sessions of ONNX Runtime: made quietly, on a device, with what they take and give by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpt_fx.errors import ExportError
from cpt_fx.export.cuda import check_session, session_providers
from cpt_fx.export.manifest import Tensor

CPU = "cpu"
_ERRORS, _FATAL = 3, 4
_DTYPES = {
    "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16", "tensor(bool)": "bool",
    "tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(uint8)": "uint8", "tensor(int8)": "int8",
}  # fmt: skip


class Slot(NamedTuple):
    """What a graph takes or gives under a name."""

    dtype: str
    shape: tuple[int | None, ...]

    def zeros(self) -> NDArray[Any]:
        """Return zeros for it: dims that vary are 1 long."""
        return np.zeros([1 if size is None else size for size in self.shape], self.dtype)

    def takes(self, other: Slot) -> bool:
        """Whether all that fits into another slot fits into this one."""
        return (self.dtype, len(self.shape)) == (other.dtype, len(other.shape)) and all(
            size in (None, given) for size, given in zip(self.shape, other.shape, strict=True)
        )

    def __str__(self) -> str:
        """Type and sizes."""
        return f"{self.dtype} ({', '.join('any' if size is None else str(size) for size in self.shape)})"


class Engine:
    """One graph in a session, and memory that is bound to it by name."""

    def __init__(self, path: Path, device: str, threads: int | None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS
        options.use_deterministic_compute = True
        # Threads that wait by spinning take the cores away from torch, which usually prepares the next batch beside.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if threads is not None:
            options.intra_op_num_threads = threads
        providers = session_providers(device)
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        except Exception as error:
            raise ExportError(f"ONNX Runtime does not load {path}: {said(error)}") from error
        check_session(self._session, device)
        self.path, self.device = path, device
        self.inputs = {value.name: _slot(value) for value in self._session.get_inputs()}
        self.outputs = {value.name: _slot(value) for value in self._session.get_outputs()}
        self._run_options = onnxruntime.RunOptions()
        self._run_options.log_severity_level = _FATAL

    def bindings(self) -> Any:
        """Return an empty set of bindings."""
        return self._session.io_binding()

    def run(self, bindings: Any) -> None:
        """Run the graph. What it complains of comes as an exception, not on the terminal too."""
        self._session.run_with_iobinding(bindings, self._run_options)
        if self.device != CPU:
            bindings.synchronize_outputs()


def said(error: Exception) -> str:
    """Return the first line of what ONNX Runtime complains of."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def slot_of(tensor: Tensor) -> Slot:
    """Return what a manifest says of a tensor."""
    return Slot(tensor.dtype, tuple(None if isinstance(size, str) else size for size in tensor.shape))


def _slot(value: Any) -> Slot:
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    dtype = _DTYPES.get(value.type)
    if dtype is None:
        raise ExportError(f"{value.name} is of {value.type}, which the Trainer does not handle")
    return Slot(str(np.dtype(dtype)), shape)
