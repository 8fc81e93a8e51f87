"""Every model of the zoo: at 32 bits the original to the last bit, at 4 bits really quantized, never modified."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Schedule, Static, named
from tests.training import (
    check_same,
    check_same_output,
    counters,
    fresh,
    same,
    snapshot,
    tensors_in,
    train_step,
)
from tests.zoo import ZOO, Build

MODELS = pytest.mark.parametrize("build", ZOO.values(), ids=ZOO.keys())

NOT_BATCHED = {"constants_made_in_forward", "product_operators", "products", "vectors", "einsums", "methods",
               "gcn", "sage", "gat", "lstm", "language_model", "functional_linear"}  # fmt: skip
"""Models in which the size of the first dim is written down, or is not that of a batch."""


def pair(build: Build, schedule: Schedule, **options: Any) -> tuple[nn.Module, nn.Module, Any, dict[str, Any]]:
    """Return an independent copy of the original, the transformed model, and inputs."""
    model, args, kwargs = build()
    reference = copy.deepcopy(model)
    return reference, cpt_fx.transform(model, schedule, **options), args, kwargs


def evaluate(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    model.eval()
    with torch.no_grad():
        return model(*fresh(args), **fresh(kwargs))


def test_there_are_enough_models() -> None:
    assert len(ZOO) >= 45


@MODELS
def test_builders_repeat_themselves(build: Build) -> None:
    (model, args, kwargs), (again, more, others) = build(), build()
    pairs = zip(tensors_in((model.state_dict(), args, kwargs)), tensors_in((again.state_dict(), more, others)),
                strict=True)  # fmt: skip
    assert all(same(ours, theirs) and ours is not theirs for ours, theirs in pairs)


@MODELS
@pytest.mark.parametrize("recipe", ["default", "paper", "integer", "fp8", "mx"])
def test_full_precision_is_the_original(build: Build, recipe: str) -> None:
    reference, result, args, kwargs = pair(build, Static(32), recipe=recipe)
    check_same_output(evaluate(result, args, kwargs), evaluate(reference, args, kwargs))
    for step in range(2):
        for model in (reference, result):
            model.train()
        check_same(train_step(result, args, kwargs, seed=step), train_step(reference, args, kwargs, seed=step))
        check_same_output(evaluate(result, args, kwargs), evaluate(reference, args, kwargs))


@MODELS
def test_each_layer_alone_at_full_precision(build: Build) -> None:
    """The other way to 32 bits: a schedule at 4, every module overridden."""
    model, args, kwargs = build()
    reference = copy.deepcopy(model)
    result = cpt_fx.transform(model, Static(4), overrides={"*": 32})
    check_same(train_step(result, args, kwargs), train_step(reference, args, kwargs))


@pytest.mark.parametrize("name", [name for name in ZOO if name not in NOT_BATCHED])
def test_a_doubled_batch(name: str) -> None:
    """No size of the example is left in the graph."""
    reference, result, args, kwargs = pair(ZOO[name], Static(32))

    def doubled(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.ndim == 1 else torch.cat([value, value])
        if isinstance(value, dict):
            return {key: doubled(item) for key, item in value.items()}
        return tuple(map(doubled, value))

    args, kwargs = doubled(args), doubled(kwargs)
    check_same(train_step(result, args, kwargs), train_step(reference, args, kwargs))
    check_same_output(evaluate(result, args, kwargs), evaluate(reference, args, kwargs))


@MODELS
def test_captured_in_evaluation_mode(build: Build) -> None:
    model, args, kwargs = build()
    reference = copy.deepcopy(model)
    result = cpt_fx.transform(model.eval(), Static(32))
    assert not any(module.training for module in result.modules())
    check_same_output(evaluate(result, args, kwargs), evaluate(reference, args, kwargs))
    check_same(train_step(result.train(), args, kwargs), train_step(reference.train(), args, kwargs))


@MODELS
def test_names_and_checkpoints(build: Build) -> None:
    reference, result, args, kwargs = pair(build, Static(4))
    plain, ours = reference.state_dict(), result.state_dict()
    assert [key for key in ours if "cpt_fx" not in key] == list(plain)
    assert [name for name, _ in result.named_parameters()] == [name for name, _ in reference.named_parameters()]
    buffers = [name for name, _ in result.named_buffers() if "cpt_fx" not in name]
    assert [name for name in buffers if name in dict(reference.named_buffers())] == [
        name for name, _ in reference.named_buffers()
    ]
    train_step(reference, args, kwargs)
    result.load_state_dict(reference.state_dict(), strict=True)
    assert all(same(result.state_dict()[key], value) for key, value in reference.state_dict().items())
    assert cpt_fx.revert(result).load_state_dict(plain) == torch.nn.modules.module._IncompatibleKeys([], [])


@MODELS
def test_the_original_is_left_alone(build: Build) -> None:
    model, args, kwargs = build()
    before, random, torch_before = snapshot(model), torch.get_rng_state(), torch.zeros
    train_before = copy.deepcopy(model)
    result = cpt_fx.transform(model, Static(4))
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.zeros is torch_before
    train_step(result, args, kwargs, lr=0.0)
    model.zero_grad()
    model.load_state_dict(train_before.state_dict())
    check_same(train_step(model, args, kwargs), train_step(train_before, args, kwargs))


@MODELS
@pytest.mark.parametrize("recipe", ["default", "paper", "integer", "fp8", "mx"])
def test_four_bits_are_four_bits(build: Build, recipe: str) -> None:
    reference, result, args, kwargs = pair(build, Static(4), recipe=recipe)
    ours, theirs = train_step(result, args, kwargs), train_step(reference, args, kwargs)
    changed = [name for name, tensor in theirs.tensors().items() if not same(ours.tensors()[name], tensor)]
    assert any(name.startswith("output") for name in changed)
    assert any("gradient" in name for name in changed)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in ours.tensors().values() if tensor is not None)
    noted = counters(result)
    assert noted
    for name, record in noted.items():
        assert int(record[0]) > 0, name
        assert 0 < int(record[4]) <= 2**4, (name, int(record[4]))


@MODELS
def test_three_steps_of_a_cycle(build: Build) -> None:
    schedule = named("CR", q_min=2, q_max=6, total_steps=6, cycles=2)
    _, result, args, kwargs = pair(build, schedule)
    for step in range(3):
        bits = schedule.bits(step).weight
        ours = train_step(result, args, kwargs, seed=step)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in ours.tensors().values() if tensor is not None)
        forward = [record for name, record in counters(result).items() if "gradient" not in name]
        assert all(0 < int(record[bits]) <= 2**bits for record in forward)
        schedule.step()
    evaluated = list(tensors_in(evaluate(result, args, kwargs)))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in evaluated)
