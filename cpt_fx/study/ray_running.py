"""Cells as tasks of a Ray cluster. Ray decides what runs where and when; this process keeps the results."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from cpt_fx.study.cells import Cell, Task
from cpt_fx.study.function import TrainFunction, load_in_worker
from cpt_fx.study.outcome import Outcome, Stopwatch, execute
from cpt_fx.study.processes import check_portable


def run_on_ray(
    cells: Sequence[Cell], train: TrainFunction, *, address: str, threads: int, gpus: float = 0
) -> Generator[tuple[Cell, Outcome], None, None]:
    """Hand all cells to Ray, and yield each with its outcome as it ends. Leaving the loop cancels what is left.

    "auto" joins the cluster that this machine belongs to, or starts Ray on this machine alone. Where Ray was
    initialized before, that is used as it is, and goes on afterwards.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError('a study on Ray needs ray: pip install "cpt_fx[ray]"') from error
    check_portable(cells, train)
    if not cells:
        return
    joined = not ray.is_initialized()
    printing = builtins.print
    if joined:
        ray.init(
            address=None if address == "auto" else address,
            runtime_env=_environment(train),
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    pending: dict[Any, tuple[Cell, Stopwatch]] = {}
    try:
        # A cell that is lost with its node is recorded as failed, and tried again when the study is.
        task: Any = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_work)
        for cell in cells:
            made = task.remote(train.reference, train.takes_seed, threads, cell.task)
            pending[made] = cell, Stopwatch()
        while pending:
            ended, _ = ray.wait(list(pending), num_returns=1)
            for made in ended:
                cell, watch = pending.pop(made)
                try:
                    outcome = ray.get(made)
                except ray.exceptions.RayError as error:
                    outcome = watch.failed(f"Ray lost the cell: {error}")
                yield cell, outcome
    finally:
        for made in pending:
            ray.cancel(made, force=True)
        if joined:
            ray.shutdown()
            builtins.print = printing  # Ray has put its own there, for its progress bars, and leaves it there


def _environment(train: TrainFunction) -> dict[str, Any]:
    """Send the folder of the training function's file to the workers, where they then run."""
    place = str(train.reference).rpartition(":")[0]
    return {"working_dir": str(Path(place).parent)} if place.endswith(".py") else {}


def _work(reference: str, takes_seed: bool, threads: int, task: Task) -> Outcome:
    """Train one cell, in a worker of Ray."""
    return execute(TrainFunction(load_in_worker(reference), reference, takes_seed), threads, task)
