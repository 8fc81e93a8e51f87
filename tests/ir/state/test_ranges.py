"""Ranges lie with their layer: its dtype aside, its mode, its parameters, and no child of ours in the tree."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx.schedules import Static
from tests.ir.state.models import (
    DYNAMIC,
    OBSERVED,
    Net,
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
    width_of,
)  # fmt: skip

recipes = pytest.mark.parametrize("recipe", ["default", "paper"])


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """Return the layers whose ranges have changed."""
    now = buffers_of_ours(model)
    assert list(now) == list(before)
    return {key.partition(".")[0] for key, tensor in now.items() if not torch.equal(tensor, before[key])}


CASTS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to": lambda model: model.to(torch.float16),
    "part": lambda model: model.get_submodule("two").bfloat16(),
    "apply": lambda model: model._apply(lambda tensor: tensor.double()),
    "there and back": lambda model: model.half().float(),
}


@captures
@pytest.mark.parametrize("how", CASTS)
def test_casts_leave_ranges_alone(capture: str, how: str) -> None:
    result = cpt_fx.transform(net(), plan(), capture=capture)
    result(batch())
    before = copied(buffers_of_ours(result))
    assert before
    CASTS[how](result)
    assert {tensor.dtype for tensor in buffers_of_ours(result).values()} == {torch.float32}
    assert changed(result, before) == set()


@captures
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_model_trains_and_learns_in_float32(capture: str, dtype: torch.dtype) -> None:
    schedule = plan()
    result = cpt_fx.transform(net(), schedule, capture=capture).to(dtype)
    for step in range(2):
        output = result(batch(step).to(dtype))
        output.float().square().sum().backward()
        schedule.step()
    assert output.dtype is dtype
    assert {tensor.dtype for tensor in buffers_of_ours(result).values()} == {torch.float32}
    assert result.eval()(batch().to(dtype)).isfinite().all()


@captures
@pytest.mark.parametrize("by_attribute", [False, True])
def test_a_range_learns_in_the_mode_of_its_layer(capture: str, by_attribute: bool) -> None:
    result = cpt_fx.transform(net(), plan(), capture=capture)
    result(batch())

    def set_mode(module: nn.Module, mode: bool) -> None:
        if by_attribute:
            module.training = mode
        else:
            module.train(mode)

    before = copied(buffers_of_ours(result))
    set_mode(result.get_submodule("two"), False)
    result(5 * batch(1))
    assert changed(result, before) == {"one", "three"}
    before = copied(buffers_of_ours(result))
    result.eval()
    result(9 * batch(2))
    assert changed(result, before) == set()
    set_mode(result.get_submodule("two"), True)
    result(9 * batch(2))
    assert changed(result, before) == {"two"}


@captures
@recipes
def test_evaluation_before_anything_was_learned(capture: str, recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    """The batch's own range, at the evaluation width, as a training forward would take; and a word about it."""
    result = cpt_fx.transform(net(), plan(), capture=capture, recipe=recipe).eval()
    reference = cpt_fx.transform(net(), Static(8), capture=capture, recipe=recipe)
    for seed in range(2):
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            output = result((seed + 1) * batch(seed))
        assert output.isfinite().all()
        assert torch.equal(output, reference((seed + 1) * batch(seed)))
        if seed == 0:
            assert not caught and "learned anything: each batch's own range is used" in caplog.text


@captures
def test_no_word_once_it_has_learned(capture: str) -> None:
    result = cpt_fx.transform(net(), plan(), capture=capture)
    result(batch())
    result.eval()(batch())  # warnings are errors


@captures
def test_no_word_where_nothing_is_learned(capture: str) -> None:
    assert ran(probe(plan(), capture, recipe=DYNAMIC).eval()) == (8, 8)


def unlearned(call: Callable[[], Tensor]) -> Tensor:
    """Run what evaluates with ranges of the batch, and expect to be told."""
    with pytest.warns(UserWarning):
        return call()


@captures
@pytest.mark.parametrize("assign", [False, True])
@recipes
def test_loading_parameters_alone_resets_ranges(capture: str, assign: bool, recipe: str) -> None:
    result = learned(plan(), capture, recipe=recipe)
    result(100 * ramp())
    narrow = result.eval()(ramp())[0]
    assert width_of(narrow) < 8
    plain = {key: value.clone() for key, value in result.state_dict().items() if "cpt_fx" not in key}
    result.load_state_dict(plain, assign=assign)
    assert width_of(unlearned(lambda: result(ramp())[0])) == 8
    assert ran(result.train()) == (3, 3)
    if recipe != "paper":  # as published, an average of one batch is a tenth of its range
        assert ran(result.eval()) == (8, 8)


@captures
def test_loading_one_layer_resets_that_layer(capture: str) -> None:
    result = cpt_fx.transform(net(), plan(), capture=capture)
    result(batch())
    before = copied(buffers_of_ours(result))
    result.load_state_dict({f"two.{key}": value for key, value in net().two.state_dict().items()}, strict=False)
    assert changed(result, before) == {"two"}
    result.get_submodule("one").load_state_dict(net().one.state_dict())
    assert changed(result, before) == {"one", "two"}


@captures
def test_loading_everything_brings_the_ranges(capture: str) -> None:
    source = learned(plan(), capture)
    result = probe(plan(), capture, example_inputs=(ramp(),))
    result(100 * ramp())
    result.load_state_dict(source.state_dict())
    assert ran(result.eval()) == (8, 8)
    for key, tensor in buffers_of_ours(result).items():
        assert torch.equal(tensor, buffers_of_ours(source)[key])


@captures
def test_a_replaced_layer_starts_unlearned(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    result = cpt_fx.transform(net(), plan(), capture=capture)
    result(100 * batch())
    torch.manual_seed(1)
    result.two = nn.Linear(6, 6)
    result.eval()
    assert result(batch()).isfinite().all()
    assert "evaluated before two.cpt_fx_input_range learned anything" in caplog.text
    result.train()(batch())
    result.eval()(batch())


@captures
def test_nothing_of_ours_in_the_tree(capture: str) -> None:
    result = cpt_fx.transform(net(), plan(), capture=capture, example_inputs=(batch(),))
    assert [name for name, _ in result.named_modules()] == [name for name, _ in Net().named_modules()]
    assert [name for name, _ in result.named_children()] == ["one", "two", "three"]
    assert [name for name, _ in result.named_parameters()] == [name for name, _ in Net().named_parameters()]
    assert {key.partition(".")[0] for key in buffers_of_ours(result)} == {"one", "two", "three"}


@captures
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_learns_nothing(capture: str, reentrant: bool) -> None:
    """The second pass over the same batch is no second batch."""

    def run(call: Callable[[nn.Module, Tensor], Any]) -> dict[str, Tensor]:
        result = cpt_fx.transform(net(), plan(), capture=capture, recipe=OBSERVED)
        for seed in range(3):
            call(result, ((seed + 1) * batch(seed)).requires_grad_()).square().sum().backward()
        return buffers_of_ours(result)

    ours = run(lambda result, x: checkpoint(result, x, use_reentrant=reentrant))
    theirs = run(lambda result, x: result(x))
    assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []


@captures
def test_a_verification_or_an_inspection_learns_nothing(capture: str) -> None:
    result = cpt_fx.transform(net(), plan(), capture=capture)
    result(batch())
    before = copied(buffers_of_ours(result))
    cpt_fx.inspect(result).verify(9 * batch())
    str(cpt_fx.inspect(result))
    assert changed(result, before) == set()


class Broken(nn.Module):
    """A graph break between two layers, and, if asked for, a product that belongs to no layer."""

    def __init__(self, *, multiplies: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.multiplies = multiplies

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.first(x)
        torch._dynamo.graph_break()
        y: Tensor = self.second(h)
        return y @ h.t() if self.multiplies else y


@pytest.mark.parametrize("multiplies", [True, False])
def test_ranges_that_come_late_are_counted(multiplies: bool, caplog: pytest.LogCaptureFixture) -> None:
    result = cpt_fx.transform(Broken(multiplies=multiplies), Static(8), capture="dynamo")
    before = len(buffers_of_ours(result))
    result(torch.randn(4, 8))
    late = (len(buffers_of_ours(result)) - before) // 3
    assert bool(late) == multiplies
    said = [record.getMessage() for record in caplog.records if "running ranges came up" in record.getMessage()]
    assert [text.partition(" ")[0] for text in said] == ([str(late)] if multiplies else [])
