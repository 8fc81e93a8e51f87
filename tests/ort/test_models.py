"""Trainings and evaluations of models of many kinds, next to PyTorch: in full precision, where nothing is rounded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import cpt_fx
from cpt_fx.errors import ExportError
from cpt_fx.export.training import ort_training
from tests import ort
from tests.ort.trainers import close, trainer_of

WIDTH, CLASSES = 8, 4


class Rotary(nn.Module):
    """Attention whose queries and keys are turned by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)
        self.frequencies: Tensor
        self.register_buffer("frequencies", 100 ** (-torch.arange(0, WIDTH // 2) / (WIDTH // 2)), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.frequencies)
        cos, sin = angles.cos(), angles.sin()
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).chunk(3, -1)
        mixed = torch.softmax(self.turned(q) @ self.turned(k).transpose(1, 2) / WIDTH**0.5, -1) @ v
        made: Tensor = self.outer(mixed.mean(1))
        return made


class Detached(nn.Module):
    """One layer on what came before it, and on the same without a way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        made: Tensor = self.last(h) + 0.5 * self.last(h.detach())
        return made


class Noisy(nn.Module):
    """Adds noise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.training:
            h = h + 0.1 * torch.randn_like(h)
        made: Tensor = self.last(h)
        return made


class Sequence(nn.Module):
    """Takes the batch in dim 1, as recurrent layers of torch do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.layer(x).mean(0))
        return made


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def spectral() -> nn.Module:
    model = plain()
    nn.utils.parametrizations.spectral_norm(model.get_submodule("0"))
    return model


class Case(NamedTuple):
    """A model, the shape of its example, shapes of batches, and the dim that is the batch."""

    make: Callable[[], nn.Module]
    example: tuple[int, ...]
    batches: tuple[tuple[int, ...], ...]
    batch: int = 0


CASES = {
    "rotary": Case(Rotary, (4, 6, WIDTH), ((4, 6, WIDTH), (3, 9, WIDTH), (1, 6, WIDTH))),
    "spectral norm": Case(spectral, (4, WIDTH), ((4, WIDTH), (3, WIDTH), (1, WIDTH))),
    "detached": Case(Detached, (4, WIDTH), ((4, WIDTH), (7, WIDTH), (1, WIDTH))),
    "example of one": Case(plain, (1, WIDTH), ((1, WIDTH), (4, WIDTH))),
    "batch in dim 1": Case(Sequence, (5, 4, WIDTH), ((5, 4, WIDTH), (5, 7, WIDTH), (6, 1, WIDTH)), 1),
    "no batch": Case(plain, (WIDTH,), ((WIDTH,), (WIDTH,)), -1),
}


def targets(case: Case, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(CLASSES, () if case.batch < 0 else (shape[case.batch],))


@pytest.mark.parametrize("name", CASES)
def test_models_train_and_evaluate_as_in_torch(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    model = case.make()
    example = torch.randn(case.example)
    given = {} if case.batch == 0 else {"loss": F.cross_entropy, "example_targets": targets(case, case.example)}
    options: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "sgd", **given}
    result = cpt_fx.transform(copy.deepcopy(model), ort.full(), example_inputs=(example,))
    ort_training(result, (example,), tmp_path / "d", **options)
    trainer = trainer_of(ort.full(), tmp_path / "d", learning_rate=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for shape in (*case.batches, *case.batches):
        x, target = torch.randn(shape), targets(case, shape)
        optimizer.zero_grad()
        loss = F.cross_entropy(model.train()(x), target)
        loss.backward()
        optimizer.step()
        assert trainer.step(x, target) == pytest.approx(loss.item(), abs=1e-5)
        with torch.no_grad():
            expected = model.eval()(x)
        found, outputs = trainer.evaluate(x, target)
        torch.testing.assert_close(torch.as_tensor(outputs), expected, rtol=0, atol=1e-5)
        assert found == pytest.approx(F.cross_entropy(expected, target).item(), abs=1e-5)
    trained = trainer.state_dict()
    close(trained, {name: value for name, value in model.state_dict().items() if name in trained})
    assert {name for name, value in model.named_parameters()} <= trained.keys()


def test_hooks_that_set_weights_are_refused(tmp_path: Path) -> None:
    model = plain()
    nn.utils.spectral_norm(model.get_submodule("0"))
    result = cpt_fx.transform(model, ort.full())
    mended = r"0 has the hook torch\.nn\.utils\.spectral_norm.*use torch\.nn\.utils\.parametrizations\.spectral_norm"
    with pytest.raises(ExportError, match=mended):
        ort_training(result, (torch.randn(4, WIDTH),), tmp_path / "d", loss="cross_entropy", optimizer="sgd")


def test_an_example_of_one_that_cannot_be_two(tmp_path: Path) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.inner(x.reshape(1, WIDTH))
            return made

    result = cpt_fx.transform(Once(), ort.full())
    options: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "sgd"}
    with pytest.raises(
        ExportError, match=r"a batch of one.*pass at least 2, or fix the batch with dynamic_batch=False"
    ):
        ort_training(result, (torch.randn(1, WIDTH),), tmp_path / "d", **options)


def test_noise_is_drawn_anew(tmp_path: Path) -> None:
    """randn_like: other numbers in each step, the same ones for the same seed, and none in evaluation."""
    torch.manual_seed(3)
    model = Noisy()
    result = cpt_fx.transform(copy.deepcopy(model), ort.full())
    x, target = torch.randn(16, WIDTH), torch.randint(CLASSES, (16,))
    ort_training(result, (x,), tmp_path / "d", loss="cross_entropy", optimizer="sgd")
    make = functools.partial(trainer_of, ort.full(), tmp_path / "d", learning_rate=0.0)
    one, other = make(), make()
    losses = [one.step(x, target) for _ in range(4)]
    assert len(set(losses)) == 4
    assert losses == [other.step(x, target) for _ in range(4)]
    expected = F.cross_entropy(model.eval()(x), target).item()
    assert one.evaluate(x, target)[0] == pytest.approx(expected, abs=1e-5)
    assert all(abs(loss - expected) < 0.2 for loss in losses)
