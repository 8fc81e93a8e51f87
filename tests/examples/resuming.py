"""A run that breaks down and is taken up must end like one that was left alone: the same for every task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.task import Task
from support.training import Outcome, fit

from cpt_fx.schedules import named


class BrokenDownError(Exception):
    """What stops a run in the middle."""


def assert_resumes(make_task: Callable[[], Task], file: Path, *, steps: int, stop: int, save_every: int) -> None:
    """Stop a run before a step, some steps past its last checkpoint, and compare all that follows, bit for bit."""
    assert stop % save_every, "the steps since the last checkpoint are what has to be made again"
    torch.set_num_threads(1)

    def run(checkpoint: Path | None, stop: int | None = None) -> Outcome:
        task = make_task()
        batch = task.batch

        def fragile(step: int, seed: int) -> Any:
            if step == stop:
                raise BrokenDownError
            return batch(step, seed)

        task.batch = fragile  # type: ignore[method-assign]
        schedule = named("RTH", q_min=4, q_max=8, total_steps=steps, cycles=2)
        return fit(task, schedule, seed=3, checkpoint=checkpoint, save_every=save_every)

    whole = run(None)
    with pytest.raises(BrokenDownError):
        run(file, stop)
    resumed = run(file)
    assert resumed.resumed_at == stop // save_every * save_every > 0
    assert resumed.losses == whole.losses
    assert resumed.metrics == whole.metrics
    expected, found = whole.model.state_dict(), resumed.model.state_dict()
    assert expected.keys() == found.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
