"""What a quantizer does is the same in every unit: scaled by a power of two, a tensor gives the scaled result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import cpt_fx
from cpt_fx import Format, native, recipes
from cpt_fx.formats import Range
from cpt_fx.functional import fake_quantize
from cpt_fx.quantizers import ops
from cpt_fx.quantizers.numerics import Grid
from cpt_fx.quantizers.ops import LearnedRange
from cpt_fx.recipes import Recipe
from cpt_fx.schedules import Static

GRIDS: list[dict[str, Any]] = [
    {"scheme": "affine", "floored": False},
    {"scheme": "affine_integer"},
    {"scheme": "symmetric"},
    {"scheme": "float", "exponent": 4, "specials": "fn"},
    {"scheme": "affine", "floored": False, "block": 16},
    {"scheme": "float", "exponent": 2, "block": 32},
]
RECIPES: dict[str, Callable[[], Recipe]] = {
    "default": recipes.default,
    "integer": recipes.integer,
    "fp8": recipes.fp8,
    "mx": recipes.mx,
    "percentile": lambda: recipes.default().with_rule("linear", input=Format(range=Range.PERCENTILE)),
    "learned": lambda: recipes.default().with_rule("linear", input=Format(range=Range.LEARNED)),
}


@st.composite
def samples(draw: st.DrawFn) -> tuple[Tensor, int, float, dict[str, Any]]:
    """A tensor of numbers between 2**-20 and 2**8 and zeros, a width, a power of two, options."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    x = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-6, 5)) + draw(st.sampled_from([0.0, 3.0]))
    x = torch.where(x.abs() < 2**-20, 0, x)
    options = dict(draw(st.sampled_from(GRIDS)), rounding=draw(st.sampled_from(["nearest", "stochastic"])))
    options["keep"] = draw(st.sampled_from([(), (0,), (-1,)]))
    return x, draw(st.integers(2, 16)), 2.0 ** draw(st.integers(-60, 40)), options


def quantized(x: Tensor, bits: int, options: dict[str, Any]) -> Tensor:
    torch.manual_seed(3)
    made: Tensor = ops.FAKE_QUANTIZE(x, torch.tensor(bits), **{**options, "keep": list(options.get("keep", ()))})
    return made


@pytest.mark.slow
@given(samples())
@settings(max_examples=300)
def test_any_unit(sample: tuple[Tensor, int, float, dict[str, Any]]) -> None:
    x, bits, unit, options = sample
    assert torch.equal(quantized(x * unit, bits, options), quantized(x, bits, options) * unit)
    with native.disabled():
        assert torch.equal(quantized(x * unit, bits, options), quantized(x, bits, options) * unit)


@pytest.mark.parametrize("options", GRIDS, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_has_no_spread(options: dict[str, Any], rounding: str) -> None:
    """Zeros stay zeros, and so far down that a step is no normal number, nothing is a NaN or out of its range."""
    options = {**options, "rounding": rounding}
    for way in (torch.enable_grad, native.disabled):
        with way():
            for bits in (2, 8, 31):
                assert torch.equal(quantized(torch.zeros(5, 3), bits, options), torch.zeros(5, 3))
                constant = quantized(torch.full((40,), 2.0**-70), bits, options)
                assert torch.allclose(constant, torch.tensor(2.0**-70), rtol=0.1, atol=0)
                for size in (1e-37, 1e-39, 1e-44):
                    x = torch.linspace(-1, 1, 40) * size
                    result = quantized(x, bits, options)
                    # A float's step is a normal number, to which noise may lift what is smaller.
                    assert bool((result.abs() <= 2 * x.abs().max() + 2.0**-125).all())


def test_the_published_floor_stays() -> None:
    x = torch.rand(50) * 1e-9
    assert fake_quantize(x, 8).unique().numel() == 1
    assert quantized(x, 8, {"floored": False}).unique().numel() > 40
    rule = recipes.paper().linear
    assert rule and all(part and part.floored for part in (rule.input, rule.weight, rule.bias, rule.gradient))
    for rule in (recipes.paper().conv, recipes.paper(family="graph").linear, recipes.paper(family="graph").bias_add):
        assert rule and all(part.floored for part in (rule.input, rule.weight, rule.bias, rule.gradient) if part)
    with pytest.raises(ValueError, match=r"Format\.floored belongs to measured ranges of scheme='affine'"):
        Format(scheme="symmetric", floored=True)  # type: ignore[arg-type]


def test_a_learned_range_in_any_unit() -> None:
    """The result and all gradients; and a range that training has brought below zero is one of no width."""
    x, up, grid = torch.randn(60), torch.randn(60), Grid()
    found = []
    for unit in (1.0, 2.0**-30, 2.0**-70):
        low, size = torch.tensor(-0.7 * unit, requires_grad=True), torch.tensor(1.3 * unit, requires_grad=True)
        scaled = (x * unit).requires_grad_()
        y = LearnedRange.apply(scaled, low, size, torch.tensor(5), grid)  # type: ignore[no-untyped-call]
        y.backward(up)
        found.append((y / unit, scaled.grad, low.grad, size.grad))
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))
    below = LearnedRange.apply(x, torch.tensor(0.5), torch.tensor(-1.0), torch.tensor(5), grid)  # type: ignore[no-untyped-call]
    assert torch.equal(below, torch.full((60,), 0.5))


class Heads(nn.Module):
    """A trunk and two heads, so that either loss may be small."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.main, self.side = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.main(h), self.side(h)


def heads() -> Heads:
    torch.manual_seed(4)
    return Heads()


def gradients(recipe: Recipe, loss: Callable[[Tensor, Tensor], Tensor], **options: Any) -> dict[str, Tensor]:
    """The gradients of a step at 8 bits, with the same noise at every call."""
    model = cpt_fx.transform(heads(), Static(8), recipe=recipe, **options)
    torch.manual_seed(9)
    x = torch.randn(32, 8)
    called: Any = model
    loss(*called(x)).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("name", RECIPES)
def test_a_small_loss_has_the_gradients_of_a_large_one(name: str) -> None:
    recipe = RECIPES[name]()

    def at(unit: float) -> dict[str, Tensor]:
        return gradients(recipe, lambda main, side: (main.square().sum() + side.square().sum()) * unit)

    plain = at(1.0)
    for power in (-17, -24, -67):
        small = at(2.0**power)
        for key, value in plain.items():
            assert torch.equal(small[key], value * 2.0**power), (key, power)
    for factor in (1e-5, 1e-7, 1e-20):
        small = at(factor)
        for key, value in plain.items():
            # Not a power of two: another grid where scales are, and a draw now and then falls to the other side.
            assert float((small[key] / factor - value).norm()) <= 0.1 * float(value.norm()), (key, factor)


@pytest.mark.parametrize("name", RECIPES)
def test_a_head_with_a_small_weight_learns(name: str) -> None:
    recipe = RECIPES[name]()
    alone = gradients(recipe, lambda main, side: main.square().sum() * 0 + side.square().sum())
    beside = gradients(recipe, lambda main, side: main.square().sum() + 2.0**-20 * side.square().sum())
    assert torch.equal(beside["side.weight"], alone["side.weight"] * 2.0**-20)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_inputs_in_any_unit(name: str, capture: str) -> None:
    """Without biases a net of relus is the same in every unit, in training and by its running ranges."""
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    found = []
    for unit in (1.0, 2.0**-45):
        model = cpt_fx.transform(copy.deepcopy(net), Static(6), recipe=RECIPES[name](), capture=capture)
        outputs = []
        for seed in range(3):
            torch.manual_seed(seed)
            outputs.append(model(torch.randn(16, 8) * unit) / unit)
        outputs.append(model.eval()(torch.randn(16, 8, generator=torch.Generator().manual_seed(7)) * unit) / unit)
        found.append(outputs)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_compiled_and_eager_agree_on_small_numbers() -> None:
    def run(x: Tensor, bits: Tensor) -> Tensor:
        made: Tensor = ops.FAKE_QUANTIZE(x, bits, scheme="affine", floored=False)
        made = made + ops.FAKE_QUANTIZE(x, bits, scheme="affine_integer")
        return made

    x, bits = torch.randn(300) * 1e-15, torch.tensor(6)
    compiled = torch.compile(run)
    torch.testing.assert_close(compiled(x, bits), run(x, bits), rtol=0, atol=1e-21)
    assert torch.equal(torch.compile(run, backend="aot_eager")(x, bits), run(x, bits))
