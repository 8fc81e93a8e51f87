"""Can ONNX Runtime use a GPU here? If it cannot, it says so in a log line and computes on the CPU; this says it first.

Without a driver it even ends the process. So the libraries and the driver are looked for before a session is made.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

from cpt_fx.errors import ExportError
from cpt_fx.export.environment import Finding, imported, mend, require, require_training

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
LIBRARIES = (
    "libcudart.so.11.0", "libcublasLt.so.11", "libcublas.so.11", "libcudnn.so.8", "libcufft.so.10", "libcurand.so.10",
)  # fmt: skip
"""Those of CUDA 11.8 and cuDNN 8 that the build with the training API needs, in an order in which they load."""
WHEELS = " ".join(f"nvidia-{name}-cu11" for name in ("cuda-runtime", "cublas", "cudnn", "cufft", "curand"))


def session_providers(device: str) -> list[str | tuple[str, dict[str, str]]]:
    """Return the `providers` of an `InferenceSession` for `"cpu"`, `"cuda"` or `"cuda:1"`; refuse what is not there.

    For a GPU the libraries that it needs are loaded.
    """
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if found is None:
        raise ExportError(f'device must be "cpu", "cuda" or "cuda:1", got {device!r}')
    if device == "cpu":
        return [CPU]
    require_training()
    require(check_cuda())
    number = found[1] or "0"
    if int(number) >= _devices():
        raise ExportError(f"device {device!r} is not there: the driver knows {_devices()}, counted from 0")
    return [(CUDA, {"device_id": number}), CPU]


def check_session(session: Any, device: str) -> None:
    """Raise an error where a session computes on the CPU though a GPU was asked for."""
    if device != "cpu" and CUDA not in session.get_providers():
        raise ExportError(
            f"device={device!r} was asked for, and ONNX Runtime fell back to {', '.join(session.get_providers())}: "
            "`cpt-fx export doctor` says what is missing"
        )


def check_cuda() -> Finding:
    """Look at the build, the libraries and the driver. Libraries that are found stay loaded."""
    build = cuda_release()
    if not build:
        problem = "a GPU needs onnxruntime-gpu, or onnxruntime-training 1.19.2 for CUDA 11.8"
        return Finding("", problem, mend("ort-gpu"))
    if build.startswith("11"):
        absent = [name for name in LIBRARIES if not _loads(name)]
        if absent:
            elsewhere = "# or name the folders of CUDA 11.8 and cuDNN 8 in LD_LIBRARY_PATH"
            remedy = (f"pip install -c constraints.txt {WHEELS}", elsewhere)
            return Finding("", f"a GPU needs CUDA 11.8 and cuDNN 8, not found: {', '.join(absent)}", remedy)
    else:
        # Newer builds know themselves which libraries they need, and look into NVIDIA's wheels.
        getattr(imported("onnxruntime")[0], "preload_dlls", lambda: None)()
    if not _devices():
        return Finding("", "NVIDIA's driver is not there, or shows no GPU: see `nvidia-smi`, and CUDA_VISIBLE_DEVICES")
    return Finding(f"CUDA {build}, GPUs: {_devices()}")


def cuda_release() -> str:
    """Return the CUDA release that the installed onnxruntime was built for, or nothing for a CPU build."""
    # The name `onnxruntime.cuda_version` stays empty where torch's ortmodule is not set up.
    info = imported("onnxruntime.capi.build_and_package_info")[0]
    return str(getattr(info, "cuda_version", "") or "")


def _loads(name: str) -> bool:
    """Load a library from where the loader looks, or from NVIDIA's wheels: whatever needs it finds it then."""
    wheels = [str(path) for folder in sys.path for path in Path(folder or ".").glob(f"nvidia/*/lib/{name}")]
    for place in (name, *wheels):
        try:
            # Its symbols stay local: torch's own CUDA libraries, of another release, may be in the same process.
            ctypes.CDLL(place)
        except OSError:
            continue
        return True
    return False


def _devices() -> int:
    """Ask the driver for the number of GPUs; there are none without a driver."""
    count = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        failed = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value
