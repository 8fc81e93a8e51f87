"""The figures show what the records hold: read back from the drawn figure, and from its SVG."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from cpt_fx.schedules import NAMES
from cpt_fx.study.analysis import panels
from cpt_fx.study.records import Record
from tests.study import made_up

pytest.importorskip("matplotlib")

from cpt_fx.study.figures import _side_by_side, figures, overlap, save


def texts(records: list[Record], name: str = "cost") -> list[str]:
    svg = save(figures(panels(records))[name], "svg").decode()
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def axes(records: list[Record], name: str = "cost") -> Any:
    """The one panel of a figure."""
    (ax,) = figures(panels(records))[name].axes
    return ax


def everything() -> list[Record]:
    parts = (made_up.by_cost(noise=4e-3), made_up.deficits(noise=2e-3), made_up.windows(), made_up.first_cycles())
    return [*(record for part in parts for record in part), *made_up.delayed()]


def test_a_figure_for_each_experiment() -> None:
    found = figures(panels(everything()))
    assert list(found) == ["cost", "deficit", "window", "first-cycle", "delayed"]
    for figure in found.values():
        assert save(figure, "png").startswith(b"\x89PNG")


def test_the_cost_figure_names_every_schedule_and_the_correlation() -> None:
    found = texts(made_up.by_cost(noise=4e-3))
    for label in [*NAMES, "static 8", "static 3", "full precision", "q_min 3, q_max 8"]:
        assert found.count(label) == 1, label
    text = " ".join(found)
    assert re.search(r"10 schedules have .*\(Spearman\) of \+0\.\d\d \(95 % interval", text) and "tau-b +0." in text
    assert "one standard deviation over 3 seeds" in text


def test_a_panel_for_each_pair_of_widths() -> None:
    found = texts([*made_up.by_cost(), *made_up.by_cost(bits=(3, 6))])
    assert found.count("RR") == 2 and "q_min 3, q_max 6" in found and "BitOps relative to static 6" in found


def test_points_stand_at_their_mean_with_their_bar() -> None:
    (panel,) = panels(made_up.by_cost(noise=4e-3))
    ax: Any = figures([panel])["cost"].axes[0]
    drawn = {round(float(line.get_ydata()[0]), 9) for line in ax.lines if len(line.get_ydata()) == 1}
    for row in panel.rows:
        assert row.mean is not None and row.deviation is not None
        if row.label != "full precision":
            assert round(row.mean.value, 9) in drawn, row.label
            assert round(row.mean.value - row.deviation, 9) in {
                round(float(segment[0][1]), 9) for bars in ax.collections for segment in bars.get_segments()
            }
    full = panel.row("full precision")
    assert full is not None and full.mean is not None
    (level,) = (line for line in ax.lines if line.get_label() == "full precision")
    assert float(level.get_ydata()[0]) == full.mean.value


@pytest.mark.parametrize("noise", [1e-3, 4e-3, 2e-2])
def test_labels_cover_nothing(noise: float) -> None:
    ax = axes(made_up.by_cost(noise=noise, seeds=4))
    canvas = ax.figure.canvas
    renderer = canvas.get_renderer()
    labels = [text for text in ax.texts if text.get_text() in {*NAMES, "static 8", "static 3"}]
    assert len(labels) == 12
    boxes = []
    for text in labels:
        boxes.append(text.get_window_extent(renderer).extents)
    for index, box in enumerate(boxes):
        assert sum(overlap(box, other) for other in boxes[index + 1 :]) < 0.03 * overlap(box, box)


def test_a_baseline_far_off_does_not_flatten_the_rest() -> None:
    records = [
        dataclasses.replace(record, value=0.1) if record.label == "static 3" else record
        for record in made_up.by_cost(noise=1e-3)
    ]
    ax = axes(records)
    assert ax.get_ylim()[0] > 0.8
    assert "static 3: 0.100 ↓" in [text.get_text() for text in ax.texts]
    records = [
        dataclasses.replace(record, value=5.0) if record.label == "full precision" else record for record in records
    ]
    assert "full precision: 5.000, above" in texts(records)


def test_points_of_one_cost_are_set_apart_around_it() -> None:
    places = _side_by_side([0.3, 0.63, 0.63, 0.63, 1.0])
    assert places[0] == 0.3 and places[2] == pytest.approx(0.63) and places[4] == 1.0
    assert places[1] < places[2] < places[3] and places[3] - places[1] < 0.06
    assert _side_by_side([]) == [] and _side_by_side([0.5]) == [0.5]


def test_failed_runs_are_mentioned() -> None:
    records = [*made_up.by_cost(), made_up.record("RR", made_up.schedules()["RR"], None, 3)]
    assert "13 runs have no value, and so no part in a mean." in texts(records)
    lost = [made_up.record("RR", made_up.schedules()["RR"], None)]
    assert figures(panels(lost)) == {}
    assert figures(panels(made_up.comparison({"full precision": 0.9}))) == {}


def test_deficit_and_window() -> None:
    found = figures(panels([*made_up.deficits(), *made_up.windows()]))
    ax: Any = found["deficit"].axes[0]
    line = next(line for line in ax.lines if len(line.get_xdata()) == 4)
    assert list(line.get_xdata()) == [0, 100, 200, 400] and line.get_ydata()[0] == pytest.approx(0.9)
    ax = found["window"].axes[0]
    spans = [tuple(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2 and line.get_linewidth() == 4]
    assert spans == [(0, 200), (100, 300), (200, 400), (400, 600)]
    text = " ".join(texts(made_up.windows(), "window"))
    assert "never at low precision" in text and "A later window" in text


def test_schedules_that_begin_later_stand_together() -> None:
    ax = axes(made_up.delayed(), "delayed")
    names = [label.get_text().replace("\n", " ") for label in ax.get_xticklabels()]
    assert names == [
        "CR", "CR delayed 100", "CR after deficit 100", "RR", "RR delayed 100", "RR after deficit 100", "static 8",
    ]  # fmt: skip


@pytest.mark.slow
def test_equal_records_give_equal_bytes() -> None:
    """In another process, with other hashes, too."""
    code = (
        "import hashlib; from tests.study import made_up; from cpt_fx.study.analysis import panels;"
        "from cpt_fx.study.figures import figures, save;"
        "f = figures(panels(made_up.by_cost(noise=4e-3)))['cost'];"
        "print(hashlib.sha256(save(f, 'svg')).hexdigest(), hashlib.sha256(save(f, 'png')).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1 and len(found.pop().split()) == 2


@pytest.mark.slow
def test_drawing_opens_no_window() -> None:
    code = (
        "import sys; from tests.study import made_up; from cpt_fx.study.analysis import panels;"
        "from cpt_fx.study.figures import figures; figures(panels(made_up.by_cost(seeds=1)));"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_one_seed_has_no_bar() -> None:
    ax = axes(made_up.by_cost(seeds=1))
    assert not ax.collections
