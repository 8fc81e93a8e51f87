"""From records to the file that `recommend` reads. All numbers are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpt_fx.schedules import NAMES
from cpt_fx.schedules.measured import read
from cpt_fx.study import analysis, measured
from cpt_fx.study.measured import Task, update
from tests.study import made_up

TASK = Task(
    dataset="made-up digits", model="a made-up net", size="1,000 images", figure="docs/results/made-up-cost.png"
)


def test_what_is_written_is_what_the_report_says(tmp_path: Path) -> None:
    path, records = tmp_path / "measured.json", made_up.by_cost(noise=4e-3)
    (made,) = update(path, "cnn", TASK, records)
    assert read(path) == {"cnn": [made]}
    (panel,) = analysis.panels(records)
    assert set(made.schedules) == {row.label for row in panel.rows} > set(NAMES)
    one, other = panel.row("RR"), panel.static
    assert one is not None and other is not None and one.mean is not None
    estimate = analysis.against(one, other)
    assert estimate is not None and estimate.interval is not None
    assert made.schedules["RR"]["mean"] == pytest.approx(one.mean.value, rel=1e-6)
    assert made.schedules["RR"]["n"] == 3 and made.cost("RR") == pytest.approx(one.relative_cost, rel=1e-6)
    expected = (estimate.value, estimate.interval.low, estimate.interval.high)
    assert made.difference("RR", "static 8") == pytest.approx(expected, rel=1e-6)
    assert made.difference("static 8", "RR") == pytest.approx((-expected[0], -expected[2], -expected[1]), rel=1e-6)
    assert made.worse("RR", "static 8") and not made.worse("static 8", "RR") and not made.worse("RR", "RR")
    assert (made.steps, list(made.seeds), made.better, made.bits) == (800, [0, 1, 2], "higher", "(3, 8)")


def test_lower_is_better(tmp_path: Path) -> None:
    (made,) = update(tmp_path / "m.json", "rnn", TASK, made_up.by_cost(slope=-0.05, noise=1e-4, better="lower"))
    assert made.worse("RR", "static 8") and made.quality("RR") < made.quality("static 8")


def test_an_entry_is_replaced_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    update(path, "cnn", TASK, made_up.by_cost())
    update(path, "cnn", TASK, made_up.by_cost(bits=(3, 6)))
    update(path, "gnn", TASK, made_up.by_cost(study="other"))
    update(path, "cnn", TASK, made_up.by_cost(seeds=5))
    update(path, "cnn", TASK, made_up.by_cost(study="other"))
    found = {
        family: [(one.study, one.bits, len(one.seeds)) for one in entries] for family, entries in read(path).items()
    }
    assert found == {
        "cnn": [("made-up", "(3, 6)", 3), ("made-up", "(3, 8)", 5), ("other", "(3, 8)", 3)],
        "gnn": [("other", "(3, 8)", 3)],
    }


def test_both_widths_at_once(tmp_path: Path) -> None:
    made = update(tmp_path / "m.json", "cnn", TASK, [*made_up.by_cost(), *made_up.by_cost(bits=(3, 6))])
    assert [one.bits for one in made] == ["(3, 8)", "(3, 6)"]


def test_too_few_seeds_are_left_out_by_name(tmp_path: Path) -> None:
    records = [record for record in made_up.by_cost() if record.label != "RR" or record.seed == 0]
    (made,) = update(tmp_path / "m.json", "cnn", TASK, records)
    assert "RR" not in made.schedules and made.left_out == {"RR": "1 of 3 seeds"}
    with pytest.raises(ValueError, match=r"no published schedule has two finished seeds at \(3, 8\)"):
        update(tmp_path / "m.json", "cnn", TASK, made_up.by_cost(seeds=1))


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'family must be one of .* Did you mean "cnn"\?'):
        update(tmp_path / "m.json", "CNNs", TASK, made_up.by_cost())
    with pytest.raises(ValueError, match="hold no comparison of schedules"):
        update(tmp_path / "m.json", "cnn", TASK, made_up.deficits())
    with pytest.raises(ValueError, match="one study at a time, these are of made-up, other"):
        update(tmp_path / "m.json", "cnn", TASK, [*made_up.by_cost(), *made_up.by_cost(study="other")])
    assert not (tmp_path / "m.json").exists()


def test_the_file_can_be_read_by_people(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    update(path, "cnn", TASK, made_up.by_cost())
    text = path.read_text()
    assert '"seeds": [0, 1, 2],' in text and json.loads(text)["families"]["cnn"]


def test_without_a_path_it_is_the_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "PATH", tmp_path / "package.json")
    update(None, "cnn", TASK, made_up.by_cost())
    assert read(tmp_path / "package.json")["cnn"]
