"""`cpt-fx export doctor`: what is installed, what works, what is missing, and which commands help."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from cpt_fx.ort.environment import Finding, builds, check_cuda, check_onnx, check_runtime, check_training, version_of

WRITE, RUN, GPU, API = "write ONNX files", "run and train them", "the same on a GPU", "ONNX Runtime's training API"


@dataclass(frozen=True)
class Examination:
    """The state of the environment."""

    python: str
    packages: dict[str, str]
    builds: dict[str, str]
    """Packages that provide the folder `onnxruntime`. Only one of them should be installed."""
    findings: dict[str, Finding]
    remark: str
    """A warning about several builds at once, even if one of them works."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        findings = {aim: {"works": finding.works} | asdict(finding) for aim, finding in self.findings.items()}
        return asdict(self) | {"findings": findings}

    def __rich__(self) -> ConsoleRenderable:
        """Render a table for a terminal."""
        table = Table("to", "works", "with", box=box.SIMPLE_HEAD, pad_edge=False)
        for aim, finding in self.findings.items():
            table.add_row(aim, Text("yes", "green") if finding.works else Text("no", "bold red"), finding.found or "–")
        installed = ", ".join(f"{name} {version}" for name, version in (self.packages | self.builds).items())
        problems = dict.fromkeys(finding.message for finding in self.findings.values() if not finding.works)
        return Group(f"Python {self.python}: {installed}", table, *map(Text, problems), Text(self.remark, "yellow"))


def examine() -> Examination:
    """Examine everything that exports need."""
    names = ("cpt_fx", "torch", "numpy", "onnx", "onnxscript", "onnx-ir")
    here = builds()
    mixed = (
        f"{' and '.join(here)} share one folder, and uninstalling either breaks the other: uninstall all, install one"
    )
    return Examination(
        python=f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        packages={name: version for name in names if (version := version_of(name))},
        builds=here,
        findings={WRITE: check_onnx("ort"), RUN: check_runtime(), GPU: check_cuda(), API: check_training()},
        remark=mixed if len(here) > 1 else "",
    )
