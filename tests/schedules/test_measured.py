"""Recommendations from measurements. Every measurement here is made up, and says so; the shipped file is only read."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpt_fx.schedules import NAMES, measured, named, recommend, relative_cost, savings_group

COSTS = {name: relative_cost(named(name, q_min=3, q_max=8, total_steps=64_000)) for name in NAMES} | {"static 8": 1.0}


def entry(means: dict[str, float], half: float, **changes: Any) -> dict[str, Any]:
    """A made-up measurement: every interval reaches `half` to each side of its difference."""
    labels = list(means)
    differences: dict[str, dict[str, list[float]]] = {}
    for index, one in enumerate(labels):
        for other in labels[index + 1 :]:
            value = means[one] - means[other]
            differences.setdefault(one, {})[other] = [value, value - half, value + half]
    row = {"sd": half, "n": 3}
    made = {
        "study": "made-up", "dataset": "made-up digits", "model": "a made-up net", "size": "1,000 images",
        "limits": "it is made up.", "steps": 800, "seeds": [0, 1, 2], "q_min": 3, "q_max": 8, "metric": "accuracy",
        "better": "higher", "figure": "docs/results/made-up-cost.png", "differences": differences, "left_out": {},
        "schedules": {label: {"mean": mean, "relative_cost": COSTS[label], **row} for label, mean in means.items()},
    }  # fmt: skip
    return made | changes


MEANS = {
    "RR": 0.80, "RTH": 0.84, "LR": 0.90, "LT": 0.90, "CR": 0.91, "CT": 0.905, "ETV": 0.87, "RTV": 0.915, "ER": 0.92,
    "ETH": 0.918, "static 8": 0.919,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "made_up.json"
    monkeypatch.setattr(measured, "PATH", path)
    return path


def hold(path: Path, *entries: dict[str, Any], family: str = "cnn") -> None:
    path.write_text(json.dumps({"families": {family: list(entries)}}))


def test_quality_is_the_best_mean_and_what_cannot_be_told_apart(file: Path) -> None:
    hold(file, entry(MEANS, 0.008))
    choice = recommend(priority="quality", family="cnn")
    assert choice.names == ("ER", "ETH", "RTV") and choice.group == "small" and choice.measured
    assert choice.relative_costs == tuple(COSTS[name] for name in choice.names)
    assert choice.figure == "docs/results/made-up-cost.png"
    for part in (
        "Measured on made-up digits with a made-up net (1,000 images): 800 steps, 3 seeds, at (3, 8), by accuracy",
        "ER has the best mean: 0.9200 ± 0.0080 at 0.822 of the cost of static 8.",
        "cannot tell it apart from ETH (−0.0020, −0.0100 to +0.0060), RTV (−0.0050, −0.0130 to +0.0030).",
        "Measurably worse, and so not among them: CR, CT, LR, LT, ETV, RTH, RR.",
        "Figure: docs/results/made-up-cost.png.",
        "What it cannot show: it is made up.",
    ):
        assert part in choice.reason, part


def test_savings_is_the_cheapest_that_is_not_measurably_worse_than_static(file: Path) -> None:
    hold(file, entry(MEANS, 0.016))
    choice = recommend(priority="savings", family="cnn")
    assert choice.names[0] == "CR" and list(choice.relative_costs) == sorted(choice.relative_costs)
    assert set(choice.names) == {"CR", "CT", "RTV", "ER", "ETH"}
    assert "CR is the cheapest that is not measurably worse than static 8: 0.910" in choice.reason
    assert "Less static 8 it is −0.009 (−0.025 to +0.007); a loss of 0.025 is not ruled out." in choice.reason


def test_savings_without_a_static_run_or_below_it_measures_by_the_best(file: Path) -> None:
    hold(file, entry({name: mean for name, mean in MEANS.items() if name != "static 8"}, 0.011))
    choice = recommend(priority="savings", family="cnn")
    assert choice.names[0] == "CR"
    assert (
        "not measurably worse than ER (static 8 was not measured, so the best of them is the measure)" in choice.reason
    )
    hold(file, entry(MEANS | {"static 8": 1.0}, 0.011))
    choice = recommend(priority="savings", family="cnn")
    assert choice.names[0] == "CR" and "static 8 is measurably better than all of them" in choice.reason


def test_balanced_is_the_smallest_sum_of_ranks(file: Path) -> None:
    hold(file, entry(MEANS, 0.016))
    choice = recommend(priority="balanced", family="cnn")
    # By mean: ER ETH RTV CR CT; by cost: CR CT RTV ER ETH. The sums are ER 3, CR 3, RTV 4, CT 5, ETH 5.
    assert choice.names == ("CR", "ER", "RTV", "CT", "ETH")
    assert (
        "has CR: 0.910" in choice.reason
        and "the best, ER, the smallest sum of ranks by mean and by cost" in choice.reason
    )


def test_priorities_agree_where_one_schedule_is_best_and_cheapest(file: Path) -> None:
    hold(file, entry(MEANS | {"RR": 0.99}, 0.01))
    for priority in ("quality", "balanced", "savings"):
        assert recommend(priority=priority, family="cnn").names[0] == "RR"


def test_lower_may_be_better(file: Path) -> None:
    turned = {name: 100 * (1 - mean) for name, mean in MEANS.items()}
    hold(file, entry(turned, 0.8, better="lower", metric="perplexity"))
    assert recommend(priority="quality", family="cnn").names == ("ER", "ETH", "RTV")
    hold(file, entry(turned, 1.6, better="lower", metric="perplexity"))
    choice = recommend(priority="savings", family="cnn")
    assert choice.names[0] == "CR" and "a loss of 2.5 is not ruled out" in choice.reason


def test_a_budget_leaves_the_measured_ones_that_fit(file: Path) -> None:
    hold(file, entry(MEANS, 0.008))
    choice = recommend(priority="quality", family="cnn", budget=0.7)
    assert choice.names == ("RTV", "CR") and max(choice.relative_costs) <= 0.7 and choice.group == "medium"


def test_a_budget_that_only_unmeasured_schedules_fit(file: Path) -> None:
    hold(file, entry({name: mean for name, mean in MEANS.items() if name not in ("RR", "RTH")}, 0.008))
    choice = recommend(priority="savings", family="cnn", budget=0.5)
    assert not choice.measured and choice.figure is None and choice.names == ("RR", "RTH")
    assert 'None of the schedules that were measured for the family "cnn" fits the budget of 0.5' in choice.reason


def test_what_has_no_measured_value_is_named(file: Path) -> None:
    partial = {name: mean for name, mean in MEANS.items() if name not in ("RR", "LT")}
    hold(file, entry(partial, 0.008, left_out={"RR": "1 of 3 seeds"}))
    assert "Without a measured value: LT, RR (1 of 3 seeds)." in recommend(family="cnn").reason.replace(
        "RR (1 of 3 seeds), LT", "LT, RR (1 of 3 seeds)"
    )


def test_other_widths_and_families_are_answered_by_the_formula(file: Path) -> None:
    hold(file, entry(MEANS, 0.008))
    other = recommend(priority="quality", family="cnn", q_min=4)
    assert not other.measured and other.group == "small" and other.figure is None
    assert "measured at (q_min, q_max) = (3, 8), not at (4, 8), so this is by the cost formula alone." in other.reason
    unknown = recommend(priority="quality", family="rnn")
    assert 'The family "rnn" was not measured here, so this is by the cost formula alone.' in unknown.reason
    assert "Published runs: the language-model LSTM" in unknown.reason
    assert not recommend(priority="quality").measured


def test_further_measurements_are_mentioned(file: Path) -> None:
    second = entry(MEANS, 0.5, study="second", dataset="made-up clothes", figure="docs/results/second.png")
    hold(file, entry(MEANS, 0.008), second)
    choice = recommend(priority="quality", family="cnn")
    assert choice.names == ("ER", "ETH", "RTV")
    assert choice.reason.endswith("Also measured: made-up clothes, a made-up net (docs/results/second.png).")


def test_a_file_that_is_no_file_of_measurements(file: Path) -> None:
    for text in ("{", "[]", '{"families": {"cnn": [{"study": "x"}]}}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"made_up.json is no file of measurements: "):
            recommend(family="cnn")


def test_without_spread_four_digits_are_shown(file: Path) -> None:
    hold(file, entry(MEANS, 0.0))
    choice = recommend(priority="quality", family="cnn")
    assert choice.names == ("ER",) and "ER has the best mean: 0.9200 ± 0.0000" in choice.reason


def test_the_shipped_measurements_can_be_read() -> None:
    for family, found in measured.read().items():
        for one in found:
            for priority in ("quality", "balanced", "savings"):
                choice = recommend(priority=priority, family=family, q_min=one.q_min, q_max=one.q_max)
                assert choice.measured and choice.figure is not None and choice.names
                assert choice.group == savings_group(choice.names[0])
                assert (Path(__file__).parents[2] / choice.figure).exists(), choice.figure
            assert all(len(row) == 4 for row in one.schedules.values()) and "made-up" not in one.dataset
