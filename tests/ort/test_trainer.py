"""A training run: steps, evaluation, state and inputs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import cpt_fx
from cpt_fx.export.training import ort_training
from cpt_fx.ort.trainer import arranged
from tests import ort
from tests.ort.trainers import close, losses, noted, trainer_of


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
def test_one_directory_serves_any_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widths that the graph sees are those of the schedule, step by step."""
    schedule = ort.schedule(name)
    trainer = trainer_of(schedule)
    given = noted(monkeypatch)
    losses(trainer, 40)
    steps = [one for one in given if "x" in one]
    seen = [[int(one[f"bits.{role}"]) for role in ("weight", "activation", "gradient")] for one in steps]
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


def test_old_state_is_there_until_the_step_is_over(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = ort.Remembering()
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
    close(trainer.state_dict(), model.state_dict())


def test_nothing_moves_between_steps() -> None:
    """What a step reads lies where the one before wrote it: running state in two places that take turns."""
    trainer = trainer_of(directory=ort.tied_directory(), clip_norm=1.0)
    memory = trainer.memory

    def places() -> list[dict[str, int]]:
        held = (memory.parameters, memory.gradients, memory.moments, memory.states)
        return [{name: block.tensor.data_ptr() for name, block in blocks.items()} for blocks in held]

    seen = []
    for number in range(4):
        seen.append(places())
        trainer.step(*ort.tokens(number))
    for kept in range(3):
        assert all(each[kept] == seen[0][kept] and each[kept] for each in seen)
    states = [each[3] for each in seen]
    assert states[0] == states[2] and states[1] == states[3]
    assert not {*states[0].values()} & {*states[1].values()}


def test_it_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever ONNX Runtime has to say comes as an exception, or not at all."""
    trainer = trainer_of(directory=ort.tied_directory())
    words, target = ort.tokens(0)
    trainer.step(words, target)
    trainer.evaluate(words, target)
    trainer.manifest.choices.clear()
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
