"""`cpt-fx export`: what it writes, what it says, and how it fails."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpt_fx.cli import parser
from cpt_fx.cli.export import API, RUN, WRITE
from tests.cli import commands
from tests.cli.commands import Capture
from tests.export.fake_packages import ROOT, install, install_writers, plain_build, training_build

TARGETS = ("onnx", "qdq", "ort-training", "report", "doctor", "inspect")
TRAINS = importlib.util.find_spec("onnxruntime") is not None
WRITES = importlib.util.find_spec("onnx") is not None and importlib.util.find_spec("onnxscript") is not None

MODELS = """
import torch
from torch import nn
import cpt_fx

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.randn(16, 4),)

def without_inputs():
    return make()[0]

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, features):
        return self.fc(features)

def named():
    return Named(), {"features": torch.randn(16, 4)}

def trained():
    model, inputs = make()
    result = cpt_fx.transform(model, cpt_fx.schedules.Static(6))
    result(*inputs)
    return result, inputs

def of_one():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
        def forward(self, x):
            return self.fc(x.view(4))
    return Flat(), (torch.randn(1, 4),)

def own_loss():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
        def forward(self, x):
            return self.fc(x).square().mean()
    return Own(), (torch.randn(16, 4),)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_exports.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "cli_exports", raising=False)
    return tmp_path


needs_onnx = pytest.mark.skipif(not WRITES, reason="the extra onnx is not installed")
needs_training = pytest.mark.skipif(not TRAINS, reason="the extra ort is not installed")


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    return commands.call(capsys, "export", *arguments)


def data(capsys: Capture, *arguments: str) -> Any:
    return commands.data(capsys, "export", *arguments)


def refused(capsys: Capture, *arguments: str) -> tuple[int, str]:
    return commands.refused(capsys, "export", *arguments)


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_explains_itself(name: str, capsys: Capture) -> None:
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    example = out.rpartition("example:\n")[2].split()
    assert example[:3] == ["cpt-fx", "export", name]
    assert callable(parser().parse_args(example[1:]).run)


def test_without_a_target_it_names_them(capsys: Capture) -> None:
    code, said = refused(capsys)
    assert code == 2
    assert "name a target, as in `cpt-fx export doctor`" in said


def test_wrong_usage_is_code_2(capsys: Capture) -> None:
    arguments = ("ort-training", "cli_exports:make", "made", "--optimizer", "adamw", "--momentum", "0.9")
    code, said = refused(capsys, *arguments)
    assert (code, "--momentum is for --optimizer sgd, got adamw" in said) == (2, True)


@pytest.mark.slow
def test_the_doctor_says_what_is_here(capsys: Capture) -> None:
    code, out, err = call(capsys, "doctor", "--json")
    found = json.loads(out)
    assert code == (0 if TRAINS and WRITES else 1)
    assert found["findings"][RUN]["works"] == TRAINS
    assert found["findings"][WRITE]["works"] == WRITES
    assert found["packages"]["torch"]
    assert ("models cannot be exported for training here" in err) == bool(code)
    code, out, _ = call(capsys, "doctor")
    assert [line for line in out.splitlines() if line.startswith(f" {RUN}")] != []
    if not TRAINS:
        assert 'pip install -c constraints.txt "cpt_fx[ort]"' in out


@pytest.mark.slow
def test_the_doctor_sees_a_mixture(tmp_path: Path) -> None:
    """In a process of its own, with packages that stand before those that are installed."""
    install_writers(tmp_path)
    install(tmp_path, "onnxruntime-training-cpu", "1.19.2", training_build())
    code, out = doctor(tmp_path)
    found = json.loads(out)
    assert (code, found["findings"][API]["works"]) == (0, True)
    assert not found["remark"]
    install(tmp_path, "onnxruntime", "1.31.1", plain_build())
    code, out = doctor(tmp_path)
    found = json.loads(out)
    assert code == 0
    assert found["findings"][RUN]["works"]
    assert found["findings"][API]["remedy"][0].startswith("pip uninstall -y onnxruntime onnxruntime-training-cpu ")
    assert found["builds"] == {"onnxruntime": "1.31.1", "onnxruntime-training-cpu": "1.19.2"}
    assert "share one folder" in found["remark"]
    code, out = doctor(tmp_path, "--table")
    assert "pip uninstall -y onnxruntime onnxruntime-training-cpu" in out


@pytest.mark.slow
def test_the_doctor_warns_of_a_mixture_that_works(tmp_path: Path) -> None:
    install_writers(tmp_path)
    install(tmp_path, "onnxruntime", "1.31.1", plain_build())
    install(tmp_path, "onnxruntime-training-cpu", "1.19.2", training_build())
    code, out = doctor(tmp_path)
    found = json.loads(out)
    assert code == 0
    # Whose files are there is what works.
    assert found["findings"][API]["found"] == "onnxruntime 1.19.2"
    assert "uninstalling either breaks the other" in found["remark"]


@pytest.mark.slow
def test_training_needs_what_writes_files(tmp_path: Path) -> None:
    install_writers(tmp_path, onnxscript="0.1.0")
    install(tmp_path, "onnxruntime-training-cpu", "1.19.2", training_build())
    code, out = doctor(tmp_path)
    problem = json.loads(out)["findings"][WRITE]["problem"]
    assert (code, problem) == (1, "writing ONNX files needs onnxscript 0.5 or newer: 0.1.0 is there")


def doctor(decision: Path, *words: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": f"{decision}:{ROOT}"}
    command = [sys.executable, "-m", "cpt_fx", "export", "doctor", *([] if words else ["--json"])]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=decision)
    assert "Traceback" not in run.stderr
    return run.returncode, run.stdout


@pytest.mark.skipif(WRITES, reason="the extra is installed")
@pytest.mark.parametrize(("target", "extra"), [("onnx", "onnx"), ("qdq", "onnx"), ("ort-training", "ort")])
def test_a_missing_extra_is_named(target: str, extra: str, capsys: Capture, models: Path) -> None:
    code, said = refused(capsys, target, "cli_exports:make", "made")
    assert code == 1
    assert f'pip install -c constraints.txt "cpt_fx[{extra}]"' in said


def test_inspect_refuses_what_is_no_export(capsys: Capture, tmp_path: Path) -> None:
    code, said = refused(capsys, "inspect", str(tmp_path))
    assert (code, "holds no manifest.json" in said) == (1, True)
    code, said = refused(capsys, "inspect", str(tmp_path / "nowhere"))
    assert (code, "is not a directory" in said) == (1, True)


@needs_onnx
def test_onnx_is_written(capsys: Capture, models: Path) -> None:
    code, out, _ = call(capsys, "onnx", "cli_exports:make", "open.onnx")
    assert code == 0
    assert out.startswith("wrote open.onnx, ")
    found = data(capsys, "onnx", "cli_exports:named", "fixed.onnx", "--bits", "6")
    assert found == {"path": "fixed.onnx", "bytes": (models / "fixed.onnx").stat().st_size}
    import onnx

    names = [value.name for value in onnx.load("open.onnx").graph.input]
    assert [name for name in names if name.startswith("bits.")] != []
    assert [value.name for value in onnx.load("fixed.onnx").graph.input] == ["features"]
    code, said = refused(capsys, "onnx", "cli_exports:make", "open.onnx")
    assert code == 1
    assert "open.onnx exists" in said
    assert call(capsys, "onnx", "cli_exports:make", "open.onnx", "--overwrite")[0] == 0


@needs_onnx
def test_an_export_needs_inputs(capsys: Capture, models: Path) -> None:
    code, said = refused(capsys, "onnx", "cli_exports:without_inputs", "made.onnx")
    assert code == 1
    assert "must return (model, example_inputs)" in said


@needs_onnx
def test_options_that_come_too_late_are_refused(capsys: Capture, models: Path) -> None:
    for option in ("--recipe=paper", "--exclude=0"):
        code, said = refused(capsys, "onnx", "cli_exports:trained", "made.onnx", option)
        assert (code, "--recipe and --exclude come too late" in said) == (2, True)


@needs_onnx
def test_qdq_is_written_and_says_what_differs(capsys: Capture, models: Path) -> None:
    code, out, _ = call(capsys, "qdq", "cli_exports:trained", "made.onnx", "--bits", "6")
    assert code == 0
    assert "6 quantizers" in out
    found = data(capsys, "qdq", "cli_exports:trained", "again.onnx")
    assert found["bytes"] == (models / "again.onnx").stat().st_size
    assert len(found["report"]["quantizers"]) == 6


@pytest.mark.parametrize("target", ["onnx", "qdq"])
def test_widths_are_read_as_in_python(target: str, capsys: Capture) -> None:
    arguments = ["export", target, "module:make", "made.onnx", "--bits"]
    assert parser().parse_args([*arguments, "4,8,8"]).bits == (4, 8, 8)
    assert parser().parse_args([*arguments, "5"]).bits == (5, 5, 5)
    for wrong in ("4,8", "four", "33", "4,8,-1", "4.5", ""):
        with pytest.raises(SystemExit):
            parser().parse_args([*arguments[:-1], f"--bits={wrong}"])
        assert "argument --bits: " in capsys.readouterr().err


@needs_onnx
def test_errors_name_the_options_of_the_command(capsys: Capture, models: Path) -> None:
    Path("there.onnx").touch()
    Path("full").mkdir()
    Path("full", "file").touch()
    for arguments, words, others in (
        (("onnx", "cli_exports:make", "there.onnx"), "pass --overwrite to", "overwrite=True"),
        (("ort-training", "cli_exports:make", "full"), "pass --overwrite to", "overwrite=True"),
        (("onnx", "cli_exports:of_one", "made.onnx"), "with --fixed-batch", "dynamic_batch"),
        (("qdq", "cli_exports:make", "made.onnx", "--bits", "9"), "--bits: weights of 9 bits", "export.onnx"),
    ):
        if arguments[0] == "ort-training" and importlib.util.find_spec("onnxruntime") is None:
            continue
        code, said = refused(capsys, *arguments)
        assert code == 1
        assert words in said and others not in said


@needs_onnx
def test_the_report_is_printed(capsys: Capture, models: Path) -> None:
    found = data(capsys, "report", "cli_exports:make")
    assert set(found["targets"]) == {"ort_training", "onnx", "qdq"}
    code, out, _ = call(capsys, "report", "cli_exports:make")
    assert code == 0
    assert "Sequential, exported" in out


@needs_onnx
@needs_training
def test_a_directory_is_written_and_inspected(capsys: Capture, models: Path) -> None:
    options = ("--optimizer", "sgd", "--lr", "0.5", "--momentum", "0.9", "--q-max", "6")
    code, out, _ = call(capsys, "ort-training", "cli_exports:make", "made", *options)
    assert code == 0
    assert "sgd" in out and "lr 0.5" in out and "momentum 0.9" in out
    assert "loss: cross_entropy" in out
    again = call(capsys, "inspect", "made")
    assert again == (0, out, "")
    found = data(capsys, "inspect", "made")
    assert found["manifest"]["optimizer"]["learning_rates"] == [0.5]
    assert {one["state"] for one in found["files"].values()} == {"as written"}
    assert refused(capsys, "ort-training", "cli_exports:make", "made")[0] == 1
    # What is no longer as it was written is shown.
    first, second = list(found["files"])[:2]
    with (models / "made" / first).open("ab") as file:
        file.write(b"x")
    (models / "made" / second).unlink()
    files = data(capsys, "inspect", "made")["files"]
    assert (files[first]["state"], files[second]["state"]) == ("changed", "missing")


@needs_onnx
@needs_training
def test_a_model_with_a_loss_of_its_own(capsys: Capture, models: Path) -> None:
    code, out, err = call(
        capsys, "ort-training", "cli_exports:own_loss", "made", "--loss", "none", "--optimizer", "adamw"
    )
    assert (code, err) == (0, "")
    assert "optimizer: adamw" in out
