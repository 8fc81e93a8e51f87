"""`cpt_fx.at_bits`: other widths for a while, so that a sweep of evaluation widths is a loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import cpt_fx
from cpt_fx.schedules import Bits, Static
from tests.ir.state.models import (
    DYNAMIC,
    batch,
    buffers_of_ours,
    captures,
    copied,
    learned,
    net,
    plan,
    probe,
    ramp,
    ran,
    ran_backward,
    shown,
)  # fmt: skip


@captures
def test_a_sweep_is_a_loop(capture: str) -> None:
    result = learned(plan(), capture).eval()
    seen = []
    for bits in range(2, 9):
        with cpt_fx.at_bits(result, bits):
            seen.append(ran(result))
    assert seen == [(bits, bits) for bits in range(2, 9)]
    assert ran(result) == (8, 8)


@captures
def test_an_int_sets_weights_and_activations(capture: str) -> None:
    schedule = plan()
    result = probe(schedule, capture)
    schedule.step(4)
    with cpt_fx.at_bits(result, 4):
        assert ran_backward(result) == (4, 4, schedule.bits(4).gradient)
    assert ran_backward(result) == schedule.bits(4)


@captures
def test_bits_set_all_three(capture: str) -> None:
    result = probe(plan(), capture)
    with cpt_fx.at_bits(result, Bits(4, 6, 7)):
        assert ran_backward(result) == (4, 6, 7)
        assert shown(result)["act", "activation"] == 6
        assert shown(result)["wgt", "weight"] == 4
    assert ran_backward(result) == (3, 3, 5)
    assert shown(result)["act", "activation"] == 3


@captures
@pytest.mark.parametrize("mode", [True, False])
def test_whatever_the_mode(capture: str, mode: bool) -> None:
    result = learned(plan(), capture).train(mode)
    with cpt_fx.at_bits(result, 5):
        assert ran(result) == (5, 5)
        result.train(not mode)
        assert ran(result) == (5, 5)
        result.training = mode
        assert ran(result) == (5, 5)
    assert ran(result) == ((3, 3) if mode else (8, 8))


@captures
def test_whatever_the_schedule_does_meanwhile(capture: str) -> None:
    schedule = plan()
    result = learned(schedule, capture)
    with cpt_fx.at_bits(result, 5):
        schedule.step(2)
        assert ran(result) == (5, 5)
        schedule.step(3)
    assert ran(result) == (7, 7) == schedule.bits(5)[:2]


@captures
def test_fixed_overrides_stay_and_offsets_apply(capture: str) -> None:
    result = learned(plan(), capture, overrides={"act": 7, "wgt": "+1"})
    with cpt_fx.at_bits(result, 4):
        assert ran(result) == (5, 7)
        assert shown(result)["act", "weight"] == 7
    fixed = learned(plan(), capture, overrides={"act": Bits(7, 6, 5), "wgt": {"offset": Bits(2, 0, 0)}})
    with cpt_fx.at_bits(fixed, Bits(3, 3, 3)):
        assert ran_backward(fixed) == (5, 6, 5)


@captures
@pytest.mark.parametrize("mode", [True, False])
def test_32_is_the_plain_model(capture: str, mode: bool) -> None:
    plain, model = net().train(mode), net().train(mode)
    result = cpt_fx.transform(model, plan(), capture=capture)
    x, y = batch().requires_grad_(), batch().requires_grad_()
    with cpt_fx.at_bits(result, Bits(32, 32, 32)):
        output = result(x)
        output.square().sum().backward()
    expected = plain(y)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


@captures
def test_the_number_32_switches_everything_off(capture: str) -> None:
    """A sweep ends with full precision: offsets and fixed overrides included, and gradients too."""
    plain, model = net(), net()
    result = cpt_fx.transform(model, plan(), capture=capture, overrides={"one": 4, "two": "-2"})
    x, y = batch().requires_grad_(), batch().requires_grad_()
    with cpt_fx.at_bits(result, 32):
        output = result(x)
        output.square().sum().backward()
    expected = plain(y)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    assert not torch.equal(result(batch()), expected)


@captures
def test_nested(capture: str) -> None:
    result = learned(plan(), capture)
    with cpt_fx.at_bits(result, 4):
        with cpt_fx.at_bits(result, Bits(6, 5, 7)):
            assert ran_backward(result) == (6, 5, 7)
            with cpt_fx.at_bits(result, 2):
                assert ran(result) == (2, 2)
            assert ran(result) == (6, 5)
        assert ran(result) == (4, 4)
    assert ran(result) == (3, 3)


@captures
def test_an_exception_ends_it(capture: str) -> None:
    result = learned(plan(), capture)
    with pytest.raises(KeyError), cpt_fx.at_bits(result, 4):
        assert ran(result) == (4, 4)
        raise KeyError("stop")
    assert ran(result) == (3, 3)


@captures
@pytest.mark.parametrize("bits", [-1, 33, 4.0, "4", None, True, (4, 4)])
def test_bad_bits(capture: str, bits: Any) -> None:
    result = learned(plan(), capture)
    with pytest.raises((TypeError, ValueError)), cpt_fx.at_bits(result, bits):
        pass
    assert ran(result) == (3, 3)


def test_a_plain_model_is_refused() -> None:
    with (
        pytest.raises((cpt_fx.TransformError, ValueError, TypeError), match="transform"),
        cpt_fx.at_bits(nn.Linear(2, 2), 4),
    ):
        pass


@captures
def test_ranges_do_not_learn_inside(capture: str) -> None:
    result = learned(plan(), capture)
    assert buffers_of_ours(result)
    before = copied(buffers_of_ours(result))
    with cpt_fx.at_bits(result, 4):
        for _ in range(3):
            result(9 * ramp())
    assert all(torch.equal(tensor, before[key]) for key, tensor in buffers_of_ours(result).items())
    result(9 * ramp())
    assert not all(torch.equal(tensor, before[key]) for key, tensor in buffers_of_ours(result).items())


@captures
def test_no_recompilation(capture: str) -> None:
    counter = CompileCounter()
    result = learned(plan(), capture).eval()
    compiled: Any = torch.compile(result, backend=counter)
    ran(compiled)
    with cpt_fx.at_bits(result, 7):
        ran(compiled)
    before = counter.frame_count
    assert before > 0
    for bits in (2, 3, 4, 5, 6, 8, 32):
        with cpt_fx.at_bits(compiled, bits):
            assert ran(compiled) == (bits, bits)
    assert ran(compiled) == (8, 8)
    assert counter.frame_count == before


@captures
def test_one_of_two_models(capture: str) -> None:
    """What is said of one model is not said of the other, nor of a copy made inside."""
    schedule = plan()
    first, second = learned(schedule, capture), learned(schedule, capture)
    with cpt_fx.at_bits(first, 6):
        assert (ran(first), ran(second)) == ((6, 6), (3, 3))
        with cpt_fx.at_bits(second, 4):
            assert (ran(first), ran(second)) == ((6, 6), (4, 4))
        assert ran(second) == (3, 3)
    assert (ran(first), ran(second)) == ((3, 3), (3, 3))


@captures
def test_a_copy_made_before_is_another_model(capture: str) -> None:
    result = learned(plan(), capture)
    twin = copy.deepcopy(result)
    with cpt_fx.at_bits(result, 6):
        assert (ran(result), ran(twin)) == ((6, 6), (3, 3))


@captures
@pytest.mark.parametrize("how", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_made_inside_follows_the_schedule(capture: str, how: Callable[[nn.Module], nn.Module]) -> None:
    """Nobody would ever end it there."""
    result = learned(plan(), capture)
    with cpt_fx.at_bits(result, 6):
        twin = how(result)
    assert (ran(twin), ran(twin.eval())) == ((3, 3), (8, 8))


@captures
def test_it_is_what_a_static_schedule_does(capture: str) -> None:
    result = cpt_fx.transform(net(), plan(), capture=capture, recipe=DYNAMIC)
    reference = cpt_fx.transform(net(), Static(Bits(4, 5, 6)), capture=capture, recipe=DYNAMIC)
    with cpt_fx.at_bits(result, Bits(4, 5, 6)):
        assert torch.equal(result(batch()), reference(batch()))


@captures
def test_a_checkpoint_inside_is_one_of_the_schedule(capture: str) -> None:
    schedule, other = plan(), plan()
    result, fresh = learned(schedule, capture), probe(other, capture)
    schedule.step(2)
    with cpt_fx.at_bits(result, 7):
        state = copied(result.state_dict())
    fresh.load_state_dict(state)
    assert (other.position, ran(fresh)) == (2, (5, 5))
