"""`cost`: the published numbers for any model, per layer, before any training."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import cpt_fx
from cpt_fx.capture.standalone import precision_of
from cpt_fx.inspection.cost import Cost, cost
from cpt_fx.schedules import NAMES, Custom, Piecewise, Schedule, Static, named
from tests import golden_data
from tests.inspection.models import Net, images, transformed
from tests.zoo import ZOO

GOLDEN = golden_data.load("costs")


def label(record: dict[str, Any]) -> str:
    fields = ("domain", "q_min", "q_max", "total", "cycles", "convention")
    return "-".join(str(record[field]) for field in fields if field in record)


def published(name: str, record: dict[str, Any]) -> Schedule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return named(name, q_min=record["q_min"], q_max=record["q_max"], total_steps=record["total"],
                     cycles=record["cycles"], period=record["period"])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("record", GOLDEN["main"] + GOLDEN["odd_or_single_cycle"], ids=label)
def test_published_costs_to_the_last_bit(record: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    for name in NAMES:
        expected, found = record["schedules"][name], cost(model, published(name, record), (torch.randn(1, 3),))
        assert found.forward == expected["forward"]
        assert found.backward == expected["backward"]
        assert found.average == expected["average"]
        assert found.relative == expected["ratio_to_static"]
        assert 100 * found.saving == expected["saving_percent"]
        assert found.static == pytest.approx(record["static_average"], rel=1e-15)
        assert found.steps == record["total"]


@pytest.mark.slow
@pytest.mark.parametrize("record", GOLDEN["domains"], ids=label)
def test_ratios_of_every_domain(record: dict[str, Any]) -> None:
    for name in NAMES:
        found = cost(nn.Linear(3, 2), published(name, record), (torch.randn(1, 3),))
        assert found.relative == pytest.approx(record["ratio_to_static"][name], rel=1e-14)


@pytest.mark.parametrize("model", [Net(), transformed()], ids=["plain", "transformed"])
def test_ratios_do_not_depend_on_the_model(model: nn.Module) -> None:
    schedule = named("RR", q_min=3, q_max=8, total_steps=64_000)
    found = cost(model, schedule, (images(),))
    assert found.relative == cost(nn.Linear(3, 2), schedule, (torch.randn(1, 3),)).relative
    assert found.bitops == pytest.approx(found.flops * found.steps * 3 * found.average)


# Operations.


def test_flops_by_hand() -> None:
    found = cost(Net(), Static(8), (images(2),), steps=10)
    flops = {layer.name: layer.flops for layer in found.layers}
    convolution = 2 * 2 * 8 * 8 * 8 * 8 * 9
    assert flops == {
        "stem": 2 * 2 * 8 * 8 * 8 * 3 * 9,
        **{f"blocks.{block}.conv{number}": convolution for block in (0, 1) for number in (1, 2)},
        "head": 2 * 2 * 8 * 10,
    }
    assert found.flops == sum(flops.values())
    head = found.layers[-1]
    assert head.forward == 10 * head.flops / 16
    assert head.backward == 10 * 2 * head.flops / 16
    assert head.bitops == head.forward + head.backward
    assert head.quantized is None


@pytest.mark.slow
def test_a_transformed_model_costs_what_the_plain_one_does() -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=100)
    for name, build in ZOO.items():
        model, args, kwargs = build()
        result = cpt_fx.transform(model, schedule, example_inputs=args, example_kwargs=kwargs)
        plain, _, _ = build()
        try:
            expected = cost(plain, schedule, args, example_kwargs=kwargs).flops
        except ValueError as error:
            assert "no FLOPs to count" in str(error), name
            continue
        assert cost(result, schedule, args, example_kwargs=kwargs).flops == expected, name


def test_recurrent_layers_and_attention_are_counted() -> None:
    lstm = cost(nn.LSTM(4, 8), Static(8), (torch.randn(3, 2, 4),), steps=1)
    assert lstm.flops == 2 * 3 * 2 * (4 * 32 + 8 * 32)
    x = torch.randn(3, 5, 16)
    for weights in (True, False):
        layer, kwargs = nn.MultiheadAttention(16, 2, batch_first=True), {"need_weights": weights}
        attention = cost(layer, Static(8), (x, x, x), example_kwargs=kwargs, steps=1)
        assert attention.flops == 2 * 3 * 5 * 16 * (3 * 16 + 16) + 2 * (2 * 3 * 2 * 5 * 5 * 8)


def test_own_operations_of_a_model_are_its_root() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.inner(x) @ self.inner(x).T
            return result

    found = cost(Bare(), Static(8), (torch.randn(2, 4),), steps=1)
    assert {layer.name: layer.flops for layer in found.layers} == {
        "(root)": 2 * 2 * 2 * 4,
        "inner": 2 * (2 * 2 * 4 * 4),
    }


# What is really quantized.


def covered(model: nn.Module, schedule: Schedule) -> Cost:
    return cost(model, schedule, (images(),), count="covered")


def test_a_fully_quantized_model_costs_as_published() -> None:
    schedule = named("LR", q_min=3, q_max=8, total_steps=400)
    found, paper = covered(transformed(), schedule), cost(transformed(), schedule, (images(),))
    assert found.relative == pytest.approx(paper.relative, rel=1e-12)
    assert found.bitops == pytest.approx(paper.bitops, rel=1e-12)
    assert all(layer.quantized for layer in found.layers)


def test_excluded_layers_cost_full_precision() -> None:
    schedule = Piecewise({0: 8, 10: 4}, total_steps=20)
    model = transformed(exclude=["head", "stem"])
    layers = {layer.name: layer for layer in covered(model, schedule).layers}
    assert layers["head"].quantized is False
    assert layers["head"].forward == 20 * layers["head"].flops
    assert layers["head"].backward == 2 * 20 * layers["head"].flops
    conv = layers["blocks.0.conv1"]
    gradients = schedule.trajectory()[:, 2]
    assert conv.forward == 10 * conv.flops * (64 + 16) / 1024
    expected = sum(2 * q * int(g) for q, g in zip([8] * 10 + [4] * 10, gradients, strict=True))
    assert conv.backward == conv.flops * expected / 1024
    assert cost(model, schedule, (images(),)).bitops < covered(model, schedule).bitops


def test_overrides_are_honoured() -> None:
    schedule = Piecewise({0: 8, 10: 4}, total_steps=20)
    model = transformed(overrides={"head": 6, "stem": "+2"})
    layers = {layer.name: layer for layer in covered(model, schedule).layers}
    assert layers["head"].forward == 20 * layers["head"].flops * 36 / 1024
    assert layers["stem"].forward == 10 * layers["stem"].flops * (100 + 36) / 1024


def test_schedules_of_a_part_are_counted_step_by_step() -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=40, cycles=2)
    own = named("RTV", q_min=2, q_max=6, total_steps=24, cycles=4, q_grad=7)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    overrides: dict[Any, Any] = {"0": own, "1": {"schedule": own, "weight": "+1", "gradient": 5}}
    model = cpt_fx.transform(net, schedule, overrides=overrides)
    found = cost(model, schedule, (torch.randn(1, 4),), count="covered")
    sums = {"0": [0, 0], "1": [0, 0], "2": [0, 0]}
    for step in range(40):
        part = own.bits(step)
        each = {"0": part, "1": part._replace(weight=part.weight + 1, gradient=5), "2": schedule.bits(step)}
        for name, (w, a, g) in each.items():
            sums[name][0] += w * a
            sums[name][1] += (w + a) * g
    for layer in found.layers:
        assert [layer.forward, layer.backward] == [layer.flops * total / 1024 for total in sums[layer.name]]
    assert found.static_bits == (8, 8, 8)
    # Static: 8 bits, the part at its own largest width.
    static = [3 * 6 * 6, 7 * 6 + (7 + 6) * 5, 3 * 8 * 8]
    assert found.static == pytest.approx(sum(static) / 1024 / 3 / 3, rel=1e-15)


def test_an_operand_without_a_quantizer_counts_in_full() -> None:
    model = transformed(overrides={"head": {"weight": None, "gradient": None}})
    found = cost(model, Static(8), (images(),), count="covered", steps=1)
    head = {layer.name: layer for layer in found.layers}["head"]
    assert head.forward == head.flops * 8 * 32 / 1024
    assert head.backward == head.flops * (8 + 32) * 32 / 1024


def test_widths_of_a_layer_are_those_the_dials_show() -> None:
    """The widths that are counted, step by step against what runtime writes."""
    schedule = named("CT", q_min=3, q_max=8, total_steps=40, cycles=4)
    model = cpt_fx.transform(Net(), schedule, overrides={"head": "-1", "stem": 7}, recipe="paper")
    expected = dict.fromkeys(("head", "stem", "blocks.0.conv1"), 0.0)
    sources = {"head": "minus_1", "stem": "fixed_7"}
    flops = {layer.name: layer.flops for layer in covered(model, schedule).layers}
    for _ in range(40):
        widths = precision_of(model).now()
        for name in expected:
            width = {role: next((bits for source, bits in widths.items()
                                 if source.startswith(role) and source.endswith(sources.get(name, role))), widths[role])
                     for role in ("weight", "activation")}  # fmt: skip
            expected[name] += flops[name] * width["weight"] * width["activation"] / 1024
        schedule.step()
    found = {layer.name: layer.forward for layer in covered(model, schedule).layers}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


# Nothing changes; shows; refuses.


@pytest.mark.parametrize("make", [Net, transformed], ids=["plain", "transformed"])
def test_nothing_changes(make: Any) -> None:
    model, x = make(), images()
    model.get_submodule("blocks").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    cost(model, Static(8), (x,), steps=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert "forward" not in model.__dict__
    if make is transformed:
        assert all(view.times_run == 0 for view in cpt_fx.inspect(model).quantizers)


def test_it_shows_itself() -> None:
    found = cost(transformed(exclude=["head"]), named("CR", q_min=3, q_max=8, total_steps=64_000), (images(),))
    assert "saves 36.66% (paper count)" in str(found)
    console = Console(width=100, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(found)
    text = capture.get()
    assert "blocks.0.conv1" in text and "saves 36.66%" in " ".join(text.split())
    assert [line.split()[-3] for line in text.splitlines() if line.startswith("head")] == ["no"]


def test_a_schedule_without_an_end_needs_steps() -> None:
    with pytest.raises(ValueError, match=r"Piecewise\(.*\) has no end: pass the length of the run, as in cost"):
        cost(Net(), Piecewise({0: 8}), (images(),))
    found = cost(Net(), Piecewise({0: 8}), (images(),), steps=7)
    assert (found.steps, found.relative, found.saving) == (7, 1.0, 0.0)


def test_the_static_run_has_gradients_of_its_forward_width() -> None:
    found = cost(Net(), named("CR", q_min=3, q_max=8, total_steps=80, q_grad=16), (images(),))
    assert found.static_bits == (8, 8, 8)
    assert found.static == 3 * 64 / 1024 / 3


def test_a_schedule_whose_widest_is_not_known() -> None:
    found = cost(Net(), Custom(lambda step: 4 + step % 3, total_steps=6), (images(),))
    assert found.static_bits == (6, 6, 6)
    assert 0 < found.relative < 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "net"}, TypeError, "model must be a torch.nn.Module, got str"),
        ({"schedule": 8}, TypeError, "schedule must be a schedule such as .* got int"),
        ({"example_inputs": torch.randn(2, 3, 8, 8)}, TypeError, "example_inputs must be a tuple .* got Tensor"),
        ({"count": "papr"}, ValueError, 'count must be one of "paper", "covered", got \'papr\'. Did you mean "paper"'),
        ({"count": "covered"}, ValueError, "count='covered' asks what is quantized, and Net is not transformed"),
        ({"steps": 0}, ValueError, "steps must be an integer of at least 1, got 0"),
        ({"model": nn.ReLU()}, ValueError, "ReLU does no matrix product, .*no FLOPs to count"),
        ({"example_inputs": ()}, TypeError, "missing 1 required positional argument"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=80)
    arguments: dict[str, Any] = {"model": Net(), "schedule": schedule, "example_inputs": (images(),)} | change
    with pytest.raises(error, match=message):
        cost(**arguments)


def test_a_transformed_model_is_called_by_its_own_name() -> None:
    model = transformed(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"^Sequential does no matrix product, .*no FLOPs to count"):
        cost(model, Static(8), (torch.zeros(0, 4),), steps=1)


def test_a_missing_input_of_a_transformed_model() -> None:
    with pytest.raises(TypeError, match="the model needs the argument 'x', which the example inputs leave out"):
        cost(transformed(), Static(8), (), steps=1)


def test_a_static_schedule_needs_no_length() -> None:
    cost = cpt_fx.cost(nn.Linear(3, 2), Static(8), (torch.randn(1, 3),))
    assert cost.relative == 1.0
    assert cost.steps == 1
