"""The width that runs is decided at each forward pass: by the mode of the result's root, and the position."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import cpt_fx
from cpt_fx.schedules import Bits, Custom, Piecewise, Sequence, Static
from tests.ir.state.models import (
    DYNAMIC,
    Probe,
    batch,
    captures,
    flags,
    learned,
    net,
    plan,
    probe,
    ramp,
    ran,
    ran_backward,
    shown,
    width_of,
)  # fmt: skip


@captures
def test_modes_restored_one_by_one_as_lightning_does(capture: str) -> None:
    """Lightning validates after every step: it calls `eval()`, and restores `module.training` by assignment."""
    schedule = plan()
    result = learned(schedule, capture)
    trained, evaluated = [], []
    for _ in range(12):
        trained.append(ran_backward(result))
        schedule.step()
        modes = {name: module.training for name, module in result.named_modules()}
        result.eval()
        evaluated.append(ran(result))
        for name, module in result.named_modules():
            module.training = modes[name]
    assert trained == [plan().bits(step) for step in range(12)]
    assert evaluated == [(8, 8)] * 12


@captures
@pytest.mark.parametrize("everywhere", [False, True], ids=["root", "all"])
def test_the_mode_is_set_as_an_attribute(capture: str, everywhere: bool) -> None:
    schedule = plan()
    result = learned(schedule, capture)

    def set_mode(mode: bool) -> None:
        for module in result.modules() if everywhere else [result]:
            module.training = mode

    for position in (0, 1, 4):
        schedule.step(position - schedule.position)
        set_mode(False)
        assert ran(result) == (8, 8)
        set_mode(True)
        assert ran(result) == schedule.bits(position)[:2] != (8, 8)


@captures
def test_flags_of_all_modules_without_any_step(capture: str) -> None:
    result = learned(plan(), capture)
    assert ran(result) == (3, 3)
    with flags(result, False):
        assert ran(result) == (8, 8)
    assert ran(result) == (3, 3)


@captures
def test_trained_from_evaluation_by_attribute(capture: str) -> None:
    """The model comes in evaluation mode, as `from_pretrained` gives it."""
    result = cpt_fx.transform(Probe().eval(), plan(), capture=capture, recipe=DYNAMIC)
    assert not result.training and ran(result) == (8, 8)
    result.training = True
    assert ran_backward(result) == (3, 3, 5)


@captures
def test_a_frozen_child_keeps_the_training_width(capture: str) -> None:
    result = learned(plan(), capture)
    for child in result.children():
        child.eval()
    assert ran(result) == (3, 3)
    for module in list(result.modules())[1:]:
        module.training = False
    assert ran(result) == (3, 3)


@captures
def test_a_training_child_in_evaluation(capture: str) -> None:
    """Monte Carlo dropout: the root is in evaluation mode, whatever some children are in."""
    result = learned(plan(), capture).eval()
    for child in result.children():
        child.train()
    assert ran(result) == (8, 8)


@captures
def test_steps_taken_in_evaluation_count(capture: str) -> None:
    schedule = plan()
    result = learned(schedule, capture).eval()
    schedule.step(4)
    assert ran(result) == (8, 8)
    result.training = True
    assert ran(result) == (6, 6)


@captures
@pytest.mark.parametrize(("eval_bits", "expected"), [(None, 8), (5, 5), ("current", 4)])
def test_evaluation_bits(capture: str, eval_bits: object, expected: int) -> None:
    schedule = plan(eval_bits=eval_bits)
    result = learned(schedule, capture)
    schedule.step()
    result.training = False
    assert ran(result) == (expected, expected)
    assert ran(result.train()) == (4, 4)
    assert ran(result.eval()) == (expected, expected)


@captures
def test_other_kinds_of_schedule(capture: str) -> None:
    kinds = [
        Piecewise({0: 3, 2: Bits(4, 6, 5)}),
        Custom(lambda step: 3 if step < 2 else Bits(4, 6, 5), total_steps=9),
        Sequence([Static(3, total_steps=2), Static(Bits(4, 6, 5), total_steps=7)]),
    ]
    for schedule in kinds:
        result = probe(schedule, capture, recipe=DYNAMIC)
        for expected in ((3, 3), (3, 3), (4, 6)):
            with flags(result, False):
                ran(result)
            assert ran(result) == expected, schedule
            schedule.step()


@captures
def test_what_inspect_shows_follows_the_attribute(capture: str) -> None:
    result = learned(plan(), capture)
    assert shown(result)["act", "activation"] == 3
    result.training = False
    assert shown(result)["act", "activation"] == 8
    result.training = True
    assert shown(result)["act", "activation"] == 3


@pytest.mark.parametrize("wrap", ["compile", "in_place", "sequential", "data_parallel"])
@captures
def test_wrapped(capture: str, wrap: str) -> None:
    """Whoever wraps the result sets modes on the wrapper, or on all modules in it."""
    schedule = plan()
    result = learned(schedule, capture)
    model: nn.Module = result
    if wrap == "compile":
        model = torch.compile(result, backend="eager")  # type: ignore[assignment]
    elif wrap == "in_place":
        result.compile(backend="eager")
    elif wrap == "sequential":
        model = nn.Sequential(result)
    else:
        model = nn.DataParallel(result)
    for step in range(3):
        assert ran(model) == schedule.bits(step)[:2]
        model.eval()
        assert ran(model) == (8, 8)
        for module in model.modules():
            module.training = True
        schedule.step()
    for module in model.modules():
        module.training = False
    assert ran(model) == (8, 8)


@captures
def test_no_change_of_width_compiles_anything(capture: str) -> None:
    counter = CompileCounter()
    schedule = plan()
    result = learned(schedule, capture)
    compiled = torch.compile(result, backend=counter)
    ran_backward(compiled)
    ran(compiled)
    with flags(result, False):
        ran(compiled)
    before = counter.frame_count
    assert before > 0
    seen = []
    for _ in range(6):
        seen.append(ran_backward(compiled))
        schedule.step()
        with flags(result, False):
            assert ran(compiled) == (8, 8)
    assert seen == [plan().bits(step) for step in range(6)]
    assert counter.frame_count == before


@captures
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(capture: str, how: str) -> None:
    """A copy by itself follows the same schedule; a pickle brings one of its own, at the same position."""
    schedule = plan()
    result = learned(schedule, capture)
    schedule.step()
    result.training = False
    twin = copy.deepcopy(result) if how == "deepcopy" else pickle.loads(pickle.dumps(result))
    assert ran(twin) == (8, 8)
    twin.training = True
    assert ran(twin) == (4, 4)
    schedule.step()
    assert ran(twin) == ((5, 5) if how == "deepcopy" else (4, 4))
    assert ran(result) == (8, 8)
    result.training = True
    assert ran(result) == (5, 5)


@captures
def test_bound_and_unbound(capture: str) -> None:
    first, second = plan(), Static(6)
    result = learned(first, capture)
    second.bind(result)
    assert ran(result) == (6, 6)
    first.step()
    assert ran(result) == (6, 6)
    first.bind(result)
    assert ran(result) == (4, 4)
    first.unbind(result)
    first.step()
    assert ran(result) == (4, 4)


@captures
def test_a_whole_run_is_that_of_hand_set_modes(capture: str) -> None:
    """Training with validation in between, modes set as attributes, is training with `train()` and `eval()`."""

    def run(by_attribute: bool) -> list[torch.Tensor]:
        schedule, model = plan(), net()
        result = cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs = []
        for step in range(6):
            optimizer.zero_grad()
            loss = result(batch(step)).square().sum()
            loss.backward()
            optimizer.step()
            schedule.step()
            if by_attribute:
                with flags(result, False):
                    outputs.append(result(batch(99)).detach())
            else:
                outputs.append(result.eval()(batch(99)).detach())
                result.train()
            outputs.append(loss.detach())
        return [*outputs, *(parameter.detach() for parameter in model.parameters())]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


@captures
def test_the_forward_of_an_earlier_mode_does_not_linger(capture: str) -> None:
    """Every call looks anew, also if nothing but the mode changed, and in the order least expected."""
    schedule = plan()
    result = learned(schedule, capture)
    expected = {True: (3, 3), False: (8, 8)}
    for mode in (False, False, True, False, True, True):
        result.training = mode
        assert ran(result) == expected[mode]
        with torch.inference_mode():
            activations, _ = result(ramp())
        assert width_of(activations) == expected[mode][1]
