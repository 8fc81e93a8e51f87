"""`cpt-fx export doctor`: what is installed, what works, what is missing, and what to type."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from cpt_fx.export.cuda import CudaStatus, cuda_status
from cpt_fx.export.environment import (
    HIGHEST_IR,
    Distribution,
    Finding,
    check_onnx,
    check_runtime,
    check_training,
    distributions,
    imported,
    version_of,
)

PACKAGES = ("cpt_fx", "torch", "numpy", "onnx", "onnxscript", "onnx-ir")
WRITE, RUN, GPU, API = "write ONNX files", "run and train them", "the same on a GPU", "ONNX Runtime's training API"


@dataclass(frozen=True)
class Examination:
    """What a look at the environment has found."""

    python: str
    machine: str
    packages: dict[str, str | None]
    builds: tuple[Distribution, ...]
    """Packages that bring the folder `onnxruntime`. Only one of them belongs there."""
    findings: dict[str, Finding]
    cuda: CudaStatus
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "python": self.python,
            "machine": self.machine,
            "packages": self.packages,
            "onnxruntime": [
                asdict(build) | {"folder": str(build.folder), "intact": build.intact} for build in self.builds
            ],
            "findings": {aim: asdict(finding) for aim, finding in self.findings.items()},
            "cuda": self.cuda.to_dict(),
            "remarks": list(self.remarks),
        }

    def __rich__(self) -> ConsoleRenderable:
        """Show tables in a terminal."""
        installed = [f"{name} {version}" for name, version in self.packages.items() if version]
        installed += [str(build) for build in self.builds]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("to", "works", "with"):
            table.add_column(heading, overflow="fold")
        for aim, finding in self.findings.items():
            table.add_row(aim, Text("yes", "green") if finding.works else Text("no", "bold red"), finding.found or "–")
        missing: dict[str, list[str]] = {}
        for aim, finding in self.findings.items():
            if not finding.works:
                missing.setdefault(finding.message, []).append(aim)
        return Group(
            Text(f"Python {self.python}, {self.machine}"),
            Text(", ".join(installed)),
            table,
            *(Text(f"to {' and to '.join(aims)}: {message}") for message, aims in missing.items()),
            *(Text(f"note: {remark}", "yellow") for remark in self.remarks),
        )


def examine() -> Examination:
    """Look at everything that exports need."""
    builds, writing, running = distributions(), check_onnx("ort"), check_runtime("ort")
    training = check_training()
    cuda = cuda_status()
    gpu = cuda.finding
    if gpu.works and not running.works:
        gpu = replace(running, found=gpu.found)
    return Examination(
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        packages={name: version_of(name) for name in PACKAGES},
        builds=builds,
        findings={WRITE: writing, RUN: running, GPU: gpu, API: training},
        cuda=cuda,
        remarks=tuple(_remarks(builds, running, training)),
    )


def _remarks(builds: tuple[Distribution, ...], running: Finding, training: Finding) -> Iterator[str]:
    if len({build.folder for build in builds}) < len(builds) and (running.works or training.works):
        yield (
            f"{' and '.join(map(str, builds))} share one folder: what was installed last works, and uninstalling "
            "either of them breaks the other. Uninstall both, then install one"
        )
    elif running.works:
        for build in builds:
            if not build.intact:
                yield (
                    f"{build.missing} files of {build} are missing and {build.replaced} are not its own: uninstall it, "
                    "and install it again"
                )
    highest = getattr(imported("onnx")[0], "IR_VERSION", 0)
    if highest > HIGHEST_IR and training.works:
        yield (
            f"onnx {version_of('onnx')} writes ONNX IR {highest} unless it is told otherwise, and the training runtime "
            f"reads up to IR {HIGHEST_IR}. cpt_fx writes that; in files that you make yourself set `model.ir_version`"
        )
