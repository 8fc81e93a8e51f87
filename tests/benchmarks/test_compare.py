"""`benchmarks/compare.py`: what it prints, writes and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(6, 4)

def alone():
    return nn.Linear(2, 2)
"""
QUICK = ("--model", "bench_models:make", "--steps", "2", "--threads", "1", "--backend", "eager")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "bench_models", raising=False)
    torch.compiler.reset()


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
        print(stop.code if code == 1 else "", file=sys.stderr)
    return (code, *capsys.readouterr())


def test_tables_and_targets(capsys: Capture) -> None:
    code, out, _ = call(capsys, *QUICK, "--contenders", "simulated", "simulated-compiled", "fp32-compiled", "brevitas")
    assert code == 0
    assert "Sequential of bench_models:make; batch 6x4" in out
    for heading in ("10 to 90 %", "peak memory", "recompiled", "quantized"):
        assert heading in out
    assert out.count("simulated, compiled") >= 3
    assert "target, simulated, compiled: compiled again at most 0 times while widths change: measured 0: met" in out
    assert "…" not in out.partition("FP32 eager:")[0]


def test_data_and_page(capsys: Capture) -> None:
    options = (*QUICK, "--contenders", "simulated", "--bits", "4", "6", "--recipe", "paper")
    code, out, err = call(capsys, *options, "--json", "--html", "page.html")
    assert code == 0
    data = json.loads(out)
    assert [row["name"] for row in data["contenders"]] == ["fp32", "simulated"]
    assert data["contenders"][1]["widths"] == [4, 5, 6]
    again = (
        "python benchmarks/compare.py --model bench_models:make --steps 2 --threads 1 --contenders simulated "
        "--recipe paper --bits 4 6"
    )
    assert data["machine"]["command"] == f"{again} --backend eager"
    assert "wrote page.html" in err
    assert Path("page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "resnet"], 2, "--model is resnet74, resnet20"),
        (["--model", "bench_models:make", "--batch", "3"], 2, "--batch is for named models"),
        (["--contenders", "fp33"], 2, 'Did you mean "fp32"?'),
        (["--steps", "1"], 2, "steps must be an integer of at least 2, got 1"),
        (["--threads", "0"], 2, "threads must be an integer of at least 1"),
        (["--batch", "0"], 2, "batch must be an integer of at least 1"),
        (["--bits", "8", "3"], 2, "q_min"),
        (["--recipe", "nope"], 2, "unknown recipe 'nope'"),
        (["--html", "."], 2, "--html must be a file"),
        (["--model", "bench_models:alone"], 1, "must return (model, example_inputs)"),
        (["--model", "bench_models:mak"], 1, "has no 'mak'"),
    ],
)
def test_what_is_refused(arguments: list[str], code: int, message: str, capsys: Capture) -> None:
    found, out, err = call(capsys, *arguments)
    assert (found, out) == (code, "")
    assert "error: " in err and "Traceback" not in err
    assert message in err


def test_help_needs_no_torch() -> None:
    code = "import sys; from compare import parser; parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS).returncode == 0
