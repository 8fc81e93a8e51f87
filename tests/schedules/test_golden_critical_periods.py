"""Bits and learning rates of the published deficit and probe runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpt_fx.schedules import Deficit, learning_rates

CASES = json.loads((Path(__file__).parents[1] / "golden" / "critical_periods.json").read_text())["cases"]


def label(case: dict[str, Any]) -> str:
    window = case.get("deficit", f"{case.get('start')}..{case.get('end')}")
    return f"{case['kind']}-{case['domain']}-{window}-{case.get('lr_schedule', 'no-lr')}"


def build(case: dict[str, Any]) -> Deficit:
    widths = {"q_min": case["q_deficit"], "q_max": case["q_normal"], "q_grad": case["q_grad"]}
    if case["kind"] == "probe":
        return Deficit(**widths, start=case["start"], end=case["end"], total_steps=case["total"])
    inclusive = case["domain"] == "cifar"
    return Deficit(**widths, steps=case["deficit"], total_steps=case["total"], inclusive=inclusive)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_bits(case: dict[str, Any]) -> None:
    published = [bits for bits, run in case["bits"] for _ in range(run)]
    trajectory = build(case).trajectory()
    assert trajectory[:, 0].tolist() == trajectory[:, 1].tolist() == published
    assert (trajectory[:, 2] == case["q_grad"]).all()
    assert (trajectory[:, 0] == case["q_deficit"]).sum() == case["low_precision_steps"]


@pytest.mark.parametrize("case", [c for c in CASES if "lr" in c], ids=label)
def test_learning_rates_to_the_last_bit(case: dict[str, Any]) -> None:
    rule = getattr(learning_rates, case["lr_schedule"].replace("-", "_"))
    arguments = {"lr": case["lr0"], "total_steps": case["total"]}
    if case["lr_schedule"].endswith("no-def-decay"):
        arguments["deficit"] = case["deficit"]
    assert [rule(step, **arguments) for step in range(case["total"])] == case["lr"]


def test_rates_hold_after_the_run() -> None:
    assert learning_rates.cosine(500, lr=1.0, total_steps=100) == pytest.approx(0.1)
    assert learning_rates.piecewise(500, lr=1.0, total_steps=100) == pytest.approx(0.01)


def test_deficit_that_leaves_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="deficit must be an integer from 0 to 99, got 100"):
        learning_rates.cosine_no_def_decay(0, lr=0.1, total_steps=100, deficit=100)
