"""What was run: size, machine, versions, options and dates of a study, as sentences."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from cpt_fx.study.records import Record


def facts(records: Sequence[Record], command: str | None = None) -> list[tuple[str, str]]:
    """Return name and text of each fact. Where runs differ in one, all its values are named."""
    trained = runs(records)
    done = sum(record.status == "done" for record in trained)
    seconds = sum(record.seconds for record in trained)
    found = [
        ("Runs", f"{len(trained)}, of which {done} finished; {duration(seconds)} from start to end, added up"),
        ("Steps", _listed(f"{steps:,}" for steps in sorted({record.total_steps for record in records}))),
        ("Seeds", _listed(str(seed) for seed in sorted({record.seed for record in records}))),
        ("Options", _listed(_options(record) for record in records)),
        ("Machine", _listed(_machine(record) for record in records)),
        ("Versions", _listed(_versions(record) for record in records)),
        ("Dates", _dates(records)),
    ]
    if command:
        found.append(("Command", command))
    return found


def runs(records: Iterable[Record]) -> list[Record]:
    """Return one record of each training run: static 8 may stand in several experiments, and was trained once."""
    distinct = {
        (record.study, record.schedule, record.seed, record.started, json.dumps(record.options, sort_keys=True)): record
        for record in records
    }
    return list(distinct.values())


def duration(seconds: float) -> str:
    """Return "42 s", "12 min" or "3.4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _listed(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _options(record: Record) -> str:
    pairs = (
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in record.options.items()
    )
    return ", ".join(pairs) or "none"


def _machine(record: Record) -> str:
    known = dict(record.machine)
    place = str(known.pop("processor", "")) or "not recorded"
    counts = [f"{value} {name if value != 1 else name.removesuffix('s')}" for name, value in known.items()]
    return ", ".join([place, *counts])


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {number}" for name, number in record.versions.items()) or "not recorded"


def _dates(records: Sequence[Record]) -> str:
    days = sorted({record.started[:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
