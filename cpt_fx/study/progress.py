"""How far a study is: a bar on a terminal, a line for each cell elsewhere. All of it goes to stderr."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from cpt_fx.study.cells import Cell
from cpt_fx.study.outcome import Outcome


class Progress(ExitStack):
    """Shows cells as they end. `finished` ones are not counted for the estimate."""

    def __init__(self, study: str, total: int, finished: int, shown: bool) -> None:
        super().__init__()
        self.failed = 0
        self._study, self._total, self._before, self._ended, self._shown = study, total, finished, finished, shown
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        """Start to show."""
        if not self._shown:
            return self
        if not sys.stderr.isatty():
            done = f", {self._ended} of them done before" if self._ended else ""
            print(f"{self._study}: {self._total} cell{'s' * (self._total != 1)}{done}", file=sys.stderr, flush=True)
            return self
        from rich import progress
        from rich.console import Console

        self._bar = self.enter_context(
            progress.Progress(
                "{task.description}",
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                "{task.fields[failed]}",
                progress.TimeElapsedColumn(),
                "{task.fields[left]}",
                console=Console(stderr=True),
            )
        )
        self._task = self._bar.add_task(self._study, total=self._total, completed=self._ended, failed="", left="")
        return self

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Count a cell that has ended."""
        self._ended += 1
        self.failed += outcome.status == "failed"
        if not self._shown:
            return
        line = f"{describe(cell)}: {result(outcome)}, {outcome.seconds:.0f} s"
        if self._bar is None:
            print(f"[{self._ended}/{self._total}] {line}{self._left()}", file=sys.stderr, flush=True)
            return
        if outcome.status == "failed":
            self._bar.console.print(line, style="red", markup=False, highlight=False)
        failed = f"{self.failed} failed" if self.failed else ""
        self._bar.update(self._task, advance=1, failed=failed, left=self._left().lstrip("; "))

    def _left(self) -> str:
        """Say how long the rest will take, at the pace of this session."""
        todo = self._total - self._ended
        pace = (time.monotonic() - self._began) / (self._ended - self._before)
        return f"; about {duration(pace * todo)} left" if todo else ""


def describe(cell: Any) -> str:
    """Name a cell in a few words."""
    place = "" if cell.experiment == "schedules" else f"{cell.experiment}, "
    return f"{place}{cell.label} ({cell.q_min}, {cell.q_max}) seed {cell.seed}"


def result(outcome: Outcome) -> str:
    """Say what came out, in a line."""
    if outcome.status == "failed":
        return f"failed: {last_line(outcome.error)}"
    return ", ".join(f"{name} {value:.4g}" for name, value in outcome.metrics.items())


def last_line(error: str | None) -> str:
    """Return the line of a traceback that says what happened."""
    return next((line.strip() for line in reversed((error or "").splitlines()) if line.strip()), "no reason is known")


def duration(seconds: float) -> str:
    """Write a time with the unit that fits."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
