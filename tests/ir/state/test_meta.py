"""Training on the meta device, where every read of a value raises: what lies elsewhere, or asks, is found here."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import cpt_fx
from cpt_fx.formats import Range
from cpt_fx.schedules import Bits, Static
from tests.ir.state.device_models import MODELS, RECIPES, Convolutional, devices, train, transformed
from tests.ir.state.models import Net, buffers_of_ours, plan, state_of_ours
from tests.selecting import mostly_slow

CAPTURES = {"conv": ("symbolic", "dynamo", "auto"), "attention": ("symbolic", "dynamo", "auto")}
COMBINATIONS = [
    (name, capture, order)
    for name in MODELS
    for capture in CAPTURES.get(name, ("dynamo", "auto"))
    for order in ("device first", "transform first")
]
combinations = pytest.mark.parametrize(("name", "capture", "order"), COMBINATIONS)
captures = pytest.mark.parametrize("capture", ["symbolic", "dynamo", "auto"])


@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, every=5))
@combinations
def test_three_steps(name: str, capture: str, order: str, recipe: str) -> None:
    make, inputs = MODELS[name]
    schedule, model = plan(), make()
    if order == "device first":
        model = model.to("meta")
    result = transformed(model, schedule, recipe=recipe, capture=capture).to("meta")
    x = inputs().to("meta")
    train(result, x, schedule)
    assert {device for _, device in devices(result).items()} == {"meta"}
    with torch.no_grad():
        assert result.eval()(x).device.type == "meta"
    result.train()
    train(result, x, schedule, steps=1)
    assert {device for _, device in devices(result).items()} == {"meta"}
    assert schedule.position == 4


@combinations
def test_there_is_state_and_it_is_there_at_once(name: str, capture: str, order: str) -> None:
    """With examples, all that a step needs is made by `transform`, on the device of the layers."""
    make, inputs = MODELS[name]
    model = make().to("meta") if order == "device first" else make()
    x = inputs()
    examples = (x.to("meta"),) if order == "device first" else (x,)
    schedule = plan()
    result = transformed(model, schedule, capture=capture, example_inputs=examples).to("meta")
    before = devices(result)
    assert buffers_of_ours(result)
    assert set(before.values()) == {"meta"}
    train(result, x.to("meta"), schedule)
    assert devices(result) == before


@captures
def test_modes_and_widths_read_nothing(capture: str) -> None:
    """`eval()`, `train()`, `step()`, another width: none of them asks a device for a value."""
    schedule = plan()
    result = transformed(Convolutional().to("meta"), schedule, capture=capture)
    x = torch.randn(2, 3, 6, 6, device="meta")
    for _ in range(3):
        result(x).sum().backward()
        schedule.step()
        result.eval()
        result(x)
        for module in result.modules():
            module.training = True
        with cpt_fx.at_bits(result, 4):
            result(x).sum().backward()
        with cpt_fx.at_bits(result, Bits(32, 32, 32)):
            result(x)
    result.load_state_dict(result.state_dict())
    result.half()
    assert {one.bits for one in cpt_fx.inspect(result).quantizers if one.role == "weight"} == {schedule.current.weight}


@pytest.mark.slow
@captures
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_compiled(capture: str, backend: str) -> None:
    schedule = plan()
    result = transformed(Convolutional().to("meta"), schedule, capture=capture)
    compiled: nn.Module = torch.compile(result, backend=backend)  # type: ignore[assignment]
    x = torch.randn(2, 3, 6, 6, device="meta")
    for _ in range(3):
        compiled(x).sum().backward()
        schedule.step()
    compiled.eval()
    compiled(x)
    assert set(devices(result).values()) == {"meta"}


@captures
@pytest.mark.parametrize("name", ["conv", "attention", "gru"])
def test_integer_execution_is_simulated_or_refused(capture: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A device without integer kernels: refused by name, or simulated and said so."""
    if capture not in CAPTURES.get(name, ("dynamo", "auto")):
        pytest.skip("torch.fx does not take this model")
    make, inputs = MODELS[name]
    schedule = plan()
    with caplog.at_level(logging.INFO, "cpt_fx"):
        try:
            result = transformed(make().to("meta"), schedule, recipe="integer", capture=capture, execution="integer")
            train(result, inputs().to("meta"), schedule)
        except cpt_fx.TransformError as error:
            assert "meta" in str(error) and "integer" in str(error)
            return
    said = caplog.text + str(cpt_fx.inspect(result)) + "".join(map(str, cpt_fx.inspect(result).passes))
    assert "simulated" in said
    assert set(devices(result).values()) == {"meta"}


@captures
def test_integer_execution_says_where_it_has_no_kernels(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the notes of the capture, in the log when a model moves, and as a refusal where all is to run on integers."""
    options = {"recipe": "integer", "capture": capture, "execution": "integer"}
    result = transformed(Convolutional(), plan(), **options)
    assert not any("meta" in note for note in cpt_fx.inspect(result).capture.notes)
    assert "meta" not in caplog.text
    result.to("meta")
    assert sum("no kernels for meta" in note for note in cpt_fx.inspect(result).capture.notes) == 1
    assert "no kernels for meta" in caplog.text
    with pytest.raises(cpt_fx.TransformError, match="no kernels for meta"):
        transformed(Convolutional().to("meta"), plan(), strict=True, **options)


@captures
def test_learned_ranges(capture: str) -> None:
    """Ranges that are parameters lie with their layer as well, and are trained there."""
    recipe = cpt_fx.recipes.default().with_rule("linear", input=cpt_fx.Format(range=Range.LEARNED))
    for model in (Net().to("meta"), Net()):
        result = transformed(model, plan(), recipe=recipe, capture=capture).to("meta")
        x = torch.randn(4, 6, device="meta")
        train(result, x, plan())
        assert set(devices(result).values()) == {"meta"}
        result.eval()(x)


@captures
@pytest.mark.parametrize("recipe", RECIPES)
def test_static_widths_and_overrides(capture: str, recipe: str) -> None:
    overrides = {"deep": 8, "head": "+1"}
    schedule = Static(Bits(4, 4, 32))
    model = Convolutional().to("meta")
    result = transformed(model, schedule, recipe=recipe, capture=capture, overrides=overrides)
    train(result, torch.randn(2, 3, 6, 6, device="meta"), schedule)
    assert set(devices(result).values()) == {"meta"}


@captures
def test_inspecting_and_reverting_after_training_on_a_device(capture: str) -> None:
    """Counters are read late, by `inspect`, or not at all; nothing of it raises."""
    schedule = plan()
    result = transformed(Convolutional().to("meta"), schedule, capture=capture)
    train(result, torch.randn(2, 3, 6, 6, device="meta"), schedule)
    quantizers = cpt_fx.inspect(result).quantizers
    assert {one.layer for one in quantizers} == {"conv", "deep", "head"}
    plain = cpt_fx.revert(result)
    assert {tensor.device.type for tensor in plain.state_dict().values()} == {"meta"}
    assert state_of_ours(plain) == {}
