"""Step times: contenders take turns, so that other load on the machine affects all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from harness.catalog import Settings
from harness.contenders import Trainee
from harness.machine import here
from harness.models import Workload
from harness.preparing import FAILURES, bench, prepare, reason
from harness.results import Result, Row

Tell = Callable[[str], None]

DEPTHS = 16
"""The number of depths of Python's stack at which rounds run, one after the other.

CPython keeps its frames in chunks. The code of a graph has a large frame; where the frame ends just before a chunk
does, every call in it allocates a chunk, and the same step may take half as long again. At which depth that happens is
chance; the median over several depths does not depend on it.
"""


def run(workload: Workload, settings: Settings, tell: Tell = lambda text: None, command: str | None = None) -> Result:
    """Compare contenders on a model. `tell` is called with a line of text on each step of progress."""
    with bench(settings):
        rows, trainees = prepared(workload, settings, tell)
        rows = timed(rows, trainees, settings.steps, tell)
    return Result(
        model=workload.name,
        about=f"{workload.about}; batch {workload.shapes}",
        settings=settings,
        machine=here(settings.threads, command),
        rows=tuple(rows.values()),
    )


def prepared(workload: Workload, settings: Settings, tell: Tell) -> tuple[dict[str, Row], dict[str, Trainee]]:
    """Build, compile and examine every contender; those that cannot run only get a row."""
    rows: dict[str, Row] = {}
    trainees: dict[str, Trainee] = {}
    for name in settings.contenders:
        tell(f"preparing {name}")
        trainee, rows[name] = prepare(name, workload, settings)
        if trainee is not None:
            trainees[name] = trainee
    return rows, trainees


def timed(rows: Mapping[str, Row], trainees: Mapping[str, Trainee], rounds: int, tell: Tell) -> dict[str, Row]:
    """Return the rows with the seconds of each round; a contender that fails drops out, with its reason."""
    result, active = dict(rows), list(trainees)
    seconds: dict[str, list[float]] = {name: [] for name in active}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index in range(rounds):
            tell(f"round {index + 1} of {rounds}")
            # A different contender begins each round: a large step leaves the caches different for the next one.
            shift = index % max(len(active), 1)
            for name in [*active[shift:], *active[:shift]]:
                try:
                    seconds[name].append(seconds_of(trainees[name].step, index % DEPTHS))
                except FAILURES as error:
                    result[name] = result[name].without(reason(error))
                    active.remove(name)
    finally:
        if collecting:
            gc.enable()
    return result | {name: replace(result[name], seconds=tuple(seconds[name])) for name in active}


def seconds_of(step: Callable[[], object], depth: int) -> float:
    """Time one step at a depth of the stack. Garbage is collected before the step, not during it."""
    if depth:
        return seconds_of(step, depth - 1)
    gc.collect()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
