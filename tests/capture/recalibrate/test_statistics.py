"""`cpt_fx.recalibrate`: what the new statistics are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import cpt_fx
from cpt_fx.schedules import Bits, Static
from tests.capture.recalibrate.models import captures, few, images, net, same, seen, statistics, transformed
from tests.ir.state.models import DYNAMIC, plan


@captures
@pytest.mark.parametrize(("bits", "width"), [(None, 8), (4, 4), (Bits(2, 5, 8), None), (32, 32)])
def test_they_are_those_of_a_width(capture: str, bits: Any, width: int | None) -> None:
    result: Any = transformed(capture)
    cpt_fx.recalibrate(result, few(), bits)
    with cpt_fx.at_bits(result, bits if width is None else width):
        mean, variance = seen(result, few(), result.norm)
    torch.testing.assert_close(result.norm.running_mean, mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(result.norm.running_var, variance, rtol=1e-6, atol=1e-7)
    with cpt_fx.at_bits(result, 3):
        assert not torch.allclose(seen(result, few(), result.norm)[1], variance, rtol=1e-6)


@captures
def test_batches_of_one_size_give_what_torch_gives_for_one_layer(capture: str) -> None:
    """Its function trains the whole model; at 32 bits and without dropout the numbers are the same."""
    model = net()
    model.drop.p = 0.0
    result = transformed(capture, copy.deepcopy(model))
    update_bn(few()[:2], model)
    cpt_fx.recalibrate(result, few()[:2], 32)
    for key, value in statistics(model).items():
        # Of a layer that runs twice, the later call weighs a little more.
        torch.testing.assert_close(statistics(result)[key], value, rtol=0.05, atol=0.05)
    for key in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(statistics(result)[key], statistics(model)[key], rtol=1e-6, atol=1e-7)


@captures
def test_evaluation_is_then_as_in_training_mode(capture: str) -> None:
    result = transformed(capture).eval()
    one = images(64, 5)
    with torch.no_grad():
        assert float(result(one).std(0).mean()) < 0.3
        cpt_fx.recalibrate(result, [one])
        new = result(one)
    assert 0.8 < float(new.std(0).mean()) < 1.2
    assert float(new.mean(0).abs().max()) < 0.2


def test_what_evaluation_has_now_is_what_counts() -> None:
    schedule = plan(eval_bits="current")
    result: Any = cpt_fx.transform(net(), schedule, recipe=DYNAMIC)
    for position, width in ((0, 3), (2, 5), (5, 7)):
        schedule.position = position
        with cpt_fx.recalibrate(result, few()):
            mean = result.norm.running_mean.clone()
        with cpt_fx.at_bits(result, width):
            torch.testing.assert_close(mean, seen(result, few(), result.norm)[0], rtol=1e-6, atol=1e-7)


def test_old_statistics_do_not_shine_through() -> None:
    result: Any = transformed()
    other = copy.deepcopy(result)
    result.norm.running_mean.fill_(torch.nan)
    result.shared.running_var.fill_(torch.inf)
    result.last.num_batches_tracked.fill_(70)
    cpt_fx.recalibrate(result, few())
    cpt_fx.recalibrate(other, few())
    assert same(statistics(result), statistics(other))
    assert int(result.last.num_batches_tracked) == 70


@pytest.mark.parametrize("momentum", [None, 0.0, 0.1, 1.0])
def test_momentum_does_not_matter(momentum: float | None) -> None:
    norm = nn.BatchNorm1d(3, momentum=momentum)
    x = torch.randn(10, 3) * 2 + 1
    cpt_fx.recalibrate(norm, [x])
    torch.testing.assert_close(norm.running_mean, x.mean(0))
    torch.testing.assert_close(norm.running_var, x.var(0))
    assert norm.momentum == momentum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm1d(3).to(dtype)
    x = (torch.randn(10, 3) * 0.1 + 0.01).to(dtype)
    cpt_fx.recalibrate(norm, [x])
    assert norm.running_mean is not None and norm.running_var is not None and norm.running_mean.dtype == dtype
    torch.testing.assert_close(norm.running_mean.double(), x.double().mean(0), rtol=0.01, atol=1e-4)
    torch.testing.assert_close(norm.running_var.double(), x.double().var(0), rtol=0.02, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (5, 3)),
        (nn.BatchNorm1d(3), (5, 3, 4)),
        (nn.BatchNorm2d(3, affine=False), (5, 3, 4, 4)),
        (nn.BatchNorm3d(3), (5, 3, 2, 2, 2)),
        (nn.SyncBatchNorm(3), (5, 3, 4)),
    ],
)
def test_every_kind_of_layer(layer: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) + 2
    handle = cpt_fx.recalibrate(nn.Sequential(layer), [x])
    torch.testing.assert_close(layer.running_mean, x.transpose(0, 1).flatten(1).mean(1))
    assert handle.layers == ("0",)


def test_lazy_layers() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="0 does not know its channels yet"):
        cpt_fx.recalibrate(model, [torch.randn(5, 3)])
    model(torch.randn(5, 3))
    cpt_fx.recalibrate(model, [torch.full((5, 3), 7.0)])
    torch.testing.assert_close(model[0].running_mean, torch.full((3,), 7.0))


@pytest.mark.parametrize("momentum", [None, 0.1, 0.5])
def test_calls_of_a_shared_layer_all_count(momentum: float | None) -> None:
    """As they do in training: by its momentum."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, momentum=momentum)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.norm(x), self.norm(x + 4)])

    model = Twice()
    x = torch.randn(10, 3)
    cpt_fx.recalibrate(model, [x])
    assert model.norm.running_mean is not None
    last = 0.5 if momentum is None else 1 / (2 - momentum)
    torch.testing.assert_close(model.norm.running_mean, x.mean(0) + 4 * last)


def _by_name(model: Any, batch: tuple[str, Tensor]) -> object:
    return model[batch[0]](batch[1])


def test_a_layer_in_some_batches_only(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.ModuleDict({"a": nn.BatchNorm1d(2), "b": nn.BatchNorm1d(2), "c": nn.BatchNorm1d(2)})
    data = [("a", torch.full((4, 2), 1.0)), ("b", torch.full((4, 2), 2.0)), ("a", torch.full((12, 2), 5.0))]
    handle = cpt_fx.recalibrate(model, data, call=_by_name)
    assert handle.layers == ("a", "b")
    means = [float(model[name].running_mean[0]) for name in "abc"]
    assert means == pytest.approx([4.0, 2.0, 0.0])
    assert "c did not run" in caplog.text


def test_a_plain_model_is_recalibrated_as_it_is() -> None:
    model = net()
    with cpt_fx.recalibrate(model, few()):
        mean, variance = seen(model, few(), model.norm)
        torch.testing.assert_close(model.norm.running_var, variance, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(model.norm.running_mean, mean, rtol=1e-6, atol=1e-7)
    with pytest.raises(cpt_fx.TransformError, match="is not transformed"):
        cpt_fx.recalibrate(model, few(), 8)


def test_a_part_of_a_model_is_at_its_evaluation_width() -> None:
    whole = nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 2))
    result = cpt_fx.transform(whole, Static(2, eval_bits=8), recipe=DYNAMIC)
    other = copy.deepcopy(result)
    data = [torch.randn(9, 3)]
    cpt_fx.recalibrate(result[0], data)  # type: ignore[index]
    cpt_fx.recalibrate(other, data)
    assert same(statistics(result), statistics(other))
    assert all(module.training for module in result.modules())
