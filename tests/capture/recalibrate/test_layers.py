"""`cpt_fx.recalibrate`: of which layers the statistics are new."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpt_fx
from tests.capture.recalibrate.models import Frozen, Net, captures, few, images, statistics, transformed
from tests.ir.state.models import plan


@captures
def test_what_train_leaves_frozen_stays(capture: str) -> None:
    torch.manual_seed(3)
    result: Any = transformed(capture, Frozen())
    before = statistics(result)
    handle = cpt_fx.recalibrate(result, few())
    assert handle.layers == ("shared", "last")
    after = statistics(result)
    assert {key for key in before if torch.equal(before[key], after[key])} == {"norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ("norm", ("shared", "last")),
        (["norm", "last"], ("shared",)),
        ("*s*", ("norm",)),
        (nn.BatchNorm1d, ("norm", "shared")),
        ((nn.BatchNorm1d, "sh*"), ("norm",)),
        (Net, ()),
        ((), ("norm", "shared", "last")),
    ],
)
def test_exclude(exclude: Any, left: tuple[str, ...]) -> None:
    result = transformed()
    before = statistics(result)
    handle = cpt_fx.recalibrate(result, few(), exclude=exclude)
    after = statistics(result)
    assert handle.layers == left
    assert {key.partition(".")[0] for key in before if not torch.equal(before[key], after[key])} == set(left)


def test_exclude_a_part_and_another_name() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 3), norm), "other": norm, "head": nn.BatchNorm1d(3)})

    def call(model: Any, batch: Tensor) -> Tensor:
        result: Tensor = model["head"](model["body"](batch))
        return result

    for exclude in ("body", "other", "body.1", nn.Sequential):
        assert cpt_fx.recalibrate(model, [torch.randn(5, 3)], call=call, exclude=exclude).layers == ("head",)


def test_exclude_names_near_misses(caplog: pytest.LogCaptureFixture) -> None:
    result = transformed()
    with pytest.raises(ValueError, match=r"exclude: 'norn' matches no module\. Did you mean \"norm\""):
        cpt_fx.recalibrate(result, few(), exclude="norn")
    with pytest.raises(ValueError, match="exclude: no module is a BatchNorm3d"):
        cpt_fx.recalibrate(result, few(), exclude=nn.BatchNorm3d)
    with pytest.raises(TypeError, match="exclude takes"):
        cpt_fx.recalibrate(result, few(), exclude=3)  # type: ignore[arg-type]
    cpt_fx.recalibrate(result, few(), exclude="conv")
    assert "exclude 'conv' selects no batch norm" in caplog.text


@captures
def test_a_model_without_batch_norm_costs_nothing(capture: str) -> None:
    def never() -> Iterator[Tensor]:
        yield from [images()] * pytest.fail("the batches were asked for")

    model = nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    result = cpt_fx.transform(model, plan(), capture=capture)
    with cpt_fx.recalibrate(result, never()) as handle:
        assert handle.layers == ()
    cpt_fx.recalibrate(transformed(capture), never(), exclude="*")
    cpt_fx.recalibrate(nn.Linear(2, 2), never())
    with pytest.raises(ValueError, match="bits"):
        cpt_fx.recalibrate(result, never(), 99)


class Functional(nn.Module):
    """A batch norm that is no layer."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(self.linear(x), self.mean, self.variance, training=self.training)


@captures
@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(3)])
def test_what_is_no_layer_is_said(capture: str, norm: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Functional(), norm)
    result = cpt_fx.transform(model, plan(), capture=capture, example_inputs=(torch.randn(4, 3),))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "cpt_fx"):
        cpt_fx.recalibrate(result, [torch.randn(8, 3)])
    assert [text for text in caplog.messages if "in the code of 0 is a function" in text]
    assert not [text for text in caplog.messages if "code of 1" in text]
    assert not any(result[0].mean)  # type: ignore[index]


@captures
def test_layers_are_not_called_functions(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    cpt_fx.recalibrate(transformed(capture), few())
    assert [text for text in caplog.messages if "batch norm" in text] == []
    assert "again" not in caplog.text
