"""Floating point formats against casts of torch, against an enumeration of all codes, and against the MX rule."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cpt_fx.formats import Scheme, Specials
from cpt_fx.functional import fake_quantize
from cpt_fx.quantizers.numerics import Grid, float_fields, float_maximum, power_of_two
from tests.quantizers.oracle import float_values, mx_block, to_float_format

FORMATS = [
    (exponent, mantissa, specials)
    for exponent, mantissa in itertools.product((1, 2, 3, 4, 5), (0, 1, 2, 3))
    for specials in ("none", "fn", "ieee")
]


def unscaled(x: Tensor, bits: int, exponent: int, specials: str, **options: Any) -> Tensor:
    """Quantize with the range of the format itself (from -largest to 0: its magnitude counts): the scale is one."""
    largest = float_values(exponent, bits - 1 - exponent, specials)[-1]
    return fake_quantize(
        x, bits, scheme="float", exponent=exponent, specials=specials, range=(-largest, largest), **options
    )


def spread(low: int, high: int, count: int = 4000) -> Tensor:
    """Values of both signs, log-uniform from 2**low to 2**high."""
    return (torch.rand(count) * (high - low) + low).exp2() * torch.randn(count).sign()


@pytest.mark.parametrize(
    ("dtype", "exponent", "bits", "specials", "low", "high"),
    [
        (torch.float8_e4m3fn, 4, 8, "fn", -12, 8),
        (torch.float8_e5m2, 5, 8, "ieee", -19, 15),
        (torch.float16, 5, 16, "ieee", -27, 15),
        (torch.bfloat16, 8, 16, "ieee", -134, 127),
    ],
    ids=str,
)
def test_equal_to_torch_casts(dtype: torch.dtype, exponent: int, bits: int, specials: str, low: int, high: int) -> None:
    x = spread(low, high)
    # Ties: the midpoints between neighbouring values of the format, where it is small enough to list them.
    grid = x.to(dtype).float()
    nearby = (grid * (1 + 2.0 ** -(bits - exponent))).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    values = torch.cat((x, grid, nearby, torch.tensor([0.0, -0.0])))
    values = values[values.abs() <= torch.finfo(dtype).max]
    result = unscaled(values, bits, exponent, specials)
    assert torch.equal(result, values.to(dtype).float())
    assert torch.equal(result.signbit(), values.signbit())


@pytest.mark.parametrize(("dtype", "exponent", "specials"), [
    (torch.float8_e4m3fn, 4, "fn"), (torch.float8_e5m2, 5, "ieee")])  # fmt: skip
def test_beyond_the_largest_value_saturates(dtype: torch.dtype, exponent: int, specials: str) -> None:
    largest = torch.finfo(dtype).max
    result = unscaled(torch.tensor([2 * largest, -1e30, math.inf, -math.inf]), 8, exponent, specials)
    assert result.tolist() == [largest, -largest, largest, -largest]
    assert unscaled(torch.tensor(math.nan), 8, exponent, specials).isnan()


@pytest.mark.parametrize(("dtype", "exponent", "specials"), [
    (torch.float8_e4m3fn, 4, "fn"), (torch.float8_e5m2, 5, "ieee")])  # fmt: skip
def test_the_oracle_lists_what_torch_lists(dtype: torch.dtype, exponent: int, specials: str) -> None:
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    assert float_values(exponent, 7 - exponent, specials) == codes[codes.isfinite()].tolist()


@pytest.mark.parametrize(("exponent", "mantissa", "specials"), FORMATS)
def test_every_code_every_tie_and_what_lies_between(exponent: int, mantissa: int, specials: str) -> None:
    magnitudes = float_values(exponent, mantissa, specials)
    bits = 1 + exponent + mantissa
    middles = [(low + high) / 2 for low, high in itertools.pairwise(magnitudes)]
    beside = [math.nextafter(middle, side) for middle in middles for side in (0, math.inf)]
    values = [*magnitudes, *middles, *beside, *(2 * magnitudes[-1] * torch.rand(50).double()).tolist()]
    signed = torch.tensor(values + [-value for value in values], dtype=torch.float64)
    result = unscaled(signed, bits, exponent, specials)
    expected = [to_float_format(value, magnitudes, mantissa) for value in signed.tolist()]
    assert result.tolist() == expected
    assert len(set(result.tolist())) == 2 * len(magnitudes) - 1 <= 2**bits - 1
    # float32 agrees on everything that float32 can hold.
    single = signed.float()
    held = single.double() == signed
    assert torch.equal(unscaled(single, bits, exponent, specials)[held].double(), result[held])


@pytest.mark.parametrize(("exponent", "mantissa", "specials"), FORMATS)
def test_scaled_to_the_data(exponent: int, mantissa: int, specials: str) -> None:
    """Without range=, the largest magnitude of a group becomes the largest value of the format."""
    magnitudes = float_values(exponent, mantissa, specials)
    bits = 1 + exponent + mantissa
    x = torch.randn(3, 40, dtype=torch.float64)
    result = fake_quantize(x, bits, keep=(0,), scheme="float", exponent=exponent, specials=specials)
    for row, quantized in zip(x.tolist(), result.tolist(), strict=True):
        scale = max(abs(value) for value in row) / magnitudes[-1]
        expected = [to_float_format(value / scale, magnitudes, mantissa) * scale for value in row]
        assert quantized == expected


def test_the_largest_value_at_every_width() -> None:
    """Where the width is too small for the exponent, the exponent gives way."""
    for exponent, specials in itertools.product(range(1, 8), Specials):
        for bits in range(2, 17):
            width = torch.tensor(bits)
            fields = [int(field) for field in float_fields(width, exponent)]
            assert fields == [min(exponent, bits - 1), bits - 1 - min(exponent, bits - 1)]
            grid = Grid(scheme=Scheme.FLOAT, exponent=exponent, specials=specials)
            expected = float_values(fields[0], fields[1], specials.value)[-1]
            assert float(float_maximum(width, grid, torch.float64)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_are_exact(dtype: torch.dtype) -> None:
    exponents = torch.arange(-127, 128)
    assert power_of_two(exponents, dtype).tolist() == [2.0 ** int(value) for value in exponents]


@pytest.mark.parametrize("mantissa", [0, 3, 7])
def test_eight_exponent_bits_fill_float32(mantissa: int) -> None:
    """No room for a scale is left, so the data's maximum is rounded like any other value: half an ulp, relative."""
    for specials in ("none", "fn", "ieee"):
        x = spread(-100, 100)
        result = fake_quantize(x, 9 + mantissa, scheme="float", exponent=8, specials=specials)
        assert float(((result - x) / x).abs().max()) <= 2.0 ** -(mantissa + 1) * (1 + 1e-6)
        small = fake_quantize(x.sign() * x.abs().clamp_max(1), 9 + mantissa, scheme="float", exponent=8)
        assert torch.equal(small, torch.sgn(x) * small.abs()) and bool(small.isfinite().all())


MX = {
    "e2m1": (2, 1, "none", 4),
    "e2m3": (2, 3, "none", 6),
    "e3m2": (3, 2, "none", 6),
    "e4m3": (4, 3, "fn", 8),
    "e5m2": (5, 2, "ieee", 8),
}


@pytest.mark.parametrize("name", MX)
def test_mx_blocks(name: str) -> None:
    exponent, mantissa, specials, bits = MX[name]
    options: dict[str, Any] = {"scheme": "float", "exponent": exponent, "specials": specials, "block": 32}
    x = torch.randn(4, 3 * 32) * torch.logspace(-6, 6, 12).repeat_interleave(32).reshape(4, -1)
    x[0, :32] = 0
    # A block whose largest value is a power of two, beside a negative one that makes the range inexact.
    x[1, :32] = torch.linspace(-0.7531, 1, 32)
    result = fake_quantize(x, bits, over=(-1,), **options)
    for row, quantized in zip(x.tolist(), result.tolist(), strict=True):
        for start in range(0, len(row), 32):
            assert quantized[start : start + 32] == mx_block(row[start : start + 32], exponent, mantissa, specials)


def test_a_power_of_two_is_not_lost() -> None:
    """zero_point + range fell short of the maximum for a quarter of such blocks, and the scale was halved."""
    low = -torch.rand(500, 1)
    x = torch.cat((low, torch.ones(500, 1), low.abs() / 3), 1)
    result = fake_quantize(x, 4, over=(-1,), scheme="float", exponent=2, block=32)
    assert bool((result[:, 1] == 1).all())


@pytest.mark.parametrize("length", [1, 5, 32, 33, 70])
def test_the_last_block_may_be_short(length: int) -> None:
    x = torch.randn(length)
    result = fake_quantize(x, 6, scheme="float", exponent=3, block=32)
    for start in range(0, length, 32):
        assert result[start : start + 32].tolist() == mx_block(x[start : start + 32].tolist(), 3, 2, "none")


@pytest.mark.parametrize("scheme", ["affine", "affine_integer", "symmetric"])
def test_uniform_blocks_have_the_range_of_their_elements(scheme: str) -> None:
    """Also the short one at the end: it was filled up with zeros, which widened its range to hold them."""
    x = 10 + torch.rand(2, 8)
    result = fake_quantize(x, 3, over=(-1,), scheme=scheme, block=3)
    for start in (0, 3, 6):
        part = slice(start, start + 3)
        assert torch.equal(result[:, part], fake_quantize(x[:, part], 3, over=(-1,), scheme=scheme))


def test_blocks_run_through_the_dims_of_their_group() -> None:
    x = torch.randn(2, 3, 8)
    options: dict[str, Any] = {"scheme": "float", "exponent": 2}
    assert torch.equal(
        fake_quantize(x, 4, keep=(1,), block=8, **options), fake_quantize(x, 4, over=(-1,), block=8, **options)
    )
    rows = x.permute(1, 0, 2).reshape(3, 16)
    expected = fake_quantize(rows, 4, keep=(0,), block=16, **options).reshape(3, 2, 8).permute(1, 0, 2)
    assert torch.equal(fake_quantize(x, 4, keep=(1,), block=16, **options), expected)


def test_a_poisoned_block_stays_alone() -> None:
    x = torch.randn(8)
    x[5] = math.nan
    result = fake_quantize(x, 6, scheme="float", exponent=3, block=4)
    assert bool(result[:4].isfinite().all()) and bool(result[4:].isnan().all())


def test_subnormals() -> None:
    """Below the smallest normal the grid goes on with equal steps, down to zero."""
    tiny = 2.0**-9  # the step of e4m3 below 2**-6
    values = torch.arange(-8, 9) * tiny
    assert torch.equal(unscaled(values, 8, 4, "fn"), values)
    assert unscaled(torch.tensor([tiny / 2, tiny * 1.5, tiny * 0.51]), 8, 4, "fn").tolist() == [0, 2 * tiny, tiny]
    # float32's own subnormals are below every grid, and stay signed zeros.
    assert unscaled(torch.tensor([1e-40, -1e-40]), 8, 4, "fn").tolist() == [0.0, -0.0]


@pytest.mark.parametrize("value", [1.999, 2.001, 3.97, 4.0, 0.13, 2.0**-7 * 1.3, -1.97, 440.0])
def test_stochastic_rounding_is_unbiased_across_binades(value: float) -> None:
    draws = 20_000
    seen = unscaled(torch.full((draws,), value), 8, 4, "fn", rounding="stochastic").double()
    levels = seen.unique()
    assert levels.numel() <= 2
    magnitudes = torch.tensor(float_values(4, 3, "fn"), dtype=torch.float64)
    assert all(bool((magnitudes == abs(level)).any()) for level in levels)
    exact = float(torch.tensor(value))
    assert float(levels.amin()) <= exact <= float(levels.amax()) or levels.numel() == 1
    step = float(levels.amax() - levels.amin())
    if step == 0:  # on the grid, or so close that this seed never left its neighbour
        assert abs(exact - float(levels[0])) < 1e-3 * abs(exact)
        return
    # One in 1.7 million at 5 sigma, for each of eight values; the seed is fixed.
    up = (exact - float(levels.amin())) / step
    assert abs(float(seen.mean()) - exact) <= 5 * step * math.sqrt(up * (1 - up) / draws)


def test_the_dial() -> None:
    """One more bit is one more bit of mantissa, then of exponent: the error never grows."""
    x = torch.randn(2000)
    for exponent, specials in ((4, "fn"), (5, "ieee"), (2, "none")):
        errors = [
            float((fake_quantize(x, bits, scheme="float", exponent=exponent, specials=specials) - x).square().mean())
            for bits in range(2, 16)
        ]
        assert errors == sorted(errors, reverse=True)
