"""The record of a quantizer: it counts runs, and shows at most 2**b levels where it quantized, and more where not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cpt_fx.formats import FULL_PRECISION
from cpt_fx.quantizers.counters import ARMED, COUNTER_LENGTH, SAMPLE, count_levels, new_counters, sample_group
from cpt_fx.quantizers.numerics import Grid
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT


def levels(counters: Tensor, bits: int) -> int:
    return int(counters[bits])


def error(counters: Tensor, bits: int) -> float:
    return float(counters[FULL_PRECISION + bits]) / 1e9


def test_a_new_record_is_empty() -> None:
    counters = new_counters()
    assert (counters.shape, counters.dtype, bool(counters.any())) == ((COUNTER_LENGTH,), torch.int64, False)


@pytest.mark.parametrize("bits", [1, 3, 8, 16, 31])
def test_levels_and_error(bits: int) -> None:
    x, counters = torch.randn(100, 40), new_counters()
    result = FAKE_QUANTIZE(x, torch.tensor(bits), counters=counters)
    assert int(counters[0]) == 1
    assert levels(counters, bits) == result.unique().numel() <= 2**bits
    relative = float((result.double() - x.double()).norm() / x.double().norm())
    assert error(counters, bits) == pytest.approx(relative, abs=1e-9)


def test_runs_are_counted_and_each_width_is_measured_once() -> None:
    counters, bits = new_counters(), torch.tensor(3)
    FAKE_QUANTIZE(torch.arange(3.0), bits, counters=counters)
    for _ in range(4):
        FAKE_QUANTIZE(torch.randn(500), bits, counters=counters)
    assert int(counters[0]) == 5 and levels(counters, 3) == 3
    bits.fill_(2)
    FAKE_QUANTIZE(torch.randn(500), bits, counters=counters)
    assert int(counters[0]) == 6 and levels(counters, 2) == 4 and levels(counters, 3) == 3


@pytest.mark.parametrize("bits", [0, 32])
def test_full_precision_only_counts(bits: int) -> None:
    counters = new_counters()
    FAKE_QUANTIZE(torch.randn(500), torch.tensor(bits), counters=counters)
    assert int(counters[0]) == 1 and not bool(counters[1:].any())


def test_a_gradient_is_recorded_when_it_comes() -> None:
    counters = new_counters()
    x = torch.randn(300, requires_grad=True)
    result = QUANTIZE_GRADIENT(x * 1, torch.tensor(2), counters=counters)
    assert counters[ARMED] == 2 and not bool(counters[:ARMED].any())  # it waits
    result.backward(torch.randn(300))
    assert int(counters[0]) == 1 and 3 <= levels(counters, 2) <= 4


def test_an_observed_tensor_is_recorded() -> None:
    counters = new_counters()
    running = [torch.zeros(()) for _ in range(3)]
    FAKE_QUANTIZE_OBSERVED(torch.randn(300), torch.tensor(2), *running, True, counters=counters)
    assert int(counters[0]) == 1 and levels(counters, 2) == 4


def test_what_was_not_quantized_shows_too_many_levels() -> None:
    """What verification relies on: a sample is far larger than 2**8."""
    x, counters = torch.randn(SAMPLE * 2), new_counters()
    count_levels(counters, x, x.clone(), 8, Grid())
    assert levels(counters, 8) > 2**8 and error(counters, 8) == 0


def test_one_group_is_looked_at() -> None:
    """Rows of different scale have different levels: mixed, they would look unquantized."""
    x, counters = torch.randn(50, 100) * torch.arange(1, 51)[:, None], new_counters()
    result = FAKE_QUANTIZE(x, torch.tensor(2), keep=[0], counters=counters)
    assert levels(counters, 2) == 4 < result.unique().numel()
    counters = new_counters()
    FAKE_QUANTIZE(x, torch.tensor(2), over=[-1], block=10, counters=counters)
    assert 2 <= levels(counters, 2) <= 4


def test_sample_group() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert sample_group(x, Grid()).tolist() == list(range(24))
    assert sample_group(x, Grid((1,))).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert sample_group(x, Grid((), (-1,))).tolist() == [0, 1, 2, 3]
    assert sample_group(x, Grid((), (0, -1))).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert sample_group(x, Grid((0,), block=5)).tolist() == [0, 1, 2, 3, 4]
    assert sample_group(torch.tensor(3.0), Grid()).tolist() == [3]
    assert sample_group(torch.zeros(3, SAMPLE), Grid()).size == SAMPLE
    assert sample_group(torch.ones(3, requires_grad=True), Grid()).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_sample_has_the_numbers_of_any_type(dtype: torch.dtype) -> None:
    x = torch.randn(6, 5, dtype=dtype).t()
    assert sample_group(x, Grid((0,))).tolist() == x[0].tolist()


def samples() -> list[tuple[Tensor, Tensor]]:
    """Pairs of a tensor and what is said to be its quantized form."""
    x = torch.randn(3, SAMPLE)
    wide = torch.randn(5).expand(7, 5).t()
    return [
        (x, x.mul(4).round().div(4)),
        (x, x.clone()),
        (x[:, ::2], x[:, ::2].round()),
        (wide, wide.round()),
        (torch.tensor([-0.0, 0.0, 1.0]), torch.tensor([-0.0, 0.0, 1.0])),
        (torch.zeros(9), torch.zeros(9)),
        (torch.tensor(1.5), torch.tensor(2.0)),
        (x, torch._neg_view(x)),
        (x, torch._efficientzerotensor(x.shape)),
        (x.double(), x.double().round()),
        (x, torch.where(x > 2, torch.nan, x)),
    ]


@pytest.mark.parametrize("case", range(len(samples())))
def test_what_is_seen_is_what_torch_counts(case: int) -> None:
    x, result = samples()[case]
    counters = new_counters()
    count_levels(counters, x, result, 8, Grid())
    before, after = (torch.from_numpy(sample_group(one, Grid())) for one in (x, result))
    if not after.isfinite().all():
        assert not counters.any()
        return
    error = (after - before).norm() / before.norm().clamp_min(1e-30)
    assert counters[8] == after.unique().numel() and abs(int(counters[40]) - float(error) * 1e9) <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_not_evidence(value: float) -> None:
    counters = new_counters()
    FAKE_QUANTIZE(torch.tensor([0.0, value]), torch.tensor(4), counters=counters)
    assert int(counters[0]) == 1 and not bool(counters[1:].any())
    FAKE_QUANTIZE(torch.tensor([0.0, 1.0]), torch.tensor(4), counters=counters)
    assert levels(counters, 4) == 2


def test_zeros_have_no_relative_error() -> None:
    counters = new_counters()
    FAKE_QUANTIZE(torch.zeros(9), torch.tensor(4), counters=counters)
    assert levels(counters, 4) == 1 and error(counters, 4) == 0


def test_empty_tensors_count_as_runs() -> None:
    counters = new_counters()
    FAKE_QUANTIZE(torch.empty(0), torch.tensor(4), counters=counters)
    assert int(counters[0]) == 1 and levels(counters, 4) == 0


def test_compiled_graphs_count_runs() -> None:
    """Levels are only read in eager: a compiled graph must not wait for the device."""
    torch._dynamo.reset()
    counters = new_counters()
    compiled = torch.compile(lambda x, b, r: FAKE_QUANTIZE(x, b, counters=r), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled(torch.randn(5), torch.tensor(4), counters)
    assert int(counters[0]) == 3 and not bool(counters[1:].any())


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_counts_runs() -> None:
    counters = new_counters()
    torch.func.vmap(lambda row: FAKE_QUANTIZE(row, torch.tensor(4), counters=counters))(torch.randn(3, 5))
    assert int(counters[0]) == 1 and not bool(counters[1:].any())
