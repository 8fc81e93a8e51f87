"""Costs, groups and recommendations."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from cpt_fx.schedules import (
    NAMES,
    Bits,
    Custom,
    Cyclic,
    Piecewise,
    Static,
    mean_costs,
    measured,
    named,
    recommend,
    relative_cost,
    savings_group,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "costs.json").read_text())


def build(name: str, record: dict[str, Any]) -> Cyclic:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return named(
            name,
            q_min=record["q_min"],
            q_max=record["q_max"],
            total_steps=record["total"],
            cycles=record["cycles"],
            period=record["period"],
        )


def label(record: dict[str, Any]) -> str:
    fields = ("domain", "q_min", "q_max", "total", "cycles", "convention")
    return "-".join(str(record[field]) for field in fields if field in record)


@pytest.mark.parametrize("record", GOLDEN["main"] + GOLDEN["odd_or_single_cycle"], ids=label)
@pytest.mark.parametrize("name", NAMES)
def test_costs_to_the_last_bit(name: str, record: dict[str, Any]) -> None:
    schedule, published = build(name, record), record["schedules"][name]
    cost = mean_costs(schedule)
    ratio = relative_cost(schedule)
    assert cost.forward == published["forward"]
    assert cost.backward == published["backward"]
    assert cost.average == published["average"]
    assert cost.mean_bits == published["mean_bits"]
    assert ratio == published["ratio_to_static"]
    assert 100 * (1 - ratio) == published["saving_percent"]
    assert mean_costs(Static(record["q_max"]), 10).average == pytest.approx(record["static_average"], rel=1e-15)


@pytest.mark.parametrize("record", GOLDEN["domains"], ids=label)
def test_ratios_of_each_domain(record: dict[str, Any]) -> None:
    ratios = {name: relative_cost(build(name, record)) for name in NAMES}
    assert ratios == record["ratio_to_static"]


def test_groups() -> None:
    published = {name: group.lower() for group, names in GOLDEN["expected_groups"].items() for name in names}
    assert {name: savings_group(name) for name in NAMES} == published


def test_unknown_group_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r'name must be one of "CR".*got \'rth\'. Did you mean "RTH"\?'):
        savings_group("rth")


def test_switched_off_costs_full_precision() -> None:
    assert mean_costs(Static(0, total_steps=3)) == mean_costs(Static(32, total_steps=3))
    assert mean_costs(Static(32, total_steps=3)).average == 1.0


def test_unequal_widths_cost_their_products() -> None:
    cost = mean_costs(Static(Bits(weight=4, activation=8, gradient=16), total_steps=1))
    assert cost.forward == 4 * 8 / 1024
    assert cost.backward == (4 * 16 + 8 * 16) / 1024  # input gradient from weights, weight gradient from activations


def test_relative_to_other_static_widths() -> None:
    run = Static(4, total_steps=5)
    assert relative_cost(run) == 1.0
    assert relative_cost(run, 8) == pytest.approx(0.25)
    assert relative_cost(run, Bits(4, 4, 8)) == pytest.approx((16 + 32) / (16 + 64))
    assert relative_cost(Piecewise({0: 8, 1: 0}, total_steps=2)) == pytest.approx((64 + 1024) / 2 / 1024)


def test_cost_needs_an_end_and_a_reference() -> None:
    with pytest.raises(ValueError, match="has no total_steps: pass a length"):
        mean_costs(Static(8))
    with pytest.raises(ValueError, match="static_bits must be given"):
        relative_cost(Custom(lambda step: 4))
    with pytest.raises(ValueError, match="cost of no steps"):
        mean_costs(Static(8), 0)


@pytest.mark.parametrize(("priority", "group"), [("quality", "small"), ("balanced", "medium"), ("savings", "large")])
def test_priority_picks_the_group(priority: str, group: str) -> None:
    choice = recommend(priority=priority)
    assert choice.group == group
    assert set(choice.names) == {name for name in NAMES if savings_group(name) == group}
    assert list(choice.relative_costs) == sorted(choice.relative_costs)
    first = named(choice.names[0], q_min=3, q_max=8, total_steps=64_000)
    assert choice.relative_cost == relative_cost(first)


def test_budget_moves_to_a_group_that_fits() -> None:
    choice = recommend(priority="quality", budget=0.63)
    assert choice.names == ("LR", "LT")
    assert max(choice.relative_costs) <= 0.63
    assert "None of it fits the budget of 0.63" in choice.reason
    assert recommend(priority="quality", budget=0.5).group == "large"
    assert recommend(priority="quality", budget=0.9).group == "small"


def test_widths_count() -> None:
    assert recommend(priority="savings", q_min=5, q_max=6).relative_cost == pytest.approx(0.806, abs=5e-4)


def test_a_family_that_was_not_measured_only_adds_to_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "read", lambda: {})
    plain, hinted = recommend(), recommend(family="transformer")
    assert hinted.names == plain.names and not hinted.measured and hinted.figure is None
    assert hinted.reason.startswith(plain.reason)
    assert "was not measured here, so this is by the cost formula alone." in hinted.reason
    assert "2 cycles" in hinted.reason


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"priority": "quality "}, ValueError, 'priority must be one of .* Did you mean "quality"?'),
        ({"family": "CNNs"}, ValueError, 'family must be one of .* Did you mean "cnn"?'),
        ({"budget": 0.3}, ValueError, "budget must be at least 0.399, the cost of the cheapest schedule, got 0.3"),
        ({"budget": "0.5"}, TypeError, "budget must be a number"),
        ({"budget": float("nan")}, ValueError, "budget must be at least"),
        ({"q_min": 9}, ValueError, "q_min must not exceed q_max, got q_min=9 and q_max=8"),
    ],
)
def test_recommend_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        recommend(**arguments)
