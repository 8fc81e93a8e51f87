"""The loop that all examples share: exact resuming, options, presets, and what a run refuses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranges import range_of
from support.script import make_schedule
from support.training import Outcome, fit

from cpt_fx.schedules import Cyclic, Deficit, Schedule, named
from tests.examples.digits_task import SCRIPT, Digits

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def schedule(steps: int = 30) -> Schedule:
    return named("CR", q_min=3, q_max=8, total_steps=steps, cycles=2)


def state(outcome: Outcome) -> dict[str, torch.Tensor]:
    return {name: value for name, value in outcome.model.state_dict().items() if torch.is_tensor(value)}


def assert_equal(one: Outcome, other: Outcome) -> None:
    assert one.losses == other.losses
    assert one.metrics == other.metrics
    assert one.curve == other.curve
    first, second = state(one), state(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class StoppedError(Exception):
    """What stops a run in the middle."""


class Fragile(Digits):
    """Digits that break down before a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.last = step

    def batch(self, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        if step == self.last:
            raise StoppedError
        return super().batch(step, seed)


@pytest.mark.parametrize("stop", [4, 17, 29])
def test_a_run_that_was_cut_short_ends_with_the_same_bits(stop: int, tmp_path: Path) -> None:
    whole = fit(Digits(), schedule(), seed=3, evaluations=3)
    file = tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        fit(Fragile(stop), schedule(), seed=3, evaluations=3, checkpoint=file, save_every=4)
    resumed = fit(Digits(), schedule(), seed=3, evaluations=3, checkpoint=file, save_every=4)
    assert resumed.resumed_at == stop // 4 * 4
    assert_equal(whole, resumed)


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    first = fit(Digits(), schedule(), checkpoint=tmp_path / "run.pt")
    again = fit(Fragile(0), schedule(), checkpoint=tmp_path / "run.pt")
    assert again.resumed_at == 30
    assert again.metrics == first.metrics


def test_evaluating_on_the_way_changes_nothing() -> None:
    assert fit(Digits(), schedule()).losses == fit(Digits(), schedule(), evaluations=10).losses


def test_seeds_differ() -> None:
    assert fit(Digits(), schedule(), seed=0).losses != fit(Digits(), schedule(), seed=1).losses


@pytest.mark.slow
def test_killed_by_the_system_and_taken_up_as_a_user_would(tmp_path: Path) -> None:
    """The process is killed as soon as there is a checkpoint; the second call ends like one that was left alone."""
    command = [sys.executable, str(HERE / "digits_task.py"), "--steps", "400", "--save-every", "20", "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"}
    file = tmp_path / "run.pt"
    running = subprocess.Popen([*command, "--checkpoint", str(file)], env=environment, stderr=subprocess.DEVNULL)
    while not file.exists():
        assert running.poll() is None, "it ended before it was killed"
    running.send_signal(signal.SIGKILL)
    running.wait()

    def finished(*more: str) -> str:
        run = subprocess.run([*command, *more], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    resumed, whole = finished("--checkpoint", str(file)), finished()
    assert "resumed at step" in resumed
    table = re.compile(r"accuracy [\d.]+ \(higher is better\)")
    assert table.findall(resumed) == table.findall(whole) != []


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    fit(Digits(), schedule(), checkpoint=file, identity={"lr": 0.1})
    with pytest.raises(ValueError, match=r"there lr is 0.1, here 0.2"):
        fit(Digits(), schedule(), checkpoint=file, identity={"lr": 0.2})
    with pytest.raises(ValueError, match="seed"):
        fit(Digits(), schedule(), checkpoint=file, seed=1, identity={"lr": 0.1})
    file.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        fit(Digits(), schedule(), checkpoint=file)


def test_what_is_typed_wins_over_presets_and_these_over_defaults() -> None:
    assert SCRIPT.options([]).weight_decay == 0.0
    preset = SCRIPT.options(["--preset", "slow"])
    assert (preset.lr, preset.steps) == (0.01, 30)
    assert SCRIPT.options(["--preset", "slow", "--lr", "1"]).lr == 1
    assert SCRIPT.options(["--preset", "slow", "--fast"]).steps == 20
    assert SCRIPT.options(preset="slow", steps=7).steps == 7
    assert SCRIPT.options(preset="slow", steps=7).lr == 0.01


def test_epochs_that_are_typed_replace_the_steps_of_a_preset() -> None:
    options = SCRIPT.options(["--preset", "slow", "--epochs", "2"])
    assert (options.epochs, options.steps) == (2, None)
    with pytest.raises(SystemExit):
        SCRIPT.options(["--epochs", "2", "--steps", "3"])


@pytest.mark.parametrize(
    ("typed", "period"), [("exact", None), ("published", 8), ("published-imagenet", 7)], ids=lambda value: str(value)
)
def test_periods_as_they_were_published(typed: str, period: int | None) -> None:
    options = SCRIPT.options(["--period", typed, "--cycles", "4"])
    made = make_schedule(options, 30)
    assert isinstance(made, Cyclic)
    assert made.period == period


def test_the_width_of_evaluation() -> None:
    for typed, bits in (("q_max", None), ("current", "current"), ("5", 5)):
        assert make_schedule(SCRIPT.options(["--eval-bits", typed]), 30).eval_bits == bits
    with pytest.raises(ValueError, match=r"--eval-bits must be a width, q_max or current, got 'best'"):
        make_schedule(SCRIPT.options(["--eval-bits", "best"]), 30)


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no option 'stepps'.*steps"):
        SCRIPT.options(stepps=3)
    with pytest.raises(ValueError, match="unknown preset"):
        SCRIPT.options(preset="fastt")


def test_the_length_of_a_run_must_be_known() -> None:
    with pytest.raises(ValueError, match="--steps or --epochs"):
        SCRIPT.run(SCRIPT.options([]))
    _, planned, outcome = SCRIPT.run(SCRIPT.options(["--epochs", "1", "--batch", "100"]))
    assert planned.total_steps == len(outcome.losses) == 12


@pytest.mark.parametrize("name", ["static", "full", "RTH"])
def test_the_table_at_the_end(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    SCRIPT.main(["--fast", "--schedule", name, "--evaluations", "2"])
    said = capsys.readouterr().out
    assert "accuracy" in said
    assert "BitOps" in said
    assert ("nothing was rounded" in said) == (name == "full")


def test_a_study_calls_it_with_a_schedule() -> None:
    metrics = SCRIPT.train(schedule(60), seed=2, lr=0.2)
    assert metrics["accuracy"] > 0.5
    assert metrics == SCRIPT.train(schedule(60), seed=2, lr=0.2)


def test_the_range_test_of_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    SCRIPT.main(["--range-test", "12", "--threads", "1"])
    assert "range test: q_min = " in capsys.readouterr().out


def test_every_width_of_a_range_test_starts_from_the_same_state() -> None:
    task = Digits()
    task.seen = 5
    range_of(task, steps=8, widths=[3, 8])
    assert task.seen == 5 + 8 * 64


def test_a_deficit_may_hold_the_learning_rate() -> None:
    """Published runs with a deficit hold the rate until it is over, and decay it over the steps at full width."""
    asked: list[tuple[int, int]] = []

    class Asking(Digits):
        def learning_rate(self, step: int, total_steps: int) -> float | None:
            asked.append((step, total_steps))
            return super().learning_rate(step, total_steps)

    fit(Asking(), Deficit(q_min=3, q_max=8, steps=4, total_steps=10), hold_rate=True)
    assert asked == [(max(step - 4, 0), 6) for step in range(10)]
    asked.clear()
    fit(Asking(), Deficit(q_min=3, q_max=8, steps=4, total_steps=10))
    assert asked == [(step, 10) for step in range(10)]


def test_a_schedule_that_was_used_is_refused() -> None:
    used = schedule(10)
    fit(Digits(), used)
    with pytest.raises(ValueError, match="stands at step 10"):
        fit(Digits(), used)
