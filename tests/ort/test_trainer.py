"""A training run: steps, gathered gradients, schedules, learning rates, evaluation, and the way back to PyTorch."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime.training.api", exc_type=ImportError)
pytest.importorskip("onnxscript")

import cpt_fx
from cpt_fx.export.training import ort_training
from cpt_fx.ort import Trainer
from cpt_fx.ort.loops import arranged, draw
from tests import ort


def trainer_of(schedule: Any = None, directory: Path | None = None, **options: Any) -> Trainer:
    options = {"seed": 5, "threads": 1} | options
    return Trainer(directory or ort.net_directory(), schedule or ort.schedule(), **options)


def losses(trainer: Trainer, count: int, start: int = 0) -> list[float]:
    return [trainer.step(*ort.batch(number)) for number in range(start, start + count)]


def test_equal_seeds_give_equal_numbers() -> None:
    first, second = losses(trainer_of(), 12), losses(trainer_of(), 12)
    assert first == second
    assert losses(trainer_of(seed=6), 12) != first


def test_the_seed_is_of_torchs_generator_by_default() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(losses(trainer_of(seed=None), 6))
    assert found[0] == found[1]
    assert losses(trainer_of(seed=None), 6) != found[0], "a second trainer draws a seed of its own"


def test_it_learns() -> None:
    trainer = trainer_of(learning_rate=0.3)
    x, target = ort.batch(0, 64)
    found = [trainer.step(x, target) for _ in range(40)]
    assert found[-1] < found[0] / 1.5


@pytest.mark.parametrize("name", ["CR", "LT", "ETV"])
def test_one_directory_serves_any_schedule(name: str) -> None:
    """The widths that the graph sees are those of the schedule, step by step."""
    schedule = ort.schedule(name)
    trainer = trainer_of(schedule)
    seen = []
    for number in range(40):
        trainer.step(*ort.batch(number))
        seen.append(
            [int(trainer._backward.controls[f"bits.{role}"].read()) for role in ("weight", "activation", "gradient")]
        )
    assert seen == ort.schedule(name).trajectory().tolist()
    assert len({tuple(row) for row in seen}) > 2
    assert trainer.schedule.position == trainer.updates == 40


def test_schedules_train_differently() -> None:
    found = [losses(trainer_of(ort.schedule(name)), 10) for name in ("CR", "LT", "ETV")]
    assert len({tuple(item) for item in found}) == 3


def test_low_widths_show_in_the_weights() -> None:
    """At two bits the loss is another than in full precision: the width reaches the quantizers."""
    two, many = (trainer_of(cpt_fx.schedules.Static(bits)) for bits in (2, 32))
    assert abs(two.step(*ort.batch(0)) - many.step(*ort.batch(0))) > 1e-3


def test_past_the_end_the_schedule_warns_as_ever() -> None:
    trainer = trainer_of(cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=2, cycles=1))
    losses(trainer, 2)
    with pytest.warns(UserWarning, match="past the end"):
        losses(trainer, 1)


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
    _close(trainer.state_dict(), model.state_dict())


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
    _close(trainer.state_dict(), model.state_dict())


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


def test_schedulers_of_torch_drive_it() -> None:
    """Without a warning about the order of calls: the trainer counts as an optimizer."""
    trainer = trainer_of(learning_rate=0.4)
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer_view, step_size=2, gamma=0.5)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(5):
            trainer.step(*ort.batch(number))
            seen.append(trainer._update.controls["learning_rate"].read().tolist())
            scheduler.step()
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


# Evaluation.


def test_evaluation_changes_nothing() -> None:
    one, other = trainer_of(), trainer_of()
    for number in range(6):
        loss, outputs = one.evaluate(*ort.batch(100 + number, 3 + number))
        assert np.isfinite(loss) and isinstance(outputs, np.ndarray) and outputs.shape == (3 + number, ort.CLASSES)
        assert one.step(*ort.batch(number)) == other.step(*ort.batch(number))


def test_evaluation_uses_its_own_widths() -> None:
    def schedule(eval_bits: int) -> Any:
        return cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=40, cycles=2, eval_bits=eval_bits)

    results = {bits: trainer_of(schedule(bits)).evaluate(*ort.batch(0))[0] for bits in (2, 8, 32)}
    assert len(set(results.values())) == 3
    full = nn.functional.cross_entropy(ort.net().eval()(ort.batch(0)[0]), ort.batch(0)[1]).item()
    assert results[32] == pytest.approx(full, abs=1e-6)


def test_evaluation_equals_pytorch() -> None:
    """With the trained weights, statistics and ranges, the transformed model says the same."""
    trainer = trainer_of()
    losses(trainer, 15)
    schedule = ort.schedule()
    result = cpt_fx.transform(ort.net(), schedule)
    schedule.step(15)
    trainer.to_torch(result)
    x, target = ort.batch(50)
    with torch.no_grad():
        expected = result.eval()(x)
    loss, outputs = trainer.evaluate(x, target)
    torch.testing.assert_close(torch.from_numpy(outputs), expected, rtol=0, atol=1e-5)
    assert loss == pytest.approx(nn.functional.cross_entropy(expected, target).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("output",), 0),
        (("output_0", "output_1"), (0, 1)),
        (("output.logits",), {"logits": 0}),
        (("output.logits", "output.hidden_0"), {"logits": 0, "hidden_0": 1}),
    ],
)
def test_outputs_come_as_the_model_returns_them(names: tuple[str, ...], expected: Any) -> None:
    found: Any = arranged([(name, np.array(index)) for index, name in enumerate(names)])
    if isinstance(found, np.ndarray):
        found = int(found)
    elif isinstance(found, dict):
        found = {name: int(value) for name, value in found.items()}
    else:
        found = tuple(int(value) for value in found)
    assert found == expected


def test_what_evaluation_draws_is_its_own() -> None:
    """Dropout that the model's code asks for in evaluation, too: the same each time, and training does not notice."""
    one, other = (trainer_of(directory=ort.tied_directory()) for _ in range(2))
    for number in range(4):
        first, second = (one.evaluate(*ort.tokens(9))[0] for _ in range(2))
        assert first == second
        assert one.step(*ort.tokens(number)) == other.step(*ort.tokens(number))


# State.


class Remembering(nn.Module):
    """Uses what a buffer held before it writes to it: the backward pass needs the old value after that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(ort.FEATURES, 16)
        self.last = nn.Linear(16, ort.CLASSES)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.clone()
        if self.training:
            self.scale.mul_(0.5).add_(x.detach().mean())
        made: Tensor = self.last(self.inner(x) * before)
        return made


def test_old_state_is_there_until_the_step_is_over(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = Remembering()
    result = cpt_fx.transform(copy.deepcopy(model), ort.full())
    ort_training(result, ort.batch(0)[:1], tmp_path / "d", loss="cross_entropy", optimizer="sgd")
    trainer = trainer_of(ort.full(), tmp_path / "d", learning_rate=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for number in range(6):
        x, target = ort.batch(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
        trainer.step(x, target)
    _close(trainer.state_dict(), model.state_dict())


def test_it_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever ONNX Runtime has to say comes as an exception, or not at all."""
    trainer = trainer_of(directory=ort.tied_directory())
    words, target = ort.tokens(0)
    trainer.step(words, target)
    trainer.evaluate(words, target)
    trainer._ranges = {}
    with pytest.raises(Exception, match="out of data bounds"):
        trainer.step(words + ort.WORDS, target)
    assert capfd.readouterr() == ("", "")


# Inputs.


def test_arrays_tensors_and_names_are_the_same() -> None:
    x, target = ort.batch(0)
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, target), {}),
        ((x.numpy(), target.numpy()), {}),
        ((x.double(), target.int()), {}),
        ((x,), {"target": target.short()}),
        ((), {"target": target, "x": x.clone().requires_grad_()}),
        ((x.t().contiguous().t(), target), {}),
    ]
    assert len({trainer_of().step(*args, **kwargs) for args, kwargs in given}) == 1


def test_other_batch_sizes() -> None:
    trainer = trainer_of()
    for size in (2, 9, 33, 2):
        trainer.step(*ort.batch(0, size))
        assert trainer.evaluate(*ort.batch(0, size))[1].shape == (size, ort.CLASSES)  # type: ignore[union-attr]


# PyTorch.


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
    _close(trainer.state_dict(), model.state_dict(), 1e-4)


def test_the_exported_optimizer_starts_where_it_starts(tmp_path: Path) -> None:
    """After updates from outside it has seen none: its first correction of bias is that of a first update."""
    directory = ort.with_optimizer(ort.net_directory(), tmp_path / "d", ort.net(), "adamw")
    trainer = trainer_of(ort.full(), directory)
    for number in range(3):
        trainer.backward(*ort.batch(number))
        trainer.advance()
    losses(trainer, 1, 3)
    assert trainer._update.controls["step"].read() == 1
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


def test_seeds_are_drawn_as_documented() -> None:
    trainer = trainer_of()
    generator = torch.Generator()
    generator.set_state(trainer.generator.get_state())
    expected = torch.randint(-(2**31), 2**31, (trainer.manifest.seeds, 2), dtype=torch.int32, generator=generator)
    losses(trainer, 1)
    assert trainer.manifest.seeds > 0
    assert torch.equal(torch.from_numpy(trainer._backward.controls["seeds"].read()), expected)
    assert draw(3, generator).shape == (3, 2)


def _close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=f"{name}: {found[name]}, {value}")
