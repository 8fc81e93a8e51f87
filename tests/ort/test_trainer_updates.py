"""Updates of a training run: gathered gradients and learning rates."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tests import ort
from tests.ort.trainers import close, losses, noted, trainer_of

# Accumulation.


def test_accumulation_is_of_the_mean() -> None:
    """In torch: the mean of the gradients of four batches, one update."""
    trainer = trainer_of(ort.full(), accumulation=4, learning_rate=0.5)
    model = ort.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for update in range(3):
        optimizer.zero_grad()
        for number in range(4):
            x, target = ort.batch(4 * update + number)
            assert trainer.pending == number
            trainer.step(x, target)
            (nn.functional.cross_entropy(model(x), target) / 4).backward()
        optimizer.step()
        assert (trainer.pending, trainer.updates, trainer.schedule.position) == (0, update + 1, update + 1)
    close(trainer.state_dict(), model.state_dict())


def test_an_update_before_its_time() -> None:
    """The last batches of an epoch: the mean is of those that there were."""
    trainer = trainer_of(ort.full(), accumulation=10, learning_rate=0.5)
    model = ort.net()
    for number in range(3):
        x, target = ort.batch(number)
        trainer.step(x, target)
        (nn.functional.cross_entropy(model(x), target) / 3).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    trainer.update()
    close(trainer.state_dict(), model.state_dict())


def test_widths_hold_within_an_update() -> None:
    trainer = trainer_of(accumulation=3)
    positions = []
    for number in range(6):
        positions.append(trainer.schedule.position)
        trainer.step(*ort.batch(number))
    assert positions == [0, 0, 0, 1, 1, 1]


# Learning rates.


def test_a_learning_rate_can_be_set() -> None:
    trainer = trainer_of(ort.full())
    assert trainer.lr == 0.01
    before = trainer.state_dict()
    trainer.lr = 0.0
    losses(trainer, 1)
    assert torch.equal(before["last.weight"], trainer.state_dict()["last.weight"])
    trainer.lr = 0.25
    losses(trainer, 1)
    assert not torch.equal(before["last.weight"], trainer.state_dict()["last.weight"])


def test_a_learning_rate_can_be_a_function() -> None:
    """Of the update, from 0; the same as setting each by hand."""
    asked = []

    def rate(update: int) -> float:
        asked.append(update)
        return 0.1 / (update + 1)

    one, other = trainer_of(learning_rate=rate), trainer_of()
    for number in range(5):
        other.lr = 0.1 / (number + 1)
        assert one.step(*ort.batch(number)) == other.step(*ort.batch(number))
    assert asked == [0, 1, 2, 3, 4]
    assert one.lr == pytest.approx(0.02)
    with pytest.raises(ValueError, match="learning_rate is a function"):
        one.lr = 0.5


def test_schedulers_of_torch_drive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warning about the order of calls: the trainer counts as an optimizer."""
    trainer = trainer_of(learning_rate=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer_view, step_size=2, gamma=0.5)
    given = noted(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(5):
            trainer.step(*ort.batch(number))
            scheduler.step()
    seen = [one["learning_rate"].tolist() for one in given if "learning_rate" in one]
    assert seen == [[0.4], [0.4], [0.2], [0.2], [0.1]]


def test_groups_have_their_own(tmp_path: Path) -> None:
    model = ort.net()
    groups = [{"params": [model.first.weight], "lr": 0.1}, {"params": [model.last.weight], "lr": 0.2}]
    directory = ort.with_optimizer(ort.net_directory(), tmp_path / "d", model, lambda _: torch.optim.SGD(groups))
    trainer = trainer_of(ort.full(), directory)
    assert trainer.lr == [0.1, 0.2]
    before = trainer.state_dict()
    trainer.lr = [0.0, 0.1]
    losses(trainer, 1)
    after = trainer.state_dict()
    assert torch.equal(before["first.weight"], after["first.weight"])
    assert not torch.equal(before["last.weight"], after["last.weight"])
    with pytest.raises(ValueError, match="3 learning rates were given for 2 parameter groups"):
        trainer.lr = [0.1, 0.1, 0.1]


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf")])
def test_a_learning_rate_is_a_sane_number(rate: float) -> None:
    with pytest.raises(ValueError, match="a learning rate must be a finite number"):
        trainer_of().lr = rate


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.4, step_size_up=2, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.7)],
            [3],
        ),
    ],
    ids=["one cycle", "lambda", "cosine", "restarts", "cyclic", "warmup, then exponential"],
)
def test_schedulers_do_what_they_do_in_torch(make: Callable[[Any], Any]) -> None:
    """Whole trainings, with the same rates as in torch."""
    trainer = trainer_of(ort.full(), learning_rate=0.3)
    model = ort.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ours, theirs = make(trainer.optimizer_view), make(optimizer)
    for number in range(7):
        x, target = ort.batch(number)
        assert trainer.lr == optimizer.param_groups[0]["lr"]
        trainer.step(x, target)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
        ours.step()
        theirs.step()
    close(trainer.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.4),
    ],
    ids=["one cycle", "cyclic"],
)
def test_schedulers_do_not_change_the_momentum(make: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"momentum is a constant of the exported update.*pass cycle_momentum=False"):
        make(trainer_of().optimizer_view)


# Clipping.


@pytest.mark.parametrize(
    ("norm", "value"), [(0.3, None), (1e3, None), (None, 0.05), (None, 1e3), (0.2, 0.05)],
    ids=["norm", "large norm", "value", "large value", "both"],
)  # fmt: skip
@pytest.mark.parametrize("accumulation", [1, 3])
def test_clipping_equals_torch(norm: float | None, value: float | None, accumulation: int) -> None:
    trainer = trainer_of(ort.full(), learning_rate=0.5, accumulation=accumulation, clip_norm=norm, clip_value=value)
    model = ort.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(4 * accumulation):
        x, target = ort.batch(number)
        trainer.step(x, target)
        (nn.functional.cross_entropy(model(x), target) / accumulation).backward()
        if number % accumulation == accumulation - 1:
            if value is not None:
                nn.utils.clip_grad_value_(model.parameters(), value)
            if norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    close(trainer.state_dict(), model.state_dict())


def test_gradients_that_are_no_numbers_stay_so() -> None:
    """As in torch: clipping hides nothing."""
    for trainer in (trainer_of(ort.full(), clip_norm=1.0), trainer_of(ort.full(), clip_value=1.0)):
        x, target = ort.batch(0)
        trainer.step(x * float("nan"), target)
        assert trainer.state_dict()["last.weight"].isnan().all()


@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_limits_are_above_zero(limit: float) -> None:
    for name in ("clip_norm", "clip_value"):
        with pytest.raises(ValueError, match=f"{name} must be a number above 0"):
            trainer_of(ort.full(), None, **{name: limit})
