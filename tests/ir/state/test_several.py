"""Several results under one schedule, several schedules in one model, results inside of modules and of results."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Piecewise, Static
from tests.ir.state.models import DYNAMIC, Probe, batch, captures, learned, net, plan, probe, ran, shown


class Whole(nn.Module):
    """Two probes, each of which may be a result of its own."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        activations, _ = self.first(x)
        _, weights = self.second(x)
        return activations, weights


@captures
def test_one_schedule_drives_them_all(capture: str) -> None:
    schedule = plan()
    models = [learned(schedule, capture) for _ in range(3)]
    models[1].eval()
    models[2].training = False
    for step in range(6):
        assert [ran(model) for model in models] == [schedule.bits(step)[:2], (8, 8), (8, 8)]
        schedule.step()
    for model in models:
        model.training = True
    assert [ran(model) for model in models] == [(3, 3)] * 3


@captures
def test_teacher_and_student(capture: str) -> None:
    """A copy in evaluation mode that is fed the student's tensors after every step."""
    schedule = plan()
    student = learned(schedule, capture)
    teacher = copy.deepcopy(student).eval()
    for step in range(6):
        assert ran(student) == schedule.bits(step)[:2]
        teacher.load_state_dict(student.state_dict())
        assert ran(teacher) == (8, 8)
        with torch.no_grad():
            for mine, its in zip(teacher.state_dict().values(), student.state_dict().values(), strict=True):
                mine.copy_(its)
        assert ran(teacher) == (8, 8)
        schedule.step()
    assert schedule.position == 6


@captures
def test_parts_of_a_whole(capture: str) -> None:
    schedule, other = plan(), Piecewise({0: 6, 2: 4})
    whole = Whole(learned(schedule, capture), learned(other, capture))
    assert ran(whole) == (6, 3)
    schedule.step(4)
    assert ran(whole) == (6, 6)
    other.step(2)
    assert ran(whole) == (4, 6)
    whole.eval()
    assert ran(whole) == (6, 8)
    for module in whole.modules():
        module.training = True
    assert ran(whole) == (4, 6)


@captures
def test_the_root_of_each_part_decides(capture: str) -> None:
    schedule = plan()
    whole = Whole(learned(schedule, capture), learned(schedule, capture))
    whole.training = False  # no result: nobody asks it
    assert ran(whole) == (3, 3)
    whole.first.training = False
    assert ran(whole) == (3, 8)
    whole.first.training, whole.second.training = True, False
    assert ran(whole) == (8, 3)


@captures
def test_a_part_beside_plain_layers(capture: str) -> None:
    """A plain backbone with a transformed head: what is plain stays plain, whatever the modes."""
    schedule = plan()
    whole = Whole(Probe(), learned(schedule, capture))
    for step in range(3):
        assert ran(whole) == (schedule.bits(step).weight, 32)
        schedule.step()
    assert ran(whole.eval()) == (8, 32)


@captures
def test_bind_and_at_bits_reach_all_parts(capture: str) -> None:
    whole = Whole(learned(plan(), capture), learned(Static(6), capture))
    with cpt_fx.at_bits(whole, 4):
        assert ran(whole) == (4, 4)
    assert ran(whole) == (6, 3)
    with cpt_fx.at_bits(whole.first, 4):
        assert ran(whole) == (6, 4)
    schedule = plan()
    schedule.bind(whole)
    schedule.step(2)
    assert ran(whole) == (5, 5)
    schedule.unbind(whole)
    schedule.step(2)
    assert ran(whole) == (5, 5)


@captures
def test_inspect_shows_all_parts(capture: str) -> None:
    schedule = plan()
    whole = Whole(learned(schedule, capture), learned(Static(6), capture))
    schedule.step()
    widths = shown(whole)
    assert (widths["first.act", "weight"], widths["second.act", "weight"]) == (4, 6)
    assert {layer.partition(".")[0] for layer, _ in widths} == {"first", "second"}
    whole.first.training = False
    assert shown(whole)["first.wgt", "activation"] == 8


@captures
def test_a_whole_is_saved_and_resumed(capture: str) -> None:
    """One schedule drives both parts; the fresh ones take its position from either."""
    schedule, later = plan(), plan()
    whole = Whole(learned(schedule, capture), learned(schedule, capture))
    schedule.step(4)
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    fresh = Whole(learned(later, capture), learned(later, capture))
    fresh.load_state_dict(state)
    assert (later.position, ran(fresh)) == (4, (6, 6))


@captures
def test_a_whole_with_two_schedules_is_resumed(capture: str) -> None:
    def make() -> tuple[Whole, list[cpt_fx.schedules.Schedule]]:
        plans = [plan(), plan(q_min=2)]
        return Whole(learned(plans[0], capture), learned(plans[1], capture)), plans

    whole, plans = make()
    plans[0].step(4)
    plans[1].step(1)
    fresh, later = make()
    fresh.load_state_dict({key: value.clone() for key, value in whole.state_dict().items()})
    assert [one.position for one in later] == [4, 1]
    assert ran(fresh) == ran(whole)


@captures
def test_a_result_put_into_a_result(capture: str) -> None:
    """What is assigned counts: the inner one follows its own schedule and its own mode."""
    schedule, other = plan(), Piecewise({0: 6, 1: 7})
    outer = cpt_fx.transform(Whole(Probe(), Probe()), schedule, capture=capture)
    ran(outer)
    outer.second = learned(other, capture)
    assert ran(outer) == (6, 3)
    schedule.step()
    assert ran(outer) == (6, 4)
    other.step()
    assert ran(outer) == (7, 4)
    other.step()
    outer.eval()
    assert ran(outer) == (7, 8)


@captures
def test_two_results_of_one_model(capture: str) -> None:
    """They share parameters, and neither width nor mode; the plain model stays plain."""
    model = Probe()
    first = cpt_fx.transform(model, Static(3), capture=capture, recipe=DYNAMIC)
    second = cpt_fx.transform(model, plan(eval_bits=5), capture=capture, recipe=DYNAMIC)
    second.eval()
    assert (ran(first), ran(second), ran(model)) == ((3, 3), (5, 5), (32, 32))
    second.training = True
    first.training = False
    assert (ran(first), ran(second)) == ((3, 3), (3, 3))
    assert first.get_parameter("act.weight") is second.get_parameter("act.weight")


@captures
def test_interleaved_backward_passes(capture: str) -> None:
    """A loss of two models under one schedule, with its step before the backward pass."""

    def run(early: bool) -> list[Tensor]:
        schedule, models = plan(), [net(), net()]
        results = [cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC) for model in models]
        loss = torch.stack([result(batch(seed)).square().sum() for seed, result in enumerate(results)]).sum()
        if early:
            schedule.step(5)
        loss.backward()
        return [one.grad for model in models for one in model.parameters() if one.grad is not None]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


@captures
def test_a_schedule_outlives_its_models(capture: str) -> None:
    schedule = plan()
    result = probe(schedule, capture)
    del result
    schedule.step(4)
    assert ran(probe(schedule, capture)) == (6, 6)
