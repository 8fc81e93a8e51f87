"""Recommendations from measurements. Every measurement here is made up, and says so; the shipped file is only read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpt_fx.schedules import NAMES, measured, named, recommend, relative_cost, savings_group
from cpt_fx.study.measured import Task, update
from tests.study import made_up

COSTS = {name: relative_cost(named(name, q_min=3, q_max=8, total_steps=64_000)) for name in NAMES} | {"static 8": 1.0}


TASK = Task(dataset="made-up digits", model="a made-up net", size="1,000 images", figure="docs/results/made-up.png")


def entry(means: dict[str, float], half: float | dict[str, float], **changes: Any) -> dict[str, Any]:
    """A made-up measurement: every interval reaches `half`, or the sum of both halves, to each side."""
    labels = list(means)
    differences: dict[str, dict[str, list[float]]] = {}
    for index, one in enumerate(labels):
        for other in labels[index + 1 :]:
            value = means[one] - means[other]
            reach = half if isinstance(half, float) else half[one] + half[other]
            differences.setdefault(one, {})[other] = [value, value - reach, value + reach]
    row = {"sd": half if isinstance(half, float) else 0.01, "n": 3}
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


def test_quality_is_the_best_mean_and_those_within_the_margin(file: Path) -> None:
    hold(file, entry(MEANS, 0.008))
    choice = recommend(priority="quality", family="cnn")
    assert choice.names == ("ER", "ETH") and choice.group == "small" and choice.measured and choice.known
    assert choice.relative_costs == tuple(COSTS[name] for name in choice.names)
    assert choice.figure == "docs/results/made-up-cost.png"
    assert str(choice).startswith("ER. Measured on")
    for part in (
        "Measured on made-up digits with a made-up net (1,000 images): 800 steps, 3 seeds, at (3, 8), by accuracy",
        "ER has the best mean of those that lose at most 0.0100 against ER, by the 95 % interval: 0.9200 ± 0.0080 at "
        "0.822 of the cost of static 8.",
        "Measurably worse, and so not among them: CR, CT, LR, LT, ETV, RTH, RR.",
        "Not shown to be within the margin: RTV.",
        "Figure: docs/results/made-up-cost.png.",
        "What it cannot show: it is made up.",
    ):
        assert part in choice.reason, part


def test_savings_is_the_cheapest_that_loses_no_more_than_the_margin(file: Path) -> None:
    hold(file, entry(MEANS, 0.005))
    choice = recommend(priority="savings", family="cnn")
    assert choice.names == ("RTV", "ER", "ETH") and choice.known
    assert (
        "RTV is the cheapest of those that lose at most 0.0100 against static 8, by the 95 % interval" in choice.reason
    )
    assert "Less static 8: RTV (−0.0040, −0.0090 to +0.0010)." in choice.reason
    assert "Measurably worse, and so not among them: CR, CT," in choice.reason


@pytest.mark.parametrize("priority", ["quality", "balanced", "savings"])
def test_what_the_data_cannot_tell_is_not_known(file: Path, priority: str) -> None:
    hold(file, entry(MEANS, 0.016))
    choice = recommend(priority=priority, family="cnn")
    assert choice.measured and not choice.known and choice.names == ("ER", "ETH", "RTV", "CR")[: len(choice.names)]
    assert "Not known: none is shown to lose at most 0.010 against" in choice.reason
    assert "more seeds would tell" in choice.reason and str(choice) == choice.reason
    if priority == "savings":
        assert "The smallest loss that is not ruled out is 0.015, of ER" in choice.reason


def test_a_noisy_schedule_is_not_recommended_before_a_steady_one_that_loses_less(file: Path) -> None:
    """As it was measured: the noise of RR hid a loss of four points, and LR, which loses half of that, was dropped."""
    means = {"RR": 0.490, "LR": 0.511, "ETH": 0.526, "static 8": 0.532}
    halves = {"RR": 0.045, "LR": 0.010, "ETH": 0.002, "static 8": 0.001}
    hold(file, entry(means, halves))
    choice = recommend(priority="savings", family="cnn")
    assert choice.names == ("ETH",) and choice.known
    hold(file, entry({name: mean for name, mean in means.items() if name != "ETH"}, halves))
    choice = recommend(priority="savings", family="cnn")
    assert not choice.known and choice.names == ("LR",)


def test_savings_without_a_static_run_are_not_known(file: Path) -> None:
    hold(file, entry({name: mean for name, mean in MEANS.items() if name != "static 8"}, 0.001))
    choice = recommend(priority="savings", family="cnn")
    assert not choice.known and choice.names[0] == "ER" and "Static 8 was not measured." in choice.reason
    hold(file, entry(MEANS | {"static 8": 1.0}, 0.001))
    choice = recommend(priority="savings", family="cnn")
    assert not choice.known and choice.names == ("ER",)
    assert "The smallest loss that is not ruled out is 0.0810, of ER" in choice.reason


def test_two_seeds_know_nothing(file: Path) -> None:
    made = entry(MEANS, 0.0)
    for row in made["schedules"].values():
        row["n"] = 2
    hold(file, made)
    for priority in ("quality", "balanced", "savings"):
        choice = recommend(priority=priority, family="cnn")
        assert not choice.known and "Fewer than 3 seeds rule out no loss." in choice.reason


def test_balanced_is_the_smallest_sum_of_ranks(file: Path) -> None:
    hold(file, entry(MEANS | {"CR": 0.9195}, 0.005))
    choice = recommend(priority="balanced", family="cnn")
    # By mean: ER CR ETH RTV; by cost: CR RTV ER ETH. The sums are CR 1, ER 2, RTV 4, ETH 5.
    assert choice.names == ("CR", "ER", "RTV", "ETH") and choice.known
    assert "CR has the smallest sum of ranks by mean and by cost of those that lose at most" in choice.reason


def test_priorities_agree_where_one_schedule_is_best_and_cheapest(file: Path) -> None:
    hold(file, entry(MEANS | {"RR": 0.99}, 0.01))
    for priority in ("quality", "balanced", "savings"):
        choice = recommend(priority=priority, family="cnn")
        assert choice.names[0] == "RR" and choice.known


def test_lower_may_be_better(file: Path) -> None:
    turned = {name: 100 * (1 - mean) for name, mean in MEANS.items()}
    hold(file, entry(turned, 0.02, better="lower", metric="perplexity"))
    # 1 % of 8.1 is the margin: ER at 8.0 and static 8 at 8.1.
    assert recommend(priority="quality", family="cnn").names == ("ER",)
    savings = recommend(priority="savings", family="cnn")
    assert savings.names == ("ER",) and savings.known and "lose at most 0.08" in savings.reason
    hold(file, entry(turned, 1.6, better="lower", metric="perplexity"))
    choice = recommend(priority="savings", family="cnn")
    assert not choice.known and "The smallest loss that is not ruled out is 1.5, of ER" in choice.reason


def measured_from(path: Path, values: dict[str, list[float]], **changes: Any) -> None:
    """From seeds to the file that `recommend` reads, by the package's own statistics."""
    built = made_up.schedules()
    records = [
        made_up.record(label, built[label], value, seed, **changes)
        for label, seeds in values.items()
        for seed, value in enumerate(seeds)
    ]
    update(path, "cnn", TASK, records)


@pytest.mark.parametrize(("seeds", "noise"), [(3, 0.005), (3, 0.02), (5, 0.01), (5, 0.05)])
def test_noise_does_not_turn_a_loss_into_advice(file: Path, seeds: int, noise: float) -> None:
    """RR and LR lose three margins: however noisy the seeds are, they are hardly ever named as known."""
    random, wrong, rounds = np.random.default_rng(seeds), 0, 30
    for _ in range(rounds):
        true = {"RR": 0.87, "LR": 0.87, "ETH": 0.9, "static 8": 0.9}
        measured_from(file, {name: (mean + noise * random.normal(size=seeds)).tolist() for name, mean in true.items()})
        for priority in ("savings", "quality", "balanced"):
            choice = recommend(priority=priority, family="cnn")
            wrong += choice.known and choice.names[0] in ("RR", "LR")
        file.unlink()
    assert wrong <= 0.05 * 3 * rounds


def test_wider_intervals_only_take_names_away(file: Path) -> None:
    random = np.random.default_rng(3)
    labels = [*NAMES, "static 8"]
    seen = set()
    for _ in range(100):
        means = dict(zip(labels, (0.9 + 0.01 * random.normal(size=len(labels))).tolist(), strict=True))
        halves = dict(zip(labels, (0.005 * random.random(len(labels))).tolist(), strict=True))
        wider = {name: half + 0.01 * random.random() * (random.random() < 0.4) for name, half in halves.items()}
        for priority in ("savings", "quality", "balanced"):
            hold(file, entry(means, halves))
            before = recommend(priority=priority, family="cnn")
            hold(file, entry(means, wider))
            after = recommend(priority=priority, family="cnn")
            seen.add((before.known, after.known))
            assert before.known or not after.known
            if after.known:
                assert set(after.names) <= set(before.names)
            # All moved by one number, or turned round, it is the same answer.
            hold(file, entry({name: mean - 0.3 for name, mean in means.items()}, wider))
            assert recommend(priority=priority, family="cnn").names == after.names
            hold(file, entry({name: -mean for name, mean in means.items()}, wider, better="lower"))
            assert recommend(priority=priority, family="cnn").names == after.names
    assert seen == {(True, True), (True, False), (False, False)}


def test_the_first_data_that_showed_it() -> None:
    """RR at 0.490 against 0.532 of static 8 was the advice for saving."""
    choice = recommend(priority="savings", family="cnn")
    assert not choice.known and "RR" not in choice.names and "Not known" in choice.reason


def test_a_budget_leaves_the_measured_ones_that_fit(file: Path) -> None:
    hold(file, entry(MEANS, 0.008))
    choice = recommend(priority="quality", family="cnn", budget=0.7)
    assert choice.names[0] == "RTV" and max(choice.relative_costs) <= 0.7 and choice.group == "medium"


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
    assert choice.names == ("ER", "ETH")
    assert choice.reason.endswith("Also measured: made-up clothes, a made-up net (docs/results/second.png).")


def test_a_file_that_is_no_file_of_measurements(file: Path) -> None:
    for text in ("{", "[]", '{"families": {"cnn": [{"study": "x"}]}}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"made_up.json is no file of measurements: "):
            recommend(family="cnn")


def test_without_spread_four_digits_are_shown(file: Path) -> None:
    hold(file, entry(MEANS, 0.0))
    choice = recommend(priority="quality", family="cnn")
    assert choice.names[0] == "ER" and "by the 95 % interval: 0.9200 ± 0.0000" in choice.reason


def test_the_shipped_measurements_can_be_read() -> None:
    for family, found in measured.read().items():
        for one in found:
            for priority in ("quality", "balanced", "savings"):
                choice = recommend(priority=priority, family=family, q_min=one.q_min, q_max=one.q_max)
                assert choice.measured and choice.figure is not None and choice.names
                assert choice.group == savings_group(choice.names[0])
                assert (Path(__file__).parents[2] / choice.figure).exists(), choice.figure
            assert all(len(row) == 4 for row in one.schedules.values()) and "made-up" not in one.dataset
