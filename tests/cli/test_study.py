"""`cpt-fx study`: what it runs, prints and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpt_fx import study
from tests.cli.commands import Capture, call, data, refused

ROOT = Path(__file__).parents[2]
TASK = """
import torch
from torch import nn
import cpt_fx

def train(schedule, seed, lr=0.1, fail=False):
    print("a word from the training")
    if fail:
        raise KeyError("no data")
    x = torch.randn(64, 8)
    y = x @ torch.randn(8, 1)
    model = cpt_fx.transform(nn.Linear(8, 1), schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(schedule.total_steps):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {"loss": loss.item(), "bits": schedule.bits(0).weight}
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A task that really trains, in a file of its own in the current folder."""
    (tmp_path / "cli_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return "cli_task.py:train"


def run_words(task: str, *more: str) -> list[str]:
    return ["study", "run", task, "--store", "s.sqlite", "--steps", "16", "--seeds", "2", "--better", "lower", *more]


@pytest.mark.slow
def test_a_study_from_beginning_to_end(task: str, capsys: Capture) -> None:
    words = run_words(
        task, "--schedules", "CR, RR,static,static 6", "--bits", "3,8", "--bits", "4,8", "--set", "lr=0.05"
    )
    code, out, err = call(capsys, *words)
    assert code == 0, err
    assert "a word from the training" not in out
    assert ["cli_task", "schedules", "16", "0", "0"] in [line.split() for line in out.splitlines()]
    assert "[12/12] RR (4, 8) seed 1: loss " in err  # static 6 and static 8 are the same in both pairs
    records = study.load("s.sqlite").records
    assert len(records) == 16
    assert {(r.study, r.metric, r.better, r.total_steps) for r in records} == {("cli_task", "loss", "lower", 16)}
    assert records[0].options == {"lr": 0.05}

    found = data(capsys, *words, "--out", "report")
    assert found["studies"] == [{"name": "cli_task", "experiment": "schedules", "done": 16, "failed": 0, "open": 0}]
    for path in found["files"].values():
        assert Path(path).stat().st_size > 0
    assert any(path.endswith(".html") for path in found["files"].values())

    assert data(capsys, "study", "status", "s.sqlite")["studies"] == found["studies"]
    code, out, err = call(capsys, "study", "report", "s.sqlite", "--out", "again")
    assert code == 0, err
    assert f"wrote {Path('again') / 'cli_task.html'}" in out
    assert {path.name for path in Path("again").iterdir()} == {path.name for path in Path("report").iterdir()}


@pytest.mark.slow
def test_processes(task: str) -> None:
    """The command itself, as it is typed."""
    done = subprocess.run(
        [sys.executable, "-m", "cpt_fx", *run_words(task, "--schedules", "CR,RR", "--workers", "2", "--name", "mine")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "a word from the training" not in done.stdout
    assert done.stderr.count("a word from the training") == 4
    assert ["mine", "schedules", "4", "0", "0"] in [line.split() for line in done.stdout.splitlines()]
    assert {r.status for r in study.load("s.sqlite", "mine").records} == {"done"}


def test_failed_cells_make_it_fail(task: str, capsys: Capture) -> None:
    words = run_words(task, "--schedules", "CR", "--set", "fail=True", "--quiet")
    code, out, err = call(capsys, *words)
    assert code == 1
    assert "cli_task, CR (3, 8) seed 0: KeyError: 'no data'" in out
    assert err.splitlines()[-1] == "cpt-fx: error: 2 cells failed; the same command tries again"
    code, out, _ = call(capsys, *words, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["failed"][0]["reason"] == "KeyError: 'no data'"
    assert "Traceback" in found["failed"][0]["traceback"]
    assert data(capsys, "study", "status", "s.sqlite")["failed"] == found["failed"]


@pytest.mark.slow
def test_critical(task: str, capsys: Capture) -> None:
    words = ["study", "critical", task, "--store", "s.sqlite", "--steps", "16", "--seeds", "3,", "--quiet"]
    found = data(
        capsys, *words, "--deficits", "0,8", "--window", "4", "--starts", "0,4", "--delayed", "RR", "--delays", "4",
        "--q-max", "6", "--constant-length", "--metric", "bits",
    )  # fmt: skip
    assert [(one["experiment"], one["done"]) for one in found["studies"]] == [
        ("deficit", 2), ("delayed", 4), ("first-cycle", 3), ("window", 3),
    ]  # fmt: skip
    records = study.load("s.sqlite").records
    assert {r.seed for r in records} == {3}
    assert {r.total_steps for r in records} == {16}
    assert {r.q_max for r in records} == {6}
    assert {r.label: r.value for r in records}["deficit 8"] == 3
    longer = data(capsys, *words, "--name", "longer", "--experiments", "deficit", "--deficits", "8")
    assert longer["studies"] == [{"name": "longer", "experiment": "deficit", "done": 1, "failed": 0, "open": 0}]
    assert study.load("s.sqlite", "longer").records[0].total_steps == 24


def test_values_of_options(task: str, capsys: Capture) -> None:
    from cpt_fx.cli import parser

    words = ["a=1", "b=0.5", "c=True", "d=None", "e=text", "f=[1, 2]", "g='7'", "weight-decay=0", "h=a=b", "i="]
    options = parser().parse_args(run_words(task, *(part for word in words for part in ("--set", word)))).options
    assert dict(options) == {
        "a": 1, "b": 0.5, "c": True, "d": None, "e": "text", "f": [1, 2], "g": "7", "weight_decay": 0, "h": "a=b",
        "i": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "lr"], "must look like name=value, got 'lr'"),
        (["--set", "lr=1", "--set", "lr=2"], "--set gives lr more than once"),
        (["--bits", "3"], "must be two widths, as in 3,8, got '3'"),
        (["--bits", "3,x"], "must be whole numbers with commas between them"),
        (["--better", "best"], "invalid choice: 'best'"),
        (["--schedules", "CR,XX"], "schedules may name"),
        (["--schedules", ","], "at least one schedule"),
        (["--set", "rate=1"], "train takes no argument 'rate' of options"),
        (["--workers", "0"], "workers must be"),
        (["--out", "cli_task.py"], "--out must be a directory, cli_task.py is a file"),
    ],
)
def test_wrong_calls(task: str, capsys: Capture, more: list[str], message: str) -> None:
    code, said = refused(capsys, *run_words(task, *more))
    assert code == 2
    assert message in said
    assert not Path("s.sqlite").exists()


def test_what_is_not_there(task: str, capsys: Capture) -> None:
    for words in (["status", "no.sqlite"], ["report", "no.sqlite", "--out", "x"]):
        code, said = refused(capsys, "study", *words)
        assert code == 1
        assert "there is no store no.sqlite" in said
    code, said = refused(capsys, *run_words("nowhere.py:train"))
    assert "there is no file" in said
    code, _, err = call(capsys, "study")
    assert code == 2
    assert "name an action, as in `cpt-fx study status`" in err


@pytest.mark.parametrize("action", ["run", "critical", "report", "status"])
def test_every_action_explains_itself(action: str, capsys: Capture) -> None:
    from cpt_fx.cli import parser

    code, out, _ = call(capsys, "study", action, "--help")
    assert code == 0
    example: Any = out.rpartition("example:\n")[2].split()
    assert example[:3] == ["cpt-fx", "study", action]
    assert callable(parser().parse_args(example[1:]).run)
