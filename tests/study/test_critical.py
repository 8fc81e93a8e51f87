"""The experiments on critical learning periods: which schedules they consist of, and that they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpt_fx import study
from cpt_fx.schedules import Bits, Deficit, Delayed, Schedule, Sequence, Static, learning_rates, named, relative_cost
from tests.study import trains


def run(folder: Path, train: Any = trains.train, **changed: Any) -> study.Study:
    given: dict[str, Any] = {"store": folder / "s.sqlite", "total_steps": 160, "seeds": 1, "progress": False}
    return study.critical(train, **given | changed)


def schedules(found: study.Study, experiment: str) -> dict[str, Schedule]:
    return {r.label: r.rebuilt() for r in found.records if r.experiment == experiment}


def test_all_four(tmp_path: Path) -> None:
    found = run(tmp_path, seeds=2)
    assert {r.status for r in found.records} == {"done"}
    assert [cell.seed for cell in found.cells[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {r.experiment for r in found.records} == set(study.EXPERIMENTS)

    deficits = schedules(found, "deficit")
    assert list(deficits) == ["deficit 0", "deficit 20", "deficit 40", "deficit 80"]
    for length, schedule in zip((0, 20, 40, 80), deficits.values(), strict=True):
        assert schedule == Deficit(q_min=3, q_max=8, steps=length, total_steps=160 + length)
        widths = schedule.trajectory()
        assert (widths[:length] == [3, 3, 8]).all()
        assert (widths[length:] == [8, 8, 8]).all()
        assert len(widths) == 160 + length

    windows = schedules(found, "window")
    assert list(windows) == [
        "window 0-40", "window 20-60", "window 40-80", "window 60-100", "window 80-120", "static 8",
    ]  # fmt: skip
    assert windows["window 20-60"] == Deficit(q_min=3, q_max=8, start=20, end=60, total_steps=160)
    # A window costs the same wherever it lies, and the last one leaves training time after it.
    assert len({relative_cost(one) for label, one in windows.items() if label != "static 8"}) == 1

    delayed = schedules(found, "delayed")
    assert list(delayed) == [
        "RR", "RR delayed 20", "RR after deficit 20", "RR delayed 40", "RR after deficit 40",
        "RTH", "RTH delayed 20", "RTH after deficit 20", "RTH delayed 40", "RTH after deficit 40", "static 8",
    ]  # fmt: skip
    rest = named("RR", q_min=3, q_max=8, total_steps=140)
    assert delayed["RR delayed 20"] == Delayed(rest, 20)
    assert delayed["RR after deficit 20"] == Sequence([Static(Bits(3, 3, 8), total_steps=20), rest])
    assert {one.total_steps for one in delayed.values()} == {160}


def test_the_first_cycle_decides(tmp_path: Path) -> None:
    """RTV against ETV: equal cost, first-cycle means of 7.2 and 4.2 bits."""
    found = run(tmp_path, experiments=["first-cycle"], total_steps=64_000)
    high, low, static = found.records
    assert (high.label, low.label, static.label) == ("RTV", "ETV", "static 8")
    assert [round(r.first_cycle_bits or 0, 1) for r in (high, low, static)] == [7.2, 4.2, 8.0]
    assert round(high.relative_cost, 3) == 0.637
    assert round(low.relative_cost, 3) == 0.635
    with pytest.raises(ValueError, match=r"needs an even number of cycles.*got cycles=3"):
        run(tmp_path, experiments=["first-cycle"], cycles=3)


def test_parameters(tmp_path: Path) -> None:
    found = run(
        tmp_path, q_min=4, q_max=6, q_grad=8, deficits=[0, 30], lengthen=False, window=10, starts=[0, 150],
        delayed=["CR"], delays=[16], cycles=4,
    )  # fmt: skip
    assert list(schedules(found, "deficit").values())[1] == Deficit(
        q_min=4, q_max=6, steps=30, total_steps=160, q_grad=8
    )
    assert list(schedules(found, "window")) == ["window 0-10", "window 150-160", "static 6"]
    assert list(schedules(found, "delayed")) == ["CR", "CR delayed 16", "CR after deficit 16", "static 6"]
    assert schedules(found, "delayed")["CR delayed 16"].bits(0) == (6, 6, 8)
    assert schedules(found, "delayed")["CR after deficit 16"].bits(0) == (4, 4, 8)
    assert {(r.q_min, r.q_max) for r in found.records} == {(4, 6)}


def test_it_goes_into_the_study_of_the_schedules(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = {"log": str(log)}
    store = tmp_path / "s.sqlite"
    study.run(trains.train, store=store, total_steps=160, schedules=["RTV", "ETV", "static"], seeds=1, progress=False,
              options=options)  # fmt: skip
    found = run(tmp_path, experiments=["first-cycle"], options=options)
    assert [(r.experiment, r.label) for r in found.records] == [
        (experiment, label) for experiment in ("first-cycle", "schedules") for label in ("RTV", "ETV", "static 8")
    ]
    assert len(log.read_text().splitlines()) == 3  # the same training is done once
    assert run(tmp_path, experiments=[], options=options).records == found.records


def by_the_schedule(schedule: Schedule) -> dict[str, float]:
    """What a training function needs for the published learning rates is in its schedule."""
    deficit = schedule.end if isinstance(schedule, Deficit) else 0
    steps = schedule.total_steps or 0
    rates = [learning_rates.piecewise_no_def_decay(i, lr=1.0, total_steps=steps, deficit=deficit) for i in range(steps)]
    return {"full": sum(rate == 1.0 for rate in rates)}


def test_learning_rates_can_follow_the_deficit(tmp_path: Path) -> None:
    found = run(tmp_path, by_the_schedule, experiments=["deficit"])
    assert [r.value for r in found.records] == [80, 100, 120, 160]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"experiments": ["deficits"]}, ValueError, 'Did you mean "deficit"'),
        ({"experiments": "deficit"}, TypeError, "experiments must be a list"),
        ({"deficits": [-1]}, ValueError, "a length of deficits must be"),
        ({"deficits": 3}, TypeError, "deficits must be a list"),
        ({"deficits": [160], "lengthen": False}, ValueError, "from 0 to 159"),
        ({"window": 0}, ValueError, "window must be"),
        ({"window": 100, "starts": [80]}, ValueError, "window of 100 steps from step 80 ends after the run"),
        ({"delayed": ["XX"]}, ValueError, "delayed must be one of"),
        ({"delays": [0]}, ValueError, "a number of steps of delays must be"),
        ({"delays": [155]}, ValueError, "from 1 to 152"),
        ({"q_min": 9}, ValueError, "q_min must not exceed q_max"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, **changed)
    assert not (tmp_path / "s.sqlite").exists()
