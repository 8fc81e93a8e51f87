"""Trainers of the small models, and what is asked of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cpt_fx.ort import Trainer
from cpt_fx.ort.engine import BoundSession
from tests import ort


def trainer_of(schedule: Any = None, directory: Path | None = None, **options: Any) -> Trainer:
    options = {"seed": 5, "threads": 1} | options
    return Trainer(directory or ort.net_directory(), schedule or ort.schedule(), **options)


def losses(trainer: Trainer, count: int, start: int = 0) -> list[float]:
    return [trainer.step(*ort.batch(number)) for number in range(start, start + count)]


def noted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what graphs are given from now on, beside what lies in memory: one dict for each run."""
    found: list[dict[str, Any]] = []
    run = BoundSession.run

    def noting(self: BoundSession, given: Any, *blocks: Any) -> Any:
        found.append(dict(given))
        return run(self, given, *blocks)

    monkeypatch.setattr(BoundSession, "run", noting)
    return found


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=f"{name}: {found[name]}, {value}")
