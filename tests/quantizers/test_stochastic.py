"""Stochastic rounding: reproducible, unbiased, on the grid, and never a full step away."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cpt_fx.functional import fake_quantize, quantize_gradient

FORMATS: list[dict[str, Any]] = [
    {"scheme": "affine"},
    {"scheme": "affine", "keep": (0,)},
    {"scheme": "affine_integer"},
    {"scheme": "symmetric"},
    {"scheme": "symmetric", "keep": (0,)},
    {"scheme": "float", "exponent": 2},
    {"scheme": "float", "exponent": 4, "specials": "fn"},
    {"scheme": "float", "exponent": 2, "block": 4},
    {"scheme": "affine", "block": 4},
]
DRAWS = 3000


def name(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def through_gradient(gradient: Tensor, bits: int, **options: Any) -> Tensor:
    x = torch.zeros_like(gradient, requires_grad=True)
    (result,) = torch.autograd.grad(quantize_gradient(x, bits, **options), x, gradient)
    return result


def directly(x: Tensor, bits: int, **options: Any) -> Tensor:
    return fake_quantize(x, bits, rounding="stochastic", **options)


WAYS: list[Any] = [directly, through_gradient]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", FORMATS, ids=name)
def test_follows_the_global_seed(way: Any, options: dict[str, Any]) -> None:
    x = torch.randn(16, 16)
    torch.manual_seed(7)
    first, second = way(x, 3, **options), way(x, 3, **options)
    torch.manual_seed(7)
    assert torch.equal(way(x, 3, **options), first)
    assert torch.equal(way(x, 3, **options), second)
    assert not torch.equal(first, second)


def test_nearest_draws_nothing() -> None:
    state = torch.get_rng_state()
    for options in FORMATS:
        fake_quantize(torch.ones(3, 4), 3, **options)
    assert torch.equal(torch.get_rng_state(), state)


def draws(x: Tensor, bits: int, count: int, options: dict[str, Any]) -> Tensor:
    """Quantize a 2-D tensor `count` times, in one call: every repetition owns its ranges."""
    keep = (0, *(dim + 1 for dim in options.get("keep", ())))
    return directly(x.expand(count, *x.shape), bits, **{**options, "keep": keep})


def inside(x: Tensor, bits: int, options: dict[str, Any]) -> Tensor:
    """Move the data to where no end of the grid clamps it: there, and only there, rounding can be unbiased."""
    if options["scheme"] == "affine_integer":
        x[0, 0], x[0, 1] = -3.0, 6.0  # a spread of 9 over 3, 15 or 255 steps: zero and both ends are grid points
        return x.clamp(-3.0, 6.0)
    if options["scheme"] == "float" and "block" in options:
        # A power-of-two scale: the largest value of the grid is 2 - ulp in the binade of the block's largest.
        binade = x.reshape(-1, 4).abs().amax(1).log2().floor().exp2().repeat_interleave(4).reshape(x.shape)
        top = binade * (2 - 2.0 ** -max(bits - 3, 0))
        return x.clamp(-top, top)
    return x


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("options", FORMATS, ids=name)
def test_unbiased(options: dict[str, Any], bits: int) -> None:
    """A z-test for each element, and one for all of them together.

    64 elements at 5.5 sigma: a false alarm once in 400,000 runs for each of the 27 cases; the seed is fixed.
    """
    x = inside(torch.randn(8, 8, dtype=torch.float64), bits, options)
    seen = draws(x, bits, DRAWS, options)
    low, high = seen.amin(0), seen.amax(0)
    moved = high > low
    assert int(moved.sum()) > 30
    # Measured against the exact variance of a draw between two neighbours, (x - low)(high - x). An element that moves
    # in fewer than 15 of 3000 draws is too rare for a normal law: for it, being near its neighbour is all one can ask.
    odds = ((x - low) / (high - low))[moved]
    assert bool(((odds > -1e-9) & (odds < 1 + 1e-9)).all())
    common = (odds > 0.005) & (odds < 0.995)
    share = ((seen - low) / (high - low)).mean(0)[moved]
    z = ((share - odds) / (odds * (1 - odds) / DRAWS).sqrt())[common]
    assert float(z.abs().max()) < 5.5
    assert abs(float(z.sum())) / math.sqrt(z.numel()) < 5.5
    assert float((share - odds)[~common].abs().max() if bool((~common).any()) else 0.0) < 0.01
    # What never moved in 3000 draws is on the grid, or within 0.005 of the largest step seen.
    step = float((high - low).max())
    assert bool(((seen[0] - x)[~moved].abs() <= 5e-3 * step).all())


@pytest.mark.parametrize("options", FORMATS, ids=name)
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_only_the_two_neighbours(options: dict[str, Any], bits: int) -> None:
    """Every draw is one of at most two values, and the value lies between them (up to the rounding of the grid)."""
    x = torch.randn(6, 8)
    seen = draws(x, bits, 200, options)
    low, high = seen.amin(0), seen.amax(0)
    assert bool(((seen == low) | (seen == high)).all())
    if options["scheme"] == "affine" and not options.get("block"):
        # 4 ulp of the largest magnitude: what the arithmetic of the grid may add to a value.
        slack = 4 * torch.finfo(torch.float32).eps * float(x.abs().max())
        still = low == high
        assert bool(((low <= x + slack) & (x <= high + slack))[~still].all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [1, 4, 8, 12, 16])
def test_grid_points_stay_where_they_are(way: Any, bits: int) -> None:
    """Noise added to the codes in float32 is rounded with them: at 16 bits that moved one grid point in 800."""
    x = torch.arange(2.0**bits)
    for _ in range(max(3, 2 ** (14 - bits))):
        assert torch.equal(way(x, bits), x)


def test_no_value_moves_a_full_step() -> None:
    x = torch.linspace(0, 1, 50_001)
    x[-1] = 65_535.0
    x[:-1] *= 65_535.0
    for _ in range(20):
        assert float((directly(x, 16).double() - x.double()).abs().max()) < 1


def test_odds_are_those_of_the_fraction() -> None:
    fractions = torch.tensor([0.0, 0.01, 0.25, 0.5, 0.75, 0.99])
    x = torch.cat((torch.tensor([0.0, 3.0]), (1 + fractions).repeat(20_000)))
    up = (directly(x, 2)[2:] == 2).float().reshape(-1, 6).mean(0)
    # 5 sigma of a share of 20,000 draws; one alarm in 350,000 for the four that can move.
    assert bool(((up - fractions).abs() <= 5 * (fractions * (1 - fractions) / 20_000).sqrt() + 1e-6).all())


def test_range_ends_are_kept_and_nothing_leaves() -> None:
    x = torch.randn(50)
    for _ in range(100):
        result = directly(x, 3)
        assert result[x.argmin()] == x.min()
        assert float((result[x.argmax()] - x.max()).abs()) <= 4e-7 * float(x.abs().max())
        assert float(result.max()) <= float(x.max()) * (1 + 4e-7)


def test_values_outside_a_given_range_are_clamped_without_noise() -> None:
    x = torch.tensor([-5.0, 7.0] * 200)
    result = fake_quantize(x, 3, range=(0.0, 1.0), rounding="stochastic")
    assert result.unique().tolist() == [0.0, 1.0]
    assert torch.equal(result > 0.5, x > 0)


def test_every_element_draws_for_itself() -> None:
    x = torch.cat((torch.tensor([0.0, 3.0]), torch.full((1000,), 1.5)))
    result = directly(x, 2)[2:]
    assert 400 < int((result == 1).sum()) < 600  # 6.3 sigma of a fair coin
    half = directly(x.to(torch.bfloat16), 2)[2:]
    assert set(half.tolist()) == {1.0, 2.0}


def test_float16_noise_is_not_coarse() -> None:
    """Drawn in float32: with float16's own grid of random numbers small fractions would be biased."""
    x = torch.cat((torch.tensor([0.0, 15.0]), torch.full((200_000,), 8.0 + 2.0**-7))).half()
    up = (directly(x, 4)[2:] == 9).double().mean()
    # 5 sigma of a share of 2**-7 in 200,000 draws
    assert abs(float(up) - 2.0**-7) < 5 * math.sqrt(2.0**-7 / 200_000)


def test_no_noise_is_nearest() -> None:
    gradient = torch.randn(5, 7)
    assert torch.equal(through_gradient(gradient, 4, rounding="nearest"), fake_quantize(gradient, 4))
