"""Schedules that keep state: their cost is that of the widths that ran, seeds do not learn from each other."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cpt_fx
from cpt_fx import study
from cpt_fx.schedules import Bits, Custom, Schedule, named, relative_cost
from cpt_fx.study.analysis import panels
from tests.study import stateful
from tests.study.stateful import KINDS, PORTABLE, TOTAL, Adaptive, made, observe


def ran(path: Path, schedule: Schedule, train: Any = stateful.train, **changed: Any) -> list[study.Record]:
    given: dict[str, Any] = {
        "store": path,
        "total_steps": TOTAL,
        "seeds": 2,
        "progress": False,
        "bits": (3, 8),
    } | changed
    return study.run(train, schedules=[("mine", schedule)], **given).records


@pytest.mark.parametrize("kind", KINDS)
def test_the_cost_is_that_of_the_widths_that_ran(kind: str, tmp_path: Path) -> None:
    schedule = made(kind)
    for attempt in range(2):
        records = ran(tmp_path / f"{attempt}.sqlite", schedule, seeds=[0, 1, 0])
        assert [record.status for record in records] == ["done", "done"], records[0].error
        for record in records:
            assert record.relative_cost == pytest.approx(record.metrics["cost"], rel=1e-9)
        if kind != "counting":
            assert records[0].relative_cost > records[1].relative_cost > (9 + 2 * 9) / (3 * 64)
    # The same again after all of that, so that nothing was learned; and in the order of the seeds turned round.
    turned = ran(tmp_path / "turned.sqlite", schedule, seeds=[1, 0])
    assert {r.seed: r.relative_cost for r in turned} == {r.seed: r.relative_cost for r in records}


@pytest.mark.slow
def test_in_processes_it_is_the_same(tmp_path: Path) -> None:
    given: dict[str, Any] = {"total_steps": TOTAL, "seeds": 3, "progress": False}
    schedules = [(kind, made(kind)) for kind in ("object", "attributes")]
    here, there = (
        study.run(stateful.train, schedules=schedules, store=tmp_path / f"{workers}", workers=workers, **given).records
        for workers in (1, 2)
    )
    assert [r.relative_cost for r in here] == [r.relative_cost for r in there]
    assert all(r.relative_cost == pytest.approx(r.metrics["cost"]) for r in there)


@pytest.mark.parametrize("kind", ["object", "closure", "own custom"])
def test_with_a_model_it_is_the_models_own_widths(kind: str, tmp_path: Path) -> None:
    for record in ran(tmp_path / "s.sqlite", made(kind), stateful.train_model):
        assert record.status == "done", record.error
        switched = 21 + 10 * record.seed  # the loss of a step counts from the next one on
        widths = [3] * switched + [8] * (TOTAL - switched)
        assert record.mean_bits == pytest.approx(sum(widths) / TOTAL)
        assert record.metrics["cost"] == pytest.approx(sum(width**2 for width in widths) / 64 / TOTAL)
        assert record.relative_cost == pytest.approx(record.metrics["cost"])


def test_a_plan_that_ran_costs_what_it_did(tmp_path: Path) -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=TOTAL, cycles=2)
    whole, half = (
        ran(tmp_path / f"{steps}", schedule, options={"steps": steps}, seeds=1)[0].relative_cost for steps in (60, 20)
    )
    assert whole == pytest.approx(relative_cost(schedule))
    first = schedule.trajectory(20).astype(float)
    assert half == pytest.approx((first[:, 0] ** 2 + 2 * first[:, 0] * 8).mean() / (3 * 64))
    assert half < whole  # it was stopped before the cycle was at its height


def test_a_row_has_the_mean_cost_of_its_runs(tmp_path: Path) -> None:
    records = ran(tmp_path / "s", made("object"))
    (panel,) = panels(records)
    (row,) = panel.rows
    assert row.relative_cost == pytest.approx(sum(record.relative_cost for record in records) / 2)


def test_what_differs_in_its_state_is_not_one_run(tmp_path: Path) -> None:
    schedules = [("a", Custom(Adaptive(0.8), total_steps=TOTAL)), ("b", Custom(Adaptive(0.1), total_steps=TOTAL))]
    given: dict[str, Any] = {"store": tmp_path / "s", "total_steps": TOTAL, "seeds": 1, "progress": False}
    first, second = study.run(stateful.train, schedules=schedules, **given).records
    assert first.relative_cost > second.relative_cost
    assert " at 0x" not in first.schedule
    # Another process has another address: what is finished is found again.
    again = study.run(stateful.train, schedules=[("a", Custom(Adaptive(0.8), total_steps=TOTAL))], **given)
    assert [record.started for record in again.records if record.label == "a"] == [first.started]


def test_a_store_of_before_keeps_the_planned_costs(tmp_path: Path) -> None:
    import sqlite3

    path = tmp_path / "s.sqlite"
    ran(path, made("object"))
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE ran")
    connection.close()
    assert {record.relative_cost for record in study.load(path).records} == {(9 + 2 * 9) / (3 * 64)}


def followed(schedule: Schedule, steps: range) -> list[Bits]:
    widths = []
    for step in steps:
        widths.append(schedule.current)
        observe(schedule, stateful.loss_at(step, 0))
        schedule.step()
    return widths


@pytest.mark.filterwarnings("error:.*not in its state")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "attributes"])
@pytest.mark.parametrize("at", [10, 20, 21, 40])
def test_a_checkpoint_keeps_what_was_learned(kind: str, at: int) -> None:
    straight = made(kind)
    expected = followed(straight, range(TOTAL))
    first = made(kind)
    followed(first, range(at))
    _ = first.current
    observe(first, 1.0)  # what comes between the look at the widths and the checkpoint does not change them
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = made(kind)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert followed(second, range(at, TOTAL)) == expected[at:]
    assert second._widths_that_ran() == straight._widths_that_ran()
    assert second.evaluation_bits(TOTAL) == straight.evaluation_bits(TOTAL)


@pytest.mark.parametrize("kind", PORTABLE)
def test_copies_and_pickles_go_on_by_themselves(kind: str) -> None:
    schedule = made(kind)
    if kind == "attributes":
        return
    followed(schedule, range(25))
    other = pickle.loads(pickle.dumps(schedule))
    assert followed(other, range(25, TOTAL)) == followed(schedule, range(25, TOTAL))
    assert other._widths_that_ran() == schedule._widths_that_ran()


def test_what_cannot_be_kept_is_named() -> None:
    fn: Any = Adaptive()
    fn.window = iter(())
    schedule = Custom(fn, total_steps=TOTAL)
    with pytest.warns(UserWarning, match=r"window of fn in Custom\(.*is no plain data, and so not in its state"):
        schedule.state_dict()
    with pytest.raises(ValueError, match="this state remembers elsewhere, which Custom"):
        state = {**Custom(Adaptive(), total_steps=TOTAL).state_dict(), "memory": {"elsewhere": {}}}
        Custom(Adaptive(), total_steps=TOTAL).load_state_dict(state)


def test_schedules_of_the_package_keep_their_state_as_it_was() -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=80)
    schedule.step(7)
    assert set(schedule.state_dict()) == {"position", "schedule", "config"}


def test_widths_hold_from_the_first_look_to_the_next_step() -> None:
    schedule = made("object")
    assert schedule.current == Bits(3, 3, 3)
    observe(schedule, 0.1)
    assert schedule.current == schedule.bits(0) == Bits(3, 3, 3)
    schedule.step()
    assert schedule.current == Bits(8, 8, 8)
    assert schedule.evaluation_bits(1) == Bits(8, 8, 8)


def test_the_record_follows_the_position() -> None:
    schedule = made("object")
    followed(schedule, range(30))
    assert schedule._widths_that_ran() == [(Bits(3, 3, 3), 21), (Bits(8, 8, 8), 9)]
    schedule.position = 25
    assert schedule._widths_that_ran() == [(Bits(3, 3, 3), 21), (Bits(8, 8, 8), 4)]
    schedule.step(3)
    schedule.position = 40
    assert schedule._widths_that_ran() == [(Bits(3, 3, 3), 21), (Bits(8, 8, 8), 19)]
    schedule.reset()
    assert schedule._widths_that_ran() == []
    other = made("object")
    for step in range(30):  # set from outside, as some loops do
        other.position = step
        _ = other.current
        observe(other, stateful.loss_at(step, 0))
    assert other._widths_that_ran() == [(Bits(3, 3, 3), 21), (Bits(8, 8, 8), 8)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.position = 10**12  # far away costs nothing


def test_a_models_checkpoint_does_not_go_on_without_what_was_learned() -> None:
    for kind in ("object", "own schedule"):
        first, second = (cpt_fx.transform(nn.Linear(2, 2), made(kind)) for _ in range(2))
        schedule = first.__dict__["_cpt_fx_part"].session.state.schedule
        followed(schedule, range(30))
        with pytest.warns(UserWarning, match=r"made at step 30.*the schedule keeps its own position, 0"):
            second.load_state_dict(first.state_dict())
