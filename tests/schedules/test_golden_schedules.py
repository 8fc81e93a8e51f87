"""The published bits, step by step."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpt_fx.schedules import NAMES, Cyclic, named

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text())


def expand(case: dict[str, Any]) -> list[int]:
    if case["encoding"] == "list":
        return list(case["bits"])
    return [bits for bits, run in case["bits"] for _ in range(run)]


def build(case: dict[str, Any], period: float | None, q_grad: tuple[int, int] | None = None) -> Cyclic:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd cycle counts are among the cases; test_errors.py covers the warning
        return named(
            case["schedule"],
            q_min=case["q_min"],
            q_max=case["q_max"],
            total_steps=case["total"],
            cycles=case["cycles"],
            period=period,
            q_grad=q_grad,
        )


def label(case: dict[str, Any]) -> str:
    fields = ("schedule", "q_min", "q_max", "total", "cycles", "convention")
    return "-".join(str(case[field]) for field in fields)


def differing(ours: Sequence[float], published: Sequence[float]) -> list[tuple[int, float, float]]:
    pairs = zip(ours, published, strict=True)
    return [(step, mine, theirs) for step, (mine, theirs) in enumerate(pairs) if mine != theirs]


def test_all_cases_are_there() -> None:
    assert len(GOLDEN["cases"]) == 200
    assert tuple(GOLDEN["schedules"]) == NAMES


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=label)
def test_bits(case: dict[str, Any]) -> None:
    schedule = build(case, case["period"])
    published = expand(case)
    assert sum(published) == case["sum_bits"]
    assert differing(schedule.trajectory()[:, 0].tolist(), published) == []
    assert (schedule.trajectory()[:, 2] == case["q_max"]).all()


@pytest.mark.parametrize("case", [c for c in GOLDEN["cases"] if c["total"] <= 1000], ids=label)
def test_bits_of_single_steps(case: dict[str, Any]) -> None:
    schedule = build(case, float(case["period"]))  # XNLI passes the period as a float
    assert differing([schedule.bits(step).weight for step in range(case["total"])], expand(case)) == []


@pytest.mark.parametrize(
    "case", [c for c in GOLDEN["cases"] if c["convention"] == "cost" and c["total"] % c["cycles"] == 0], ids=label
)
def test_default_period_is_the_integer_one_where_cycles_divide(case: dict[str, Any]) -> None:
    assert differing(build(case, None).trajectory()[:, 0].tolist(), expand(case)) == []


@pytest.mark.parametrize("case", GOLDEN["unrounded"], ids=label)
def test_values_to_the_last_bit(case: dict[str, Any]) -> None:
    schedule = build(case, case["period"])
    assert differing([schedule.value(step) for step in range(case["total"])], case["values"]) == []


@pytest.mark.parametrize("case", GOLDEN["with_cycled_gradient_bits"], ids=label)
def test_gradient_bits_cycle_too(case: dict[str, Any]) -> None:
    schedule = build(case, case["period"], q_grad=(case["grad_q_min"], case["grad_q_max"]))
    published = np.array([case["bits"], case["bits"], case["grad_bits"]]).T
    np.testing.assert_array_equal(schedule.trajectory(), published)


@pytest.mark.parametrize("name", NAMES)
def test_named_forms_are_the_published_ones(name: str) -> None:
    form = GOLDEN["schedules"][name]
    general = Cyclic(
        profile=form["profile"],
        pattern="triangular" if form["triangular"] else "repeated",
        reflection=form["reflection"],
        q_min=3,
        q_max=8,
        total_steps=100,
    )
    assert general == named(name, q_min=3, q_max=8, total_steps=100)
    assert general.name == name
