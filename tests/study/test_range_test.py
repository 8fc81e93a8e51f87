"""The range test: it finds the width at which training starts to work, and touches nothing."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpt_fx
from cpt_fx.api import history_of
from cpt_fx.capture.standalone import precision_of
from cpt_fx.study.range_test import RangeTest, default_loss, range_test

Batch = tuple[Tensor, Tensor]


def make_batches(count: int = 8, seed: int = 0) -> list[Batch]:
    """Ten classes, each a random direction with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(10, 32, generator=generator)
    labels = [torch.randint(0, 10, (32,), generator=generator) for _ in range(count)]
    return [(centres[y] + 0.3 * torch.randn(32, 32, generator=generator), y) for y in labels]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def make_model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make_model()


def width_of(model: nn.Module) -> int:
    schedule = precision_of(model).schedule
    assert schedule is not None
    return schedule.bits(0).weight


class Scripted:
    """A loss whose progress per width is written down, with a gradient that changes nothing."""

    def __init__(self, progress: dict[int, float]) -> None:
        self.progress = progress
        self.steps = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        width = width_of(model)
        step, self.steps = self.steps % 8, self.steps + 1
        nothing = sum((parameter.sum() * 0 for parameter in model.parameters()), torch.zeros(()))
        return nothing + (2.0 if step == 0 else 2.0 - self.progress.get(width, 1.0))


def scripted(progress: dict[int, float], **options: Any) -> RangeTest:
    return range_test(make_model(), [0], loss=Scripted(progress), steps_per_width=8, **options)


def test_it_trains_and_measures() -> None:
    result = range_test(make_model(), make_batches(), steps_per_width=40)
    assert result.widths == (2, 3, 4, 5, 6, 7, 8)
    assert result.q_min in (2, 3, 4)
    assert [len(losses) for losses in (*result.losses, result.full_precision)] == [40] * 8
    assert result.progress[-1] == pytest.approx(1, abs=0.1)
    assert result.full_precision_drop > 1
    # A quarter of the steps at the end is what counts.
    tail = result.losses[0][-10:]
    assert result.drops[0] == pytest.approx(result.full_precision[0] - sum(tail) / 10)


def test_evaluations_are_with_the_statistics_of_the_width() -> None:
    """They follow each run, and change nothing that is judged."""
    batches = make_batches()
    statistics: list[Tensor] = []
    # Evaluated right after training at 2 bits: with other statistics that would be told, which is an error here.

    def accuracy(model: Any) -> float:
        assert not model.training and not torch.is_grad_enabled()
        statistics.append(model[1].running_mean.clone())
        x, y = batches[-1]
        new = float((model(x).argmax(1) == y).float().mean())
        expected = torch.stack([model[0](x).mean(0) for x, _ in batches[-10:]]).mean(0)
        torch.testing.assert_close(model[1].running_mean, expected, rtol=1e-4, atol=1e-5)
        return new

    plain = range_test(make_model_of(1), batches, widths=[2, 4], steps_per_width=8)
    result = range_test(make_model_of(1), batches, widths=[2, 4], steps_per_width=8, evaluate=accuracy)
    assert dataclasses.replace(result, evaluations=()) == plain
    assert len(result.evaluations) == len(statistics) == 3
    assert all(0.5 < value <= 1 for value in result.evaluations)
    assert result.to_dict()["evaluations"] == list(result.evaluations)
    assert "evaluated" in str(result) and "evaluated" not in str(plain)


@pytest.mark.parametrize(
    ("progress", "threshold", "expected"),
    [
        ({}, 0.8, 2),
        ({2: 0.5}, 0.8, 3),
        ({2: 0.75}, 0.75, 2),
        ({2: 0.5, 3: 0.7}, 0.6, 3),
        ({2: 0.9, 4: 0.5}, 0.8, 5),  # a lucky low width does not count: from q_min on, all must train
        ({2: 0.5, 3: 0.85}, 0.9, 4),
        ({2: -3.0, 3: 1.4}, 0.8, 3),
    ],
)
def test_q_min_is_where_progress_starts(progress: dict[int, float], threshold: float, expected: int) -> None:
    assert scripted(progress, threshold=threshold).q_min == expected


def test_a_loss_that_is_not_finite_is_no_progress() -> None:
    result = scripted({2: math.inf, 3: math.nan})
    assert result.q_min == 4
    assert result.drops[:2] == (-math.inf, -math.inf)
    assert all(math.isnan(loss) for loss in result.losses[0][2:])
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["losses"][1][1] is None
    assert "no" in str(result)


def test_the_model_and_the_random_state_are_left_alone() -> None:
    model = make_model()
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    range_test(model, make_batches(), steps_per_width=8, threshold=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_seed_makes_it_reproducible_whatever_came_before() -> None:
    model = make_model()
    data = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*make_batches(), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    first = range_test(model, loader, steps_per_width=12, threshold=0.1, seed=3)
    torch.rand(5)
    assert range_test(model, loader, steps_per_width=12, threshold=0.1, seed=3) == first
    assert range_test(model, loader, steps_per_width=12, threshold=0.1, seed=4).losses != first.losses


def test_every_width_sees_the_same_batches_from_the_same_weights() -> None:
    seen: dict[int, list[tuple[float, float]]] = {}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        weight = float(next(model.parameters()).detach().sum())
        seen.setdefault(width_of(model), []).append((float(batch[0].sum()), weight))
        return default_loss(model, batch)

    range_test(make_model(), make_batches(), loss=loss, steps_per_width=10, widths=(4, 8), threshold=0.01)
    assert list(seen) == [32, 4, 8]
    assert len({tuple(batch for batch, _ in steps) for steps in seen.values()}) == 1
    assert len({steps[0][1] for steps in seen.values()}) == 1
    assert seen[4][-1][1] != seen[8][-1][1]


def test_a_width_measures_the_same_in_any_company() -> None:
    options: dict[str, Any] = {"steps_per_width": 12, "threshold": 0.01}
    alone = range_test(make_model_of(1), make_batches(), widths=[8], **options)
    assert range_test(make_model_of(1), make_batches(), widths=[4, 6, 8], **options).losses[-1] == alone.losses[0]


def test_widths_gradient_and_recipe_reach_the_model() -> None:
    bits = set()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        state = precision_of(model)
        bits.add(tuple(int(width) for width in (state.schedule.bits(0) if state.schedule else ())))
        assert not model.training or "paper" in history_of(model).pipeline
        return default_loss(model, batch)

    options: dict[str, Any] = {"widths": (6, 4, 4), "gradient": 5, "recipe": "paper", "threshold": 0.01}
    result = range_test(make_model(), make_batches(), loss=loss, steps_per_width=4, **options)
    assert bits == {(32, 32, 32), (4, 4, 5), (6, 6, 5)}
    assert result.widths == (4, 6)


def test_data_that_can_start_again_does() -> None:
    loads = 0

    class Twice:
        def __iter__(self) -> Iterator[Batch]:
            nonlocal loads
            loads += 1
            return iter(make_batches(3))

    range_test(make_model(), Twice(), steps_per_width=8, threshold=0.01, widths=[8])
    assert loads == 3


def test_an_iterator_that_is_long_enough_will_do() -> None:
    assert range_test(make_model(), iter(make_batches()), steps_per_width=8, threshold=0.01).q_min


class WithLoss(nn.Module):
    """Takes keywords and returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.inner(x), labels)}


def test_batches_may_be_keywords() -> None:
    batches = [{"x": x, "labels": y} for x, y in make_batches()]
    result = range_test(WithLoss(), batches, steps_per_width=20)
    assert result.full_precision_drop > 0.5


def test_the_optimizer_is_the_users() -> None:
    made = []

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return made[-1]

    range_test(make_model(), make_batches(), optimizer=optimizer, steps_per_width=12, widths=(4, 8), threshold=0.01)
    assert len(made) == 3


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"widths": []}, ValueError, "widths must hold at least one"),
        ({"widths": [3.5]}, TypeError, "widths must be an integer from 1 to 31, got 3.5"),
        ({"widths": [32]}, ValueError, "widths must be an integer from 1 to 31, got 32"),
        ({"steps_per_width": 0}, ValueError, "steps_per_width must be an integer of at least 4, got 0"),
        ({"threshold": 0}, ValueError, "threshold must be a share above 0 and at most 1, got 0"),
        ({"threshold": "0.5"}, ValueError, "threshold must be a share .* got '0.5'"),
        ({"gradient": 0}, ValueError, "gradient must be an integer from 1 to 32, got 0"),
        ({"recipe": "papr"}, ValueError, "unknown recipe 'papr'.* Did you mean \"paper\""),
        ({"data": []}, ValueError, "data is empty"),
        ({"data": 3}, TypeError, "data must be an iterable of batches, got int"),
        ({"data": [torch.zeros(4, 32)]}, TypeError, "a batch must be .* got Tensor: pass loss="),
        (
            {"data": iter(make_batches(3))},
            ValueError,
            "ended after 3 of steps_per_width=50 batches and cannot be started again",
        ),
        ({"data": [{"input": torch.zeros(4, 32)}]}, TypeError, "returned no loss: pass loss="),
        ({"model": len}, TypeError, "model must be a torch.nn.Module, got builtin_function_or_method"),
        ({"loss": lambda model, batch: 0.5}, TypeError, "loss must return a tensor with one element, got float"),
        ({"loss": lambda model, batch: model(batch[0])}, TypeError, r"got shape \(32, 10\)"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}, ValueError, "no progress in full precision: .*optimizer"),
        ({"exclude": ["no.such"]}, ValueError, "no.such"),
    ],
)
def test_bad_input_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"model": make_model(), "data": make_batches(), **changes}
    with pytest.raises(error, match=message):
        range_test(arguments.pop("model"), arguments.pop("data"), **arguments)


def test_no_width_that_trains_is_an_error_with_the_measurement() -> None:
    with pytest.raises(
        ValueError, match=r"8 bits do not reach 80 % .* \(2 bits 100 %, .* 8 bits 30 %\): try more widths"
    ):
        scripted({8: 0.3})


def test_it_shows_and_saves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = scripted({2: 0.5})
    text = str(result)
    assert text.startswith("range test: q_min = 3, at 80 % of the progress in full precision\n")
    assert [line.split()[0] for line in text.splitlines() if "%" in line][1:] == [
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
        "32",
    ]
    ax = result.plot(tmp_path / "range.svg")
    assert (tmp_path / "range.svg").stat().st_size > 1000
    labels = [line.get_label() for line in ax.get_lines()]
    assert labels[:3] == ["full precision", "2 bits", "3 bits (q_min)"]
    assert json.loads(json.dumps(result.to_dict()))["progress"][0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("progress", "widths", "lower"),
    [({}, (3, 4), True), ({3: 0.5}, (3, 4), False), ({}, (1, 2), False), ({}, (5,), True)],
)
def test_where_the_lowest_width_passes_q_min_is_a_bound(
    progress: dict[int, float], widths: tuple[int, ...], lower: bool
) -> None:
    """Below one bit there is nothing left to try."""
    result = scripted(progress, widths=widths)
    assert result.at_lower_end is lower
    assert result.to_dict()["at_lower_end"] is lower
    assert (f"q_min = {result.q_min} or less: the lowest width tried passes" in str(result)) is lower


def test_the_result_is_frozen_and_public() -> None:
    assert cpt_fx.schedules.range_test is range_test
    assert cpt_fx.schedules.RangeTest is RangeTest
    with pytest.raises(dataclasses.FrozenInstanceError):
        scripted({}).q_min = 3  # type: ignore[misc]


def test_the_progress_bar_is_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    range_test(make_model(), [0], loss=Scripted({}), steps_per_width=8, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "range test" in shown.err


def test_losses_of_torch_are_applied_to_output_and_target() -> None:
    batches = [(torch.randn(16, 4), torch.randint(0, 3, (16,))) for _ in range(3)]
    batches = [(x, x[:, :3].argmax(1)) for x, _ in batches]
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    results = [
        range_test(model, batches, widths=(8,), steps_per_width=30, progress=False, loss=loss).losses
        for loss in (nn.functional.cross_entropy, nn.CrossEntropyLoss(), default_loss)
    ]
    assert results[0] == results[1] == results[2]


def test_a_loss_of_torch_may_be_partial_but_not_a_class() -> None:
    batches = [(torch.randn(16, 4), torch.randint(0, 2, (16,)))] * 3
    net = nn.Sequential(nn.Linear(4, 2))
    partial = functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)
    found = range_test(net, batches, widths=(8,), steps_per_width=20, progress=False, loss=partial)
    assert found.q_min == 8
    with pytest.raises(TypeError, match="got the class CrossEntropyLoss: call it first"):
        range_test(net, batches, widths=(8,), progress=False, loss=nn.CrossEntropyLoss)  # type: ignore[arg-type]
