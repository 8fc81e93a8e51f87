"""Is ONNX Runtime installed, which build of it, and does it work? Whatever is wrong is said with the way to mend it.

Several packages bring the folder `onnxruntime`: the plain runtime, its GPU builds, and the two that train. pip lets one
write over another's files, and lets an uninstall take away files that the other needs. So nothing here trusts a list of
what is installed: the modules are imported, and the list explains why that failed.
"""

from __future__ import annotations

import importlib
import platform
import re
import shlex
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from cpt_fx.errors import ExportError

TRAINING = "1.19"
"""The last release of ONNX Runtime that has an API for training of its own, for C++, C# and Java, too."""
CPU_BUILD, GPU_BUILD = "onnxruntime-training-cpu", "onnxruntime-training"
PLAIN_GPU_BUILD = "onnxruntime-gpu"
EXTRAS = {PLAIN_GPU_BUILD: "ort-gpu", CPU_BUILD: "ort-training", GPU_BUILD: "ort-training-gpu"}
"""Packages that bring the folder `onnxruntime`, but for the plain one -> the extra that installs each."""
LATEST_PYTHON = {CPU_BUILD: (3, 12), GPU_BUILD: (3, 11)}
"""The last Python that a package has wheels for; the first one is 3.8."""
HIGHEST_IR = 10
"""The newest version of the ONNX format that 1.19 reads."""
OLDEST = {"onnx": "1.16", "onnxscript": "0.5", "onnxruntime": "1.18"}
"""As in the extras of pyproject.toml: from these on there are int4, IR 10, and an exporter that torch uses."""
_FOLDER = "onnxruntime"


class PackageError(ExportError, ImportError):
    """What an export or a run needs is not installed, or not in working order."""


@dataclass(frozen=True)
class Distribution:
    """A package that brings the folder `onnxruntime`, and how much of it is there."""

    name: str
    version: str
    folder: Path
    files: int
    missing: int
    replaced: int
    """Files of another size than this package's: written over by another package."""

    @property
    def intact(self) -> bool:
        """All of its code is there, and its own."""
        return not self.missing and not self.replaced

    def __str__(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Finding:
    """Whether something can be done here; if not, why not, and what to type."""

    works: bool
    found: str
    """What it would be done with, such as `onnxruntime 1.31.1`."""
    problem: str = ""
    remedy: tuple[str, ...] = ()
    """Commands, or sentences where no command helps."""

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
    require(check_runtime("ort"))


def check_onnx(extra: str = "onnx") -> Finding:
    """Look whether models can be written as ONNX; `extra` is what to install where nothing is there yet."""
    found: list[str] = []
    for name, module in (("onnx", "onnx"), ("onnxscript", "onnxscript"), ("onnx-ir", "onnx_ir")):
        version = version_of(name)
        problem = imported(module)[1]
        wanted = OLDEST.get(name, "")
        if version is None and problem:
            problem = f"writing ONNX files needs the package {name}, which is not installed"
        elif problem:
            problem = f"{name} {version} is installed, but does not import ({problem})"
        elif version is not None and wanted and _numbers(version) < _numbers(wanted):
            problem = f"{name} {version} is installed; {wanted} or newer is needed"
        if problem:
            return Finding(False, ", ".join(found), problem, (install(_extra(extra)),))
        found.append(f"{name} {version}")
    return Finding(True, ", ".join(found))


def check_runtime(extra: str = "onnx") -> Finding:
    """Look whether ONNX files can be run: also those that `Trainer` trains with."""
    module, problem = imported(_FOLDER)
    version = str(getattr(module, "__version__", ""))
    if not hasattr(module, "InferenceSession"):
        problem = _explained(problem, "running ONNX files", "onnxruntime")
    elif version and _numbers(version) < _numbers(OLDEST[_FOLDER]):
        problem = f"onnxruntime {version} is installed; {OLDEST[_FOLDER]} or newer is needed"
    else:
        return Finding(True, _described() or f"onnxruntime {version}")
    return Finding(False, _described(), problem, mend(_extra(extra)))


def check_training() -> Finding:
    """Look whether ONNX Runtime's own API for training is there, which `Trainer` does not need."""
    problem = imported("onnxruntime.training.api")[1] or imported("onnxruntime.training.artifacts")[1]
    extra = _extra("ort-training")
    package = GPU_BUILD if extra == EXTRAS[GPU_BUILD] else CPU_BUILD
    version = str(getattr(sys.modules.get(_FOLDER), "__version__", ""))
    if problem:
        problem = _explained(problem, "the API onnxruntime.training", f"{package} {TRAINING}")
    elif _numbers(version)[:2] != _numbers(TRAINING):
        problem = f"{_described() or f'onnxruntime {version}'} is installed; that API needs release {TRAINING}"
    else:
        return Finding(True, _described() or f"onnxruntime {version}")
    return Finding(False, _described(), problem, (*python_step(package), *mend(extra)))


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install -c constraints.txt "cpt_fx[{extra}]"'


def mend(extra: str) -> tuple[str, ...]:
    """Return the commands that put exactly one build of ONNX Runtime in the place of what is there."""
    # All of them go first: pip takes a package whose files were written over for one that is there.
    names = [item.name for item in _here()]
    steps = [f"pip uninstall -y {' '.join(names)}"] if names else []
    folder = _folder()
    if folder is not None and not names:
        steps.append(f"rm -r {shlex.quote(str(folder))}")
    return (*steps, install(extra))


def distributions() -> tuple[Distribution, ...]:
    """Return every package that brings a folder `onnxruntime`, whatever it is called."""
    names = sorted(set(metadata.packages_distributions().get(_FOLDER, ())))
    return tuple(_distribution(metadata.distribution(name)) for name in names)


def version_of(name: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def require(finding: Finding) -> None:
    """Raise what a look has found, unless it works."""
    if not finding.works:
        raise PackageError(finding.message)


def imported(name: str) -> tuple[ModuleType | None, str]:
    """Import a module; return it, or why that cannot be done."""
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        # A broken mixture fails in its own ways: AttributeError, OSError of a library, ...
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and missing.partition(".")[0] != name.partition(".")[0]:
            return None, f"it needs the package {missing}, which is not installed"
        return None, str(error).strip().partition("\n")[0] or type(error).__name__


def _explained(problem: str, aim: str, package: str) -> str:
    """Return why something of ONNX Runtime does not import, by what is installed and what is left of it."""
    here = _here()
    folder = _folder()
    if not here:
        if folder is None:
            return f"{aim} needs {package}, which is not installed"
        if not (folder / "__init__.py").is_file():
            return f"{aim} needs {package}; {folder} is only what an uninstalled package left behind"
        return f"{aim} needs {package}; {folder} belongs to no installed package, and does not work ({problem})"
    listed = " and ".join(map(str, here))
    if len(here) > 1:
        return (
            f"{listed} are installed at once, in one folder: they write over each other's files, and what is there now "
            f"does not work for {aim} ({problem})"
        )
    (item,) = here
    if not item.intact:
        return (
            f"{item} is listed as installed, but {item.missing} of its {item.files} files are missing and "
            f"{item.replaced} were written over: another build of onnxruntime was installed on top of it, or removed "
            "again"
        )
    if "training" in aim and "training" not in item.name:
        return f"{listed} is installed, which does not have that API; it needs {package} in its place"
    return f"{listed} is installed, but does not import: {problem}"


def _described() -> str:
    """Name the package whose files are in the folder that would be imported; several where none is whole."""
    here = _here()
    return " and ".join(str(item) for item in [item for item in here if item.intact] or here)


def _here() -> list[Distribution]:
    """Return the packages whose folder would be imported. Without any folder: those that are listed nevertheless."""
    folder = _folder()
    return [item for item in distributions() if folder is None or item.folder == folder]


def _folder() -> Path | None:
    """Return the folder that `import onnxruntime` looks into."""
    spec = PathFinder.find_spec(_FOLDER)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]).resolve() if places else None


def _distribution(found: metadata.Distribution) -> Distribution:
    """Compare a package's list of its files with what is there. By size: sums would take seconds."""
    missing = replaced = count = 0
    for file in found.files or ():
        if file.parts[0] != _FOLDER or file.suffix == ".pyc":
            continue
        count += 1
        path = Path(str(file.locate()))
        if not path.is_file():
            missing += 1
        elif file.size is not None and path.stat().st_size != file.size:
            replaced += 1
    name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
    folder = Path(str(found.locate_file(_FOLDER))).resolve()
    return Distribution(name, found.version, folder, count, missing, replaced)


def _extra(usual: str = "onnx") -> str:
    """Return the extra that fits what is installed: who has a build that trains keeps it."""
    return next((EXTRAS[item.name] for item in _here() if item.name in EXTRAS), usual)


def python_step(package: str) -> tuple[str, ...]:
    """Return what to do first where a package has no wheel for this Python or this machine."""
    version, latest = sys.version_info[:2], LATEST_PYTHON[package]
    system, machine = platform.system(), platform.machine().lower()
    reason = ""
    if not (3, 8) <= version <= latest:
        reason = f"this is Python {version[0]}.{version[1]}"
    elif machine not in ("x86_64", "amd64") and system != "Darwin":
        reason = f"this machine is {system} on {machine}"
    elif package == GPU_BUILD and system != "Linux":
        reason = f"this machine runs {system}"
    if not reason:
        return ()
    places = "Linux on x86-64" if package == GPU_BUILD else "Linux and Windows on x86-64, and for macOS"
    return (
        f"# {package} has wheels for Python 3.8 to {latest[0]}.{latest[1]}, for {places}; {reason}",
        "# make a virtual environment with Python 3.11 on such a machine, and there:",
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
