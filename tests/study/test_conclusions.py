"""Sentences follow from the numbers: what is there is said with its spread, what is not is said to be not there."""

from __future__ import annotations

import pytest

from cpt_fx.schedules import NAMES, savings_group
from cpt_fx.study import analysis
from cpt_fx.study.analysis import panels
from cpt_fx.study.findings import conclusions
from cpt_fx.study.records import Record
from tests.study import made_up

NONE = "no difference that these seeds can show"


def said(records: list[Record]) -> str:
    return "\n".join(line for one in conclusions(panels(records)) for line in [one.where, *one.findings])


def test_a_strong_effect_is_said() -> None:
    text = said(made_up.by_cost(noise=1e-4))
    assert "Schedules at (3, 8), by accuracy (higher is better), over 3 seeds." in text
    assert "more compute goes with better quality" in text
    assert "The best mean among the schedules: E" in text and "The cheapest: RR, 0.8" in text
    assert "small less large: +0.021" in text and text.count("better") >= 4
    assert f"{NONE} for" not in text
    assert "Of 10 such comparisons at 95 %, 0.5 would stand out by chance." in text


def test_the_other_direction_is_said_too() -> None:
    assert "more compute goes with worse quality" in said(made_up.by_cost(slope=-0.05, noise=1e-4))
    text = said(made_up.by_cost(slope=-0.05, noise=1e-4, better="lower"))
    assert "more compute goes with better quality" in text and "(lower is better)" in text


def test_no_effect_is_said_to_be_none() -> None:
    means = dict.fromkeys([*NAMES, "static 8"], 0.9)
    text = said(made_up.comparison(means, noise=0.01))
    assert "no order that these seeds can show" in text
    assert text.count(NONE) >= 3
    assert "goes with" not in text


def test_every_difference_has_its_interval() -> None:
    text = said(made_up.by_cost(noise=1e-3))
    line = next(line for line in text.splitlines() if line.startswith("Against static 8"))
    worse = line.partition("worse ")[2]
    for name in NAMES:
        assert f"{name} −0." in worse, name
    assert worse.count(" to −0.") == 10


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_group_without_values_is_named(name: str) -> None:
    records = made_up.by_cost()
    kept = [record for record in records if record.label not in NAMES or savings_group(record.label) != name]
    assert f"The group with {name} saving has no schedule with a value." in said(kept)


def test_one_seed_claims_nothing() -> None:
    text = said(made_up.by_cost(seeds=1))
    assert "over 1 seed." in text and "With one seed there is no spread" in text
    assert "without an interval: some points have a single run" in text
    assert "too few seeds to say for RR" in text
    assert "stand out by chance" not in text


def test_gaps_come_first() -> None:
    records = [*made_up.by_cost(), made_up.record("RR", made_up.schedules()["RR"], None, 3)]
    (found,) = conclusions(panels(records))
    assert found.findings[0] == "13 runs have no value; what follows is from the others."
    (found,) = conclusions(panels([made_up.record("RR", made_up.schedules()["RR"], None)]))
    assert found.findings == ("No run has a value.",)


def test_critical_periods() -> None:
    text = said(made_up.deficits(noise=1e-4))
    assert "A longer deficit goes with worse quality: rank correlation −1.00" in text
    assert "deficit 400 −0.039" in text and text.count(", worse") == 3
    text = said(made_up.windows())
    assert "A later window goes with better quality: rank correlation +1.00" in text
    assert said(made_up.deficits(harm=0.0, noise=0.01)).count(NONE) == 3
    assert "shows no order of quality" in said(made_up.deficits(harm=0.0, noise=0.01))
    assert "longer by its deficit" not in text
    assert "Each run is longer by its deficit" in said(made_up.deficits(noise=1e-4, longer=True))


def test_three_points_are_no_trend() -> None:
    for text in (said(made_up.deficits((0, 100, 200), noise=1e-4)), said(made_up.windows((0, 200, 400)))):
        assert "3 points are too few for a trend, which takes 4." in text
        assert "goes with" not in text and "rank correlation" not in text
    # Five points out of order by one place: chance does that more often than once in twenty.
    (panel,) = panels(made_up.windows((0, 200, 300, 400, 600)))
    rows = [row for row in panel.rows if row.label != "static 8"]
    found = analysis.correlation(list(zip([2.0, 1.0, 3.0, 4.0, 5.0], rows, strict=True)), panel)
    assert found.rho == pytest.approx(0.9) and found.rho_interval is not None and not found.rho_interval.covers(0.0)
    assert not analysis.is_trend(found)


def test_a_window_at_the_end_says_what_it_is_evaluated_with() -> None:
    assert "evaluated at" not in said(made_up.windows((0, 200, 400)))
    text = said(made_up.windows((0, 600)))
    assert "window 600 ends at 3 bits and is evaluated at 8: if the net has batch norm" in text
    assert text.count("evaluated at") == 1


def test_equal_cost_different_beginnings() -> None:
    text = said(made_up.first_cycles())
    assert "RTV 7.2 bits in its first cycle and cost 0.637, ETV 4.2 bits in its first cycle and cost 0.635" in text
    assert "RTV less ETV is +0.02" in text and text.endswith(", better.")
    assert said(made_up.first_cycles(harm=0.0)).endswith(f"{NONE}.")
    # A comparison of all schedules has both, and says the same.
    assert "RTV less ETV is" in said(made_up.by_cost())


def test_the_remedy_is_compared_with_the_same_schedule() -> None:
    text = said(made_up.delayed(noise=1e-4))
    assert "RR delayed 100 less RR: +0.01" in text and "CR after deficit 100 less CR: −0.0" in text
    assert text.count(", better.") == 2 and text.count(", worse.") == 2
