"""Step times: contenders take turns, so that whatever disturbs the machine disturbs all of them."""

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
"""Rounds run at so many depths of Python's stack, in turn.

CPython keeps its frames in chunks. The code of a graph has a large frame; where that ends just before a chunk does,
every call in it allocates one, and the same step may take half as long again. How deep that is, is chance: the median
over several depths is not.
"""


def run(workload: Workload, settings: Settings, tell: Tell = lambda text: None, command: str | None = None) -> Result:
    """Compare contenders on a model. `tell` is told what is being done."""
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
    """Build, compile and examine every contender; those that cannot run are rows only."""
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
            # Another one begins each round: whoever follows a large step finds other things in the caches.
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
    """Time one step, so many calls down. Garbage is collected before and not during it."""
    if depth:
        return seconds_of(step, depth - 1)
    gc.collect()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
