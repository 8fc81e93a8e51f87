"""Train the cells of a study: in this process, in other processes of this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import builtins
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from cpt_fx.errors import check_int
from cpt_fx.study.cells import Cell
from cpt_fx.study.training import Outcome, Stopwatch, Task, TrainFunction, execute, load_in_worker

Results = Generator[tuple[Cell, Outcome], None, None]


@dataclass(frozen=True)
class Engine:
    """Where and how cells are trained; conflicting settings raise ValueError."""

    workers: int
    threads: int
    ray: str | None
    gpus: float

    def __post_init__(self) -> None:
        check_int("workers", self.workers, 1)
        check_int("threads", self.threads, 1)
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, int | float) or not self.gpus >= 0:
            raise ValueError(f"gpus must be the number of GPUs for each cell, got {self.gpus!r}")
        if self.ray is not None and self.workers != 1:
            raise ValueError(
                f"workers are processes of this machine; with ray the cluster decides, got workers={self.workers}"
            )
        if self.ray is None and self.gpus:
            raise ValueError(
                f"gpus are what Ray reserves; without ray the training chooses its device, got gpus={self.gpus}"
            )

    def results(self, cells: Sequence[Cell], train: TrainFunction) -> Results:
        """Train the cells, and yield each with its outcome as it ends."""
        if self.ray is not None:
            yield from run_on_ray(cells, train, address=self.ray, threads=self.threads, gpus=self.gpus)
        elif self.workers > 1:
            yield from run_in_processes(cells, train, workers=self.workers, threads=self.threads)
        else:
            for cell in cells:
                yield cell, execute(train, self.threads, cell.task)


def run_in_processes(cells: Sequence[Cell], train: TrainFunction, *, workers: int, threads: int) -> Results:
    """Train the cells in processes of this machine, which are killed when the generator is closed.

    A `ProcessPoolExecutor` breaks as a whole when one of its processes dies, and does not tell which task it had. So
    each process has a pool of its own, and one that dies loses only its current cell.
    """
    _check_portable(cells, train)
    queue = deque(cells)
    crew: list[_Worker] = []
    at_work: dict[Future[Outcome], tuple[_Worker, Cell, Stopwatch]] = {}
    try:
        for _ in range(min(workers, len(cells))):
            crew.append(_Worker())
        free = list(crew)
        while queue or at_work:
            while queue and free:
                worker, cell = free.pop(), queue.popleft()
                worker.wait_until_ready()
                try:
                    task = worker.pool.submit(_train_one, str(train.reference), train.takes_seed, threads, cell.task)
                except BrokenProcessPool as error:  # the process died while it was idle
                    task = Future()
                    task.set_exception(error)
                at_work[task] = worker, cell, Stopwatch()
            for task in wait(at_work, return_when=FIRST_COMPLETED).done:
                worker, cell, watch = at_work.pop(task)
                try:
                    outcome = task.result()
                except BrokenProcessPool:
                    outcome = watch.failed(f"the process died while it trained: {worker.end()}")
                    crew[crew.index(worker)] = worker = _Worker()
                except Exception as error:  # not from the training itself, which raises nothing
                    said = f"{type(error).__name__}: {error}"
                    raise RuntimeError(f"the training function cannot be imported by a worker: {said}") from error
                free.append(worker)
                yield cell, outcome
    finally:
        for worker in crew:
            worker.end()


class _Worker:
    """A process that trains one cell after another."""

    def __init__(self) -> None:
        # Always spawned: a fork would copy locks that torch's threads hold, and some systems cannot fork.
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)
        self._started = self.pool.submit(os.getpid)
        (self._process,) = self.pool._processes.values()

    def wait_until_ready(self) -> None:
        """Wait until the process has imported the script that started the study."""
        try:
            self._started.result()
        except BrokenProcessPool:
            raise RuntimeError(
                f"a worker process ended before it was ready ({self.end()}); it has said above why. In a script, the "
                'study must start below the line `if __name__ == "__main__":`'
            ) from None

    def end(self) -> str:
        """Kill the process, whatever it is doing, and return how it ended."""
        self._process.kill()
        self._process.join()
        self.pool.shutdown(cancel_futures=True)
        return _ending(self._process.exitcode)


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    name = {one.value: one.name for one in signal.Signals}.get(-code, f"signal {-code}")
    return f"{name}, as when the system has no memory left" if name == "SIGKILL" else name


def _prepare() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process dies, instead of training on."""
    parent: Any = multiprocessing.parent_process()
    connection.wait([parent.sentinel])
    os._exit(1)


def run_on_ray(cells: Sequence[Cell], train: TrainFunction, *, address: str, threads: int, gpus: float = 0) -> Results:
    """Submit all cells to Ray, and yield each with its outcome as it ends; closing the generator cancels the rest.

    "auto" joins the cluster that this machine belongs to, or starts Ray on this machine alone. If Ray is already
    initialized, it is used as it is, and not shut down.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError('a study on Ray needs ray: pip install "cpt_fx[ray]"') from error
    _check_portable(cells, train)
    if not cells:
        return
    joined = not ray.is_initialized()
    printing = builtins.print
    if joined:
        place = str(train.reference).rpartition(":")[0]
        # The folder of the training function's file is sent to the workers, as their working directory.
        sent = {"working_dir": str(Path(place).parent)} if place.endswith(".py") else {}
        where = None if address == "auto" else address
        ray.init(address=where, runtime_env=sent, logging_level=logging.WARNING, log_to_driver=False)
    pending: dict[Any, tuple[Cell, Stopwatch]] = {}
    try:
        # A cell that is lost with its node is recorded as failed, and tried again when the study is run again.
        task: Any = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_train_one)
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
            builtins.print = printing  # Ray replaces it for its progress bars, and does not restore it


def _train_one(reference: str, takes_seed: bool, threads: int, task: Task) -> Outcome:
    """Train one cell, in another process."""
    return execute(TrainFunction(load_in_worker(reference), reference, takes_seed), threads, task)


def _check_portable(cells: Sequence[Cell], train: TrainFunction) -> None:
    """Raise ValueError for what cannot be sent to another process, before anything is trained."""
    if train.reference is None:
        raise ValueError(
            f"{getattr(train.call, '__qualname__', train.call)} cannot be imported by another process: write it as a "
            "function at the top level of a file (not as a lambda, an inner function, or in a notebook or at a "
            "prompt), or use workers=1"
        )
    for cell in cells:
        try:
            pickle.dumps(cell.schedule)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ValueError(
                f"the schedule {cell.label!r} cannot be sent to another process ({error}): write its function at the "
                "top level of a file, or use workers=1"
            ) from error
