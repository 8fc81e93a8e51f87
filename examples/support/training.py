"""One training loop for every domain: three of its lines add low precision."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

import cpt_fx
from cpt_fx.schedules import Deficit, Schedule
from support.task import Task


@dataclass
class Outcome:
    """The result of a run."""

    model: nn.Module
    metrics: dict[str, float]
    losses: list[float] = field(default_factory=list)
    curve: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Metrics during training: steps made, and the result of `evaluate`."""
    seconds: float = 0.0
    """Time spent, without that of earlier runs that it continues."""
    resumed_at: int = 0


def fit(
    task: Task,
    schedule: Schedule,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    save_every: int | None = None,
    evaluations: int = 0,
    bar: bool = False,
    execution: str = "simulated",
    compile: bool = False,
    hold_rate: bool = False,
    identity: dict[str, object] | None = None,
) -> Outcome:
    """Train a task under a schedule, from its start or from where its checkpoint stopped.

    Args:
        task: the model, its data and how they are trained.
        schedule: the bits over the run; its `total_steps` are the run.
        seed: for the initial weights, the order of the data and all noise.
        checkpoint: a file that is written during training and at the end. If it exists, the run continues from it, and
            ends with the same bits as an uninterrupted one.
        save_every: steps between two checkpoints, a tenth of the run by default.
        evaluations: how often to evaluate during training.
        bar: show a progress bar where standard error is a terminal.
        execution: `"simulated"` or `"integer"`.
        compile: hand the transformed model to torch.compile.
        hold_rate: during a deficit at the start, hold the first learning rate; its rule applies to the remaining steps.
        identity: what a checkpoint must have in common with this run, besides schedule and seed.
    """
    total = schedule.total_steps
    if total is None or total < 1:
        raise ValueError(f"the schedule must say how many steps the run has, got {schedule!r}")
    if schedule.position:
        raise ValueError(f"the schedule stands at step {schedule.position}: a run needs one that nobody has stepped")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    plain = task.model()
    model = cpt_fx.transform(  # the same model, with quantizers
        plain, schedule, recipe=task.recipe, exclude=task.exclude, execution=execution
    )
    optimizer = task.optimizer(model)
    outcome = Outcome(model, {})
    run = _Run(
        {"schedule": repr(schedule), "seed": seed, **(identity or {})}, task, model, optimizer, schedule, outcome
    )
    first = 0
    if checkpoint is not None and checkpoint.exists():
        first = outcome.resumed_at = run.load(checkpoint)
    trained: nn.Module = torch.compile(model) if compile else model  # type: ignore[assignment]
    save_every = save_every or max(total // 10, 1)
    evaluate_every = max(total // evaluations, 1) if evaluations else total + 1
    held = schedule.end if hold_rate and isinstance(schedule, Deficit) and schedule.start == 0 else 0
    started = time.perf_counter()

    with _bar(bar, total, first) as progress:
        for step in range(first, total):
            rate = task.learning_rate(max(step - held, 0), total - held)
            if rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rate
            model.train()
            loss = task.loss(trained, task.batch(step, seed))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            task.after_backward(model)
            optimizer.step()
            outcome.losses.append(loss.item())
            progress(step, schedule.bits(step).weight, outcome.losses[-1])
            schedule.step()  # after each optimizer step

            done = step + 1
            if done % task.steps_per_epoch == 0:
                with _evaluating(model):
                    task.after_epoch(trained, optimizer)
            if done % evaluate_every == 0 and done < total:
                outcome.curve.append((done, run.metrics(trained, done, seed)))
            if checkpoint is not None and (done % save_every == 0 or done == total):
                run.save(checkpoint, done)

    outcome.metrics = run.metrics(trained, total, seed)
    outcome.curve.append((total, outcome.metrics))
    outcome.seconds = time.perf_counter() - started
    return outcome


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without affecting the random numbers that training draws."""
    model.eval()
    with torch.no_grad(), torch.random.fork_rng():
        yield
    model.train()


@dataclass
class _Run:
    """Everything that the next step depends on, except the random numbers."""

    identity: dict[str, object]
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    outcome: Outcome

    def metrics(self, trained: nn.Module, done: int, seed: int) -> dict[str, float]:
        """Evaluate with running statistics of batch norm and with new ones, of the latest ten batches.

        The run is judged by the first of them: running statistics, as published, under the published recipe, else new.
        """
        latest = (self.task.batch(step, seed) for step in range(max(done - 10, 0), done))
        with cpt_fx.recalibrate(self.model, latest, call=self.task.run) as handle, _evaluating(self.model):
            new = self.task.evaluate(trained)
        if not handle.layers:
            return new
        with _evaluating(self.model):
            running = self.task.evaluate(trained)
        if self.task.recipe.name.startswith("paper"):
            return {**running, **{f"recalibrated {name}": value for name, value in new.items()}}
        return {**new, **{f"unrecalibrated {name}": value for name, value in running.items()}}

    def save(self, path: Path, done: int) -> None:
        """Write a checkpoint. The file is replaced as a whole, and is never incomplete."""
        state = {
            "run": self.identity,
            "done": done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "task": self.task.state_dict(),
            "random": torch.get_rng_state(),
            "losses": self.outcome.losses,
            "curve": self.outcome.curve,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".part")
        torch.save(state, temporary)
        os.replace(temporary, path)

    def load(self, path: Path) -> int:
        """Load a checkpoint; return how many steps it has made."""
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True)
            saved = state["run"]
        except Exception as error:
            raise ValueError(
                f"{path} is not a checkpoint of this script ({error}): give --checkpoint another file"
            ) from error
        for name in sorted({*saved, *self.identity}):
            if saved.get(name) != self.identity.get(name):
                raise ValueError(
                    f"{path} belongs to another run: there {name} is {saved.get(name)!r}, here "
                    f"{self.identity.get(name)!r}. Give the same options to go on with it, or --checkpoint another file"
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.task.load_state_dict(state["task"])
        torch.set_rng_state(state["random"])
        self.outcome.losses[:] = state["losses"]
        self.outcome.curve[:] = state["curve"]
        return int(state["done"])


@contextmanager
def _bar(shown: bool, total: int, first: int) -> Iterator[Any]:
    """Yield a function to call after every step."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as progress:
        task = progress.add_task("training", total=total, completed=first)
        every = max(total // 200, 1)  # drawing must not cost more than training

        def tell(step: int, bits: int, loss: float) -> None:
            if (step + 1) % every == 0 or step + 1 == total:
                progress.update(task, completed=step + 1, description=f"{bits:>2} bits, loss {loss:.4f}")

        yield tell
