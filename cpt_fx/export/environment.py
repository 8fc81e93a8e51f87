"""Is ONNX Runtime installed, which build of it, and does it work? Whatever is wrong is said with the way to mend it.

Several packages bring the folder `onnxruntime`: the plain runtime, its GPU builds, and the two that train. pip lets one
write over another's files, and lets an uninstall take away files that the other needs. So nothing here trusts a list of
what is installed: the modules are imported, and the list explains why that failed.
"""

from __future__ import annotations

import ctypes
import importlib
import re
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
"""Packages that bring the folder `onnxruntime`, but for the plain one -> the extra that installs each."""
WRITERS = {"onnx": "1.16", "onnxscript": "0.5", "onnx_ir": "0.1"}
RUNTIME = {"onnxruntime": "1.18"}
"""Modules, each with its oldest release that will do: from these on there are int4, IR 10, torch's exporter."""
TRAINING = "1.19"
"""The last release of ONNX Runtime that has an API for training of its own, for C++, C# and Java, too."""
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class PackageError(ExportError, ImportError):
    """What an export or a run needs is not installed, or not in working order."""


@dataclass(frozen=True)
class Finding:
    """What something can be done with here; or why it cannot, and what to type."""

    found: str = ""
    problem: str = ""
    remedy: tuple[str, ...] = ()
    """Commands, or comments where no command helps."""

    @property
    def works(self) -> bool:
        """Whether it can be done."""
        return not self.problem

    @property
    def message(self) -> str:
        """The problem, then each step of the remedy on a line of its own."""
        return "\n  ".join((f"{self.problem}. Do:" if self.remedy else self.problem, *self.remedy))


def require_onnx() -> None:
    """Raise an error that says what to install, unless models can be written as ONNX here."""
    require(check_onnx())


def require_training() -> None:
    """Raise an error that says what to install, unless models can be exported for training, and trained, here."""
    require(check_onnx("ort"))
    require(check_runtime())


def require(finding: Finding) -> None:
    """Raise what a look has found, unless it works."""
    if not finding.works:
        raise PackageError(finding.message)


def check_onnx(extra: str = "onnx") -> Finding:
    """Look whether models can be written as ONNX; `extra` is what to install where nothing is there yet."""
    return _look("writing ONNX files", WRITERS, (_install(_own(extra)),))


def check_runtime() -> Finding:
    """Look whether ONNX files can be run: also those that `Trainer` trains with."""
    return _look("running ONNX files", RUNTIME, mend(_own("ort")))


def check_training() -> Finding:
    """Look whether ONNX Runtime's own API for training is there, which `Trainer` does not need."""
    version = str(getattr(imported("onnxruntime")[0], "__version__", ""))
    problem = imported("onnxruntime.training.api")[1] or imported("onnxruntime.training.artifacts")[1]
    if not problem and version.startswith(f"{TRAINING}."):
        return Finding(f"onnxruntime {version}")
    needs = f"the API onnxruntime.training needs onnxruntime-training-cpu {TRAINING}, for Python up to 3.12"
    gpu = {"onnxruntime-gpu", "onnxruntime-training"} & set(builds())
    remedy = mend("ort-training-gpu" if gpu else "ort-training")
    return Finding("", f"{needs}: {problem or f'{version} is there'}", remedy)


def check_cuda() -> Finding:
    """Look at the build and the driver: without one, ONNX Runtime ends the process."""
    if CUDA not in providers():
        problem = "a GPU needs onnxruntime-gpu, or onnxruntime-training 1.19.2 for CUDA 11.8"
        return Finding("", problem, mend("ort-gpu"))
    # Newer builds know themselves which libraries they need, and look into NVIDIA's wheels.
    getattr(imported("onnxruntime")[0], "preload_dlls", lambda: None)()
    if not gpus():
        return Finding("", "NVIDIA's driver is not there, or shows no GPU: see `nvidia-smi`, and CUDA_VISIBLE_DEVICES")
    return Finding(f"GPUs: {gpus()}")


def providers() -> list[str]:
    """Return what the build of ONNX Runtime computes on."""
    return list(getattr(imported("onnxruntime")[0], "get_available_providers", list)())


def gpus() -> int:
    """Ask the driver for the number of GPUs; there are none without a driver."""
    count = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        failed = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value


def mend(extra: str) -> tuple[str, ...]:
    """Return the commands that put exactly one build of ONNX Runtime in the place of what is there."""
    # All of them go first: pip takes a package whose files were written over for one that is there.
    here = builds()
    why = "  # they write over each other's files" if len(here) > 1 else ""
    return (*([f"pip uninstall -y {' '.join(here)}{why}"] if here else []), _install(extra))


def builds() -> dict[str, str]:
    """Return the packages that bring the folder `onnxruntime` which would be imported, each with its version."""
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
    """Import a module; return it, or why that cannot be done."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        # A broken mixture fails in its own ways: AttributeError, OSError of a library, ...
        return None, str(error).strip().partition("\n")[0] or type(error).__name__


def _look(aim: str, modules: Mapping[str, str], remedy: tuple[str, ...]) -> Finding:
    """Import modules; find what there is, or the first one that does not import or is too old."""
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
    """Return the extra of the build that is there, if there is one: who has one that trains keeps it."""
    return next((EXTRAS[name] for name in builds() if name in EXTRAS), extra)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
