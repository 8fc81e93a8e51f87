"""How each contender is built from a model. One that cannot be built raises an error, whose message is shown."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from cpt_fx.api import transform
from cpt_fx.errors import check_choice
from cpt_fx.schedules import NAMES, Schedule, Static, named
from harness import peers
from harness.catalog import Contender, Settings
from harness.models import Loss, Workload

LEARNING_RATE = 1e-3


@dataclass(kw_only=True)
class Trainee:
    """A model with its batch, loss and optimizer. `schedule` is None if there are no widths to change."""

    contender: Contender
    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Loss
    schedule: Schedule | None = None
    autocast: bool = False

    def __post_init__(self) -> None:
        """Make the optimizer, and keep the uncompiled model, whose counters and graphs are read later."""
        self.plain = self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)

    def output(self, *inputs: Any) -> Any:
        """Return the model's output."""
        if not self.autocast:
            return self.model(*inputs)
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*inputs)

    def step(self) -> None:
        """Take one training step, the unit that is timed for every contender."""
        self.loss(self.output(*self.inputs)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()


def make(contender: Contender, workload: Workload, settings: Settings) -> Trainee:
    """Build a contender, not compiled yet, from copies of the model and its batch."""
    model, inputs = copy.deepcopy(workload.model).train(), copy.deepcopy(workload.inputs)
    trainee = partial(Trainee, contender=contender, inputs=inputs, loss=workload.loss)
    match contender.kind:
        case "fp32":
            return trainee(model=model)
        case "bf16":
            return trainee(model=model, autocast=True)
        case "simulated":
            schedule = plan(settings)
            return trainee(model=transform(model, schedule, recipe=settings.recipe), schedule=schedule)
        case "integer":
            schedule = plan(settings)
            # Its own recipe: scales must factor out of a product, and those of other recipes do not.
            return trainee(model=transform(model, schedule, recipe="integer", execution="integer"), schedule=schedule)
        case kind:
            return trainee(model=peers.BUILDERS[kind](model, inputs))


def plan(settings: Settings) -> Schedule:
    """Return the schedule: short cycles, so that a few steps see every width."""
    if settings.schedule == "static":
        return Static(settings.q_max)
    name = check_choice("schedule", settings.schedule, NAMES)
    # More cycles than any measurement needs: after the last step of a schedule the widths would stay constant.
    period = cycle(settings)
    return named(name, q_min=settings.q_min, q_max=settings.q_max, total_steps=10_000 * period, period=period)


def cycle(settings: Settings) -> int:
    """Return the steps of a cycle: two and a bit for each width, since schedules change fast in the middle."""
    return 1 if settings.schedule == "static" else 2 * (settings.q_max - settings.q_min + 1)
