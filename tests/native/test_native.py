"""Kernels give the bits of the torch operators, or leave a tensor to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpt_fx import native
from cpt_fx.quantizers import kernels as simulate
from cpt_fx.quantizers.counters import new_counters
from cpt_fx.quantizers.noise import new_seed, uniform
from cpt_fx.quantizers.numerics import Grid, quantize
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT

GROUPS: list[dict[str, Any]] = [{}, {"keep": [0]}, {"keep": [1]}, {"over": [-1]}, {"over": [0, -1]}]
SCHEMES = ["affine", "affine_integer", "symmetric"]


@pytest.fixture(autouse=True)
def kernels() -> None:
    """These tests are about kernels: where there is no compiler there is nothing to compare."""
    if native.status() != "used":
        pytest.skip(f"native kernels: {native.status()}")


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors hold the same bits, but for the payload of NaN and the sign of zero.

    The minimum of zeros of both signs is whichever was met first, and that is up to threads and vectors.
    """
    nan = one.isnan()
    return torch.equal(nan, two.isnan()) and torch.equal(one[~nan], two[~nan])


def both(x: Tensor, bits: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Quantize with a kernel, and without, from the same state of the generator."""
    results = []
    for kernels_off in (False, True):
        torch.manual_seed(5)
        if kernels_off:
            with native.disabled():
                results.append(FAKE_QUANTIZE(x, torch.tensor(bits), **options))
        else:
            results.append(FAKE_QUANTIZE(x, torch.tensor(bits), **options))
    return results[0], results[1]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8, 16, 24])
def test_the_bits_of_the_torch_operators(bits: int, groups: dict[str, Any], scheme: str, rounding: str) -> None:
    for shape in ((3, 4, 5), (2, 7, 130), (2, 3, 65, 67)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(bits)) * 3 + 0.5
        kernel, torch_operators = both(x, bits, scheme=scheme, rounding=rounding, **groups)
        assert same_bits(kernel, torch_operators)


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=80),
    bits=st.integers(1, 24),
    scheme=st.sampled_from(SCHEMES),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)
def test_any_numbers(values: list[float], bits: int, scheme: str, rounding: str) -> None:
    """NaN, infinities, zeros of both signs, subnormal and huge numbers, constant tensors."""
    kernel, torch_operators = both(torch.tensor(values), bits, scheme=scheme, rounding=rounding)
    assert same_bits(kernel, torch_operators)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    x = torch.randn(3, 40_001)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for options in ({}, {"keep": [0]}):
            kernel, torch_operators = both(x, 6, rounding="stochastic", **options)
            assert same_bits(kernel, torch_operators)
    finally:
        torch.set_num_threads(before)


def test_running_ranges_and_records_are_the_same() -> None:
    x = [torch.randn(4, 5, 6) * scale for scale in (1.0, 3.0, 0.1)]
    states = []
    for kernels_off in (False, True):
        running, counters = [torch.zeros(()) for _ in range(3)], new_counters()
        for batch in x:
            if kernels_off:
                with native.disabled():
                    FAKE_QUANTIZE_OBSERVED(batch, torch.tensor(4), *running, True, counters=counters)
            else:
                FAKE_QUANTIZE_OBSERVED(batch, torch.tensor(4), *running, True, counters=counters)
        states.append([*running, counters])
    assert all(torch.equal(kernel, torch_operators) for kernel, torch_operators in zip(*states, strict=True))
    assert states[0][3][0] == 3


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 4, dtype=torch.float64),
        torch.randn(4, 4).bfloat16(),
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.empty(0, 3),
        torch.randn(4, 4, device="meta"),
    ],
    ids=["float64", "bfloat16", "transposed", "channels_last", "empty", "meta"],
)
def test_left_to_the_torch_operators(x: Tensor) -> None:
    assert not simulate.serves(x, Grid())


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_given_range_is_that_of_every_group(scheme: str, groups: dict[str, Any]) -> None:
    ends = {"zero_point": torch.tensor(-1.0), "range": torch.tensor(2.5)}
    kernel, torch_operators = both(torch.randn(6, 7, 8), 4, scheme=scheme, **groups, **ends)
    assert same_bits(kernel, torch_operators)


def test_a_buffer_that_another_process_may_read_is_not_taken_again() -> None:
    x = torch.randn(1 << 16)
    shared = simulate.new_like(x).share_memory_()
    storage = shared.untyped_storage()._cdata
    del shared
    assert storage not in {simulate.new_like(x).untyped_storage()._cdata for _ in range(3)}


def test_a_buffer_is_not_taken_while_somebody_holds_it() -> None:
    x = torch.randn(1 << 16)
    held = [simulate.new_like(x) for _ in range(9)]
    assert len({tensor.data_ptr() for tensor in held}) == 9
    view = held[-1][3:]
    place = held[-1].data_ptr()
    del held
    assert place not in {simulate.new_like(x).data_ptr() for _ in range(9)}
    assert view.numel()


def test_noise_is_uniform_and_its_own_for_every_element_and_seed() -> None:
    torch.manual_seed(0)
    x = torch.empty(1 << 18)
    first, second = uniform(new_seed(x.device), x).double(), uniform(new_seed(x.device), x).double()
    assert first.min() >= 0 and first.max() < 1
    # A sum of n uniform numbers: five standard deviations.
    assert abs(first.mean() - 0.5) < 5 / math.sqrt(12 * x.numel())
    for other in (second, first.roll(1), first.roll(7), first.roll(1024)):
        assert abs(torch.corrcoef(torch.stack((first, other)))[0, 1]) < 5 / math.sqrt(x.numel())
    eighths = torch.histc(first, 8, 0, 1)
    assert ((eighths - x.numel() / 8).abs() < 5 * math.sqrt(x.numel() * 7 / 64)).all()


def test_noise_of_compiled_code_is_that_of_eager_code() -> None:
    x, seed = torch.randn(3, 50), torch.tensor([7, -9], dtype=torch.int32)
    compiled = torch.compile(lambda seed, like: uniform(seed, like), backend="aot_eager")
    assert torch.equal(compiled(seed, x), uniform(seed, x))


def test_gradients_are_rounded_by_the_same_noise() -> None:
    gradients = []
    for kernels_off in (False, True):
        leaf = torch.ones(50, 700, requires_grad=True)
        torch.manual_seed(3)
        result = QUANTIZE_GRADIENT(leaf * 1, torch.tensor(4))
        outer = torch.randn(50, 700, generator=torch.Generator().manual_seed(1))
        if kernels_off:
            with native.disabled():
                result.backward(outer)
        else:
            result.backward(outer)
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])  # type: ignore[arg-type]
    assert quantize(outer, torch.tensor(4), Grid()).unique().numel() == 16 == gradients[0].unique().numel()  # type: ignore[union-attr]
