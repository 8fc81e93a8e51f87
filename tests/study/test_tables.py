"""Tables and CSV say what the records hold, and what they do not hold."""

from __future__ import annotations

import csv
import io
import json
import math

import pytest

from cpt_fx.study.analysis import panels
from cpt_fx.study.findings import (
    Table,
    correlation_table,
    decimals,
    failures,
    group_table,
    number,
    plus,
    schedule_table,
    signed,
    spread,
    tables,
)
from cpt_fx.study.statistics import Estimate, Interval
from cpt_fx.study.writing import raw, summary
from tests.study import made_up


def cells(table: Table, label: str) -> dict[str, str]:
    (row,) = (row for row in table.rows if row[0] == label)
    return dict(zip(table.headings, row, strict=True))


def test_the_schedule_table() -> None:
    (panel,) = panels(made_up.by_cost(noise=1e-3))
    table = schedule_table(panel)
    assert table.title == "Schedules at (3, 8)"
    row = cells(table, "RR")
    assert (row["saving"], row["cost"], row["mean bits"], row["seeds"]) == ("large", "0.397", "3.79", "3")
    mean, deviation = row["accuracy ± sd"].split(" ± ")
    assert float(mean) == pytest.approx(0.87, abs=5e-3) and float(deviation) < 5e-3
    assert row["less static 8 (95 % interval)"].startswith("−0.0") and row["verdict"] == "worse"
    static = cells(table, "static 8")
    assert static["less static 8 (95 % interval)"] == static["verdict"] == "–"
    assert "higher is better" in table.note


def test_gaps_stand_beside_the_seeds() -> None:
    records = [*made_up.by_cost(), made_up.record("RR", made_up.schedules()["RR"], None, 3)]
    (panel,) = panels(records)
    table = schedule_table(panel)
    assert cells(table, "RR")["seeds"] == "3 (1 failed)" and cells(table, "CR")["seeds"] == "3 (1 missing)"
    lost = failures([panel])
    assert len(lost.rows) == 13
    assert lost.note == "13 of 52 runs have no value. They count in no mean."
    assert ("schedules", "(3, 8)", "RR", "3", "ValueError: the loss is nan at step 40") in lost.rows
    assert ("schedules", "(3, 8)", "CR", "3", "was not run, or not finished") in lost.rows


def test_of_a_traceback_the_last_line_is_shown() -> None:
    error = "Traceback (most recent call last):\n  File ...\nValueError: no | data\n"
    record = made_up.record("RR", made_up.schedules()["RR"], None, error=error)
    table = failures(panels([record]))
    assert table.rows[0][-1] == "ValueError: no | data"
    assert "ValueError: no \\| data" in table.markdown()


def test_nothing_failed_no_table() -> None:
    found = panels(made_up.by_cost())
    assert failures(found).rows == () and "Runs without a value" not in [table.title for table in tables(found)]


def test_groups_and_correlation() -> None:
    found = panels(made_up.by_cost(noise=1e-3))
    table = group_table(found[0])
    assert [row[0] for row in table.rows] == [
        "small saving", "medium saving", "large saving", "small less medium", "small less large", "medium less large",
    ]  # fmt: skip
    assert cells(table, "small less large")["verdict"] == "better"
    table = correlation_table(found[0])
    assert [row[2] for row in table.rows] == ["10", "12"]
    assert all(float(row[3]) > 0.8 for row in table.rows)
    lone = panels(made_up.comparison({"CR": 0.9, "CT": 0.8}))
    assert group_table(lone[0]).rows == correlation_table(lone[0]).rows == ()
    assert [table.title for table in tables(lone)] == ["Schedules at (3, 8)"]


def test_critical_tables_show_where_precision_was_low() -> None:
    first, window, cycle, later = tables(
        panels([*made_up.deficits(), *made_up.windows(), *made_up.first_cycles(), *made_up.delayed()])
    )
    assert (
        cells(first, "deficit 0")["low steps"] == "none of 800"
        and cells(first, "deficit 400")["low steps"] == "0 to 400 of 800"
    )
    assert cells(window, "window 100")["low steps"] == "100 to 300 of 800"
    assert cells(cycle, "ETV")["bits of first cycle"] == "4.19"
    assert cells(cycle, "ETV")["difference (95 % interval)"].startswith("less RTV: −0.0")
    assert cells(later, "RR delayed 100")["difference (95 % interval)"].startswith("less RR: +0.0")


def test_markdown_is_a_table_with_its_note() -> None:
    table = Table(title="t", headings=("a", "b"), rows=(("x|y", "1"), ("z", "2")), note="read it so")
    assert table.markdown() == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n| z | 2 |\n\nread it so"


def test_the_summary_has_every_row_in_full() -> None:
    records = [*made_up.by_cost(noise=1e-3), *made_up.deficits()]
    found = panels(records)
    lines = list(csv.DictReader(io.StringIO(summary(found))))
    assert len(lines) == 13 + 4
    row = next(line for line in lines if line["schedule"] == "RR")
    value = found[0].row("RR")
    assert value is not None and value.mean is not None and value.mean.interval is not None
    assert float(row["mean"]) == value.mean.value and float(row["mean_low"]) == value.mean.interval.low
    assert float(row["lowest"]) == min(value.values.values()) and row["seeds"] == "3" and row["failed"] == "0"
    assert row["compared_with"] == "static 8" and row["verdict"] == "worse" and row["paired"] == "True"
    assert float(row["difference_low"]) < float(row["difference"]) < float(row["difference_high"]) < 0
    deficit = next(line for line in lines if line["schedule"] == "deficit 200")
    assert (deficit["low_from"], deficit["low_until"]) == ("0", "200")


def test_the_records_come_back_from_their_csv() -> None:
    records = [*made_up.by_cost(), made_up.record("RR", made_up.schedules()["RR"], None, 3)]
    lines = list(csv.DictReader(io.StringIO(raw(records))))
    assert len(lines) == len(records)
    for line, record in zip(lines, records, strict=True):
        assert line["schedule"] == record.schedule and int(line["seed"]) == record.seed
        assert (float(line["value"]) if line["value"] else None) == record.value
        assert json.loads(line["machine"]) == record.machine and json.loads(line["options"]) == record.options
        if record.metrics:
            assert float(line["metrics.loss"]) == record.metrics["loss"]
    assert lines[-1]["error"] == "ValueError: the loss is nan at step 40" and lines[-1]["metrics.loss"] == ""


@pytest.mark.parametrize(("noise", "digits"), [(4e-3, 4), (2.0, 1), (300.0, 0)])
def test_decimals_follow_the_spread(noise: float, digits: int) -> None:
    (panel,) = panels(made_up.comparison({"CR": 5.0, "RR": 5.0, "ER": 5.0}, seeds=5, noise=noise))
    assert decimals(panel) == digits


def test_decimals_without_spread() -> None:
    (panel,) = panels(made_up.comparison({"CR": 0.9}, seeds=1))
    assert decimals(panel) == 4
    (panel,) = panels([made_up.record("CR", made_up.schedules()["CR"], 0.0)])
    assert decimals(panel) == 2
    (panel,) = panels([made_up.record("CR", made_up.schedules()["CR"], None)])
    assert math.isfinite(decimals(panel))


def test_numbers_have_true_signs() -> None:
    estimate = Estimate(value=-0.004, interval=Interval(-0.01, 0.002), n=3)
    assert signed(estimate, 3) == "−0.004 (−0.010 to +0.002)"
    assert signed(None, 3) == "–" and signed(Estimate(value=0.5, interval=None, n=1), 1) == "+0.5"
    assert plus(-0.0001, 2) == "0.00" and number(-1.5, 1) == "−1.5"
    assert spread(Estimate(value=0.5, interval=None, n=1), None, 2) == "0.50"
    assert spread(None, None, 2) == "–"
