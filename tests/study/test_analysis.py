"""What is read out of records: made-up ones, with effects that are known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from cpt_fx.schedules import NAMES, Deficit, Static, relative_cost, savings_group
from cpt_fx.study import analysis
from cpt_fx.study.analysis import Panel, low_steps, panels, reference, undisturbed
from cpt_fx.study.records import Record
from tests.study import made_up


def only(records: list[Record]) -> Panel:
    (panel,) = panels(records)
    return panel


def test_a_panel_for_each_experiment_and_width() -> None:
    records = [*made_up.deficits(), *made_up.by_cost(bits=(3, 6)), *made_up.by_cost(bits=(4, 8)), *made_up.by_cost()]
    found = [(panel.experiment, panel.q_min, panel.q_max) for panel in panels(records)]
    assert found == [("schedules", 3, 8), ("schedules", 4, 8), ("schedules", 3, 6), ("deficit", 3, 8)]


def test_rows_are_cheapest_first() -> None:
    panel = only(made_up.by_cost())
    assert [row.label for row in panel.rows] == [
        "static 3", "RR", "RTH", "LR", "LT", "CR", "CT", "ETV", "RTV", "ER", "ETH", "static 8", "full precision",
    ]  # fmt: skip
    assert [row.label for row in panel.cyclic] == [row.label for row in panel.rows if row.label in NAMES]
    assert panel.static is panel.row("static 8")
    assert {row.group for row in panel.rows} == {"large", "medium", "small", "static", "full precision"}


def test_mean_and_deviation_are_over_seeds() -> None:
    schedule = made_up.schedules()["CR"]
    row = only([made_up.record("CR", schedule, value, seed) for seed, value in enumerate([0.5, 0.7, 0.9])]).rows[0]
    assert row.mean is not None and row.mean.value == pytest.approx(0.7) and row.mean.n == 3
    assert row.deviation == pytest.approx(np.std([0.5, 0.7, 0.9], ddof=1))


def test_what_failed_and_what_is_missing_is_counted() -> None:
    built = made_up.schedules()
    records = [made_up.record("CR", built["CR"], 0.5, seed) for seed in range(3)]
    records += [made_up.record("RR", built["RR"], 0.5, 0), made_up.record("RR", built["RR"], None, 1)]
    records += [made_up.record("ER", built["ER"], math.nan, 0), made_up.record("ER", built["ER"], math.inf, 2)]
    panel = only(records)
    rr, er, cr = panel.row("RR"), panel.row("ER"), panel.row("CR")
    assert rr is not None and er is not None and cr is not None
    assert dict(rr.values) == {0: 0.5} and rr.missing == (2,) and rr.gaps == "1 failed, 1 missing"
    assert rr.failed == {1: "ValueError: the loss is nan at step 40"}
    assert er.mean is None and er.deviation is None and er.missing == (1,)
    assert er.failed == {0: "accuracy is nan", 2: "accuracy is inf"}
    assert cr.gaps == ""


def test_a_second_try_that_worked_counts() -> None:
    schedule = made_up.schedules()["CR"]
    row = only([made_up.record("CR", schedule, None), made_up.record("CR", schedule, 0.5)]).rows[0]
    assert not row.gaps and dict(row.values) == {0: 0.5}


def test_what_cannot_be_averaged_is_refused() -> None:
    schedule = made_up.schedules()["CR"]
    record = made_up.record("CR", schedule, 0.5)
    with pytest.raises(ValueError, match=r'"CR" with seed 0 is there twice: 0\.5, 0\.6'):
        panels([record, dataclasses.replace(record, value=0.6)])
    with pytest.raises(ValueError, match='"CR" was run for 800 and for 400 steps, which cannot be averaged'):
        panels([record, dataclasses.replace(record, seed=1, total_steps=400)])
    with pytest.raises(ValueError, match=r"must agree in better, got \['higher', 'lower'\]"):
        panels([record, dataclasses.replace(record, seed=1, better="lower")])
    with pytest.raises(ValueError, match=r"must agree in metric, got \['accuracy', 'loss'\]"):
        panels([record, dataclasses.replace(record, seed=1, metric="loss")])
    failed = dataclasses.replace(made_up.record("CR", schedule, None, 1), metric="")
    assert only([failed, record]).metric == "accuracy"


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_positive_means_more_compute_better_quality(better: str) -> None:
    slope = 0.1 if better == "higher" else -0.1
    found = analysis.cost_correlation(only(made_up.by_cost(slope=slope, noise=1e-5, better=better)))
    assert found.rho is not None and found.rho > 0.9 and found.points == 10
    assert found.rho_interval is not None and found.rho_interval.low > 0.8
    turned = analysis.cost_correlation(only(made_up.by_cost(slope=-slope, noise=1e-5, better=better)))
    assert turned.rho == pytest.approx(-found.rho, abs=0.1)


def test_the_correlation_is_scipys_over_means_and_costs() -> None:
    panel = only(made_up.by_cost(noise=0.01))
    rows = [row for row in panel.rows if row.label in NAMES]
    costs = [round(row.relative_cost, 3) for row in rows]
    means = [np.mean(list(row.values.values())) for row in rows]
    found = analysis.cost_correlation(panel)
    assert found.rho == pytest.approx(stats.spearmanr(costs, means).statistic)
    assert found.tau == pytest.approx(stats.kendalltau(costs, means).statistic)


def test_baselines_count_only_when_asked_for() -> None:
    panel = only(made_up.by_cost())
    assert analysis.cost_correlation(panel).points == 10
    assert analysis.cost_correlation(panel, baselines=True).points == 12  # full precision is no point


def test_no_value_at_all_has_no_correlation() -> None:
    panel = only([made_up.record(label, schedule, None) for label, schedule in made_up.schedules().items()])
    assert analysis.cost_correlation(panel).reason == "no run has a value"


def test_differences_are_paired_where_the_seeds_agree() -> None:
    panel = only([record for record in made_up.by_cost(noise=0.01) if (record.label, record.seed) != ("RR", 2)])
    static, rr, cr = panel.static, panel.row("RR"), panel.row("CR")
    assert static is not None and rr is not None and cr is not None
    paired, unpaired = analysis.against(cr, static), analysis.against(rr, static)
    assert paired is not None and paired.paired and paired.n == 3
    assert unpaired is not None and not unpaired.paired and unpaired.n == 2
    expected = np.mean([cr.values[seed] - static.values[seed] for seed in range(3)])
    assert paired.value == pytest.approx(expected)


def test_a_difference_has_the_sign_of_first_minus_second() -> None:
    panel = only(made_up.comparison({"CR": 0.7, "static 8": 0.9}, noise=1e-4))
    row, static = panel.row("CR"), panel.static
    assert row is not None and static is not None
    found = analysis.against(row, static)
    assert found is not None and found.value == pytest.approx(-0.2, abs=1e-3)
    assert analysis.verdict(found, "higher") == "worse"
    assert analysis.verdict(found, "lower") == "better"


def test_verdicts() -> None:
    alike = only(made_up.comparison({"CR": 0.9, "static 8": 0.9}, noise=0.01))
    row, static = alike.row("CR"), alike.static
    assert row is not None and static is not None
    assert analysis.verdict(analysis.against(row, static), "higher") == "not told apart"
    assert analysis.verdict(None, "higher") == "no interval"
    single = only(made_up.comparison({"CR": 0.7, "static 8": 0.9}, seeds=1))
    row, static = single.row("CR"), single.static
    assert row is not None and static is not None
    assert analysis.verdict(analysis.against(row, static), "higher") == "no interval"


def test_groups_are_means_seed_by_seed() -> None:
    means = {name: {"small": 0.9, "medium": 0.8, "large": 0.6}[savings_group(name)] for name in NAMES}
    panel = only(made_up.comparison(means, noise=1e-3))
    found = {group.name: group for group in analysis.groups(panel)}
    assert list(found) == ["small", "medium", "large"]
    for name, value in (("small", 0.9), ("medium", 0.8), ("large", 0.6)):
        mean = found[name].mean
        assert mean is not None and mean.value == pytest.approx(value, abs=2e-3) and mean.n == 3
    differences = {(one, two): estimate for one, two, estimate in analysis.group_differences(panel)}
    for pair, value in ((("small", "medium"), 0.1), (("small", "large"), 0.3), (("medium", "large"), 0.2)):
        estimate = differences[pair]
        assert estimate is not None and estimate.value == pytest.approx(value, abs=3e-3) and estimate.told_apart


def test_a_seed_that_one_schedule_lacks_is_no_part_of_its_group() -> None:
    """Otherwise the mean would move with which schedule it was that failed."""
    means = {"RR": 0.5, "RTH": 0.7}
    records = [record for record in made_up.comparison(means) if (record.label, record.seed) != ("RR", 1)]
    (group,) = analysis.groups(only(records))
    assert dict(group.values) == pytest.approx({0: 0.6, 2: 0.6})


def test_low_steps() -> None:
    panel = only(made_up.windows())
    found = {row.label: low_steps(row, panel) for row in panel.rows}
    assert found == {
        "static 8": (0, 0), "window 0": (0, 200), "window 100": (100, 300), "window 200": (200, 400),
        "window 400": (400, 600),
    }  # fmt: skip
    base = undisturbed(panel)
    assert base is not None and base.label == "static 8"
    panel = only(made_up.deficits())
    assert {row.label: low_steps(row, panel) for row in panel.rows}["deficit 400"] == (0, 400)
    base = undisturbed(panel)
    assert base is not None and base.label == "deficit 0"
    panel = only(made_up.by_cost())
    static, cr = panel.row("static 3"), panel.row("CR")
    assert static is not None and cr is not None
    assert low_steps(static, panel) == (0, 800) and low_steps(cr, panel) is None


def test_references() -> None:
    def names(records: list[Record]) -> dict[str, str | None]:
        panel = only(records)
        return {row.label: other.label if (other := reference(row, panel)) else None for row in panel.rows}

    assert set(names(made_up.by_cost()).values()) == {"static 8", None}
    assert names(made_up.deficits())["deficit 400"] == "deficit 0" and names(made_up.deficits())["deficit 0"] is None
    assert names(made_up.first_cycles()) == {"ETV": "RTV", "RTV": "static 8", "static 8": None}
    assert names(made_up.delayed()) == {
        "CR": "static 8", "CR delayed 100": "CR", "CR after deficit 100": "CR",
        "RR": "static 8", "RR delayed 100": "RR", "RR after deficit 100": "RR", "static 8": None,
    }  # fmt: skip


def test_first_cycles() -> None:
    panel = only(made_up.by_cost())
    high, low = panel.row("RTV"), panel.row("ETV")
    assert high is not None and high.first_cycle_bits == pytest.approx(7.2, abs=0.05)
    assert low is not None and low.first_cycle_bits == pytest.approx(4.2, abs=0.05)


@pytest.mark.parametrize("text", ["Deficit(start=__import__('os').system('true'), end=8)", "Deficit(", "Deficit(3)"])
def test_where_precision_was_low_is_read_without_running_a_text(text: str) -> None:
    panel = only([dataclasses.replace(record, schedule=text) for record in made_up.deficits([100])])
    assert low_steps(panel.rows[0], panel) is None


def test_the_made_up_costs_are_the_real_ones() -> None:
    row = only(made_up.by_cost()).row("static 3")
    assert row is not None and row.relative_cost == pytest.approx(relative_cost(Static(3, 8, total_steps=1), 8))


def test_costs_that_agree_to_three_digits_are_one_cost() -> None:
    records = [
        dataclasses.replace(record, relative_cost={"CR": 0.62801, "CT": 0.62839, "RR": 0.4}[record.label])
        for record in made_up.comparison({"CR": 0.8, "CT": 0.9, "RR": 0.7})
    ]
    assert analysis.cost_correlation(only(records)).rho == pytest.approx(
        stats.spearmanr([1, 1, 0], [8, 9, 7]).statistic
    )


def test_an_empty_window_is_none_wherever_it_lies() -> None:
    panel = only(
        [made_up.record("window 300-300", Deficit(q_min=3, q_max=8, start=300, steps=0, total_steps=800), 0.9)]
    )
    assert low_steps(panel.rows[0], panel) == (0, 0)
    assert undisturbed(panel) is panel.rows[0]
