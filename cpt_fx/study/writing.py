"""Write a study's report: figures, tables, every record, a page, and a summary in Markdown."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path

from cpt_fx.common.files import replace
from cpt_fx.study import page as report
from cpt_fx.study.analysis import Panel, ScheduleRow, against, low_steps, panels, reference, verdict
from cpt_fx.study.figures import COLOURS, INK, RULE, SOFT, figures, save
from cpt_fx.study.findings import conclusions, counted, markdown, tables
from cpt_fx.study.records import Record, duration
from cpt_fx.study.statistics import Estimate

FIGURE_TITLES = {
    "cost": "Quality against cost",
    "deficit": "Low precision at the start of training",
    "window": "A window of low precision, moved along training",
    "first-cycle": "Equal cost, different beginnings",
    "delayed": "Schedules that begin later",
}
NO_FIGURES = 'There are no figures, because matplotlib is not installed: pip install "cpt_fx[viz]".'
DARK = {"small": "#56b4e9", "medium": "#3fc79a", "large": "#ff9a57", "other": "#dd8fc0"}
"""The colours of the figures on a dark page, light enough to read."""
VARIABLES = {COLOURS[name]: f"--{name}" for name in DARK}
VARIABLES |= {INK: "--ink", SOFT: "--soft", RULE: "--rule", "#ffffff": "--page"}
"""The page's CSS variable for each colour of the drawings."""
_LIGHT = "".join(f"--{name}: {COLOURS[name]}; " for name in DARK)
_DARK = "".join(f"--{name}: {colour}; " for name, colour in DARK.items())

STYLE = f"""
:root {{ {_LIGHT}}}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK}}} }}
main {{ max-width: 1040px; }}
figure svg {{ max-width: 780px; }}
.wide {{ overflow-x: auto; margin: 10px 0 0; }}
.wide th, .wide td {{ padding: 7px 0 7px 14px; font-size: 13.5px; }}
.wide th:first-child {{ padding-left: 0; }}
.wide thead th {{ white-space: normal; vertical-align: bottom; }}
.wide td.text {{ text-align: left; white-space: normal; color: var(--soft); min-width: 20ch; }}
.wide td.better {{ color: var(--c1); }} .wide td.worse {{ color: var(--c2); }}
.wide td.apart {{ color: var(--soft); }}
section ul {{ margin: 4px 0 0; padding-left: 20px; max-width: 86ch; }} section li {{ margin: 3px 0; }}
section p {{ margin: 8px 0 0; max-width: 82ch; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 5px 20px; margin: 10px 0 0; font-size: 13.5px; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.notes {{ white-space: pre-line; }}
"""


def write(
    records: Iterable[Record],
    folder: str | os.PathLike[str],
    *,
    title: str | None = None,
    notes: str | None = None,
    command: str | None = None,
) -> dict[str, Path]:
    """Write the reports of one or several studies into a folder, and return the paths of its files by kind.

    A study named digits gives digits.html, digits.md, digits.csv (a line for each schedule), digits-records.csv (a line
    for each run), and for each figure digits-cost.png and .svg, digits-deficit.png and so on. `notes` are shown above
    the tables: what the data are, and what they cannot show. `command` regenerates the report. Each file is
    written completely or not at all. With records of several studies, the keys of the result begin with their names.
    """
    kept = list(records)
    if not kept:
        raise ValueError("there are no records to write: no run of the study was finished, nor failed")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    studies = list(dict.fromkeys(record.study for record in kept))
    stems = {study: stem(study) for study in studies}
    if len(set(stems.values())) < len(studies):
        raise ValueError(f"these studies would be written to the same files, so write them one by one: {studies}")
    made: dict[str, Path] = {}
    for study in studies:
        own = [record for record in kept if record.study == study]
        for end, content in _contents(own, stems[study], title or study, notes or "", command).items():
            path = folder / f"{stems[study]}{end}"
            replace(path, content)
            made[f"{study}: " * (len(studies) > 1) + end[1:]] = path
    return made


def stem(study: str) -> str:
    """Return the name that a study's files begin with: letters, digits, dots, dashes and underscores."""
    short = re.sub(r"[^\w.-]+", "-", study).encode()[:80].decode(errors="ignore")
    return short.strip("-.") or "study"


def _contents(
    records: Sequence[Record], name: str, title: str, notes: str, command: str | None
) -> dict[str, str | bytes]:
    """Return the content of each file, by the end of its name."""
    found = panels(records)
    drawn: dict[str, dict[str, bytes]] = {}
    if with_figures := find_spec("matplotlib") is not None:
        for topic, figure in figures(found).items():
            drawn[stem(topic)] = {kind: save(figure, kind) for kind in ("png", "svg")}
    lead, missing = _lead(found, records), "" if with_figures else NO_FIGURES
    page, text = _told(found, name, drawn, facts(records, command), notes, missing)
    foot = "Written by cpt_fx.study from the records of the runs."
    contents: dict[str, str | bytes] = {".html": report.page(title, lead, page, foot)}
    contents |= {".csv": summary(found), "-records.csv": raw(records)}
    contents |= {f"-{topic}.{kind}": data for topic, kinds in drawn.items() for kind, data in kinds.items()}
    return contents | {".md": "\n\n".join((f"# {markdown(title)}", lead, *text)) + "\n"}


def _told(
    found: Sequence[Panel], name: str, drawn: Mapping[str, Mapping[str, bytes]], about: Sequence[tuple[str, str]],
    notes: str, missing: str,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Return the sections of the page, and those of the Markdown file."""
    page = [f"<style>{STYLE}</style>", *([f'<p class="note">{escape(missing)}</p>'] if missing else [])]
    text = [*filter(None, (notes, missing))]
    for topic, kinds in drawn.items():
        headline = escape(FIGURE_TITLES.get(topic, topic.capitalize()))
        drawing = report.inlined(kinds["svg"].decode(), topic, headline, VARIABLES)
        page.append(f"<figure><figcaption><h2>{headline}</h2></figcaption>\n{drawing}</figure>")
        text.append(f"![{FIGURE_TITLES.get(topic, topic)}]({name}-{topic}.png)")
    text.append("## What comes out")
    told = ""
    for one in conclusions(found):
        findings = "".join(f"<li>{escape(finding)}</li>" for finding in one.findings)
        told += f"<p><b>{escape(one.where)}</b></p><ul>{findings}</ul>"
        text += [f"**{markdown(one.where)}**", "\n".join(f"* {markdown(finding)}" for finding in one.findings)]
    page.append(f"<section><h2>What comes out</h2>{told}</section>")
    if notes:
        page.append(f'<section><h2>Notes</h2><p class="notes">{escape(notes)}</p></section>')
    for table in tables(found):
        cells = report.table(table.headings, table.rows, place="wide", coloured=False, kind=_kind)
        note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
        page.append(f"<section><h2>{escape(table.title)}</h2>{cells}{note}</section>")
        text += [f"## {markdown(table.title)}", table.markdown()]
    items = "".join(f"<dt>{escape(fact)}</dt><dd>{escape(told)}</dd>" for fact, told in about)
    page.append(f"<section><h2>What was run</h2><dl>{items}</dl></section>")
    lines = [f"* {fact}: " + (f"`{told}`" if fact == "Command" else markdown(told)) for fact, told in about]
    return page, [*text, "## What was run", "\n".join(lines)]


def _kind(heading: str, cell: str) -> str:
    """Return the CSS class of a table cell."""
    if heading in ("reason", "schedules"):
        return "text"
    return {"better": "better", "worse": "worse", "not told apart": "apart"}.get(cell, "") * (heading == "verdict")


def _lead(found: Sequence[Panel], records: Sequence[Record]) -> str:
    """Return the opening sentences: how large the study is, and that it covers only one task."""
    bits = ", ".join(dict.fromkeys(panel.bits for panel in found))
    labels = len({record.label for record in records})
    seeds = counted(len({record.seed for record in records}), "seed")
    steps = sorted({record.total_steps for record in records})
    length = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    trained = _runs(records)
    finished = sum(record.status == "done" for record in trained)
    return (
        f"{labels} schedules at (q_min, q_max) = {bits}, {seeds}, {length} steps each; {finished} of {len(trained)} "
        "runs finished. One task: what holds here need not hold for other data, other models or longer training."
    )


# What was run.


def facts(records: Sequence[Record], command: str | None = None) -> list[tuple[str, str]]:
    """Return name and text of each fact about the runs; where runs differ, all values are listed."""
    trained = _runs(records)
    done = sum(record.status == "done" for record in trained)
    seconds = sum(record.seconds for record in trained)
    days = sorted({record.started[:10] for record in records})
    found = [
        ("Runs", f"{len(trained)}, of which {done} finished; {duration(seconds)} from start to end, added up"),
        ("Steps", _listed(f"{steps:,}" for steps in sorted({record.total_steps for record in records}))),
        ("Seeds", _listed(str(seed) for seed in sorted({record.seed for record in records}))),
        ("Options", _listed(_named(record.options, "=") or "none" for record in records)),
        ("Machine", _listed(_machine(record) for record in records)),
        ("Versions", _listed(_named(record.versions) or "not recorded" for record in records)),
        ("Dates", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"),
    ]
    return [*found, ("Command", command)] if command else found


def _runs(records: Iterable[Record]) -> list[Record]:
    """Return one record of each training run: static 8 may be part of several experiments, but is trained once."""
    distinct = {
        (record.study, record.schedule, record.seed, record.started, json.dumps(record.options, sort_keys=True)): record
        for record in records
    }
    return list(distinct.values())


def _listed(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _named(values: Mapping[str, object], between: str = " ") -> str:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return ", ".join(f"{name}{between}{text}" for name, text in texts.items())


def _machine(record: Record) -> str:
    known = dict(record.machine)
    place = str(known.pop("processor", "")) or "not recorded"
    counts = [f"{value} {name if value != 1 else name.removesuffix('s')}" for name, value in known.items()]
    return ", ".join([place, *counts])


# The numbers as CSV, in full precision.


def summary(panels: Sequence[Panel]) -> str:
    """Return all rows of all panels as CSV."""
    return _csv([_line(panel, row) for panel in panels for row in panel.rows])


def _line(panel: Panel, row: ScheduleRow) -> dict[str, object]:
    other, values = reference(row, panel), list(row.values.values())
    estimate = against(row, other) if other else None
    low_from, low_until = low_steps(row, panel) or (None, None)
    of_row = ("relative_cost", "mean_bits", "first_cycle_bits", "total_steps")
    return {
        **{name: getattr(panel, name) for name in ("experiment", "q_min", "q_max")},
        "schedule": row.label,
        "saving": row.group,
        **{name: getattr(row, name) for name in of_row},
        "low_from": low_from,
        "low_until": low_until,
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


def raw(records: Sequence[Record]) -> str:
    """Return every record as CSV; each metric has a column, mappings are JSON."""
    metrics = sorted({name for record in records for name in record.metrics})
    lines = []
    for record in records:
        line = {name: value for name, value in record.to_dict().items() if name != "metrics"}
        line = {name: json.dumps(v, sort_keys=True) if isinstance(v, dict) else v for name, v in line.items()}
        lines.append(line | {f"metrics.{name}": record.metrics.get(name) for name in metrics})
    return _csv(lines)


def _ends(name: str, estimate: Estimate | None) -> Mapping[str, float | None]:
    interval = estimate.interval if estimate else None
    return {f"{name}_{end}": getattr(interval, end, None) for end in ("low", "high")}


def _csv(lines: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
