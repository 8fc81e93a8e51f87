"""The package as it is installed: what it lists, what it ships, and the one name under which `passes/` exists."""

import importlib
import importlib.metadata
import importlib.resources
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import cpt_fx

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]
EXTRAS = {
    "bench",
    "demo",
    "detection",
    "dev",
    "examples",
    "gnn",
    "lightning",
    "onnx",
    "ort",
    "ort-gpu",
    "ort-training",
    "ort-training-gpu",
    "ray",
    "transformers",
    "viz",
}


def pyproject() -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return data


def packages_in(folder: Path, name: str) -> set[str]:
    """Every package below a real folder; links are not followed."""
    found = {name}
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink() and (child / "__init__.py").exists():
            found |= packages_in(child, f"{name}.{child.name}")
    return found


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", item.name).lower(): str(item.specifier) for item in requirements}


def test_listed_packages_are_the_folders() -> None:
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    assert set(listed) == packages_in(ROOT / "cpt_fx", "cpt_fx") | packages_in(ROOT / "passes", "cpt_fx.passes")


def test_every_folder_with_code_is_a_package() -> None:
    files = [*(ROOT / "cpt_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    assert [str(file) for file in files if not (file.parent / "__init__.py").exists()] == []


def test_passes_stays_flat() -> None:
    assert packages_in(ROOT / "passes", "cpt_fx.passes") == {"cpt_fx.passes"}


def test_the_link_leads_where_the_mapping_says() -> None:
    mapping = pyproject()["tool"]["setuptools"]["package-dir"]
    assert mapping == {"cpt_fx": "cpt_fx", "cpt_fx.passes": "passes"}
    link = ROOT / "cpt_fx" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("..", "passes")
    assert link.resolve() == (ROOT / mapping["cpt_fx.passes"]).resolve()


def test_no_other_link_in_the_package() -> None:
    links = [path for path in (ROOT / "cpt_fx").rglob("*") if path.is_symlink()]
    assert links == [ROOT / "cpt_fx" / "passes"]


@pytest.mark.parametrize("statement", ["import passes", "from passes import anything"])
def test_plain_passes_is_refused_with_the_right_name(statement: str) -> None:
    run = subprocess.run([sys.executable, "-c", statement], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1
    last_line = run.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: ")
    assert "import cpt_fx.passes" in last_line
    assert "'passes'" in last_line


def test_the_real_name_imports() -> None:
    assert importlib.import_module("cpt_fx.passes").__name__ == "cpt_fx.passes"


def test_typed() -> None:
    assert importlib.resources.files(cpt_fx).joinpath("py.typed").is_file()
    assert "py.typed" in pyproject()["tool"]["setuptools"]["package-data"]["cpt_fx"]


def test_one_version() -> None:
    assert cpt_fx.__version__ == importlib.metadata.version("cpt_fx") == pyproject()["project"]["version"]


def test_the_changelog_knows_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(cpt_fx.__version__)}\]", text, flags=re.MULTILINE)


def test_extras() -> None:
    assert set(pyproject()["project"]["optional-dependencies"]) == EXTRAS
    assert set(importlib.metadata.metadata("cpt_fx").get_all("Provides-Extra") or ()) == EXTRAS


def test_core_dependencies_are_few() -> None:
    names = {Requirement(line).name for line in pyproject()["project"]["dependencies"]}
    assert names == {"networkx", "numpy", "rich", "torch"}


def test_constraints_pin_torch_first() -> None:
    pins = constraints()
    assert next(iter(pins)) == "torch"
    assert pins["torch"] == "==2.13.0"


def test_constraints_pin_every_dependency() -> None:
    project = pyproject()["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    wanted = {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in lines} - {"cpt-fx"}
    assert wanted - set(constraints()) == set()
    assert [name for name, pin in constraints().items() if not pin.startswith("==")] == []


def test_the_command_is_declared() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="cpt-fx")
    assert entry.value == "cpt_fx.cli:main"
    assert callable(entry.load())


def test_hosted_ci_is_the_local_one() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"- run: (.*)", workflow) == ["bash .ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
