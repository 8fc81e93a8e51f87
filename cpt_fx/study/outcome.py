"""What comes out of one training run, in whichever process it ran, and the doing of it; and what it ran on and with."""

from __future__ import annotations

import math
import os
import platform
import random
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from cpt_fx.schedules.memory import fresh
from cpt_fx.study.cells import Task
from cpt_fx.study.function import TrainFunction

PACKAGES = ("cpt_fx", "torch", "numpy", "torch_geometric", "transformers")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training run returned, or why it failed."""

    status: str
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    started: str
    seconds: float
    machine: dict[str, object] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    widths: list[tuple[int, ...]] = field(default_factory=list)
    """Weight, activation and gradient width, and for how many steps they ran; empty where nothing was stepped."""


class Stopwatch:
    """When something began, and how long it has taken."""

    def __init__(self) -> None:
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The time since."""
        return round(time.perf_counter() - self._began, 3)

    def failed(self, error: str) -> Outcome:
        """Return the outcome of a run that was lost."""
        return Outcome(status="failed", error=error, started=self.started, seconds=self.seconds)


def execute(train: TrainFunction, threads: int, task: Task) -> Outcome:
    """Seed, train, and check what is returned. Whatever goes wrong in the training is part of the outcome."""
    import torch

    schedule, seed, options, metric = task
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    watch = Stopwatch()
    error, metrics, widths = None, dict[str, float](), list[tuple[int, ...]]()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        # stdout belongs to what the study itself prints, such as --json. No run sees what another one has learned.
        with redirect_stdout(sys.stderr), fresh(schedule) as own:
            returned = train(own, seed, options)
            widths = [(*bits, count) for bits, count in own._widths_that_ran()]
        metrics, error = checked(returned, metric)
    except (Exception, SystemExit):  # a script may end itself; the study goes on
        error = traceback.format_exc()
    finally:
        torch.set_num_threads(before)
    return Outcome(
        status="done" if error is None else "failed",
        error=error,
        metrics=metrics,
        started=watch.started,
        seconds=watch.seconds,
        machine={"processor": processor(), "cores": os.cpu_count() or 1, "threads": threads},
        versions=versions(PACKAGES),
        widths=widths,
    )


def checked(returned: object, metric: str | None) -> tuple[dict[str, float], str | None]:
    """Return the finite numbers among what a training function returned, and what is wrong with it, if anything."""
    found = returned if isinstance(returned, Mapping) else {metric or "metric": returned}
    metrics: dict[str, float] = {}
    wrong = []
    for key, value in found.items():
        number = _number(value)
        if number is None:
            wrong.append(f"{key} = {value!r}, not a number")
        elif not math.isfinite(number):
            wrong.append(f"{key} = {number}")
        else:
            metrics[str(key)] = number
    compared = metric or next((str(key) for key in found), None)
    if compared is None:
        return metrics, "the training function returned an empty dict"
    if compared in metrics:
        return metrics, None
    if wrong:
        return metrics, f"the training function returned {'; '.join(wrong)}"
    return metrics, absent(compared, metrics)


def absent(metric: str, metrics: Mapping[str, float]) -> str:
    """Say that what is compared was not returned."""
    return f"the training function returned no {metric!r}, but {', '.join(metrics) or 'an empty dict'}"


def _number(value: object) -> float | None:
    """Return a float for a number, a numpy scalar or a tensor of one element."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            value = item()
        except (RuntimeError, ValueError):  # it has several elements
            return None
    # True is an integer to Python; as a result it is a slip.
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# What a measurement belongs to.


def processor() -> str:
    """Return the name of the processor, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"Python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
