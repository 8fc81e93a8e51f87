"""Can ONNX Runtime use a GPU here? If it cannot, it says so in a log line and computes on the CPU; this says it first.

Without a driver it even ends the process. So the build and the driver are looked for before a session is made.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

from cpt_fx.errors import ExportError
from cpt_fx.export.environment import Finding, imported, mend, require

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def session_providers(device: str) -> list[str | tuple[str, dict[str, str]]]:
    """Return the `providers` of an `InferenceSession` for `"cpu"`, `"cuda"` or `"cuda:1"`; refuse what is not there.

    For a GPU the libraries that it needs are loaded.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if found is None:
        raise ExportError(f'device must be "cpu", "cuda" or "cuda:1", got {device!r}')
    if device == "cpu":
        return [CPU]
    require(check_cuda())
    number = found[1] or "0"
    if int(number) >= _devices():
        raise ExportError(f"device {device!r} is not there: the driver knows {_devices()}, counted from 0")
    return [(CUDA, {"device_id": number}), CPU]


def check_session(session: Any, device: str) -> None:
    """Raise an error where a session computes on the CPU though a GPU was asked for."""
    if device != "cpu" and CUDA not in session.get_providers():
        raise ExportError(
            f"device={device!r} was asked for, and ONNX Runtime fell back to {', '.join(session.get_providers())}: its "
            "log names the library of CUDA or cuDNN that it did not find; name its folder in LD_LIBRARY_PATH"
        )


def check_cuda() -> Finding:
    """Look at the build and the driver."""
    if CUDA not in _providers():
        problem = "a GPU needs onnxruntime-gpu, or onnxruntime-training 1.19.2 for CUDA 11.8"
        return Finding("", problem, mend("ort-gpu"))
    # Newer builds know themselves which libraries they need, and look into NVIDIA's wheels.
    getattr(imported("onnxruntime")[0], "preload_dlls", lambda: None)()
    if not _devices():
        return Finding("", "NVIDIA's driver is not there, or shows no GPU: see `nvidia-smi`, and CUDA_VISIBLE_DEVICES")
    return Finding(f"GPUs: {_devices()}")


def _providers() -> list[str]:
    return list(getattr(imported("onnxruntime")[0], "get_available_providers", list)())


def _devices() -> int:
    """Ask the driver for the number of GPUs; there are none without a driver."""
    count = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        failed = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value
