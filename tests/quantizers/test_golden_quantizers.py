"""Every case of golden/quantizers.json, to the bit: the published quantizers, observers and gradient noise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cpt_fx.functional import fake_quantize, quantize_gradient
from cpt_fx.quantizers.numerics import SCALE_FLOOR, range_of
from tests import golden_data
from tests.golden_data import Case, case_id, cases

# Which dims own a range at each place of the published scheme: the kept dims, or the dims that one range spans.
WHOLE: dict[str, Any] = {}
FIRST: dict[str, Any] = {"keep": (0,)}
VECTORS: dict[str, Any] = {"over": (-1,)}
INNER: dict[str, Any] = {"over": (0, -1)}
GROUPS = {
    "conv_weight": FIRST,
    "conv_bias": WHOLE,
    "conv_activation": WHOLE,
    "conv_gradient": WHOLE,
    "linear_activation": WHOLE,
    "linear_weight": FIRST,
    "linear_bias": WHOLE,
    "linear_gradient": INNER,
    "attention_operand": VECTORS,
    "gnn_feature": VECTORS,
    "gnn_weight": FIRST,
    "gnn_bias": WHOLE,
    "gnn_norm": FIRST,
    "gnn_gradient": INNER,
    "gat_mailbox_feature": FIRST,
    "gat_mailbox_alpha": FIRST,
}
KINDS = {"quantize": 165, "quantize_grad": 80, "observer": 36, "observer_untrained": 2, "noisy_gradient": 4}


def arrays(case: Case) -> dict[str, Tensor]:
    return golden_data.tensors("quantizers", case)


def of_kind(kind: str) -> list[Case]:
    return cases("quantizers", kind=kind)


def test_every_case_is_tested() -> None:
    assert {kind: len(of_kind(kind)) for kind in KINDS} == KINDS
    assert len(golden_data.load("quantizers")["cases"]) == sum(KINDS.values()) == 287


def assert_same(result: Tensor, expected: Tensor) -> None:
    """Equal to the bit, but that -0 equals 0 and NaN is NaN."""
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", of_kind("quantize"), ids=case_id)
def test_quantize(case: Case) -> None:
    data, bits, site = arrays(case), int(case["bits"]), case["site"]
    x = data["x"]
    if site == "default_call":  # the published default averages the rows' extremes; here that range is passed in
        result = fake_quantize(x, bits, range=(data["zero_point"], data["range"]))
    else:
        result = fake_quantize(x, bits, **GROUPS[site])
        value_range = range_of(x, GROUPS[site].get("keep", ()), GROUPS[site].get("over"))
        assert_same(value_range.zero_point.flatten(), data["zero_point"].flatten())
        assert_same(value_range.range.flatten(), data["range"].flatten())
    assert_same(result, data["q"])
    if "codes" not in data:
        return
    scale = (data["range"] / (2**bits - 1)).clamp_min(SCALE_FLOOR)
    codes = ((result.double() - data["zero_point"].double()) / scale.double()).round()
    # A grid finer than the float spacing of its values cannot give its codes back.
    wide = (scale > 4 * torch.finfo(torch.float32).eps * x.abs()).expand_as(codes)
    assert torch.equal(codes[wide], data["codes"].double()[wide])
    assert torch.equal(data["codes"] * scale + data["zero_point"], result)


@pytest.mark.parametrize("case", of_kind("quantize_grad"), ids=case_id)
def test_quantize_gradient(case: Case) -> None:
    data = arrays(case)
    x = torch.zeros_like(data["grad_in"], requires_grad=True)
    quantize_gradient(x, int(case["bits"]), rounding="nearest", **GROUPS[case["site"]]).backward(data["grad_in"])
    assert x.grad is not None
    assert_same(x.grad, data["grad_out"])


def observe(x: Tensor, bits: int, running: tuple[Tensor, ...], training: bool) -> Tensor:
    result: Tensor = torch.ops.cpt_fx.fake_quantize_observed(
        x, torch.tensor(bits), *running, training, momentum=0.9, corrected=False
    )
    return result


def start() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(()), torch.zeros(()), torch.zeros(())


@pytest.mark.parametrize("case", of_kind("observer"), ids=case_id)
def test_observer(case: Case) -> None:
    data, running = arrays(case), start()
    for index in range(case["batches"]):
        assert_same(observe(data["x"][index], case["bits"], running, True), data["q"][index])
        assert_same(running[0], data["running_zero_point"][index].reshape(()))
        assert_same(running[1], data["running_range"][index].reshape(()))
    before = [state.clone() for state in running]
    for bits in case["eval_bits"]:
        x = data["eval_x"].requires_grad_()
        result = observe(x, bits, running, False)
        assert_same(result, data[f"eval_q_{bits}"])
        (gradient,) = torch.autograd.grad(result, x, data["eval_grad_upstream"])
        assert_same(gradient, data[f"eval_grad_{bits}"])
        assert_same(gradient, data["eval_grad_upstream"])
    for now, then in zip(running, before, strict=True):
        assert_same(now, then)


def test_evaluation_clamped_somewhere() -> None:
    """Else the golden gradients would say nothing about clamping."""
    clamped = 0
    for case in of_kind("observer"):
        data = arrays(case)
        low = data["running_zero_point"][-1].flatten()
        high = low + data["running_range"][-1].flatten()
        clamped += int(((data["eval_x"] < low) | (data["eval_x"] > high)).sum())
    assert clamped > 100


@pytest.mark.parametrize("case", of_kind("observer_untrained"), ids=case_id)
def test_untrained_observer(case: Case) -> None:
    """The reference takes the zeros it starts with for a range; here that takes a weight, and else the batch serves."""
    data = arrays(case)
    low, size, _ = start()
    assert_same(observe(data["eval_x"], case["bits"], (low, size, torch.ones(())), False), data["eval_q"])
    result = observe(data["eval_x"], case["bits"], start(), False)
    assert_same(result, fake_quantize(data["eval_x"], case["bits"]))
    assert not torch.equal(result, data["eval_q"])


@pytest.mark.parametrize("case", of_kind("noisy_gradient"), ids=case_id)
def test_noisy_gradient(case: Case) -> None:
    """Statistics of the real noise over as many draws as the golden data took."""
    data, bits, draws = arrays(case), int(case["bits"]), int(case["draws"])
    gradient, step = data["grad_in"], (data["range"] / (2**bits - 1)).double()
    step = step if case["site"] == "linear_gradient" else step.reshape(())
    x = torch.zeros_like(gradient, requires_grad=True)
    # The autograd graph is kept: each backward draws anew.
    result = quantize_gradient(x, bits, **GROUPS[case["site"]])
    seen = torch.stack([torch.autograd.grad(result, x, gradient, retain_graph=True)[0] for _ in range(draws)])
    errors = (seen.double() - gradient) / step
    # 1e-4: what the float32 arithmetic of the grid may add at 8 bits (255 codes * 2**-22).
    assert float(errors.abs().max()) < 1 + 1e-4
    expected = data["expected_std_in_steps"].double()
    standard_error = expected / math.sqrt(draws)
    # At most 192 elements at 5 sigma: a false alarm with one seed in ten thousand; the seed is fixed.
    assert bool((errors.mean(0).abs() <= 5 * standard_error + 1e-4).all())
    # The standard deviation of a two-valued variable is estimated to within 0.5/sqrt(n): again 5 of those.
    torch.testing.assert_close(errors.std(0), expected, rtol=0, atol=2.5 / math.sqrt(draws))
    low = torch.minimum(seen.amin(0), data["min_seen"])
    high = torch.maximum(seen.amax(0), data["max_seen"])
    # Both implementations saw the same two neighbouring grid points (up to their last bits), where both are likely.
    likely = expected > 0.1
    slack = 1e-4 * step.expand_as(gradient)
    assert bool(((low - seen.amin(0)).abs() <= slack)[likely].all())
    assert bool(((high - seen.amax(0)).abs() <= slack)[likely].all())
    # Range ends are grid points and the noise is clamped: no draw leaves the range.
    assert float(seen.min()) >= float(gradient.min())
    assert float(seen.max()) <= float(gradient.max()) + 1e-4 * float(step.max())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_poisons_its_group_only(poison: float) -> None:
    """As published: NaN or an infinite range makes the whole group NaN."""
    x = torch.randn(3, 8)
    expected = fake_quantize(x, 4, keep=(0,))
    x[1, 5] = poison
    result = fake_quantize(x, 4, keep=(0,))
    assert bool(result[1].isnan().all())
    assert torch.equal(result[[0, 2]], expected[[0, 2]])
    gradient = torch.zeros(3, 8, requires_grad=True)
    quantize_gradient(gradient, 4).backward(x)
    assert gradient.grad is not None and bool(gradient.grad.isnan().all())


def test_the_published_zero_gradient_becomes_noise() -> None:
    """The published grid has no zero: those of this row become 0.0714 at 3 bits."""
    row = torch.tensor([[-0.3, 0.0, 0.0, 1.0]])
    assert fake_quantize(row, 3)[0, 1].item() == pytest.approx(0.0714, abs=1e-4)
    assert fake_quantize(row, 3, scheme="affine_integer")[0, 1].item() == 0.0
