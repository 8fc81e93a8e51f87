"""Two studies side by side, with a difference that is known."""

from __future__ import annotations

import dataclasses
import math

import pytest

from cpt_fx.study.comparison import compare
from cpt_fx.study.records import Record
from tests.study import made_up

NAMES = ("FP-Agg", "Q-Agg")


def lower(records: list[Record], by: float) -> list[Record]:
    return [dataclasses.replace(r, value=None if r.value is None else r.value - by) for r in records]


def test_a_constant_difference_is_found_in_every_row() -> None:
    records = made_up.by_cost(noise=4e-3)
    (table,) = compare(records, lower(records, 0.01), names=NAMES)
    assert table.title == "FP-Agg and Q-Agg at (3, 8)" and table.headings[4] == "FP-Agg less Q-Agg (95 % interval)"
    assert len(table.rows) == 14 and table.rows[-1][0] == "mean of 13"
    for row in table.rows:
        assert row[4] == "+0.0100 (+0.0100 to +0.0100)" and row[5] == "better", row
    assert table.rows[0][1].startswith("0.8") and " ± 0.00" in table.rows[0][2] and table.rows[0][3] == "3"


def test_the_mean_shows_what_single_schedules_cannot() -> None:
    """Each schedule's difference is lost in its noise; the noise of thirteen is not."""
    base = made_up.by_cost(seeds=6)
    first = [dataclasses.replace(r, value=(r.value or 0.0) + 0.02 * math.sin(7 * i * i)) for i, r in enumerate(base)]
    (table,) = compare(first, lower(base, 0.01), names=NAMES)
    assert [row[5] for row in table.rows[:-1]].count("not told apart") > 6
    assert table.rows[-1][5] == "better"
    (table,) = compare(base, lower(base, -0.01), names=NAMES)
    assert table.rows[-1][5] == "worse"


def test_what_only_one_has_is_named() -> None:
    records = made_up.by_cost()
    (table,) = compare(records, [r for r in records if r.label != "RR"], names=NAMES)
    assert "RR" not in {row[0] for row in table.rows} and table.note.endswith("Only one of both has RR.")
    some = [r for r in records if (r.label, r.seed) != ("RR", 0)]
    (table,) = compare(records, some, names=NAMES)
    row = next(row for row in table.rows if row[0] == "RR")
    assert row[3] == "3, 2" and table.rows[-1][3] == "2"


def test_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"FP-Agg and Q-Agg have no experiment at the same \(q_min, q_max\)"):
        compare(made_up.by_cost(), made_up.by_cost(bits=(3, 6)), names=NAMES)
    with pytest.raises(ValueError, match=r"by accuracy \(higher is better\) and Q-Agg by loss"):
        compare(made_up.by_cost(), made_up.by_cost(metric="loss", better="lower"), names=NAMES)
