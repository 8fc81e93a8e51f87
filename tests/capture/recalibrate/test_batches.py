"""`cpt_fx.recalibrate`: kinds of batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from tests.capture.recalibrate.models import captures, few, images, same, statistics, transformed


@pytest.mark.parametrize(
    "batches",
    [
        [(batch, torch.zeros(len(batch))) for batch in few()],
        [[batch, "label"] for batch in few()],
        [{"x": batch} for batch in few()],
        (batch for batch in few()),
        iter(few()),
        itertools.islice(itertools.chain(few(), itertools.repeat(images())), 3),
        tuple(few()),
        torch.utils.data.DataLoader(torch.cat(few()), batch_size=8),  # type: ignore[arg-type]
    ],
)
def test_batches_of_all_forms(batches: Any) -> None:
    result, other = transformed(), transformed()
    cpt_fx.recalibrate(result, batches)
    cpt_fx.recalibrate(other, few())
    assert same(statistics(result), statistics(other))


def test_a_call_of_ones_own() -> None:
    result, other = transformed(), transformed()
    cpt_fx.recalibrate(result, [{"pixels": batch} for batch in few()], call=lambda model, batch: model(batch["pixels"]))
    cpt_fx.recalibrate(other, few())
    assert same(statistics(result), statistics(other))


class Lists(nn.Module):
    """Takes several tensors in a list, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: Any) -> Tensor:
        result: Tensor = self.norm(torch.cat([one.view(-1, 3) for one in inputs]))
        return result


def test_lists_count_by_what_comes_with_them() -> None:
    pictures = [[torch.full((3, 4), 1.0)] * 2, [torch.full((3, 4), 4.0)]]
    several = [[torch.full((2, 3), 1.0)] * 2, [torch.full((1, 3), 4.0)] * 2]
    labels = [torch.zeros(2), torch.zeros(1)]
    cases: list[list[Any]] = [
        list(zip(pictures, ([{}, {}], [{}]), strict=True)),
        list(zip(several, labels, strict=True)),
        [(one,) for one in pictures],
    ]
    for given in cases:
        model = Lists()
        cpt_fx.recalibrate(model, given)
        assert model.norm.running_mean is not None
        assert model.norm.running_mean.tolist() == pytest.approx([2.0] * 3)


@pytest.mark.parametrize("batch", ["text", 3, None, (), []])
def test_other_batches_are_refused(batch: Any) -> None:
    result = transformed()
    before = statistics(result)
    with pytest.raises(TypeError, match="pass call= for anything else, got"):
        cpt_fx.recalibrate(result, [images(), batch])
    assert same(statistics(result), before)


@pytest.mark.parametrize("batches", [images(), {"x": images()}, 3, "data", None])
def test_one_batch_is_not_several(batches: Any) -> None:
    with pytest.raises(TypeError, match="batches must be several batches"):
        cpt_fx.recalibrate(transformed(), batches)


def test_no_batches_are_an_error() -> None:
    with pytest.raises(ValueError, match="there were none"):
        cpt_fx.recalibrate(transformed(), [])


@captures
def test_a_batch_too_small_is_skipped_and_said(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    """The last norm finds one value per channel in one image, the others before it many."""
    result, other = transformed(capture), transformed(capture)
    cpt_fx.recalibrate(result, [images(1, 7), *few(), images(1, 8), images(0)])
    assert "skipped 3 of 6 batches" in caplog.text
    cpt_fx.recalibrate(other, few())
    assert same(statistics(result), statistics(other))
    with pytest.raises(ValueError, match="there were none"):
        cpt_fx.recalibrate(result, [images(1, 7)])
    assert same(statistics(result), statistics(other))


def test_what_is_not_finite_is_refused() -> None:
    result = transformed()
    before = statistics(result)
    with pytest.raises(ValueError, match="batch norm in norm sees values that are not finite"):
        cpt_fx.recalibrate(result, [images(), images() * torch.nan])
    assert same(statistics(result), before)


class Batch:
    """One of the user's own."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)


@pytest.mark.parametrize("kind", ["array", "pair of arrays", "object"])
def test_batches_that_are_no_tensors_count_by_their_size_too(kind: str) -> None:
    uneven = [images(4, 1), images(24, 2) * 3]
    expected, result = transformed("auto"), transformed("auto")
    cpt_fx.recalibrate(expected, uneven)
    if kind == "object":
        cpt_fx.recalibrate(result, map(Batch, uneven), call=lambda model, batch: model(batch.x))
    elif kind == "array":
        arrays = [batch.numpy() for batch in uneven]
        cpt_fx.recalibrate(result, arrays, call=lambda model, batch: model(torch.from_numpy(batch)))
    else:
        pairs = [(batch.numpy(), list(range(len(batch)))) for batch in uneven]
        cpt_fx.recalibrate(result, pairs, call=lambda model, batch: model(torch.from_numpy(batch[0])))
    assert same(statistics(result), statistics(expected))
