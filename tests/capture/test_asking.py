"""Code that asks what a traced value is, or writes behind the trace's back: refused or right, never silently wrong."""

from __future__ import annotations

import copy
import gc
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx import CaptureError
from cpt_fx.schedules import Static
from tests.capture.asking import ASKING, FINE, Case, writes
from tests.training import check_same, check_same_output, snapshot, train_step

PLACE = r"asking/\w+\.py:\d+"


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    writes.LOSSES.clear()
    writes.CALLS = 0
    yield
    torch._dynamo.reset()


def outside() -> tuple[Any, ...]:
    """What the cases change outside of their model."""
    return (len(writes.LOSSES), writes.CALLS, torch.is_grad_enabled(), sys.gettrace(), isinstance, hasattr, type)


def compared(result: nn.Module, reference: nn.Module, case: Case, *, evaluated: bool = True) -> None:
    """Two steps of training, and evaluation, to the last bit."""
    fresh: list[Any] = []
    for model in (reference, result):
        writes.LOSSES.clear()
        writes.CALLS = 0
        model.__dict__.pop("calls", None)
        if "calls" in vars(type(model)):
            delattr(type(model), "calls")
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
    assert any("not captured by torch.fx" in note and re.search(PLACE, note) for note in capture.notes), capture.notes
    if name != "by_result_that_is_none":  # whose attention is decomposed, equal to rounding
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


def test_none_for_an_argument_that_the_code_asks_about() -> None:
    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, labels: Any) -> Any:
            return self.fc(x) if labels is None else self.fc(x) * 2

    model, x = Losing(), torch.randn(3, 4)
    for capture in ("auto", "symbolic"):
        result = cpt_fx.transform(model, Static(32), capture=capture)
        assert torch.equal(result(x, x), model(x, x))
        with pytest.raises(ValueError, match="captured with labels given"):
            result(x, None)
    result = cpt_fx.transform(model, Static(32), example_inputs=(x, None))
    assert torch.equal(result(x, None), model(x, None)) and torch.equal(result(x, x), model(x, x))


def test_an_optional_argument_that_is_given_in_the_examples_may_be_left_out() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Any = None) -> Any:
            return self.fc(x) if mask is None else self.fc(x) * 2

    model, x = Masked(), torch.randn(3, 4)
    result = cpt_fx.transform(model, Static(32), example_inputs=(x, x))
    assert torch.equal(result(x, x), model(x, x)) and torch.equal(result(x), model(x))
    with pytest.raises(ValueError, match="captured with mask given"):
        cpt_fx.transform(model, Static(32), example_inputs=(x, x), capture="symbolic")(x)


@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<ipython-input-1>"])
def test_code_without_a_file_is_the_models_too(file: str) -> None:
    names: dict[str, Any] = {"Tensor": Tensor}
    source = "def forward(self, x, mask):\n    return self.fc(x) * mask if type(mask) is Tensor else self.fc(x)\n"
    exec(compile(source, file, "exec"), names)
    model: nn.Module = type("Typed", (nn.Module,), {"forward": names["forward"]})()
    model.fc = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match=f"{file}:2"):
        cpt_fx.transform(model, Static(32), capture="symbolic")


def test_only_the_users_own_change_captures_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that one does with a result changes the frontend or the graphs, but for changing the model."""
    case = FINE["questions_about_the_module"]
    result, (x,) = cpt_fx.transform(case.build(), Static(8)), case.arguments()
    graphs = [graph.graph for graph in cpt_fx.graphs(result)]
    result(x).sum().backward()
    for around in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), cpt_fx.at_bits(result, 4)):
        with around:
            result.eval()(x), result.train()(x)
    result.load_state_dict(result.state_dict())
    result.requires_grad_(False).requires_grad_(True).double().float()
    torch.optim.SGD(result.parameters(), 0.1).step()
    cpt_fx.inspect(result).verify(x)
    cpt_fx.cost(result, Static(8), (x,))
    torch.set_default_dtype(torch.float64)
    try:
        result(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [graph.graph for graph in cpt_fx.graphs(result)] == graphs and "captured" not in caplog.text
    result.act = nn.Tanh()
    result(x)
    assert "captured again" in caplog.text and cpt_fx.inspect(result).capture.frontend == "symbolic"


def test_the_garbage_collectors_callbacks_are_not_the_models_code() -> None:
    """They run in whatever line creates an object too many, and may set what they like."""
    seen = 0

    def callback(phase: str, info: dict[str, int]) -> None:
        nonlocal seen
        seen += 1

    before = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        cpt_fx.transform(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Static(8), capture="symbolic")
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(callback)
    assert seen and gc.isenabled()
