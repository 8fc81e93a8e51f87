"""The way of a training run back to PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import cpt_fx
from cpt_fx.ort.trainer import draw
from tests import ort
from tests.ort.trainers import close, losses, noted, trainer_of


def test_weights_go_back_to_the_plain_model() -> None:
    trainer = trainer_of()
    losses(trainer, 5)
    model = ort.net()
    assert trainer.to_torch(model) is model
    trained = trainer.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    assert model.norm.num_batches_tracked == 5
    assert bool(model.state_dict()["norm.running_mean"].any())


def test_ranges_go_back_to_a_transformed_model() -> None:
    trainer = trainer_of()
    losses(trainer, 5)
    result = cpt_fx.transform(ort.net(), ort.schedule())
    trainer.to_torch(result)
    ranges = {name: value for name, value in result.state_dict().items() if "cpt_fx_input_range" in name}
    trained = trainer.state_dict()
    assert ranges and all(torch.equal(value, trained[name]) for name, value in ranges.items())
    assert any(value != 0 for value in ranges.values())


def test_tied_weights_stay_one() -> None:
    trainer = trainer_of(directory=ort.tied_directory(), learning_rate=0.05)
    for number in range(4):
        trainer.step(*ort.tokens(number))
    trained = trainer.state_dict()
    assert trained["embedding.weight"] is trained["head.weight"]
    model = ort.tied()
    before = copy.deepcopy(model)
    trainer.to_torch(model)
    assert model.head.weight is model.embedding.weight
    assert not torch.equal(model.head.weight, before.head.weight)
    assert torch.equal(model.frozen.weight, before.frozen.weight)
    assert not model.frozen.weight.requires_grad


def test_what_comes_back_is_a_copy() -> None:
    trainer = trainer_of()
    trained = trainer.state_dict()
    kept = {name: value.clone() for name, value in trained.items()}
    losses(trainer, 2)
    assert all(torch.equal(trained[name], kept[name]) for name in kept)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimizers_of_torch_drive_it(momentum: float) -> None:
    """On the same memory: RMSprop, which there is no graph for, against a run in torch."""
    trainer = trainer_of(ort.full())
    parameters = trainer.torch_parameters()
    optimizer = torch.optim.RMSprop(parameters.values(), lr=0.01, momentum=momentum)
    model = ort.net()
    other = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=momentum)
    for number in range(10):
        x, target = ort.batch(number)
        optimizer.zero_grad()
        loss = trainer.backward(x, target)
        optimizer.step()
        trainer.advance()
        other.zero_grad()
        expected = nn.functional.cross_entropy(model(x), target)
        expected.backward()
        other.step()
        assert loss == pytest.approx(expected.item(), abs=1e-4)
    assert trainer.updates == trainer.schedule.position == 10
    close(trainer.state_dict(), model.state_dict(), 1e-4)


def test_the_exported_optimizer_starts_where_it_starts(tmp_path: Path) -> None:
    """After updates from outside it has seen none: its first correction of bias is that of a first update."""
    directory = ort.with_optimizer(ort.net_directory(), tmp_path / "d", ort.net(), "adamw")
    trainer = trainer_of(ort.full(), directory)
    for number in range(3):
        trainer.backward(*ort.batch(number))
        trainer.advance()
    losses(trainer, 1, 3)
    assert trainer.optimizer_steps == 1
    remembered = torch.from_numpy(trainer.memory.moments["last.weight.exp_avg"].read())
    torch.testing.assert_close(remembered, 0.1 * trainer.gradients()["last.weight"])
    assert trainer.updates == 4


def test_nothing_is_copied() -> None:
    trainer = trainer_of(ort.full())
    parameters = trainer.torch_parameters()
    assert trainer.torch_parameters()["last.weight"] is parameters["last.weight"]
    trainer.backward(*ort.batch(0))
    place = parameters["last.weight"].grad
    assert place is not None and place.abs().sum() > 0
    with torch.no_grad():
        parameters["last.weight"].fill_(7.0)
    assert bool((trainer.state_dict()["last.weight"] == 7).all())
    losses(trainer, 1)
    assert not bool((parameters["last.weight"] == 7).all())


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_add_up_as_in_torch(to_none: bool) -> None:
    """Two calls add up; `zero_grad` starts afresh, and so does `advance`."""
    trainer = trainer_of(ort.full())
    parameters = trainer.torch_parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.0)

    def gradient() -> Tensor:
        found = parameters["last.weight"].grad
        assert found is not None
        return found.clone()

    trainer.backward(*ort.batch(0))
    once = gradient()
    trainer.backward(*ort.batch(0))
    torch.testing.assert_close(gradient(), 2 * once)
    optimizer.zero_grad(set_to_none=to_none)
    trainer.backward(*ort.batch(0))
    torch.testing.assert_close(gradient(), once)
    trainer.advance()
    trainer.backward(*ort.batch(0))
    torch.testing.assert_close(gradient(), once)
    parameters["last.weight"].grad = 3 * once
    trainer.backward(*ort.batch(0))
    torch.testing.assert_close(gradient(), 4 * once)


def test_gradients_can_be_looked_at() -> None:
    trainer = trainer_of(ort.full())
    model = ort.net()
    x, target = ort.batch(0)
    trainer.backward(x, target)
    nn.functional.cross_entropy(model(x), target).backward()
    found = trainer.gradients()
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-7)


def test_foreign_memory_is_noticed() -> None:
    trainer = trainer_of()
    weight = trainer.torch_parameters()["last.weight"]
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match=r"the parameter last\.weight was given other memory"):
        trainer.backward(*ort.batch(0))


def test_seeds_are_drawn_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    given = noted(monkeypatch)
    generator = torch.Generator()
    generator.set_state(trainer.generator.get_state())
    expected = torch.randint(-(2**31), 2**31, (trainer.manifest.seeds, 2), dtype=torch.int32, generator=generator)
    losses(trainer, 1)
    assert trainer.manifest.seeds > 0
    assert torch.equal(torch.from_numpy(given[0]["seeds"]), expected)
    assert draw(3, generator).shape == (3, 2)
