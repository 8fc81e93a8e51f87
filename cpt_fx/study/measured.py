"""Write what a study measured to the file that :func:`cpt_fx.schedules.recommend` reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from cpt_fx.common.files import replace
from cpt_fx.errors import check_choice
from cpt_fx.schedules import NAMES
from cpt_fx.schedules.measured import FAMILIES, PATH, Measurement, Task, read
from cpt_fx.study.analysis import Panel, against, panels
from cpt_fx.study.records import Record

__all__ = ["Task", "update"]


def update(
    path: str | os.PathLike[str] | None, family: str, task: Task, records: Iterable[Record]
) -> list[Measurement]:
    """Add a study's comparison of schedules to a file of measurements, and return what was written.

    `path` None means the package's own file. There is one entry for each (q_min, q_max); an entry of the same study and
    widths is replaced. A schedule with fewer than two finished seeds has no interval, and is left out by name.
    """
    check_choice("family", family, FAMILIES)
    target = PATH if path is None else Path(path)
    own = [record for record in records if record.experiment == "schedules"]
    studies = sorted({record.study for record in own})
    if len(studies) > 1:
        raise ValueError(f"give the records of one study at a time, these are of {', '.join(studies)}")
    made = [_measurement(studies[0], task, panel) for panel in panels(own)]
    if not made:
        raise ValueError('the records hold no comparison of schedules: none has experiment "schedules"')
    known = read(target) if target.exists() else {}
    replaced = {(one.study, one.q_min, one.q_max) for one in made}
    kept = [one for one in known.get(family, []) if (one.study, one.q_min, one.q_max) not in replaced]
    data: dict[str, Any] = {name: [asdict(one) for one in entries] for name, entries in known.items()}
    data[family] = [asdict(one) for one in [*kept, *made]]
    text = json.dumps({"families": dict(sorted(data.items()))}, indent=1)
    # Lists of numbers on one line rather than one number per line: the file is read by people too.
    text = re.sub(r"\[\s+([-+.\deE,\s]+?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    replace(target, text + "\n")
    return made


def _measurement(study: str, task: Task, panel: Panel) -> Measurement:
    rows = [row for row in panel.rows if len(row.values) > 1]
    if not any(row.label in NAMES for row in rows):
        raise ValueError(
            f"no published schedule has two finished seeds at {panel.bits}, so nothing can be said with an interval"
        )
    differences: dict[str, dict[str, list[float]]] = {}
    for one, other in combinations(rows, 2):
        estimate = against(one, other)
        assert estimate is not None and estimate.interval is not None  # both have at least two values
        found = (estimate.value, estimate.interval.low, estimate.interval.high)
        differences.setdefault(one.label, {})[other.label] = [_rounded(number) for number in found]
    return Measurement(
        study=study,
        **asdict(task),
        steps=rows[0].total_steps,
        seeds=list(panel.seeds),
        **{name: getattr(panel, name) for name in ("q_min", "q_max", "metric", "better")},
        schedules={
            row.label: {
                "mean": _rounded(row.mean.value),
                "sd": _rounded(row.deviation or 0.0),
                "n": len(row.values),
                "relative_cost": _rounded(row.relative_cost),
            }
            for row in rows
            if row.mean is not None
        },
        differences=differences,
        left_out={row.label: f"{len(row.values)} of {len(panel.seeds)} seeds" for row in panel.rows if row not in rows},
    )


def _rounded(value: float) -> float:
    """Round to seven digits: far below any spread, and readable in the file."""
    return float(f"{value:.7g}")
