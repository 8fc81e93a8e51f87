"""The store of a study: one SQLite file that can be read while it is written.

`cells` is the plan: the cells of the study, finished or not. `runs` holds what was trained; cells that share a run
refer to the same one. `ran` holds the widths that each run used. A run is written once it has ended, in one
transaction, so that a killed process leaves nothing half written.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpt_fx.schedules.bits import FULL_PRECISION
from cpt_fx.schedules.savings import costs_of, static_cost
from cpt_fx.study.cells import Cell, canonical
from cpt_fx.study.records import Record
from cpt_fx.study.training import Outcome, Stopwatch, absent

FORMAT = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS cells (
    position INTEGER NOT NULL, study TEXT NOT NULL, experiment TEXT NOT NULL, label TEXT NOT NULL,
    q_min INTEGER NOT NULL, q_max INTEGER NOT NULL, seed INTEGER NOT NULL, run TEXT NOT NULL,
    schedule TEXT NOT NULL, total_steps INTEGER NOT NULL, relative_cost REAL NOT NULL, mean_bits REAL NOT NULL,
    first_cycle_bits REAL, metric TEXT, better TEXT NOT NULL, options TEXT NOT NULL,
    PRIMARY KEY (study, experiment, label, q_min, q_max, seed)
);
CREATE TABLE IF NOT EXISTS runs (
    identity TEXT PRIMARY KEY, status TEXT NOT NULL, error TEXT, metrics TEXT NOT NULL, started TEXT NOT NULL,
    seconds REAL NOT NULL, machine TEXT NOT NULL, versions TEXT NOT NULL, code TEXT, attempts INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS ran (identity TEXT PRIMARY KEY, widths TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS running (only_one INTEGER PRIMARY KEY, pid INTEGER NOT NULL, since TEXT NOT NULL);
"""


@dataclass(frozen=True)
class StoredCell:
    """A cell of the plan as it is stored, with its record where it was trained."""

    study: str
    experiment: str
    label: str
    q_min: int
    q_max: int
    seed: int
    record: Record | None


class Store:
    """An open store; use :func:`reading` or :func:`writing` to get one."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path

    def add_plan(self, cells: Sequence[Cell]) -> None:
        """Add cells to the plan, and drop unfinished cells of the same experiments that are not among them."""
        common = cells[0].setting
        rows = [
            (
                position, *cell.place, cell.identity, repr(cell.schedule), cell.total_steps, cell.facts.relative_cost,
                cell.facts.mean_bits, cell.facts.first_cycle_bits, common.metric, common.better,
                canonical(common.options),
            )
            for position, cell in enumerate(cells)
        ]  # fmt: skip
        with self._connection:
            self._connection.executemany(
                "DELETE FROM cells WHERE study = ? AND experiment = ? "
                "AND run NOT IN (SELECT identity FROM runs WHERE status = 'done')",
                sorted({cell.place[:2] for cell in cells}),
            )
            for cell in cells:
                self._check_place(cell)
            marks = ", ".join("?" * len(rows[0]))
            self._connection.executemany(f"INSERT OR REPLACE INTO cells VALUES ({marks})", rows)
            # The metric is that of the whole study.
            values = (common.metric, common.better, common.study)
            self._connection.execute("UPDATE cells SET metric = ?, better = ? WHERE study = ?", values)

    def _check_place(self, cell: Cell) -> None:
        """Raise ValueError if another run is stored for the same cell: a study compares like with like."""
        earlier = self._connection.execute(
            "SELECT schedule, options FROM cells WHERE study = ? AND experiment = ? AND label = ? AND q_min = ? "
            "AND q_max = ? AND seed = ? AND run != ?",
            (*cell.place, cell.identity),
        ).fetchone()
        if earlier is None:
            return
        options = canonical(cell.setting.options)
        there, here = (
            (f"options {earlier['options']}", f"options {options}")
            if earlier["options"] != options
            else (earlier["schedule"], repr(cell.schedule))
        )
        if there == here:
            there, here = "another function in its schedule", "this one"
        study, _, label, q_min, q_max, seed = cell.place
        raise ValueError(
            f"the study {study!r} in {self.path} has a finished {label} ({q_min}, {q_max}) seed {seed} with {there}, "
            f"not with {here}: a study compares like with like, so give this one another name"
        )

    def finished(self) -> dict[str, str | None]:
        """Return the identities of the finished runs, each with the fingerprint of the code that made it."""
        return dict(self._connection.execute("SELECT identity, code FROM runs WHERE status = 'done'"))

    def add_run(self, identity: str, outcome: Outcome, code: str | None) -> None:
        """Store the outcome of a run, replacing that of an earlier attempt."""
        with self._connection:
            self._connection.execute(
                "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, "
                "1 + ifnull((SELECT attempts FROM runs WHERE identity = ?1), 0))",
                (
                    identity, outcome.status, outcome.error, json.dumps(outcome.metrics), outcome.started,
                    outcome.seconds, json.dumps(outcome.machine), json.dumps(outcome.versions), code,
                ),
            )  # fmt: skip
            self._connection.execute("INSERT OR REPLACE INTO ran VALUES (?, ?)", (identity, json.dumps(outcome.widths)))

    def cells(self, study: str | None = None) -> list[StoredCell]:
        """Return the plan of a study, or of all studies, in its order."""
        rows = self._connection.execute(
            "SELECT cells.*, ran.widths, runs.* FROM cells LEFT JOIN runs ON cells.run = runs.identity "
            "LEFT JOIN ran ON cells.run = ran.identity "
            "WHERE ? IS NULL OR study = ? ORDER BY study, experiment, cells.position, cells.rowid",
            (study, study),
        ).fetchall()
        first: dict[str, str] = {}  # the metric by default: the first that the study's function returned
        for row in rows:
            if row["status"] == "done" and row["study"] not in first:
                first[row["study"]] = next(iter(_mapping(row, "metrics")), "metric")
        return [_found(row, first.get(row["study"], "metric")) for row in rows]

    def studies(self) -> list[str]:
        """Return the names of the studies in the file."""
        return [name for (name,) in self._connection.execute("SELECT DISTINCT study FROM cells ORDER BY study")]

    def runner(self) -> str:
        """Return which process runs a study on the file; an empty string if that is not known."""
        row = self._connection.execute("SELECT pid, since FROM running").fetchone()
        return "" if row is None else f" (process {row['pid']!r}, since {_visible(str(row['since']))})"

    def note_runner(self) -> None:
        """Record this process as the one that runs a study on the file."""
        with self._connection:
            values = (os.getpid(), Stopwatch().started)
            self._connection.execute("INSERT OR REPLACE INTO running VALUES (1, ?, ?)", values)


def reading(path: Path) -> AbstractContextManager[Store]:
    """Open an existing store, even while a study writes to it."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no store {path}; `cpt-fx study run --store {path} ...` makes one")
    return _opened(path)


@contextmanager
def writing(path: Path) -> Iterator[Store]:
    """Open a store for the one process that runs a study on it; create it if it does not exist.

    The lock is a transaction on a file beside the store. The system releases it when the process ends, however it ends.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to keep the store {path.name} in")
    with _opened(path) as store, closing(sqlite3.connect(f"{path}.lock", timeout=0, isolation_level=None)) as lock:
        try:
            lock.execute("PRAGMA journal_mode=MEMORY")  # nothing is written: no journal file is needed
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise OSError(f"the store {path} cannot be locked by {path}.lock: {error}") from error
            raise RuntimeError(
                f"another study is running on the store {path}{store.runner()}: wait for its end, or use another "
                "store. `cpt-fx study status` can be used meanwhile"
            ) from None
        store.note_runner()
        yield store


@contextmanager
def _opened(path: Path) -> Iterator[Store]:
    with closing(sqlite3.connect(path, timeout=60)) as connection:
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("PRAGMA journal_mode=WAL")  # readers do not wait for the writer, nor the writer for them
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise ValueError(f"the store {path} has format {version}; this version of cpt_fx reads format {FORMAT}")
            if version == 0 and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise ValueError(f"{path} is a SQLite file, but not of a study")
            if not connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'ran'").fetchone()[0]:
                connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;")
            # No study writes views or triggers, which would run when a table is read or written.
            connection.execute("PRAGMA trusted_schema=OFF")
            wanted = "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index')"
            for kind, name in connection.execute(wanted):
                raise ValueError(f"the store {path} holds the {kind} {name!r}, which no study writes")
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path} cannot be used as a store: {error}") from error
        yield Store(connection, path)


def _found(row: sqlite3.Row, first_metric: str) -> StoredCell:
    for column, kinds in _CELL.items() if row["identity"] is None else (_CELL | _RUN).items():
        if not isinstance(row[column], kinds) or (isinstance(row[column], float) and not math.isfinite(row[column])):
            raise _foreign(row, column)
    place: dict[str, Any] = {
        key: _visible(row[key]) for key in ("study", "experiment", "label", "q_min", "q_max", "seed")
    }
    if row["identity"] is None:
        return StoredCell(**place, record=None)
    metric = _visible(row["metric"]) or first_metric
    metrics = {name: _number(row, value) for name, value in _mapping(row, "metrics").items()}
    status, error, value = row["status"], _visible(row["error"]), metrics.get(metric)
    for column, known in (("status", ("done", "failed")), ("better", ("higher", "lower"))):
        if row[column] not in known:
            raise _foreign(row, column)
    if status == "done" and value is None:
        status, error = "failed", absent(metric, metrics)
    kept = ("schedule", "total_steps", "relative_cost", "mean_bits", "first_cycle_bits", "better", "started", "seconds")
    record = Record(
        **place,
        **{key: _visible(row[key]) for key in kept} | _cost(row),
        status=status,
        error=error,
        metric=metric,
        value=value if status == "done" else None,
        metrics=metrics,
        machine=_mapping(row, "machine"),
        versions=_mapping(row, "versions") | ({"code": _visible(row["code"])} if row["code"] else {}),
        options=_mapping(row, "options"),
    )
    return StoredCell(**place, record=record)


# A store may come from anyone, and SQLite does not enforce the types of columns.
_CELL: dict[str, Any] = dict.fromkeys(("study", "experiment", "label", "schedule", "better"), str)
_CELL |= dict.fromkeys(("q_min", "q_max", "seed", "total_steps"), int)
_CELL |= dict.fromkeys(("relative_cost", "mean_bits"), float) | {"first_cycle_bits": float | None, "metric": str | None}
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONGEST = 100_000_000
_RUN = {"status": str, "error": str | None, "started": str, "seconds": float, "code": str | None}


def _visible(value: Any) -> Any:
    """Escape characters that control a terminal: \\x1b for escape, \\u202e for the right-to-left override."""
    if isinstance(value, str):
        return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), value)
    if isinstance(value, dict):
        return {_visible(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, list) else value


def _mapping(row: sqlite3.Row, column: str) -> dict[str, Any]:
    try:
        found = _visible(json.loads(row[column]))
    except (ValueError, TypeError, RecursionError) as error:
        raise _foreign(row, column) from error
    if not isinstance(found, dict):
        raise _foreign(row, column)
    return found


def _cost(row: sqlite3.Row) -> dict[str, float]:
    """Return cost and mean width of the steps that ran; nothing if none was recorded: the planned ones apply."""
    try:
        found = np.array(json.loads(row["widths"] or "[]"), dtype=np.int64).reshape(-1, 4)
        widths, counts = found[:, :3], found[:, 3]
        if not ((widths >= 0) & (widths <= FULL_PRECISION)).all() or not ((counts > 0) & (counts < _LONGEST)).all():
            raise ValueError("these are no widths and numbers of steps")
        if counts.sum() > _LONGEST:
            raise ValueError("no run has so many steps")
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise _foreign(row, "widths") from error
    if not len(found):
        return {}
    costs = costs_of(np.repeat(widths, counts, axis=0))
    return {"relative_cost": costs.average / static_cost(row["q_max"]), "mean_bits": costs.mean_bits}


def _number(row: sqlite3.Row, value: object) -> float:
    try:
        if isinstance(value, int | float):
            return float(value)
    except OverflowError:
        pass
    raise _foreign(row, "metrics")


def _foreign(row: sqlite3.Row, column: str) -> ValueError:
    shown = repr(row[column])
    where = f"seed {row['seed']!r} of {row['label']!r}"
    return ValueError(
        f"the store holds {column} = {shown if len(shown) < 80 else shown[:80] + '…'} for {where}, which no study "
        "writes: it was damaged, or made by something else"
    )
