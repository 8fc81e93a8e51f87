"""`cpt_fx.recalibrate`: what the new statistics are, of which layers, and how one gets rid of them."""

from __future__ import annotations

import copy
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

import cpt_fx
from cpt_fx.schedules import Bits, Static
from tests.widths.models import CAPTURES, DYNAMIC, OBSERVED, plan

captures = pytest.mark.parametrize("capture", CAPTURES)


class Net(nn.Module):
    """Convolutions with batch norm and dropout, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.again, self.shared = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        for _ in range(2):
            y = F.relu(self.shared(self.again(y)))
        result: Tensor = self.last(self.head(self.drop(y.mean((2, 3)))))
        return result


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def images(count: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(seed)) + 0.3


def few() -> list[Tensor]:
    return [images(8, 1), images(8, 2), images(4, 3)]


def transformed(capture: str = "auto", model: nn.Module | None = None, **options: Any) -> nn.Module:
    options = {"recipe": DYNAMIC, **options}
    return cpt_fx.transform(net() if model is None else model, plan(), capture=capture, **options)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items() if ".running_" in key}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def seen(model: Any, batches: list[Tensor], norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the weighted means of what the first norm is given in evaluation."""
    model.eval()
    with torch.no_grad():
        given = [model.conv(batch).double() for batch in batches]
    dims = (0, 2, 3)
    total = sum(len(batch) for batch in batches)
    mean = sum(len(batch) * y.mean(dims) for batch, y in zip(batches, given, strict=True)) / total
    variance = sum(len(batch) * y.var(dims) for batch, y in zip(batches, given, strict=True)) / total
    assert isinstance(mean, Tensor) and isinstance(variance, Tensor)
    return mean.float(), variance.float()


# What the new statistics are.


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


# Kinds of batches.


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


# Which layers.


class Frozen(Net):
    """Keeps a layer in evaluation mode, as one does in fine-tuning."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self


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


# Putting them back.


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
    root = Path(__file__).parents[1]
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
