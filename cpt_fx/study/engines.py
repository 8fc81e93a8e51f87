"""Where the cells of a study are trained: in this process, in others of this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import builtins
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cpt_fx.errors import check_int
from cpt_fx.study.cells import Cell
from cpt_fx.study.training import STARTING, Outcome, Stopwatch, Task, TrainFunction, execute, load_in_worker

READY = "ready"
Results = Generator[tuple[Cell, Outcome], None, None]


@dataclass(frozen=True)
class Engine:
    """Where and how cells are trained; settings that contradict each other are refused."""

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
    """Train the cells in processes of this machine, each with a pipe to it. Leaving the loop ends the processes.

    A pool of the standard library gives up as a whole when one of its processes dies, and does not say which task it
    had. Here a process that dies costs the one cell it was at.
    """
    _check_portable(cells, train)
    queue = deque(cells)
    crew: list[_Worker] = []
    try:
        while queue or any(worker.cell for worker in crew):
            while len(crew) < min(workers, len(queue) + sum(worker.cell is not None for worker in crew)):
                crew.append(_Worker(train, threads))
            ready = wait([worker.connection for worker in crew])
            for worker in [one for one in crew if one.connection in ready]:
                cell, outcome = worker.cell, worker.receive()
                if not worker.alive:
                    crew.remove(worker)
                    worker.close()
                if cell is not None and outcome is not None:
                    yield cell, outcome
                if worker.alive and queue:
                    worker.give(queue.popleft())
    finally:
        for worker in crew:
            worker.close()


class _Worker:
    """A process that trains one cell after another."""

    def __init__(self, train: TrainFunction, threads: int) -> None:
        # Always spawned: a fork would copy the threads' locks of torch, and there is none on some systems.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, train.reference, train.takes_seed, threads), name=STARTING
        )
        self._process.start()
        theirs.close()  # so that the pipe ends when the process does
        self.cell: Cell | None = None
        self.alive = True
        self._ready = False
        self._watch = Stopwatch()

    def give(self, cell: Cell) -> None:
        """Send a cell to train."""
        self.cell = cell
        self._watch = Stopwatch()
        with suppress(OSError):  # of one that has died; receiving says so
            self.connection.send(cell.task)

    def receive(self) -> Outcome | None:
        """Return the outcome of the cell given, also when the process died of it; None when it is ready for one."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return self._died()
        if isinstance(message, Outcome):
            self.cell = None
            return message
        if message != READY:
            raise RuntimeError(f"the training function cannot be imported in a worker process:\n{message}")
        self._ready = True
        return None

    def close(self) -> None:
        """End the process, at whatever it is."""
        self.connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()

    def _died(self) -> Outcome:
        self.alive = False
        self._process.join()
        how = _ending(self._process.exitcode)
        if not self._ready:
            raise RuntimeError(
                f"a worker process ended before it was ready ({how}); it has said above why. In a script, the study "
                'must start below the line `if __name__ == "__main__":`'
            )
        self.cell = None
        return self._watch.failed(f"the process died while it trained: {how}")


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
    return f"{name}, as when the system has no memory left" if name == "SIGKILL" else name


def _work(connection: Connection, reference: str, takes_seed: bool, threads: int) -> None:
    """Train what comes through the pipe: all that a worker process does."""
    multiprocessing.current_process().name = "cpt-fx study worker"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of the group; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        train = TrainFunction(load_in_worker(reference), reference, takes_seed)
    except BaseException:
        connection.send(traceback.format_exc())
        return
    connection.send(READY)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(execute(train, threads, task))


def _end_with_parent() -> None:
    """Do not go on training for a process that was killed."""
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    os._exit(1)


def run_on_ray(cells: Sequence[Cell], train: TrainFunction, *, address: str, threads: int, gpus: float = 0) -> Results:
    """Hand all cells to Ray, and yield each with its outcome as it ends. Leaving the loop cancels what is left.

    "auto" joins the cluster that this machine belongs to, or starts Ray on this machine alone. Where Ray was
    initialized before, that is used as it is, and goes on afterwards.
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
        # The folder of the training function's file goes to the workers, where they then run.
        sent = {"working_dir": str(Path(place).parent)} if place.endswith(".py") else {}
        where = None if address == "auto" else address
        ray.init(address=where, runtime_env=sent, logging_level=logging.WARNING, log_to_driver=False)
    pending: dict[Any, tuple[Cell, Stopwatch]] = {}
    try:
        # A cell that is lost with its node is recorded as failed, and tried again when the study is.
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
            builtins.print = printing  # Ray has put its own there, for its progress bars, and leaves it there


def _train_one(reference: str, takes_seed: bool, threads: int, task: Task) -> Outcome:
    """Train one cell, in a worker of Ray."""
    return execute(TrainFunction(load_in_worker(reference), reference, takes_seed), threads, task)


def _check_portable(cells: Sequence[Cell], train: TrainFunction) -> None:
    """Refuse what cannot be sent to another process, before anything is trained."""
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
