"""Worker processes that try models: one that dies or hangs is replaced, and what it was doing is a fault."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.fuzz.trying import Fault, Outcome, examine, try_number

LIMIT = 90
"""Seconds of work for a model."""
PATIENCE = 600
"""Seconds, as they pass, until a worker that does not stop by itself is stopped: it waits for something."""
LIVES = 150
"""Models until a worker is replaced: what torch's compiler keeps of old ones adds up."""

Task = Callable[[Path], Any]


@dataclass(frozen=True)
class Numbered:
    """Try a model by its number."""

    seed: int
    number: int

    def __call__(self, folder: Path) -> tuple[Outcome, str]:
        """Do it."""
        return try_number(self.seed, self.number, folder, LIMIT)


@dataclass(frozen=True)
class Again:
    """Ask one oracle about some source in one frontend; `other` frontends are what it is compared with."""

    source: str
    frontends: tuple[str, ...]
    oracles: tuple[str, ...]

    def __call__(self, folder: Path) -> Outcome:
        """Do it."""
        return examine(0, self.source, folder, frontends=self.frontends, chosen=self.oracles, limit=40)


def quiet() -> None:
    """Let nothing be printed: models do, and torch's compiler logs every break."""
    import torch

    os.environ["CPT_FX_INTEGER"] = "always"
    torch.set_num_threads(1)
    # Dynamo times every guard that it makes, for its log, and empties the processor's cache for that.
    guards: Any = torch._dynamo.guards
    guards.profile_guard_manager = lambda *_: 0.0
    compiler_logs: Any = torch._logging
    compiler_logs.set_logs(all=logging.CRITICAL)
    for name in ("torch", "cpt_fx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _work(connection: Connection) -> None:
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        while (task := connection.recv()) is not None:
            connection.send(task(Path(folder)))


class Worker:
    """A process that does one task after another."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin anew."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.done, self.since = 0, 0.0
        self.task: Any = None

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def give(self, task: Any) -> None:
        """Let it do something."""
        if self.done >= LIVES:
            self.stop()
            self.start()
        self.task, self.since = task, time.monotonic()
        self.connection.send(task)

    def take(self) -> Any:
        """Return what came out, or the fault that it died."""
        try:
            found = self.connection.recv()
            self.done += 1
        except (EOFError, OSError):
            self.process.join()
            found = f"the process ended with {self.process.exitcode}"
            self.stop()
            self.start()
        self.task = None
        return found

    def hangs(self) -> bool:
        """Whether it has been at a task for too long, in code that no signal stops."""
        return self.task is not None and time.monotonic() - self.since > PATIENCE


def crash(text: str) -> Fault:
    """Describe a death."""
    return Fault("process", "", "crash", text)


class Pool:
    """Some workers."""

    def __init__(self, count: int) -> None:
        self.workers = [Worker() for _ in range(count)]

    def close(self) -> None:
        """End all."""
        for worker in self.workers:
            worker.stop()

    def results(self, tasks: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Do all tasks; return each with what came out, in the order in which they end."""
        for worker in self.workers:
            if (task := next(tasks, None)) is not None:
                worker.give(task)
        while any(worker.task is not None for worker in self.workers):
            busy = {worker.connection: worker for worker in self.workers if worker.task is not None}
            for connection in wait(list(busy), timeout=1):
                worker = busy[connection]  # type: ignore[index]
                task = worker.task
                yield task, worker.take()
                if (following := next(tasks, None)) is not None:
                    worker.give(following)
            for worker in filter(Worker.hangs, self.workers):
                task = worker.task
                worker.stop()
                worker.start()
                yield task, "it hung, in code that no signal stops"
                if (following := next(tasks, None)) is not None:
                    worker.give(following)
