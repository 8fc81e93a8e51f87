"""State lies with its layer: no child, no place taken, its own precision, its own mode, its own keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import cpt_fx
from cpt_fx.schedules import named
from tests.ir.result.models import (
    QUIET,
    Chain,
    Heard,
    Images,
    Net,
    batch,
    check_ran,
    equal,
    far,
    learned,
    made,
    ours,
    ranges,
    runs,
    trained,
    ways,
)

pytestmark = QUIET


@ways
@pytest.mark.parametrize("make", [Net, Chain, Images])
def test_no_child_of_ours(make: type[nn.Module], way: str) -> None:
    plain, result = make(), made(make(), way)
    x = torch.randn(4, 3, 8, 8) if make is Images else batch()
    for _ in range(2):
        assert len(list(result.children())) == len(list(plain.children()))
        assert len(list(result.modules())) == len(list(plain.modules()))
        assert [name for name, _ in result.named_modules()] == [name for name, _ in plain.named_modules()]
        assert ours(name for name, _ in result.named_modules()) == []
        result(x)


@ways
def test_freezing_by_children_leaves_the_width(way: str) -> None:
    """`for n, c in t.named_children(): if n != "fc": c.eval()`: the width is the root's, the ranges are the layer's."""
    plan = named("CR", q_min=3, q_max=8, total_steps=40, cycles=4)
    result = made(Chain(), way, schedule=plan)
    result(batch())
    before = learned(result)
    for name, child in result.named_children():
        if name != "fc":
            child.eval()
    result(5 * batch(3)).sum().backward()
    views = [view for view in cpt_fx.inspect(result).quantizers if view.role in ("weight", "activation")]
    assert {view.bits for view in views} == {3}
    after = learned(result)
    changed = {key for key, value in after.items() if value != before.get(key)}
    assert "fc.input" in changed and not [key for key in changed if key.startswith("backbone.")]
    plan.step(9)
    result(batch())
    views = [view for view in cpt_fx.inspect(result).quantizers if view.role in ("weight", "activation")]
    assert {view.bits for view in views} == {plan.bits(9).weight} and plan.bits(9).weight > 3


@ways
def test_a_result_says_all_its_state_before_its_first_call(way: str) -> None:
    """With example inputs: nothing is added or moved by later calls."""
    result = made(Net(), way, 8, example_inputs=(batch(),))
    before = [[name for name, _ in named_()] for named_ in (result.named_parameters, result.named_buffers)]
    keys = list(result.state_dict())
    for training in (True, False, True):
        result.train(training)
        result(batch())
    assert [[name for name, _ in named_()] for named_ in (result.named_parameters, result.named_buffers)] == before
    assert list(result.state_dict()) == keys


@ways
def test_without_examples_nothing_changes_place(way: str, heard: Heard) -> None:
    result = made(Images(), way, 8)
    parameters = [name for name, _ in result.named_parameters()]
    buffers = [name for name, _ in result.named_buffers()]
    for training in (True, False):
        result.train(training)
        result(torch.randn(4, 3, 8, 8))
        assert [name for name, _ in result.named_parameters()][: len(parameters)] == parameters
        assert [name for name, _ in result.named_buffers()][: len(buffers)] == buffers
    if len(list(result.named_buffers())) > len(buffers):  # what only a first call can find is said, once
        assert heard.text().count("example_inputs") == 1


@ways
def test_what_is_averaged_and_broadcast(way: str) -> None:
    """Position, widths and records are no buffers: integers of ours would be averaged."""
    result = made(Images(), way, schedule=named("LR", q_min=3, q_max=8, total_steps=12, cycles=2))
    result(torch.randn(4, 3, 8, 8))
    plain = dict(Images().named_buffers())
    added = {name: buffer for name, buffer in result.named_buffers() if name not in plain}
    assert [name for name, buffer in added.items() if not buffer.is_floating_point()] == []
    assert [name for name in added if "cpt_fx" not in name] == []
    assert set(plain) <= {name for name, _ in result.named_buffers()}


@ways
def test_frozen_batch_norm(way: str) -> None:
    """The usual loop over modules(), which asks for classes: statistics stand still, quantizers run."""
    result = made(Images(), way)
    frozen = [module for module in result.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(frozen) == 2
    for module in frozen:
        module.eval()
        module.requires_grad_(False)
    before = runs(result)
    output = result(torch.randn(4, 3, 8, 8))
    output.sum().backward()
    check_ran(result, before, "conv", "body.0", "fc")
    assert all(int(module.num_batches_tracked or 0) == 0 for module in frozen)
    assert result.bn.weight.grad is None and result.conv.weight.grad is not None


@ways
def test_averaged_model(way: str) -> None:
    plan = named("LR", q_min=3, q_max=8, total_steps=12, cycles=2)
    result = made(Chain(), way, schedule=plan, example_inputs=(batch(),))
    average: Any = AveragedModel(result, use_buffers=True)  # type: ignore[no-untyped-call, unused-ignore]
    optimizer = torch.optim.SGD(result.parameters(), lr=0.01)
    for seed in range(4):
        optimizer.zero_grad()
        result(batch(seed)).square().sum().backward()
        optimizer.step()
        plan.step()
        average.update_parameters(result)
    assert int(average.n_averaged) == 4
    average.eval()
    model = Chain()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(average.module.get_parameter(name))
        output, plain = average(batch()), model(batch())
    views = [view for view in cpt_fx.inspect(average).quantizers if view.role in ("weight", "activation")]
    assert {view.bits for view in views} == {8}
    assert not equal(output, plain) and float((output - plain).norm() / plain.norm()) < 0.15


@ways
@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "to"])
def test_ranges_stay_float32(cast: str, way: str) -> None:
    result = trained(way)
    before, shown = ranges(result), learned(result)
    assert before and all(value.dtype is torch.float32 for value in before.values())
    cast_it: Any = {"to": lambda m: m.to(torch.bfloat16)}.get(cast, lambda m: getattr(m, cast)())
    cast_it(result)
    after = ranges(result)
    assert after.keys() == before.keys()
    assert all(after[key].dtype is torch.float32 and torch.equal(after[key], before[key]) for key in before)
    assert learned(result) == shown
    x = batch().to(result.fc.weight.dtype)
    assert result(x).dtype is x.dtype and far(result.eval()(x), 0 * result(x))


@ways
def test_ranges_of_a_part_stay_float32(way: str) -> None:
    result = trained(way)
    before = ranges(result)
    result.fc.half()
    result.backbone.to(torch.bfloat16)
    result.backbone[0].half()
    after = ranges(result)
    assert all(after[key].dtype is torch.float32 and torch.equal(after[key], before[key]) for key in before)
    result.float()
    assert torch.isfinite(result(batch())).all()


@ways
def test_an_optimizer_of_the_result(way: str) -> None:
    model = Net()
    result = made(model, way)
    assert [id(parameter) for parameter in result.parameters()] == [id(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(result.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = result(batch())[0].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and sum(runs(result).values()) > 0
    assert equal(model.fc.weight, result.fc.weight)


@ways
def test_a_copy_of_a_layer_has_ranges_of_its_own(way: str) -> None:
    result = trained(way)
    result.backbone[2] = copy.deepcopy(result.backbone[2])
    before = learned(result)
    result.train()
    result(50 * batch(9))
    assert learned(result)["backbone.2.input"] != before["backbone.2.input"]
    twin = copy.deepcopy(result)
    before = learned(result)
    twin(500 * batch(9))
    assert learned(result) == before and learned(twin) != before
