"""What is said of an environment: nothing installed, the wrong build, two builds in one folder, what is left of one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cpt_fx.errors import ExportError
from cpt_fx.ort import environment
from cpt_fx.ort.environment import PackageError
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


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def said(site: Path, function: str) -> str:
    """What a `require_...` raises, or a `check_...` finds to be wrong; or nothing."""
    code = f"""
from cpt_fx.errors import ExportError
from cpt_fx.ort import environment
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


BOTH = "pip uninstall -y onnxruntime onnxruntime-training-cpu  # they write over each other's files"


@pytest.mark.parametrize(
    ("prepare", "expected", "mend"),
    [
        (nothing, "No module named 'onnxruntime'", [TRAINING]),
        (plain_only, "No module named 'onnxruntime.training'", ["pip uninstall -y onnxruntime", TRAINING]),
        (plain_on_top, "cannot import name 'PropagateCastOpsStrategy'", [BOTH, TRAINING]),
        (plain_gone, "No module named 'onnxruntime.capi", ["pip uninstall -y onnxruntime-training-cpu", TRAINING]),
        (written_over, "cannot import name", ["pip uninstall -y onnxruntime-training-cpu", TRAINING]),
        (all_gone, "No module named 'onnxruntime.training.api'", [TRAINING]),
        (not_a_package, "cannot import name 'PropagateCastOpsStrategy'", [TRAINING]),
        (
            older,
            "1.17.3 is there",
            ["pip uninstall -y onnxruntime-training", INSTALL.format("ort-training-gpu")],
        ),
        (without_h5py, "No module named 'h5py'", ["pip uninstall -y onnxruntime-training-cpu", TRAINING]),
    ],
)
def test_what_lacks_the_training_api_says_how_to_mend_it(
    prepare: Callable[[Path], None], expected: str, mend: list[str], site: Path
) -> None:
    install_writers(site)
    prepare(site)
    text = said(site, "check_training")
    assert text.startswith("the API onnxruntime.training needs onnxruntime-training-cpu 1.19, for Python up to 3.12: ")
    assert expected in text
    assert steps(text) == mend


def test_a_gpu_build_is_replaced_by_one(site: Path) -> None:
    install(site, "onnxruntime-gpu", "1.31.1", plain_build())
    assert steps(said(site, "check_training"))[-1] == INSTALL.format("ort-training-gpu")


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (nothing, "running ONNX files needs onnxruntime 1.18 or newer: No module named 'onnxruntime'"),
        (all_gone, "only a part of it is there"),
        (plain_gone, "only a part of it is there"),
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
    assert "needs onnxruntime 1.18 or newer: 1.9.0 is there" in said(site, "check_runtime")


def test_builds_are_those_in_the_folder_that_is_imported(site: Path, tmp_path: Path) -> None:
    plain_on_top(site)
    install(tmp_path / "elsewhere", GPU, "1.19.2", training_build())
    code = f"""
import sys
sys.path.append({str(tmp_path / "elsewhere")!r})
from cpt_fx.ort.environment import builds
print(builds(), end="")
"""
    assert python(site, code).stdout == f"{{'{PLAIN}': '1.31.1', '{CPU}': '1.19.2'}}"


def test_missing_writers_are_named(site: Path) -> None:
    assert "needs onnx 1.16 or newer: No module named 'onnx'" in said(site, "require_onnx")
    install(site, "onnx", "1.23.2", {"onnx/__init__.py": "__version__ = '1.23.2'"})
    assert "needs onnxscript 0.5 or newer: No module named 'onnxscript'" in said(site, "require_onnx")
    assert steps(said(site, "require_onnx")) == [INSTALL.format("onnx")]
    assert steps(said(site, "require_training")) == [INSTALL.format("ort")]
    # Who has a build that trains is not led to another.
    install(site, GPU, "1.19.2", training_build())
    assert steps(said(site, "require_onnx")) == [INSTALL.format("ort-training-gpu")]


def test_writers_that_do_not_work_are_named(site: Path) -> None:
    install_writers(site, onnx="1.9.0")
    assert "needs onnx 1.16 or newer: 1.9.0 is there" in said(site, "require_onnx")
    (site / "onnx/__init__.py").write_text("import no_such_library  # none")
    assert "needs onnx 1.16 or newer: No module named 'no_such_library'" in said(site, "require_onnx")


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


def test_the_error_is_of_both_kinds() -> None:
    assert issubclass(PackageError, ExportError)
    assert issubclass(PackageError, ImportError)


def test_training_packages_that_are_installed_work() -> None:
    pytest.importorskip("onnxruntime.training.api")
    environment.require_training()
    assert environment.check_training().works
    assert len(environment.builds()) == 1
