"""ONNX Runtime's own API for training: its `Module` and `Optimizer` do what PyTorch and `Trainer` do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import cpt_fx
from cpt_fx.errors import ExportError
from cpt_fx.export.artifacts import update_graph
from cpt_fx.export.training import described, ort_training
from cpt_fx.ir.state import width_from
from cpt_fx.ort import Trainer
from cpt_fx.ort.environment import check_training
from cpt_fx.ort.trainer import draw
from tests import ort
from tests.ort.trainers import close, trainer_of

STEPS = 6
needs_api = pytest.mark.skipif(not check_training().works, reason="needs the extra ort-training")
Make = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class Loop:
    """A training of artifacts, as a user of that API writes it; inputs go in by their names."""

    def __init__(self, folder: Path, learning_rate: float) -> None:
        from onnxruntime.training.api import CheckpointState, Module, Optimizer

        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)
        self.optimizer.set_learning_rate(learning_rate)

    def run(self, feeds: dict[str, Any], *, training: bool = True) -> Any:
        self.module.train(training)
        return self.module(*(np.asarray(feeds[name]) for name in self.module.input_names()))

    def step(self, feeds: dict[str, Any]) -> float:
        loss = self.run(feeds)
        self.update()
        return float(loss)

    def update(self) -> None:
        self.optimizer.step()
        self.module.lazy_reset_grad()

    def values(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(value.data.copy()) for name, value in self.state.parameters}


def made(directory: Path, tmp_path: Path, learning_rate: float = 0.1) -> Loop:
    cpt_fx.export.ort_artifacts(directory, tmp_path / "artifacts")
    return Loop(tmp_path / "artifacts", learning_rate)


def feeds_of(trainer: Trainer, batch: tuple[Any, ...], *, training: bool = True) -> dict[str, Any]:
    """What the trainer is about to feed."""
    manifest, schedule = trainer.manifest, trainer.schedule
    bits = (schedule.bits if training else schedule.evaluation_bits)(schedule.position)
    widths = {name: np.array(width_from(source, bits), np.int64) for name, source in manifest.width_sources.items()}
    generator = trainer.generator.clone_state() if training else torch.Generator().manual_seed(trainer.updates)
    names = [tensor.name for tensor in (*manifest.inputs, *manifest.targets)]
    return {
        **dict(zip(names, batch, strict=True)),
        **widths,
        "seeds": draw(manifest.seeds if training else manifest.evaluation_seeds, generator),
    }


@needs_api
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.1),
    ],
    ids=["sgd", "adamw", "adam"],
)
def test_it_trains_as_pytorch(make: Make, tmp_path: Path) -> None:
    directory = ort.with_optimizer(ort.net_directory(), tmp_path / "d", ort.net(), make)
    loop = made(directory, tmp_path)
    model = ort.net()
    optimizer = make(model.parameters())
    widths = dict.fromkeys(("bits.weight", "bits.activation", "bits.gradient"), np.array(32))
    for number in range(STEPS):
        # Gradients of two batches, of other sizes.
        for size in (8, 5):
            x, target = ort.batch(number, size)
            loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()
            found = loop.run({"x": x, "target": target, "seeds": np.zeros((2, 2), np.int32), **widths})
            assert found == pytest.approx(loss.item(), abs=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        loop.update()
    close(loop.values(), {name: value.float() for name, value in model.state_dict().items()})


@needs_api
@pytest.mark.parametrize("name", ["net", "tied"])
def test_it_trains_as_trainer(name: str, tmp_path: Path) -> None:
    """At the widths of a schedule, with random rounding and dropout from the same seeds; running state goes along."""
    directory, batch = (ort.net_directory(), ort.batch) if name == "net" else (ort.tied_directory(), ort.tokens)
    trainer = trainer_of(directory=directory, learning_rate=0.05)
    loop = made(directory, tmp_path, 0.05)
    for number in range(STEPS):
        found = loop.step(feeds_of(trainer, batch(number, 8 + number)))
        assert found == pytest.approx(trainer.step(*batch(number, 8 + number)), abs=1e-5)
    close(loop.values(), {name: torch.from_numpy(value).float() for name, value in trainer._values().items()})
    loss, outputs = loop.run(feeds_of(trainer, batch(50), training=False), training=False)
    expected, scores = trainer.evaluate(*batch(50))
    assert loss == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(outputs, np.asarray(scores), atol=1e-4)


@needs_api
def test_old_state_is_there_until_the_step_is_over(tmp_path: Path) -> None:
    """Where the backward pass reads what a buffer was before the forward pass wrote to it."""
    torch.manual_seed(7)
    model = ort.Remembering()
    ort_training(
        cpt_fx.transform(copy.deepcopy(model), ort.full()), ort.batch(0)[:1], tmp_path / "d",
        loss="cross_entropy", optimizer="sgd",
    )  # fmt: skip
    loop = made(tmp_path / "d", tmp_path, 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    widths = dict.fromkeys(("bits.weight", "bits.activation", "bits.gradient"), np.array(32))
    for number in range(STEPS):
        x, target = ort.batch(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
        loop.step({"x": x, "target": target, "seeds": np.zeros((2, 2), np.int32), **widths})
    close(loop.values(), model.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
        lambda p: torch.optim.SGD([{"params": [one]} for one in p], lr=0.1),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p),
    ],
    ids=["momentum", "weight decay", "maximize", "groups", "amsgrad", "adam with weight decay", "rmsprop"],
)
def test_other_optimizers_go_through_the_trainer(make: Make, tmp_path: Path) -> None:
    optimizer = make(list(ort.net().parameters()))
    with pytest.raises(ExportError, match=r"training API knows AdamW .*: cpt_fx\.ort\.Trainer trains it"):
        update_graph(described(optimizer))


@pytest.mark.skipif(check_training().works, reason="the API is there")
def test_without_the_api_the_error_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"needs onnxruntime-training-cpu 1\.19(.*\n)+.*cpt_fx\[ort-training\]"):
        cpt_fx.export.ort_artifacts(ort.net_directory(), tmp_path / "artifacts")
    assert not (tmp_path / "artifacts").exists()
