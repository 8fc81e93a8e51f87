"""A forgotten `schedule.step()`, and a result of `transform` that was not assigned, are told once; nothing else is."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import cpt_fx
from cpt_fx.schedules import Custom, Deficit, Piecewise, Schedule, Static
from tests.ir.state.models import DYNAMIC, batch, captures, net, plan


class Told:
    """The warnings so far."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self.caught = caught

    def about(self, line: str) -> list[str]:
        """Return the texts that name a line of code."""
        return [text for text in self.all() if line in text]

    def all(self) -> list[str]:
        """Return all texts."""
        return [str(one.message) for one in self.caught]


@pytest.fixture
def told() -> Iterator[Told]:
    """Collect all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield Told(caught)
    gc.collect(1)


def long(**options: Any) -> Schedule:
    return plan(total_steps=240, cycles=8, **options)


def transformed(model: nn.Module, schedule: Schedule, capture: str = "auto") -> nn.Module:
    return cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC)


def train(call: Callable[..., Any], *optimizers: Optimizer, steps: int = 12, after: Any = lambda: None) -> None:
    for step in range(steps):
        call(batch(step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after()


def sgd(model: nn.Module, **options: Any) -> SGD:
    return SGD(model.parameters(), lr=0.01, **options)


# Told.


@captures
def test_a_schedule_that_stands_still(capture: str, told: Told) -> None:
    result = transformed(net(), long(), capture)
    optimizer = sgd(result)
    train(result, optimizer, steps=8)
    assert told.about("schedule.step()") == []
    train(result, optimizer, steps=20)
    assert len(told.about("schedule.step()")) == 1


@pytest.mark.parametrize("make", [AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_with_any_optimizer(make: type[Optimizer], told: Told) -> None:
    result = transformed(net(), long())
    train(result, make(result.parameters(), lr=0.01), steps=12)  # type: ignore[call-arg]
    assert len(told.about("schedule.step()")) == 1


def test_an_optimizer_made_before(told: Told) -> None:
    model = net()
    optimizer = sgd(model)
    train(transformed(model, long()), optimizer, steps=12)
    assert len(told.about("schedule.step()")) == 1


def test_a_schedule_that_was_stepped_and_then_forgotten(told: Told) -> None:
    """The second phase of a training has a loop of its own, without the line."""
    schedule = long()
    result = transformed(net(), schedule)
    optimizer = sgd(result)
    train(result, optimizer, after=schedule.step)
    assert told.about("schedule.step()") == []
    train(result, optimizer, steps=15)
    assert len(told.about("schedule.step()")) == 1


def test_a_compiled_model(told: Told) -> None:
    result = transformed(net(), long())
    train(torch.compile(result, backend="eager"), sgd(result), steps=15)
    assert len(told.about("schedule.step()")) == 1


def test_two_optimizers_and_no_step(told: Told) -> None:
    model = net()
    result = transformed(model, long())
    train(result, SGD(model.one.parameters(), lr=0.01), SGD(model.two.parameters(), lr=0.01), steps=15)
    assert len(told.about("schedule.step()")) == 1


@captures
@pytest.mark.parametrize("kept", ["dropped", "kept", "kept with examples"])
def test_a_result_that_was_not_assigned(capture: str, kept: str, told: Told) -> None:
    model = net()
    examples = (batch(),) if kept.endswith("examples") else None
    result: Any = cpt_fx.transform(model, long(), capture=capture, recipe=DYNAMIC, example_inputs=examples)
    if kept == "dropped":
        del result
        gc.collect()
    train(model, sgd(model), steps=25)
    assert len(told.about("cpt_fx.transform(")) == 1


def test_a_static_schedule_whose_result_was_not_assigned(told: Told) -> None:
    """The schedule is no matter here: a run in full precision is none at 4 bits."""
    model = net()
    cpt_fx.transform(model, Static(4))
    train(model, sgd(model), steps=25)
    assert len(told.about("cpt_fx.transform(")) == 1


def test_not_assigned_though_the_schedule_is_stepped(told: Told) -> None:
    model, schedule = net(), long()
    cpt_fx.transform(model, schedule)
    train(model, sgd(model), steps=25, after=schedule.step)
    assert len(told.about("cpt_fx.transform(")) == 1


# Not told.


def check_silence(told: Told) -> None:
    assert told.all() == []


STILL: dict[str, Callable[[], Schedule]] = {
    "static": lambda: Static(4),
    "one entry": lambda: Piecewise({0: 4}),
    "a cycle without height": lambda: plan(q_min=8, q_max=8, q_grad=8, total_steps=240),
}


@captures
@pytest.mark.parametrize("kind", STILL)
def test_widths_that_never_change(capture: str, kind: str, told: Told) -> None:
    result = transformed(net(), STILL[kind](), capture)
    train(result, sgd(result), steps=25)
    check_silence(told)


ENDED: dict[str, tuple[Callable[[], Schedule], int]] = {
    "past the last entry": (lambda: Piecewise({0: 4, 3: 8}), 3),
    "past a deficit": (lambda: Deficit(q_min=3, q_max=8, steps=5, total_steps=90), 5),
    "at the end": (lambda: plan(), 12),
    "custom at its end": (lambda: Custom(lambda step: 3 + step % 2, total_steps=6), 6),
}


@pytest.mark.parametrize("kind", ENDED)
def test_widths_that_change_no_more(kind: str, told: Told) -> None:
    make, position = ENDED[kind]
    schedule = make()
    result = transformed(net(), schedule)
    schedule.step(position)
    train(result, sgd(result), steps=25)
    check_silence(told)


@captures
def test_a_schedule_that_is_stepped(capture: str, told: Told) -> None:
    schedule = long()
    result = transformed(net(), schedule, capture)
    train(result, sgd(result), steps=25, after=schedule.step)
    check_silence(told)


def test_accumulated_gradients(told: Told) -> None:
    schedule = long()
    result = transformed(net(), schedule)
    optimizer = sgd(result)
    for step in range(60):
        result(batch(step)).square().mean().backward()
        if step % 15 == 14:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    check_silence(told)


@captures
def test_two_optimizers_in_turn(capture: str, told: Told) -> None:
    """A GAN under one schedule: a step of each, then one of the schedule."""
    schedule = long()
    generator, critic = transformed(net(), schedule, capture), transformed(net(), schedule, capture)
    optimizers = sgd(generator), sgd(critic)
    for step in range(25):
        for model, optimizer in zip((generator, critic), optimizers, strict=True):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    check_silence(told)


def test_a_critic_with_many_steps_to_one(told: Told) -> None:
    """Not every optimizer has made ten steps: the generator's has made one."""
    schedule = long()
    model = net()
    result = transformed(model, schedule)
    often, seldom = SGD(model.one.parameters(), lr=0.01), SGD(model.two.parameters(), lr=0.01)
    for _ in range(3):
        train(result, often, steps=12)
        train(result, seldom, steps=1, after=schedule.step)
    check_silence(told)


def test_an_optimizer_of_something_else(told: Told) -> None:
    result, other = transformed(net(), long()), net()
    with torch.no_grad():
        result.eval()(batch())
    train(other, sgd(other), steps=25)
    check_silence(told)


def test_transformed_twice(told: Told) -> None:
    """A notebook's cell that ran again: the first result is never called, and nobody minds."""
    model, schedule = net(), long()
    first = transformed(model, long())
    result = transformed(model, schedule)
    train(result, sgd(result), steps=25, after=schedule.step)
    check_silence(told)
    assert first is not result


@captures
@pytest.mark.parametrize("how", ["compiled", "wrapped", "functional"])
def test_called_in_other_ways(capture: str, how: str, told: Told) -> None:
    schedule, model = long(), net()
    result = transformed(model, schedule, capture)
    call: Any = {
        "compiled": torch.compile(result, backend="eager"),
        "wrapped": nn.Sequential(result),
        "functional": lambda x: torch.func.functional_call(result, dict(result.named_parameters()), (x,)),
    }[how]
    train(call, sgd(result), steps=25, after=schedule.step)
    check_silence(told)


def test_a_copy_is_trained(told: Told) -> None:
    schedule = long()
    result = transformed(net(), schedule)
    twin = copy.deepcopy(result)
    train(twin, sgd(twin), steps=25, after=schedule.step)
    check_silence(told)


def test_a_reverted_model_goes_on_plain(told: Told) -> None:
    schedule = long()
    result = transformed(net(), schedule)
    train(result, sgd(result), steps=3, after=schedule.step)
    plain = cpt_fx.revert(result)
    train(plain, sgd(plain), steps=25)
    check_silence(told)


def test_nothing_is_changed_or_kept(told: Told) -> None:
    """Whoever watches optimizers watches: gradients, parameters, state and lifetimes are as without."""
    schedule, model, twin = long(), net(), net()
    result = cpt_fx.transform(model, schedule, overrides={"*": 32})
    ours, theirs = AdamW(result.parameters(), lr=0.01), AdamW(twin.parameters(), lr=0.01)
    for step in range(12):
        for one, optimizer in ((result, ours), (twin, theirs)):
            optimizer.zero_grad()
            one(batch(step)).square().mean().backward()
            optimizer.step()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None
        assert torch.equal(mine, its) and torch.equal(mine.grad, its.grad) and vars(mine) == vars(its)
    assert list(ours.state_dict()["state"]) == list(theirs.state_dict()["state"])
    copy.deepcopy(ours)


def test_parameters_can_be_swapped(told: Told) -> None:
    """Which torch refuses where a tensor is weakly referred to."""
    result = transformed(net(), long())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        result.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    check_silence(told)


def squares(model: nn.Module, data: Any) -> Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def test_a_model_that_was_tried_goes_on_plain(told: Told) -> None:
    model = net()
    data = [(batch(step), torch.zeros(8, 4)) for step in range(8)]
    cpt_fx.schedules.range_test(model, data, loss=squares, widths=(4, 8), steps_per_width=4, progress=False)
    train(model, sgd(model), steps=25)
    check_silence(told)


def test_a_second_phase_whose_first_optimizer_is_still_there(told: Told) -> None:
    """Nobody knows whether the first will be used again; after a hundred steps it will not."""
    schedule = long()
    result = transformed(net(), schedule)
    head = SGD(result.get_submodule("three").parameters(), lr=0.01)
    train(result, head, after=schedule.step)
    train(result, sgd(result), steps=25)
    check_silence(told)
    second = sgd(result)
    train(result, second, steps=110)
    assert len(told.about("schedule.step()")) == 1


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_that_stands_still(how: str, told: Told) -> None:
    result = transformed(net(), long())
    twin = copy.deepcopy(result) if how == "deepcopy" else pickle.loads(pickle.dumps(result))
    train(twin, sgd(twin))
    assert len(told.about("schedule.step()")) == 1


def test_a_schedule_that_is_bound_later(told: Told) -> None:
    result = transformed(net(), Static(8))
    optimizer = sgd(result)
    train(result, optimizer)
    check_silence(told)
    schedule = long()
    schedule.bind(result)
    train(result, optimizer)
    assert len(told.about("schedule.step()")) == 1


def test_a_result_that_is_used_again_after_revert(told: Told) -> None:
    result = transformed(net(), long())
    optimizer = sgd(result)
    train(result, optimizer, steps=3)
    cpt_fx.revert(result)
    train(result, optimizer)
    assert len(told.about("schedule.step()")) == 1


def test_what_goes_wrong_in_a_reminder_stops_nothing(
    told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("not known yet")

    schedule = long()
    result = transformed(net(), schedule)
    monkeypatch.setattr(schedule, "trajectory", broken)
    train(result, sgd(result), steps=25)
    check_silence(told)
