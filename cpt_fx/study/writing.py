"""Writes a study's report: figures, tables, every record, a page, and a summary in Markdown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cpt_fx.files import replace
from cpt_fx.study import csv_text, figure_style
from cpt_fx.study.analysis import Panel, panels
from cpt_fx.study.conclusions import conclusions
from cpt_fx.study.facts import facts, runs
from cpt_fx.study.page import FIGURE_TITLES, html
from cpt_fx.study.records import Record
from cpt_fx.study.tables import tables
from cpt_fx.study.wording import markdown

NO_FIGURES = 'There are no figures, because matplotlib is not installed: pip install "cpt_fx[viz]".'


def write(
    records: Iterable[Record],
    folder: str | os.PathLike[str],
    *,
    title: str | None = None,
    notes: str | None = None,
    command: str | None = None,
) -> dict[str, Path]:
    """Write the report of one or several studies into a folder, and return its files by what they are.

    A study named digits gives digits.html, digits.md, digits.csv (a line for each schedule), digits-records.csv (a line
    for each run), and for each figure digits-cost.png and .svg, digits-deficit.png and so on. `notes` are shown above
    the tables: what the data are, and what they cannot show. `command` is what regenerates the report. Each file is
    complete or not there. Where the records are of several studies, the keys of the result begin with their names.
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
        for key, content in _contents(own, stems[study], title or study, notes or "", command).items():
            path = folder / f"{stems[study]}{key}"
            replace(path, content)
            name = key.removeprefix("-") if key.startswith("-") else key.removeprefix(".")
            made[name if len(studies) == 1 else f"{study}: {name}"] = path
    return made


def stem(study: str) -> str:
    """Return the name that a study's files begin with: letters, digits, dots, dashes and underscores."""
    short = re.sub(r"[^\w.-]+", "-", study).encode()[:80].decode(errors="ignore")
    return short.strip("-.") or "study"


def _contents(
    records: Sequence[Record], name: str, title: str, notes: str, command: str | None
) -> dict[str, str | bytes]:
    """Return what to write, by the end of the file's name."""
    found = panels(records)
    drawn: dict[str, dict[str, bytes]] = {}
    missing = ""
    if figure_style.available():
        from cpt_fx.study.figures import figures

        for topic, figure in figures(found).items():
            drawn[stem(topic)] = {kind: figure_style.save(figure, kind) for kind in ("png", "svg")}
    else:
        missing = NO_FIGURES
    lead, said, shown, about = _lead(found, records), conclusions(found), tables(found), facts(records, command)
    page = html(
        title, lead, figures={topic: kinds["svg"].decode() for topic, kinds in drawn.items()}, said=said,
        tables=shown, facts=about, notes=notes, missing_figures=missing,
    )  # fmt: skip
    contents: dict[str, str | bytes] = {
        ".html": page,
        ".csv": csv_text.summary(found),
        "-records.csv": csv_text.raw(records),
    }
    for topic, kinds in drawn.items():
        contents |= {f"-{topic}.{kind}": data for kind, data in kinds.items()}
    text = [f"# {markdown(title)}", lead, *([notes] if notes else []), *([missing] if missing else [])]
    text += [f"![{FIGURE_TITLES.get(topic, topic)}]({name}-{topic}.png)" for topic in drawn]
    text.append("## What comes out")
    for one in said:
        text += [f"**{markdown(one.where)}**", "\n".join(f"* {markdown(finding)}" for finding in one.findings)]
    for table in shown:
        text += [f"## {markdown(table.title)}", table.markdown()]
    text += ["## What was run", "\n".join(f"* {fact}: {_code(fact, told)}" for fact, told in about)]
    contents[".md"] = "\n\n".join(text) + "\n"
    return contents


def _lead(found: Sequence[Panel], records: Sequence[Record]) -> str:
    """Say how large the study is, before it says anything else."""
    bits = ", ".join(dict.fromkeys(panel.bits for panel in found))
    labels = len({record.label for record in records})
    seeds = len({record.seed for record in records})
    steps = sorted({record.total_steps for record in records})
    length = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    trained = runs(records)
    finished = sum(record.status == "done" for record in trained)
    return (
        f"{labels} schedules at (q_min, q_max) = {bits}, {seeds} seed{'s' * (seeds != 1)}, {length} steps each; "
        f"{finished} of {len(trained)} runs finished. One task: what holds here need not hold for other data, other "
        "models or longer training."
    )


def _code(fact: str, text: str) -> str:
    return f"`{text}`" if fact == "Command" else markdown(text)
