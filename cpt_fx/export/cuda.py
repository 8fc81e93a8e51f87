"""Can ONNX Runtime use a GPU here? If it cannot, it says so in a log line and computes on the CPU; this says it first.

Without a driver it even ends the process. So the libraries and the driver are looked for before a session is made.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpt_fx.errors import ExportError
from cpt_fx.export.environment import (
    EXTRAS,
    GPU_BUILD,
    PLAIN_GPU_BUILD,
    Finding,
    imported,
    mend,
    require,
    require_training,
)

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
WHEELS = {
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11",
    "libcublasLt.so.11": "nvidia-cublas-cu11",
    "libcublas.so.11": "nvidia-cublas-cu11",
    "libcudnn.so.8": "nvidia-cudnn-cu11",
    "libcufft.so.10": "nvidia-cufft-cu11",
    "libcurand.so.10": "nvidia-curand-cu11",
}
"""The libraries of CUDA 11.8 and cuDNN 8 that the build with the training API needs, in an order in which they load."""
_PINS = {"nvidia-cudnn-cu11": "<9"}
_FOLDERS = ("/usr/local/cuda-11.8/lib64", "/usr/local/cuda-11.8/lib", "/usr/local/cuda/lib64")


@dataclass(frozen=True)
class CudaStatus:
    """What there is of what training on a GPU needs."""

    build: str
    """The CUDA release that onnxruntime was built for, or nothing for a CPU build."""
    providers: tuple[str, ...]
    libraries: dict[str, str]
    """Each library -> where it was found, or nothing."""
    driver: str
    """The CUDA release that the driver knows, or nothing where there is no working driver."""
    devices: int
    problem: str = ""
    remedy: tuple[str, ...] = ()

    @property
    def finding(self) -> Finding:
        """Whether training can run on a GPU."""
        found = f"CUDA {self.driver}, {self.devices} GPU" + "s" * (self.devices > 1) if self.devices else ""
        return Finding(not self.problem, found, self.problem, self.remedy)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self) | {"works": not self.problem}


def cuda_status() -> CudaStatus:
    """Look at the build, the libraries and the driver. Libraries that are found stay loaded."""
    build = cuda_release()
    driver, devices = _driver()
    providers = _providers()
    if not build:
        found = "the onnxruntime that is installed is built for the CPU; " if providers else ""
        problem = f"{found}a GPU needs {PLAIN_GPU_BUILD}, or {GPU_BUILD} 1.19.2 for CUDA 11.8"
        return CudaStatus(build, providers, {}, driver, devices, problem, mend(EXTRAS[PLAIN_GPU_BUILD]))
    if build.startswith("11"):
        libraries = {name: _loaded(name) for name in WHEELS}
    else:
        # Newer builds know themselves which libraries they need, and look into NVIDIA's wheels.
        libraries = {}
        getattr(imported("onnxruntime")[0], "preload_dlls", lambda: None)()
    problem, remedy = _missing(libraries, driver, devices, build)
    return CudaStatus(build, providers, libraries, driver, devices, problem, remedy)


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
    status = cuda_status()
    require(status.finding)
    number = int(found[1] or 0)
    if number >= status.devices:
        raise ExportError(f"device {device!r} is not there: the driver knows {status.devices}, counted from 0")
    return [(CUDA, {"device_id": str(number)}), CPU]


def check_session(session: Any, device: str) -> None:
    """Raise an error where a session computes on the CPU though a GPU was asked for."""
    if device != "cpu" and CUDA not in session.get_providers():
        raise ExportError(
            f"device={device!r} was asked for, and ONNX Runtime fell back to {', '.join(session.get_providers())}: "
            "`cpt-fx export doctor` says what is missing"
        )


def cuda_release() -> str:
    """Return the CUDA release that the installed onnxruntime was built for, or nothing."""
    # The name `onnxruntime.cuda_version` stays empty where torch's ortmodule is not set up.
    info = imported("onnxruntime.capi.build_and_package_info")[0]
    return str(getattr(info, "cuda_version", "") or "")


def _missing(libraries: dict[str, str], driver: str, devices: int, build: str) -> tuple[str, tuple[str, ...]]:
    absent = [name for name, place in libraries.items() if not place]
    if absent:
        wheels = " ".join(
            f'"{wheel}{_PINS.get(wheel, "")}"' for wheel in dict.fromkeys(WHEELS[name] for name in absent)
        )
        return (
            f"{', '.join(absent)} of CUDA 11.8 and cuDNN 8 {'is' if len(absent) == 1 else 'are'} not found",
            (
                f"pip install -c constraints.txt {wheels}",
                "# or install CUDA 11.8 and cuDNN 8, and name their folders in LD_LIBRARY_PATH",
            ),
        )
    if not driver:
        return "no NVIDIA driver works here (libcuda.so.1)", ("# install NVIDIA's driver, and look at `nvidia-smi`",)
    if int(driver.partition(".")[0]) < int(build.partition(".")[0]):
        return f"the NVIDIA driver knows CUDA {driver}; {build} needs a newer one", ("# install a newer NVIDIA driver",)
    if not devices:
        return "the NVIDIA driver shows no GPU", ("# look at `nvidia-smi`, and at CUDA_VISIBLE_DEVICES",)
    return "", ()


def _providers() -> tuple[str, ...]:
    return tuple(getattr(imported("onnxruntime")[0], "get_available_providers", tuple)())


def _loaded(name: str) -> str:
    """Load a library; return where it was found. One that is loaded is found by whatever needs it."""
    # Its symbols stay local: torch's own CUDA libraries, of another release, may be in the same process.
    for place in (name, *_places(name)):
        try:
            ctypes.CDLL(place)
        except OSError:
            continue
        return "the loader's path" if place == name else place
    return ""


def _places(name: str) -> list[str]:
    """Return files of this name in NVIDIA's wheels and where CUDA is usually installed."""
    wheels = [path for base in sys.path for path in sorted(Path(base or ".").glob(f"nvidia/*/lib/{name}"))]
    homes = [os.environ[key] + "/lib64" for key in ("CUDA_HOME", "CUDA_PATH") if key in os.environ]
    return [str(path) for path in (*wheels, *(Path(folder, name) for folder in (*homes, *_FOLDERS))) if path.is_file()]


def _driver() -> tuple[str, int]:
    """Ask the driver for the CUDA release that it knows, and for the number of GPUs."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version, count = ctypes.c_int(), ctypes.c_int()
        failed = library.cuInit(0) or library.cuDriverGetVersion(ctypes.byref(version))
        failed = failed or library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return "", 0
    return ("", 0) if failed else (f"{version.value // 1000}.{version.value % 1000 // 10}", count.value)
