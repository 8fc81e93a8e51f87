"""Packages that look as pip leaves them: files, a record of them, and what another package does to these files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_RUNTIME = """
__version__ = "{version}"
class InferenceSession: pass
def get_available_providers(): return ["CPUExecutionProvider"]
"""
_INFO = "cuda_version = '{cuda}'\n"
_BINDINGS = "plain = 1\n"
_TRAINING_BINDINGS = "PropagateCastOpsStrategy = register_gradient_definition = GradientNodeDefinition = object\n"
_NEEDS = "from onnxruntime.capi._pybind_state import PropagateCastOpsStrategy\n"


def plain_build(version: str = "1.31.1") -> dict[str, str]:
    """Return the files of a build that only runs models."""
    return {
        "onnxruntime/__init__.py": _RUNTIME.format(version=version),
        "onnxruntime/capi/__init__.py": "",
        "onnxruntime/capi/_pybind_state.py": _BINDINGS,
        "onnxruntime/tools.py": "only = 'in the plain build'\n",
    }


def training_build(version: str = "1.19.2", cuda: str = "", bindings: str = _TRAINING_BINDINGS) -> dict[str, str]:
    """Return the files of a build that trains, too."""
    return {
        "onnxruntime/__init__.py": _RUNTIME.format(version=version),
        "onnxruntime/capi/__init__.py": "",
        "onnxruntime/capi/_pybind_state.py": bindings,
        "onnxruntime/capi/build_and_package_info.py": _INFO.format(cuda=cuda),
        "onnxruntime/training/__init__.py": "",
        "onnxruntime/training/api.py": _NEEDS,
        "onnxruntime/training/artifacts.py": _NEEDS,
    }


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Do what pip does: write over what is there, and keep a record."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    record = [f"{path},sha256=x,{len(text)}" for path, text in files.items()]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(
        "\n".join({path.partition("/")[0].removesuffix(".py") for path in files}) + "\n"
    )
    (info / "RECORD").write_text("\n".join([*record, f"{info.name}/RECORD,,"]) + "\n")


def uninstall(site: Path, name: str) -> None:
    """Do what pip does: delete what the record names, whoever wrote it last; folders stay where anything is left."""
    (info,) = site.glob(f"{name.replace('-', '_')}-*.dist-info")
    for line in (info / "RECORD").read_text().splitlines():
        (site / line.partition(",")[0]).unlink(missing_ok=True)
    shutil.rmtree(info)


def install_writers(site: Path, *, onnx: str = "1.23.2", onnxscript: str = "0.7.2") -> None:
    """Install what writes ONNX files."""
    for name, module, version in (
        ("onnx", "onnx", onnx),
        ("onnxscript", "onnxscript", onnxscript),
        ("onnx-ir", "onnx_ir", "1.1.0"),
    ):
        install(site, name, version, {f"{module}/__init__.py": f"__version__ = {version!r}\n"})


def python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code that sees these packages and this checkout, and nothing else."""
    return subprocess.run(
        [sys.executable, "-S", "-W", "error", "-c", code],
        env={"PYTHONPATH": f"{site}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        cwd=site,
    )
