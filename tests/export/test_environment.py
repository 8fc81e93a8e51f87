"""What is said of an environment: nothing installed, the wrong build, two builds in one folder, what is left of one."""

import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpt_fx.errors import ExportError
from cpt_fx.export import environment
from cpt_fx.export.environment import PackageError
from tests.export.fake_packages import (
    install,
    install_writers,
    plain_build,
    python,
    training_build,
    uninstall,
)

CPU, GPU, PLAIN = "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime"
INSTALL = 'pip install -c constraints.txt "cpt_fx[{}]"'
TRAINING = INSTALL.format("ort-training")
# Wheels that fit this Python and machine need no further word.
FITS = (3, 8) <= sys.version_info[:2] <= (3, 12) and platform.machine() in ("x86_64", "AMD64", "arm64")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def said(site: Path, function: str) -> str:
    """What a `require_...` raises, or a `check_...` finds to be wrong; or nothing."""
    code = f"""
from cpt_fx.errors import ExportError
from cpt_fx.export import environment
try:
    found = environment.{function}()
    print("" if found is None else found.message, end="")
except ImportError as error:
    assert isinstance(error, ExportError)
    print(error, end="")
"""
    run = python(site, code)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def steps(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()[1:] if not line.strip().startswith("#")]


def nothing(site: Path) -> None:
    pass


def plain_only(site: Path) -> None:
    install(site, PLAIN, "1.31.1", plain_build())


def plain_on_top(site: Path) -> None:
    install(site, CPU, "1.19.2", training_build())
    install(site, PLAIN, "1.31.1", plain_build())


def training_on_top(site: Path) -> None:
    install(site, PLAIN, "1.31.1", plain_build())
    install(site, CPU, "1.19.2", training_build())


def plain_gone(site: Path) -> None:
    plain_on_top(site)
    uninstall(site, PLAIN)


def all_gone(site: Path) -> None:
    plain_on_top(site)
    (site / "onnxruntime/__pycache__").mkdir()
    uninstall(site, CPU)
    uninstall(site, PLAIN)


def written_over(site: Path) -> None:
    install(site, CPU, "1.19.2", training_build())
    (site / "onnxruntime/capi/_pybind_state.py").write_text("other = 1\n")


def not_a_package(site: Path) -> None:
    for path, text in training_build(bindings="").items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def older(site: Path) -> None:
    install(site, GPU, "1.17.3", training_build("1.17.3", cuda="11.8"))


def without_h5py(site: Path) -> None:
    install(site, CPU, "1.19.2", training_build(bindings="import h5py\n"))


def working(site: Path) -> None:
    install(site, CPU, "1.19.2", training_build())


def working_gpu(site: Path) -> None:
    install(site, GPU, "1.19.2", training_build(cuda="11.8"))


@pytest.mark.parametrize("prepare", [working, working_gpu, training_on_top])
def test_the_training_build_is_accepted(prepare: Callable[[Path], None], site: Path) -> None:
    install_writers(site)
    prepare(site)
    for function in ("require_onnx", "require_training", "check_training"):
        assert said(site, function) == ""


@pytest.mark.parametrize("prepare", [plain_only, plain_on_top, written_over, not_a_package, without_h5py])
def test_what_runs_models_trains_them(prepare: Callable[[Path], None], site: Path) -> None:
    install_writers(site)
    prepare(site)
    assert said(site, "require_training") == ""


@pytest.mark.skipif(not FITS, reason="there are no wheels for this Python or machine, which is said, too")
@pytest.mark.parametrize(
    ("prepare", "expected", "mend"),
    [
        (nothing, ["needs onnxruntime-training-cpu 1.19, which is not installed"], [TRAINING]),
        (
            plain_only,
            ["onnxruntime 1.31.1 is installed, which does not have that API; it needs onnxruntime-training-cpu 1.19"],
            ["pip uninstall -y onnxruntime", TRAINING],
        ),
        (
            plain_on_top,
            [
                "onnxruntime 1.31.1 and onnxruntime-training-cpu 1.19.2 are installed at once",
                "cannot import name 'PropagateCastOpsStrategy'",
            ],
            ["pip uninstall -y onnxruntime onnxruntime-training-cpu", TRAINING],
        ),
        (
            plain_gone,
            ["onnxruntime-training-cpu 1.19.2 is listed as installed, but 3 of its 7 files are missing"],
            ["pip uninstall -y onnxruntime-training-cpu", TRAINING],
        ),
        (
            written_over,
            ["0 of its 7 files are missing and 1 were written over"],
            ["pip uninstall -y onnxruntime-training-cpu", TRAINING],
        ),
        (all_gone, ["is only what an uninstalled package left behind"], ["rm -r {site}/onnxruntime", TRAINING]),
        (
            not_a_package,
            ["belongs to no installed package, and does not work (cannot import name 'PropagateCastOpsStrategy'"],
            ["rm -r {site}/onnxruntime", TRAINING],
        ),
        (
            older,
            ["onnxruntime-training 1.17.3 is installed; that API needs release 1.19"],
            ["pip uninstall -y onnxruntime-training", INSTALL.format("ort-training-gpu")],
        ),
        (
            without_h5py,
            [
                "onnxruntime-training-cpu 1.19.2 is installed, but does not import",
                "needs the package h5py, which is not",
            ],
            ["pip uninstall -y onnxruntime-training-cpu", TRAINING],
        ),
    ],
)
def test_what_lacks_the_training_api_says_how_to_mend_it(
    prepare: Callable[[Path], None], expected: list[str], mend: list[str], site: Path
) -> None:
    install_writers(site)
    prepare(site)
    text = said(site, "check_training")
    assert [sentence for sentence in expected if sentence not in text] == []
    if prepare is not older or sys.version_info < (3, 12):
        assert steps(text) == [step.format(site=site) for step in mend]


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (nothing, "running ONNX files needs onnxruntime, which is not installed"),
        (all_gone, "is only what an uninstalled package left behind"),
        (plain_gone, "3 of its 7 files are missing"),
    ],
)
def test_what_cannot_run_models_is_refused(prepare: Callable[[Path], None], expected: str, site: Path) -> None:
    prepare(site)
    assert expected in said(site, "check_runtime")


@pytest.mark.parametrize("prepare", [plain_only, plain_on_top])
def test_what_runs_models_is_accepted(prepare: Callable[[Path], None], site: Path) -> None:
    prepare(site)
    assert said(site, "check_runtime") == ""


def test_a_runtime_that_is_too_old_is_refused(site: Path) -> None:
    install(site, PLAIN, "1.9.0", plain_build("1.9.0"))
    assert "onnxruntime 1.9.0 is installed; 1.18 or newer is needed" in said(site, "check_runtime")


def test_missing_writers_are_named(site: Path) -> None:
    assert "needs the package onnx, which is not installed" in said(site, "require_onnx")
    install(site, "onnx", "1.23.2", {"onnx/__init__.py": ""})
    assert "needs the package onnxscript, which is not installed" in said(site, "require_onnx")
    assert steps(said(site, "require_onnx")) == [INSTALL.format("onnx")]
    assert steps(said(site, "require_training")) == [INSTALL.format("ort")]
    # Who has a build that trains is not led to another.
    install(site, GPU, "1.19.2", training_build())
    assert steps(said(site, "require_onnx")) == [INSTALL.format("ort-training-gpu")]


def test_writers_that_do_not_work_are_named(site: Path) -> None:
    install_writers(site, onnx="1.9.0")
    assert "onnx 1.9.0 is installed; 1.16 or newer is needed" in said(site, "require_onnx")
    (site / "onnx/__init__.py").write_text("import no_such_library")
    assert "onnx 1.9.0 is installed, but does not import (it needs the package no_such_library" in said(
        site, "require_onnx"
    )


def test_the_package_imports_without_any_of_it(site: Path) -> None:
    code = """
import cpt_fx.export
for name in ("onnx", "qdq", "ort_training", "report"):
    try:
        getattr(cpt_fx.export, name)
    except ImportError as error:
        print(name, str(error).splitlines()[-1].strip())
"""
    run = python(site, code)
    onnx, ort = INSTALL.format("onnx"), INSTALL.format("ort")
    assert run.stdout.splitlines() == [f"onnx {onnx}", f"qdq {onnx}", f"ort_training {ort}", f"report {onnx}"]


@pytest.mark.parametrize(
    ("version", "system", "machine", "package", "expected"),
    [
        ((3, 11), "Linux", "x86_64", CPU, ""),
        ((3, 11), "Darwin", "arm64", CPU, ""),
        ((3, 12), "Windows", "AMD64", CPU, ""),
        ((3, 11), "Linux", "x86_64", GPU, ""),
        (
            (3, 13),
            "Linux",
            "x86_64",
            CPU,
            "Python 3.8 to 3.12, for Linux and Windows on x86-64, and for macOS; this is Python 3.13",
        ),
        ((3, 12), "Linux", "x86_64", GPU, "Python 3.8 to 3.11, for Linux on x86-64; this is Python 3.12"),
        ((3, 11), "Linux", "aarch64", CPU, "this machine is Linux on aarch64"),
        ((3, 11), "Windows", "AMD64", GPU, "this machine runs Windows"),
    ],
)
def test_a_python_without_wheels_is_named(
    version: tuple[int, int], system: str, machine: str, package: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "sys", SimpleNamespace(version_info=(*version, 0)))
    monkeypatch.setattr(environment, "platform", SimpleNamespace(system=lambda: system, machine=lambda: machine))
    found = environment.python_step(package)
    assert expected in "\n".join(found)
    assert bool(found) == bool(expected)


def test_the_error_is_of_both_kinds() -> None:
    assert issubclass(PackageError, ExportError)
    assert issubclass(PackageError, ImportError)


def test_training_packages_that_are_installed_work() -> None:
    pytest.importorskip("onnxruntime.training.api")
    environment.require_training()
    assert environment.check_training().works
    assert all(item.intact for item in environment.distributions())
