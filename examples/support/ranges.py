"""The precision range test of a task: the smallest width that still trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cpt_fx.schedules import RangeTest, range_test
from support.task import Task


def range_of(task: Task, *, steps: int, widths: Iterable[int] = range(2, 9), seed: int = 0) -> RangeTest:
    """Train the task for a few steps at each width, as at the start of a run: same data, optimizer and rate."""
    fresh = task.state_dict()

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = nn.ParameterList(parameters)
        made = task.optimizer(trained)
        rate = task.learning_rate(0, 100 * steps)
        for group in made.param_groups if rate is not None else ():
            group["lr"] = rate
        made.register_step_pre_hook(lambda *_: task.after_backward(trained))
        return made

    def loss(model: nn.Module, numbered: tuple[int, Any]) -> Tensor:
        step, batch = numbered
        if step == 0:
            task.load_state_dict(fresh)  # every width starts where the first one did
        return task.loss(model, batch)

    torch.manual_seed(seed)
    model = task.model()
    batches = [(step, task.batch(step, seed)) for step in range(steps)]
    return range_test(
        model,
        batches,
        loss=loss,
        optimizer=optimizer,
        widths=widths,
        steps_per_width=steps,
        recipe=task.recipe,
        exclude=task.exclude,
        seed=seed,
    )
