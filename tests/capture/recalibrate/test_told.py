"""Evaluation with batch norm's statistics of low widths is told once, naming the line; nothing else is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import cpt_fx
from cpt_fx.schedules import Piecewise, Schedule, Static
from tests.capture.recalibrate.models import Frozen, Net, captures, few, images
from tests.ir.state.models import DYNAMIC


@pytest.fixture
def told() -> Iterator[list[str]]:
    """The texts told so far that speak of it."""
    texts: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        show = warnings.showwarning
        warnings.filterwarnings("always", message=".*with cpt_fx.recalibrate")
        warnings.showwarning = lambda message, *_, **__: texts.append(str(message))
        yield texts
        warnings.showwarning = show


class Run:
    """A model in training."""

    def __init__(self, schedule: Schedule, model: nn.Module | None = None, **options: Any) -> None:
        options = {"recipe": DYNAMIC, **options}
        self.schedule = schedule
        self.model = cpt_fx.transform(Net() if model is None else model, schedule, **options)
        self.optimizer = SGD(self.model.parameters(), lr=0.01)

    def train(self, steps: int = 2) -> None:
        self.model.train()
        for _ in range(steps):
            self.model(images()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(images())
            self.model(images())


@pytest.mark.parametrize(("capture", "bits"), [("symbolic", 2), ("symbolic", 4), ("dynamo", 4)])
def test_it_is_told_once(capture: str, bits: int, told: list[str]) -> None:
    run = Run(Static(bits, 8, eval_bits=8), capture=capture)
    run.evaluate()
    assert told == []
    for _ in range(3):
        run.train()
        run.evaluate()
    (text,) = told
    assert f"Net is evaluated right after training at {bits} bits" in text
    assert "`with cpt_fx.recalibrate(model, batches):" in text


@captures
def test_not_above_and_not_between(capture: str, told: list[str]) -> None:
    run = Run(Piecewise({0: 5, 2: 8, 4: 3, 6: 8}), capture=capture)
    run.train(2)
    run.evaluate()
    run.train(2)
    run.evaluate()
    run.train(2)  # at 3 bits, but not evaluated
    run.train(2)
    run.evaluate()
    assert told == []


def test_one_layer_at_few_bits_is_enough(told: list[str]) -> None:
    run = Run(Static(8), overrides={"again": {"weight": 4}})
    run.train()
    run.evaluate()
    assert len(told) == 1


def test_gradients_and_switched_off_layers_are_no_reason(told: list[str]) -> None:
    run = Run(Static(8, 3), overrides={"again": 0})
    run.train()
    run.evaluate()
    assert told == []


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(6, 6)), nn.Sequential(nn.Linear(6, 6), nn.GroupNorm(2, 2))])
def test_not_without_batch_norm(model: nn.Module, told: list[str]) -> None:
    run = Run(Static(3, eval_bits=8), model)
    run.train()
    run.evaluate()
    assert told == []


class AllFrozen(Frozen):
    def train(self, mode: bool = True) -> AllFrozen:
        super().train(mode)
        for norm in (self.shared, self.last):
            norm.eval()
        return self


@pytest.mark.slow
@captures
def test_not_where_batch_norm_is_frozen(capture: str, told: list[str]) -> None:
    run = Run(Static(3, eval_bits=8), AllFrozen(), capture=capture)
    run.train()
    run.evaluate()
    assert told == []
    run = Run(Static(3, eval_bits=8), Frozen(), capture=capture)
    run.train()
    run.evaluate()
    assert len(told) == 1


@pytest.mark.slow
@captures
def test_not_inside_with(capture: str, told: list[str]) -> None:
    run = Run(Static(3, eval_bits=8), capture=capture)
    for _ in range(2):
        run.train()
        with cpt_fx.recalibrate(run.model, few()):
            run.evaluate()
    run.train()
    handle = cpt_fx.recalibrate(run.model, few())
    run.evaluate()
    assert told == []
    run.model.train()
    run.model(images())
    handle.restore()
    run.evaluate()  # with the old statistics
    assert len(told) == 1


def test_new_statistics_that_stay_are_old_after_a_step(told: list[str]) -> None:
    run = Run(Static(3, eval_bits=8))
    run.train()
    cpt_fx.recalibrate(run.model, few())
    run.evaluate()
    assert told == []
    run.train()
    run.evaluate()
    assert len(told) == 1


@captures
def test_not_without_a_step(capture: str, told: list[str]) -> None:
    """A proof, an example and a forward pass in training mode are none."""
    run = Run(Static(3, eval_bits=8), capture=capture, example_inputs=(images(),))
    run.model.train()
    run.model(images()).sum().backward()
    cpt_fx.inspect(run.model).verify(images())
    run.evaluate()
    assert told == []


def test_a_copy_tells_for_itself(told: list[str]) -> None:
    run = Run(Static(3, eval_bits=8))
    run.train()
    other = copy.deepcopy(run.model)
    other.eval()(images())
    assert told == []
    run.evaluate()
    assert len(told) == 1


def test_a_step_in_evaluation_mode_is_none(told: list[str]) -> None:
    run = Run(Static(3, eval_bits=8))
    run.model.eval()
    run.model(images()).square().mean().backward()
    run.optimizer.step()  # where nothing of batch norm moves
    run.model.train()
    run.model(images())
    run.evaluate()
    assert told == []
