"""The numbers of a study as CSV, in full precision: a summary row by row, and every record."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from cpt_fx.study.analysis import Panel, against, verdict
from cpt_fx.study.critical_rows import low_steps, reference
from cpt_fx.study.records import Record
from cpt_fx.study.statistics import Estimate


def summary(panels: Sequence[Panel]) -> str:
    """Return all rows of all panels as CSV, in full precision."""
    lines = []
    for panel in panels:
        for row in panel.rows:
            other = reference(row, panel)
            estimate = against(row, other) if other else None
            low = low_steps(row, panel)
            values = list(row.values.values())
            lines.append(
                {
                    "experiment": panel.experiment,
                    "q_min": panel.q_min,
                    "q_max": panel.q_max,
                    "schedule": row.label,
                    "saving": row.group,
                    "relative_cost": row.relative_cost,
                    "mean_bits": row.mean_bits,
                    "first_cycle_bits": row.first_cycle_bits,
                    "total_steps": row.total_steps,
                    "low_from": low[0] if low else None,
                    "low_until": low[1] if low else None,
                    "metric": panel.metric,
                    "better": panel.better,
                    "seeds": len(values),
                    "failed": len(row.failed),
                    "missing": len(row.missing),
                    "mean": row.mean.value if row.mean else None,
                    "sd": row.deviation,
                    "lowest": min(values, default=None),
                    "highest": max(values, default=None),
                    **_ends("mean", row.mean),
                    "compared_with": other.label if other else None,
                    "difference": estimate.value if estimate else None,
                    **_ends("difference", estimate),
                    "paired": estimate.paired if estimate else None,
                    "verdict": verdict(estimate, panel.better) if other else None,
                }
            )
    return _csv(lines)


def raw(records: Sequence[Record]) -> str:
    """Return every record as CSV; each metric has a column, mappings are JSON."""
    metrics = sorted({name for record in records for name in record.metrics or {}})
    lines = []
    for record in records:
        line = {name: value for name, value in asdict(record).items() if name != "metrics"}
        line = {name: json.dumps(v, sort_keys=True) if isinstance(v, dict) else v for name, v in line.items()}
        lines.append(line | {f"metrics.{name}": (record.metrics or {}).get(name) for name in metrics})
    return _csv(lines)


def _ends(name: str, estimate: Estimate | None) -> Mapping[str, float | None]:
    interval = estimate.interval if estimate else None
    return {
        f"{name}_low": interval.low if interval else None,
        f"{name}_high": interval.high if interval else None,
    }


def _csv(lines: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    names = list(dict.fromkeys(name for line in lines for name in line))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
