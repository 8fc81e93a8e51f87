"""Run the unfinished cells of a study, store each result as it arrives, and show progress."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from cpt_fx.errors import nearest
from cpt_fx.study.cells import PERIODS, Cell, GradientBits, Setting, periods, plan
from cpt_fx.study.engines import Engine
from cpt_fx.study.records import Record, duration, said
from cpt_fx.study.store import StoredCell, reading, writing
from cpt_fx.study.training import Outcome, refuse_in_worker


@dataclass(frozen=True)
class Study:
    """A study in a store, read again on each access, so that a running study can be inspected."""

    store: Path
    name: str | None = None
    """None: all studies of the store."""

    @property
    def cells(self) -> list[StoredCell]:
        """The cells of the study, each with its record if it was trained."""
        with reading(self.store) as kept:
            return kept.cells(self.name)

    @property
    def records(self) -> list[Record]:
        """The records of all cells that were trained, finished or failed."""
        return [cell.record for cell in self.cells if cell.record is not None]

    @property
    def failed(self) -> list[Record]:
        """The records of the cells that failed; `error` of each says why."""
        return [record for record in self.records if record.status == "failed"]

    def write(self, folder: str | PathLike[str], **told: str | None) -> dict[str, Path]:
        """Write tables and figures (CSV, Markdown, PNG, SVG and one HTML page), and return the paths of files by kind.

        ``told`` holds optional texts: the ``title`` of the report; ``notes``, which say what the data are and what they
        cannot show; and the ``command`` that regenerates the report.
        """
        from cpt_fx.study.writing import write  # imported here, since a study that only runs does not need it

        return write(self.records, folder, **told)


def load(store: str | PathLike[str], name: str | None = None) -> Study:
    """Return a study that was run, or is running; without a name, all studies of the store."""
    path = Path(store)
    with reading(path) as kept:
        names = kept.studies()
    if name is not None and name not in names:
        listed = ", ".join(repr(one) for one in names) or "none"
        raise ValueError(f"the store {path} has no study {name!r}; it has {listed}.{nearest(name, names)}")
    return Study(path, name)


def run(
    train: Callable[..., object] | str,
    *,
    store: str | PathLike[str],
    name: str | None = None,
    total_steps: int,
    schedules: Sequence[Any] | None = None,
    bits: Iterable[tuple[int, int]] = ((3, 8),),
    seeds: int | Iterable[int] = 3,
    cycles: int = 8,
    q_grad: GradientBits = None,
    better: str = "higher",
    metric: str | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
    threads: int = 1,
    ray: str | None = None,
    gpus: float = 0,
    progress: bool = True,
) -> Study:
    """Train one task under many schedules, and keep every result in `store`; finished runs are not repeated.

    ``train(schedule)`` or ``train(schedule, seed)`` trains from scratch and returns a number, or a dict of numbers; it
    may also be a reference such as ``"file.py:train"``. `options` are further keyword arguments. The entry
    `metric` of a dict is compared, by default the first.

    ``schedules`` holds names of the ten published schedules, ``"static q_max"``, ``"static q_min"``, ``"static 6"``,
    ``"full precision"``, schedules, functions of (q_min, q_max, total_steps) that return one, and ("label", one of
    these). None stands for the ten, static at q_max and q_min, and full precision. Each is run for each (q_min, q_max)
    of `bits` and each seed; ``seeds`` is their number, or the seeds themselves.

    ``workers`` processes train with ``threads`` torch threads each; 1 trains in this process. ``ray`` is "auto" or the
    address of a Ray cluster: then Ray distributes the cells, and reserves `gpus` GPUs for each.
    """
    setting = Setting(
        train, name=name, total_steps=total_steps, seeds=seeds, cycles=cycles, q_grad=q_grad, better=better,
        metric=metric, options=options,
    )  # fmt: skip
    cells = plan(setting, schedules, bits)
    return _finished(setting, cells, store, Engine(workers, threads, ray, gpus), progress)


def critical(
    train: Callable[..., object] | str,
    *,
    store: str | PathLike[str],
    name: str | None = None,
    total_steps: int,
    q_min: int = 3,
    q_max: int = 8,
    experiments: Iterable[str] = PERIODS,
    deficits: Iterable[int] | None = None,
    lengthen: bool = True,
    window: int | None = None,
    starts: Iterable[int] | None = None,
    delayed: Iterable[str] = ("RR", "RTH"),
    delays: Iterable[int] | None = None,
    seeds: int | Iterable[int] = 3,
    cycles: int = 8,
    q_grad: GradientBits = None,
    better: str = "higher",
    metric: str | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
    threads: int = 1,
    ray: str | None = None,
    gpus: float = 0,
    progress: bool = True,
) -> Study:
    """Look for critical learning periods: does low precision early in training do lasting harm?

    Training, store and engines are as in :func:`run`; ``experiments`` is a selection of

    deficit      low precision in the first N steps
    window       a window of low precision, moved along training
    first-cycle  RTV against ETV: they cost the same, but RTV begins with a cycle of high precision and ETV with one of
                 low
    delayed      the remedy: a schedule that starts later, at its largest widths until then; and its opposite, the same
                 schedule after a deficit

    ``deficits`` are numbers of first steps at q_min (default: none, an eighth, a quarter and half of total_steps). With
    ``lengthen``, as published, such a run is that much longer, so that each has total_steps at q_max; without, all runs
    are total_steps long. ``window`` is the length of the moving window (default: a quarter of total_steps), ``starts``
    where it begins (default: every eighth, to the middle). ``delayed`` names schedules, ``delays`` the steps they wait
    (default: an eighth and a quarter).

    The training function can tell from its schedule which run it is in: by ``schedule.total_steps``, and for a
    ``cpt_fx.schedules.Deficit`` also by ``start`` and ``end``.
    """
    setting = Setting(
        train, name=name, total_steps=total_steps, seeds=seeds, cycles=cycles, q_grad=q_grad, better=better,
        metric=metric, options=options,
    )  # fmt: skip
    cells = periods(
        setting, q_min=q_min, q_max=q_max, experiments=experiments, deficits=deficits, lengthen=lengthen,
        window=window, starts=starts, delayed=delayed, delays=delays,
    )  # fmt: skip
    return _finished(setting, cells, store, Engine(workers, threads, ray, gpus), progress)


def carry_out(
    setting: Setting, cells: Sequence[Cell], store: str | PathLike[str], engine: Engine, shown: bool, *, level: int = 3
) -> Study:
    """Train the cells that are not finished, and return the study that the store then holds."""
    refuse_in_worker()
    study = Study(Path(store), setting.study)
    if not cells:
        return study
    code = setting.train.fingerprint
    with writing(study.store) as kept:
        kept.add_plan(cells)
        finished = kept.finished()
        runs: dict[str, Cell] = {}  # cells with the same identity are trained once
        for cell in cells:
            runs.setdefault(cell.identity, cell)
        if other := sum(finished.get(identity, code) != code for identity in runs):
            warnings.warn(
                f"{other} of {len(runs)} cells of {setting.study!r} were made by other code: the file of the training "
                "function has changed since. They are kept and not run again; use another name or another store to run "
                "all of them anew",
                stacklevel=level,
            )
        todo = [cell for identity, cell in runs.items() if identity not in finished]
        results = engine.results(todo, setting.train)
        try:
            with progress(setting.study, len(runs), len(runs) - len(todo), shown) as add, closing(results):
                for cell, outcome in results:
                    kept.add_run(cell.identity, outcome, code)
                    add(cell, outcome)
        except KeyboardInterrupt:
            done = len(kept.finished().keys() & runs)
            print(
                f"stopped: {done} of {len(runs)} cells are done and kept in {study.store}; the same call goes on from "
                "there",
                file=sys.stderr,
            )
            raise
    return study


def _finished(
    setting: Setting, cells: Sequence[Cell], store: str | PathLike[str], engine: Engine, shown: bool
) -> Study:
    """Carry out a study, and warn if cells failed."""
    study = carry_out(setting, cells, store, engine, shown, level=4)
    experiments = {cell.experiment for cell in cells}
    if failed := [record for record in study.failed if record.experiment in experiments] if cells else []:
        warnings.warn(
            f"{len(failed)} of {len(cells)} cells failed, the first one, {describe(failed[0])}, with: "
            f"{said(failed[0].error)}. `cpt-fx study status {study.store}` shows all; the same call tries them again",
            stacklevel=3,
        )
    return study


# Progress.


@contextmanager
def progress(study: str, total: int, finished: int, shown: bool) -> Iterator[Callable[[Cell, Outcome], None]]:
    """Show progress on stderr, as a bar on a terminal and as lines elsewhere; yield a function that counts a cell."""
    lines, ended, failed, began = shown and not sys.stderr.isatty(), finished, 0, time.monotonic()
    columns = ("{task.fields[failed]}", TimeElapsedColumn(), "{task.fields[left]}")
    hidden = lines or not shown
    with Progress("{task.description}", BarColumn(), MofNCompleteColumn(), *columns, console=Console(stderr=True),
                  disable=hidden) as bar:  # fmt: skip
        task = bar.add_task(study, total=total, completed=finished, failed="", left="")
        if lines:
            done = f", {finished} of them done before" if finished else ""
            print(f"{study}: {total} cell{'s' * (total != 1)}{done}", file=sys.stderr, flush=True)

        def add(cell: Cell, outcome: Outcome) -> None:
            nonlocal ended, failed
            ended, failed = ended + 1, failed + (outcome.status == "failed")
            # The time that the rest will take at the pace so far.
            pace = (time.monotonic() - began) / (ended - finished)
            left = f"about {duration(pace * (total - ended))} left" if ended < total else ""
            line = f"{describe(cell)}: {result(outcome)}, {outcome.seconds:.0f} s"
            if lines:
                print(f"[{ended}/{total}] {line}{'; ' * bool(left)}{left}", file=sys.stderr, flush=True)
            elif shown and outcome.status == "failed":
                bar.console.print(line, style="red", markup=False, highlight=False)
            bar.update(task, advance=1, failed=f"{failed} failed" if failed else "", left=left)

        yield add


def describe(cell: Any) -> str:
    """Name a cell in a few words."""
    place = "" if cell.experiment == "schedules" else f"{cell.experiment}, "
    return f"{place}{cell.label} ({cell.q_min}, {cell.q_max}) seed {cell.seed}"


def result(outcome: Outcome) -> str:
    """Describe an outcome in one line."""
    if outcome.status == "failed":
        return f"failed: {said(outcome.error)}"
    return ", ".join(f"{name} {value:.4g}" for name, value in outcome.metrics.items())
