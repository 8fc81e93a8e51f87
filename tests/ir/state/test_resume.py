"""A checkpoint of the model carries the position: a fresh schedule takes it, another one keeps its own and warns."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Custom, Cyclic, Delayed, Piecewise, Schedule, Sequence, Static, named
from tests.ir.state.models import DYNAMIC, Probe, batch, captures, copied, learned, net, plan, probe, ran


def saved_at(position: int, schedule: Schedule | None = None, capture: str = "auto") -> dict[str, Tensor]:
    """Return the plain tensors of a probe's checkpoint, made at a position."""
    schedule = plan() if schedule is None else schedule
    result = learned(schedule, capture)
    schedule.step(position)
    return copied(result.state_dict())


def through_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("cpt_fx")]


@captures
@pytest.mark.parametrize("how", ["state_dict", "file", "deepcopy"])
def test_a_fresh_run_goes_on(capture: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    source_plan = plan()
    source = learned(source_plan, capture)
    source_plan.step(4)
    state: Any = source.state_dict()
    state = {"state_dict": lambda s: s, "file": through_file, "deepcopy": copy.deepcopy}[how](state)
    schedule = plan()
    result = probe(schedule, capture)
    with caplog.at_level(logging.INFO, "cpt_fx"):
        result.load_state_dict(state)
    assert schedule.position == 4
    assert ran(result) == (6, 6)
    assert any("continues at step 4 of 12" in line and "schedule.reset()" in line for line in lines(caplog))
    schedule.step()
    assert ran(result) == plan().bits(5)[:2] and schedule.position == 5
    schedule.reset()
    assert schedule.position == 0 and ran(result) == (3, 3)


@captures
def test_saved_in_evaluation_mode(capture: str) -> None:
    """Trainers save after validation: the mode of saving says nothing about that of loading."""
    source_plan, schedule = plan(), plan()
    source, result = learned(source_plan, capture), probe(schedule, capture)
    source_plan.step(2)
    ran(source.eval())
    result.load_state_dict(copied(source.state_dict()))
    assert (schedule.position, ran(result)) == (2, (5, 5))
    other_plan = plan()
    other = learned(other_plan, capture).eval()
    other.load_state_dict(copied(source.train().state_dict()))
    assert (other_plan.position, ran(other)) == (2, (8, 8))
    assert ran(other.train()) == (5, 5)


@captures
def test_a_trainer_that_knows_only_model_and_optimizer(capture: str) -> None:
    """The losses of a run that was interrupted are those of one that was not."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Schedule]:
        schedule = plan()
        result = cpt_fx.transform(net(), schedule, capture=capture, recipe=DYNAMIC)
        return result, torch.optim.AdamW(result.parameters(), lr=0.01), schedule

    def run(result: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = result(batch(step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    whole = run(*start(), range(9))
    begun = start()
    first = run(*begun, range(4))
    state = copy.deepcopy([begun[0].state_dict(), begun[1].state_dict()])
    resumed = start()
    resumed[0].load_state_dict(state[0])
    resumed[1].load_state_dict(state[1])
    assert first + run(*resumed, range(4, 9)) == whole


@captures
@pytest.mark.parametrize("order", ["model first", "schedule first"])
def test_whoever_saves_the_schedule_too(capture: str, order: str) -> None:
    schedule = plan()
    state, other = saved_at(4, capture=capture), plan()
    other.step(4)
    result = probe(schedule, capture)
    loads: list[Callable[[], object]] = [
        lambda: result.load_state_dict(state),
        lambda: schedule.load_state_dict(other.state_dict()),
    ]
    for load in loads if order == "model first" else reversed(loads):
        load()
    assert (schedule.position, ran(result)) == (4, (6, 6))


@captures
def test_loading_twice_is_loading_once(capture: str) -> None:
    schedule = plan()
    result = probe(schedule, capture)
    state = saved_at(4, capture=capture)
    result.load_state_dict(state)
    result.load_state_dict(state)
    assert schedule.position == 4


@captures
def test_a_checkpoint_of_the_first_step_says_nothing(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    schedule = plan()
    with caplog.at_level(logging.INFO, "cpt_fx"):
        probe(schedule, capture).load_state_dict(saved_at(0, capture=capture))
    assert schedule.position == 0
    assert not any("continues" in line for line in lines(caplog))


@captures
def test_a_plain_checkpoint_moves_nothing(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    schedule = plan()
    result = probe(schedule, capture)
    with caplog.at_level(logging.INFO, "cpt_fx"):
        result.load_state_dict(Probe().state_dict())
    assert (schedule.position, ran(result)) == (0, (3, 3))
    assert not any("continues" in line for line in lines(caplog))


OTHERS: dict[str, Callable[[], Schedule]] = {
    "another width": lambda: plan(q_min=4),
    "another name": lambda: named("CR", q_min=3, q_max=8, total_steps=12, cycles=2, q_grad=(5, 8)),
    "another length": lambda: plan(total_steps=24),
    "other gradients": lambda: plan(q_grad=8),
    "static": lambda: Static(4),
    "other evaluation": lambda: plan(eval_bits=6),
}


@captures
@pytest.mark.parametrize("other", OTHERS)
def test_another_schedule_keeps_its_own_position(capture: str, other: str) -> None:
    schedule = OTHERS[other]()
    result = probe(schedule, capture)
    with pytest.warns(UserWarning, match="position|step"):
        result.load_state_dict(saved_at(4, capture=capture))
    assert schedule.position == 0
    assert ran(result) == schedule.bits(0)[:2]


@captures
def test_a_schedule_that_has_begun_keeps_its_own_position(capture: str) -> None:
    schedule = plan()
    result = probe(schedule, capture)
    schedule.step(2)
    with pytest.warns(UserWarning, match="position|step"):
        result.load_state_dict(saved_at(4, capture=capture))
    assert (schedule.position, ran(result)) == (2, (5, 5))
    result.load_state_dict(saved_at(2, capture=capture))  # the same position is nothing to warn of
    assert schedule.position == 2


def smooth(share: float) -> float:
    return share * share * (3.0 - 2.0 * share)


EQUAL: dict[str, Callable[[], Schedule]] = {
    "piecewise": lambda: Piecewise({0: 3, 4: 6}),
    "sequence": lambda: Sequence([plan(), Static(8, total_steps=5)]),
    "delayed": lambda: Delayed(plan(), start=1),
    "named callable": lambda: Cyclic(profile=smooth, q_min=3, q_max=8, total_steps=12, cycles=2),
    "no end": lambda: Custom(alternating),
}


def alternating(step: int) -> int:
    return 4 + step % 2


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_schedules_of_every_kind(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    schedule = EQUAL[kind]()
    result = probe(schedule)
    with caplog.at_level(logging.INFO, "cpt_fx"):
        result.load_state_dict(saved_at(5, EQUAL[kind]()))
    assert (schedule.position, ran(result)) == (5, schedule.bits(5)[:2])
    assert any("continues at step 5" in line for line in lines(caplog))


def local_alike() -> Callable[[int], int]:
    def alternating(step: int) -> int:
        return 4 + step % 2

    return alternating


UNEQUAL: dict[str, Callable[[], Schedule]] = {
    "lambda": lambda: Custom(lambda step: 4 + step % 2, total_steps=12),
    "local function": lambda: Custom(local_alike(), total_steps=12),
    "lambda as profile": lambda: Cyclic(profile=lambda t: t, q_min=3, q_max=8, total_steps=12),
    "inside another": lambda: Delayed(Custom(lambda step: 4 + step % 2, total_steps=12), start=1),
}


@pytest.mark.parametrize("kind", UNEQUAL)
def test_callables_without_a_name_are_never_equal(kind: str) -> None:
    schedule = UNEQUAL[kind]()
    result = probe(schedule)
    with pytest.warns(UserWarning, match="position|step"):
        result.load_state_dict(saved_at(5, UNEQUAL[kind]()))
    assert schedule.position == 0


@captures
def test_the_first_load_counts(capture: str) -> None:
    """Two models under one schedule, as a GAN has them; the second checkpoint is a later one."""
    schedule = plan()
    first, second = probe(schedule, capture), probe(schedule, capture)
    first.load_state_dict(saved_at(4, capture=capture))
    with pytest.warns(UserWarning, match="position|step"):
        second.load_state_dict(saved_at(6, capture=capture))
    assert schedule.position == 4
    assert ran(first) == ran(second) == (6, 6)


@captures
def test_two_models_of_one_time(capture: str) -> None:
    schedule = plan()
    first, second = probe(schedule, capture), probe(schedule, capture)
    for model in (first, second):
        model.load_state_dict(saved_at(4, capture=capture))
    assert schedule.position == 4


@captures
def test_part_of_a_larger_checkpoint(capture: str) -> None:
    """The result is a child, as in a LightningModule, and loading is not strict."""
    schedule = plan()
    outer = nn.ModuleDict({"model": probe(schedule, capture)})
    outer.load_state_dict({f"model.{key}": value for key, value in saved_at(4, capture=capture).items()}, strict=False)
    assert (schedule.position, ran(outer["model"])) == (4, (6, 6))


@captures
def test_assigned_state(capture: str) -> None:
    schedule = plan()
    result = probe(schedule, capture)
    result.load_state_dict(saved_at(4, capture=capture), assign=True)
    assert (schedule.position, ran(result)) == (4, (6, 6))
    assert ran(result.eval()) == (8, 8)


@captures
def test_what_is_saved_later_is_later(capture: str) -> None:
    """The copy in a state_dict is of its time, taken when it was asked for; no forward has to run in between."""
    source_plan = plan()
    source = learned(source_plan, capture)
    states = []
    for _ in range(3):
        states.append(copied(source.state_dict()))
        source_plan.step(2)
    for expected, state in zip((0, 2, 4), states, strict=True):
        schedule = plan()
        probe(schedule, capture).load_state_dict(state)
        assert schedule.position == expected


@captures
@pytest.mark.parametrize(
    "damaged, text",
    [
        (torch.tensor(3), "holds no position and schedule"),
        (torch.tensor([-5, 0]), "holds -5, which is no step"),
        (torch.tensor([float("nan"), 0.0]), "holds nan, which is no step"),
    ],
)
def test_a_damaged_position_is_named(capture: str, damaged: Tensor, text: str) -> None:
    schedule = plan()
    result = learned(schedule, capture)
    with pytest.raises(RuntimeError, match=f"cpt_fx_position {text}"):
        result.load_state_dict({**result.state_dict(), "cpt_fx_position": damaged})
    assert schedule.position == 0
