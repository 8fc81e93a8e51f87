"""`cpt_fx.recalibrate`: how one gets rid of the new statistics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from tests.capture.recalibrate.models import captures, few, images, same, statistics, transformed
from tests.ir.state.models import DYNAMIC, OBSERVED, plan


@captures
def test_the_old_ones_come_back(capture: str) -> None:
    result: Any = transformed(capture)
    result(images())
    buffers = {name: (buffer, buffer.data_ptr()) for name, buffer in result.named_buffers()}
    before = statistics(result)
    with cpt_fx.recalibrate(result, few()) as handle:
        new = statistics(result)
        assert not same(new, before)
    assert same(statistics(result), before)
    handle.restore()
    again = cpt_fx.recalibrate(result, few())
    assert same(statistics(result), new)
    again.restore()
    assert same(statistics(result), before)
    cpt_fx.recalibrate(result, few())  # dropped: they stay
    again.restore()
    handle.restore()
    assert same(statistics(result), new)
    for name, buffer in result.named_buffers():
        assert (buffer, buffer.data_ptr()) == (buffers[name][0], buffers[name][1]) or "cpt_fx" in name


def test_they_come_back_after_an_exception_inside() -> None:
    result = transformed()
    before = statistics(result)
    with pytest.raises(RuntimeError, match="validation"), cpt_fx.recalibrate(result, few()):
        raise RuntimeError("validation")
    assert same(statistics(result), before)


def test_one_inside_another() -> None:
    result = transformed()
    before = statistics(result)
    with cpt_fx.recalibrate(result, few(), 8):
        outer = statistics(result)
        with cpt_fx.recalibrate(result, few(), 2):
            assert not same(statistics(result), outer)
        assert same(statistics(result), outer)
    assert same(statistics(result), before)


def test_observed_ranges_do_not_learn() -> None:
    result = transformed(recipe=OBSERVED)
    for seed in range(3):
        result(images(8, seed))
    ranges = {key: value.clone() for key, value in result.state_dict().items() if "_range_" in key}
    assert ranges
    cpt_fx.recalibrate(result, [10 * batch for batch in few()])
    state = result.state_dict()
    assert all(torch.equal(state[key], value) for key, value in ranges.items())


@captures
@pytest.mark.parametrize("mode", [True, False])
def test_between_a_forward_pass_and_its_backward_pass(capture: str, mode: bool) -> None:
    def gradient(recalibrates: bool) -> Tensor:
        result: Any = transformed(capture).train(mode)
        torch.manual_seed(1)
        loss = result(images()).square().sum()
        if recalibrates:
            with cpt_fx.recalibrate(result, few()):
                pass
        loss.backward()
        assert isinstance(result.conv.weight.grad, Tensor)
        return result.conv.weight.grad

    assert torch.equal(gradient(False), gradient(True))


def test_a_backward_pass_that_would_find_other_statistics_raises() -> None:
    result = transformed().eval()
    loss = result(images()).sum()
    with cpt_fx.recalibrate(result, few()), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_that_was_moved_meanwhile() -> None:
    result = transformed()
    before = statistics(result)
    with cpt_fx.recalibrate(result, few()):
        result.double()
    assert all(torch.equal(value.float(), before[key]) for key, value in statistics(result).items())


def test_the_page_shows_what_was_measured() -> None:
    root = Path(__file__).parents[3]
    rows, measured = (
        [
            line
            for line in (root / name).read_text(encoding="utf-8").splitlines()
            if re.match(r"\| (paper|def|int)", line)
        ]
        for name in ("docs/batch_norm.md", "benchmarks/results/batch_norm.md")
    )
    assert len(rows) == 11
    assert set(rows) <= set(measured)


def test_an_exported_program_has_no_layers_which_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    program = torch.export.export(model.train(), (torch.randn(4, 3),))
    result = cpt_fx.transform(program, plan(), recipe=DYNAMIC)
    assert cpt_fx.recalibrate(result, [torch.randn(4, 3)]).layers == ()
    assert "batch norm in the code of" in caplog.text
