"""Ranges that are trained, and ranges that leave out the tails."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.formats import Format, Rounding
from cpt_fx.quantizers.numerics import Grid, percentile_range
from cpt_fx.quantizers.ops import LearnedRange
from cpt_fx.recipes import Recipe, default
from cpt_fx.schedules import Static


def quantized(x: Tensor, zero_point: Tensor, range: Tensor, bits: int = 3) -> Tensor:
    result: Tensor = LearnedRange.apply(x, zero_point, range, torch.tensor(bits), Grid())  # type: ignore[no-untyped-call]
    return result


def test_gradients_are_those_of_the_formula_element_by_element() -> None:
    x = torch.tensor([-1.5, -1.0, -0.6, 0.1, 0.72, 1.0, 1.9], dtype=torch.float64, requires_grad=True)
    upstream = torch.arange(1, 8, dtype=torch.float64)
    low = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    width = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    quantized(x, low, width).backward(upstream)
    to_x, to_low, to_width = [], 0.0, 0.0
    for value, weight in zip(x.tolist(), upstream.tolist(), strict=True):
        u = (value + 1.0) / (2.0 / 7)
        to_x.append(weight if 0 <= u <= 7 else 0.0)
        to_low += 0.0 if 0 <= u <= 7 else weight
        to_width += weight * ((round(u) - u) / 7 if 0 <= u <= 7 else float(u > 7))
    share = 1 / math.sqrt(7 * 7)
    assert x.grad is not None
    assert low.grad is not None
    assert width.grad is not None
    assert x.grad.tolist() == to_x
    assert low.grad.item() == pytest.approx(to_low * share, rel=1e-12)
    assert width.grad.item() == pytest.approx(to_width * share, rel=1e-12)


@pytest.mark.parametrize("bits", [0, 32])
def test_full_precision_trains_no_range(bits: int) -> None:
    x = torch.randn(20, requires_grad=True)
    low, width = torch.tensor(-0.1, requires_grad=True), torch.tensor(0.2, requires_grad=True)
    result = quantized(x, low, width, bits)
    result.sum().backward()
    assert torch.equal(result, x)
    assert torch.equal(x.grad, torch.ones(20))  # type: ignore[arg-type]
    assert low.grad == 0
    assert width.grad == 0
    # Products round another way where an operand lies otherwise in memory.
    turned = torch.randn(6, 8).narrow(-1, 0, 2).t()
    passed = quantized(turned, low, width, bits)
    assert (passed.stride(), passed.data_ptr()) == (turned.stride(), turned.data_ptr())


@pytest.mark.parametrize("kind", ["dynamic", "observer", "percentile", "learned"])
@pytest.mark.parametrize("bits", [0, 32])
def test_full_precision_draws_no_random_numbers(bits: int, kind: str) -> None:
    recipe = with_input(kind)
    rule = recipe.linear
    assert rule is not None
    assert rule.input is not None
    recipe = recipe.with_rule("linear", input=dataclasses.replace(rule.input, rounding=Rounding.STOCHASTIC))
    x = torch.randn(5, 8)
    model = cpt_fx.transform(nn.Linear(8, 4), Static(bits), recipe=recipe, example_inputs=(x,), prove=False)
    state = torch.get_rng_state()
    model(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_learned_range_is_no_change_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model = cpt_fx.transform(nn.Linear(8, 4), Static(4), recipe=with_input("learned"), capture="symbolic")
    (graph,) = cpt_fx.graphs(model)
    model(torch.randn(5, 8))
    assert cpt_fx.graphs(model) == [graph]
    assert "captured again" not in caplog.text


def with_input(kind: str) -> Recipe:
    return default().with_rule("linear", input=Format(scheme="affine", range=kind, percentile=90.0))  # type: ignore[arg-type]


def test_a_learned_range_starts_at_the_first_batch_and_is_trained() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model = cpt_fx.transform(net, Static(4), recipe=with_input("learned"))
    x = torch.randn(64, 8)
    ranges = [name for name, _ in model.named_parameters() if "cpt_fx_" in name]
    assert ranges == [f"{layer}.cpt_fx_input_range_{part}" for layer in "02" for part in ("min", "size")]
    assert [name for name, _ in model.named_parameters() if name not in ranges] == list(dict(net.named_parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    first = model.get_parameter("0.cpt_fx_input_range_size").detach().clone()
    assert first == x.max() - x.min()
    optimizer.step()
    model(x)
    assert model.get_parameter("0.cpt_fx_input_range_size") != first
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(10 * x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_that_read_one_tensor_learn_a_range_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)  # type: ignore[no-any-return]

    def activations(kind: str) -> int:
        model = cpt_fx.transform(Two(), Static(4), recipe=with_input(kind))
        return sum(quantizer.role == "activation" for quantizer in cpt_fx.inspect(model).quantizers)

    assert activations("learned") == 2
    assert activations("observer") == 1


@pytest.mark.parametrize("percentile", [50.0, 90.0, 99.9, 100.0])
def test_a_percentile_range_covers_that_part_of_the_elements(percentile: float) -> None:
    x = torch.randn(30, 40)
    value_range = percentile_range(x, percentile)
    ordered = sorted(x.flatten().tolist())
    cut = int(1200 * (1 - percentile / 100) / 2)
    assert value_range.zero_point == ordered[cut]
    assert value_range.maximum() == ordered[-1 - cut]


def test_a_percentile_range_is_used_in_training_and_averaged_for_evaluation() -> None:
    model = cpt_fx.transform(nn.Sequential(nn.Linear(50, 3)), Static(8), recipe=with_input("percentile"))
    x = torch.randn(20, 50)
    x[0, 0] = 1000.0
    model(x)
    state = model.state_dict()
    running = state["0.cpt_fx_input_range_size"] / state["0.cpt_fx_input_range_weight"]
    torch.testing.assert_close(running, percentile_range(x, 90.0).range)
    assert running < 10


def test_a_nan_spoils_a_percentile_range_visibly() -> None:
    x = torch.randn(1000)
    x[3] = math.nan
    assert percentile_range(x, 90.0).range.isnan()
