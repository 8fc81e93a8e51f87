"""Checks of ONNX Runtime: whether it is installed, in which build, and whether it works; errors say how to repair it.

Several packages provide the folder `onnxruntime`: the plain runtime, its GPU builds, and two training builds. pip lets
one overwrite another's files, and lets an uninstall remove files that the other needs. So nothing here trusts a list
of installed packages: the modules are imported, and the list only explains why that failed.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from cpt_fx.errors import ExportError

EXTRAS = {
    "onnxruntime-gpu": "ort-gpu",
    "onnxruntime-training-cpu": "ort-training",
    "onnxruntime-training": "ort-training-gpu",
}
"""Packages other than the plain one that provide the folder `onnxruntime` -> the extra that installs each."""
WRITERS = {"onnx": "1.16", "onnxscript": "0.5", "onnx_ir": "0.1"}
RUNTIME = {"onnxruntime": "1.18"}
"""Modules, each with its oldest supported release: the first with int4, IR 10, or torch's exporter."""
TRAINING = "1.19"
"""The last release of ONNX Runtime with a training API of its own, for Python, C++, C# and Java."""
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class PackageError(ExportError, ImportError):
    """A package that an export or a run needs is missing or broken."""


@dataclass(frozen=True)
class Finding:
    """The result of a check: what was found, or the problem and the commands that solve it."""

    found: str = ""
    problem: str = ""
    remedy: tuple[str, ...] = ()
    """Commands, or comments where no command helps."""

    @property
    def works(self) -> bool:
        """Whether the check passed."""
        return not self.problem

    @property
    def message(self) -> str:
        """The problem, then one line for each step of the remedy."""
        return "\n  ".join((f"{self.problem}. Do:" if self.remedy else self.problem, *self.remedy))


def require_onnx() -> None:
    """Raise an error that says what to install, unless ONNX files can be written here."""
    require(check_onnx())


def require_training() -> None:
    """Raise an error that says what to install, unless models can be exported for training, and trained, here."""
    require(check_onnx("ort"))
    require(check_runtime())


def require(finding: Finding) -> None:
    """Raise an error if a check failed."""
    if not finding.works:
        raise PackageError(finding.message)


def check_onnx(extra: str = "onnx") -> Finding:
    """Check whether ONNX files can be written; `extra` is what to install if no build is installed yet."""
    return _look("writing ONNX files", WRITERS, (_install(_own(extra)),))


def check_runtime() -> Finding:
    """Check whether ONNX files can be run, including those that `Trainer` uses."""
    return _look("running ONNX files", RUNTIME, mend(_own("ort")))


def check_training() -> Finding:
    """Check whether ONNX Runtime's own training API is available, which `Trainer` does not need."""
    version = str(getattr(imported("onnxruntime")[0], "__version__", ""))
    problem = imported("onnxruntime.training.api")[1] or imported("onnxruntime.training.artifacts")[1]
    if not problem and version.startswith(f"{TRAINING}."):
        return Finding(f"onnxruntime {version}")
    needs = f"the API onnxruntime.training needs onnxruntime-training-cpu {TRAINING}, for Python up to 3.12"
    gpu = {"onnxruntime-gpu", "onnxruntime-training"} & set(builds())
    remedy = mend("ort-training-gpu" if gpu else "ort-training")
    return Finding("", f"{needs}: {problem or f'{version} is there'}", remedy)


def check_cuda() -> Finding:
    """Check the build and the driver: without a driver, ONNX Runtime ends the process."""
    if CUDA not in providers():
        problem = "a GPU needs onnxruntime-gpu, or onnxruntime-training 1.19.2 for CUDA 11.8"
        return Finding("", problem, mend("ort-gpu"))
    # Newer builds find the libraries that they need by themselves, also in NVIDIA's wheels.
    getattr(imported("onnxruntime")[0], "preload_dlls", lambda: None)()
    if not gpus():
        return Finding("", "NVIDIA's driver is not there, or shows no GPU: see `nvidia-smi`, and CUDA_VISIBLE_DEVICES")
    return Finding(f"GPUs: {gpus()}")


def providers() -> list[str]:
    """Return the execution providers of the installed build of ONNX Runtime."""
    return list(getattr(imported("onnxruntime")[0], "get_available_providers", list)())


def gpus() -> int:
    """Return the number of GPUs that the driver reports; 0 without a driver."""
    count = ctypes.c_int()
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        failed = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def mend(extra: str) -> tuple[str, ...]:
    """Return the commands that replace all installed builds of ONNX Runtime by one."""
    # All of them are uninstalled first: pip takes a package whose files were overwritten for installed.
    here = builds()
    why = "  # they write over each other's files" if len(here) > 1 else ""
    return (*([f"pip uninstall -y {' '.join(here)}{why}"] if here else []), _install(extra))


def builds() -> dict[str, str]:
    """Return the packages that provide the folder `onnxruntime` that is imported, each with its version."""
    spec = PathFinder.find_spec("onnxruntime")
    folders = [Path(place).resolve() for place in (spec and spec.submodule_search_locations) or ()]
    names = sorted(set(metadata.packages_distributions().get("onnxruntime", ())))
    places = {name: Path(str(metadata.distribution(name).locate_file("onnxruntime"))).resolve() for name in names}
    return {name: metadata.version(name) for name in names if not folders or places[name] in folders}


def version_of(name: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def imported(name: str) -> tuple[ModuleType | None, str]:
    """Import a module; return it, or the reason why that failed."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        # Several builds at once fail in various ways: AttributeError, OSError of a library, ...
        return None, str(error).strip().partition("\n")[0] or type(error).__name__


def _look(aim: str, modules: Mapping[str, str], remedy: tuple[str, ...]) -> Finding:
    """Import modules; return what was found, or the first one that fails to import or is too old."""
    found: list[str] = []
    for name, oldest in modules.items():
        module, problem = imported(name)
        version = str(getattr(module, "__version__", "only a part of it"))
        if problem or _numbers(version) < _numbers(oldest):
            return Finding("", f"{aim} needs {name} {oldest} or newer: {problem or f'{version} is there'}", remedy)
        found.append(f"{name} {version}")
    return Finding(", ".join(found))


def _install(extra: str) -> str:
    return f'pip install -c constraints.txt "cpt_fx[{extra}]"'


def _own(extra: str) -> str:
    """Return the extra of the installed build, or `extra` if it has none: a training build is kept."""
    return next((EXTRAS[name] for name in builds() if name in EXTRAS), extra)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
