"""`torch.compile` of a transformed model: the same numbers, no graph breaks, and nothing is compiled again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import cpt_fx
from cpt_fx.schedules import Bits, Custom, Static, named
from tests.training import check_same, records, same, train_step
from tests.zoo import ZOO


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_whole(model: nn.Module, backend: Any) -> nn.Module:
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def test_every_width_without_compiling_again() -> None:
    plan = Custom(lambda step: Bits(step + 1, step + 1, 32), total_steps=32)
    eager = cpt_fx.transform(small(), plan)
    traced = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compile_whole(traced, counter)
    x = torch.randn(4, 3, 6, 6)
    for _ in range(32):
        ours, theirs = train_step(compiled, (x,), {}), train_step(eager, (x,), {})
        assert torch.equal(ours.output, theirs.output), plan.position
        for name, gradient in theirs.gradients.items():
            assert same(ours.gradients[f"_orig_mod.{name}"], gradient), (plan.position, name)
        plan.step()
    assert counter.frame_count == 1
    for name, record in records(traced).items():
        assert int(record[0]) == 32, name
    ranges = {key: value for key, value in eager.state_dict().items() if ".ranges." in key}
    assert ranges and all(same(traced.state_dict()[key], value) for key, value in ranges.items())


def test_modes_compile_once_each() -> None:
    plan = named("CR", q_min=3, q_max=8, total_steps=8, cycles=2)
    eager = cpt_fx.transform(small(), plan)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compile_whole(eager, counter)
    x = torch.randn(4, 3, 6, 6)
    for _ in range(3):
        compiled.train()
        compiled(x)
        compiled.eval()
        with torch.no_grad():
            expected: Tensor = eager(x)
            assert torch.equal(compiled(x), expected)
        plan.step()
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", ["vision_transformer", "in_place", "tied_weights", "lora", "residual_net", "frozen"])
def test_other_models(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    eager = cpt_fx.transform(model.eval(), Static(Bits(4, 4, 32)))
    compiled = compile_whole(copy.deepcopy(eager), "aot_eager")
    ours, theirs = train_step(compiled, args, kwargs), train_step(eager, args, kwargs)
    ours.gradients = {key.removeprefix("_orig_mod."): value for key, value in ours.gradients.items()}
    ours.parameters = {key.removeprefix("_orig_mod."): value for key, value in ours.parameters.items()}
    ours.buffers = {key.removeprefix("_orig_mod."): value for key, value in ours.buffers.items()}
    check_same(ours, theirs)


@pytest.mark.slow
def test_inductor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    eager = cpt_fx.transform(model, Static(Bits(6, 6, 32)))
    compiled = compile_whole(copy.deepcopy(eager), "inductor")
    x = torch.randn(4, 8)
    ours, theirs = train_step(compiled, (x,), {}), train_step(eager, (x,), {})
    torch.testing.assert_close(ours.output, theirs.output)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(ours.gradients[f"_orig_mod.{name}"], gradient)
