"""Code that asks what a traced value is, or writes behind the trace's back: refused or right, never silently wrong."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cpt_fx
from cpt_fx import CaptureError
from cpt_fx.schedules import Static
from tests import asking
from tests.asking import ASKING, FINE, Case
from tests.training import check_same, check_same_output, snapshot, train_step

PLACE = r"asking\.py:\d+"


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    asking.LOSSES.clear()
    asking.CALLS = 0
    yield
    torch._dynamo.reset()


def outside() -> tuple[Any, ...]:
    """What the cases change outside of their model."""
    return (len(asking.LOSSES), asking.CALLS, torch.is_grad_enabled(), sys.gettrace(), isinstance, hasattr, type)


def compared(result: nn.Module, reference: nn.Module, case: Case, *, evaluated: bool = True) -> None:
    """Two steps of training, and evaluation, to the last bit."""
    fresh: list[Any] = []
    for model in (reference, result):
        asking.LOSSES.clear()
        asking.CALLS = 0
        model.__dict__.pop("calls", None)
        if "calls" in vars(type(model)):
            del type(model).calls
        steps = [train_step(model.train(), case.arguments(), {}) for _ in range(2)]
        with torch.no_grad():
            fresh.append((steps, model.eval()(*case.arguments()) if evaluated else None))
    (theirs, said), (ours, says) = fresh
    for one, other in zip(ours, theirs, strict=True):
        check_same(one, other)
    check_same_output(says, said)


@pytest.mark.parametrize("name", ASKING)
def test_symbolic_refuses_and_names_the_place(name: str) -> None:
    case = ASKING[name]
    model = case.build()
    before, around = snapshot(model), outside()
    tensors = [*model.parameters(), *model.buffers()]
    values = [(tensor.detach().clone(), tensor.requires_grad, tensor.grad) for tensor in tensors]
    with pytest.raises(CaptureError, match=PLACE):
        cpt_fx.transform(model, Static(32), capture="symbolic", strict=True)
    assert snapshot(model) == before and outside() == around
    for tensor, (value, asked, grad) in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value) and tensor.requires_grad is asked and tensor.grad is grad


@pytest.mark.parametrize("name", ASKING)
def test_auto_is_right_and_says_why(name: str) -> None:
    case = ASKING[name]
    model, reference = case.build(), case.build()
    result = cpt_fx.transform(model, Static(32))
    capture = cpt_fx.inspect(result).capture
    assert capture.frontend == "dynamo"
    assert any("not captured by torch.fx" in note and "asking.py:" in note for note in capture.notes), capture.notes
    if name != "by_result_that_is_none":  # whose attention is opened, equal to rounding
        compared(result, reference, case, evaluated=False)
        assert cpt_fx.inspect(result).quantizers


@pytest.mark.parametrize("name", FINE)
def test_plain_models_stay_with_torch_fx(name: str) -> None:
    case = FINE[name]
    for capture in ("auto", "symbolic"):
        model, reference = case.build(), case.build()
        result = cpt_fx.transform(model, Static(32), capture=capture, strict=True)
        assert cpt_fx.inspect(result).capture.frontend == "symbolic"
        compared(result, reference, case)
        compared(copy.deepcopy(result), reference, case)
