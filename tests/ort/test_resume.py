"""Saved and resumed: the same losses to the last bit, also after SIGKILL; damaged and foreign files change nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import cpt_fx
from cpt_fx.ort import StateFileError, Trainer, transfer
from tests import ort
from tests.ort.trainers import losses

STEPS = 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`Net` with AdamW: there is something to remember."""
    target = tmp_path_factory.mktemp("resume") / "exported"
    return ort.with_optimizer(ort.net_directory(), target, ort.net(), lambda p: torch.optim.AdamW(p, lr=0.02))


def trainer_of(directory: Path, schedule: Any = None, **options: Any) -> Trainer:
    return Trainer(directory, schedule or ort.schedule(), **({"seed": 5, "threads": 1} | options))


@pytest.mark.parametrize("at", [0, 1, 7, 12])
def test_resume_is_exact(directory: Path, tmp_path: Path, at: int) -> None:
    trainer = trainer_of(directory)
    losses(trainer, at, 0)
    trainer.save(tmp_path / "state")
    expected = losses(trainer, 10, at)
    other = trainer_of(directory, seed=99)
    losses(other, 3, 70)
    other.load(tmp_path / "state")
    assert other.updates == other.schedule.position == at
    assert losses(other, 10, at) == expected
    for name, value in trainer.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_resume_in_the_middle_of_an_update(directory: Path, tmp_path: Path) -> None:
    trainer = trainer_of(directory, accumulation=4)
    losses(trainer, 6, 0)
    trainer.save(tmp_path / "state")
    expected = losses(trainer, 10, 6)
    other = trainer_of(directory, accumulation=4)
    other.load(tmp_path / "state")
    assert other.pending == 2
    assert losses(other, 10, 6) == expected


def test_learning_rates_are_resumed(directory: Path, tmp_path: Path) -> None:
    trainer = trainer_of(directory)
    trainer.lr = 0.125
    trainer.save(tmp_path / "state")
    other = trainer_of(directory)
    other.load(tmp_path / "state")
    assert other.lr == 0.125


def test_embedding_dropout_and_frozen_weights(tmp_path: Path) -> None:
    def run(trainer: Trainer, start: int) -> list[float]:
        return [trainer.step(*ort.tokens(number)) for number in range(start, start + 8)]

    trainer = trainer_of(ort.tied_directory())
    run(trainer, 0)
    trainer.save(tmp_path / "state")
    other = trainer_of(ort.tied_directory())
    other.load(tmp_path / "state")
    assert run(other, 8) == run(trainer, 8)


_CHILD = """
import sys
from pathlib import Path
from cpt_fx.ort import Trainer
from tests import ort
directory, state, log, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
trainer = Trainer(directory, ort.schedule(), seed=5, threads=1)
if state.exists():
    trainer.load(state)
with open(log, "a") as file:
    for number in range(trainer.updates, steps):
        loss = trainer.step(*ort.batch(number))
        file.write(f"{number} {loss.hex()}\\n")
        file.flush()
        trainer.save(state)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_process_goes_on(directory: Path, tmp_path: Path) -> None:
    """Killed wherever it is, in a step or while it saves: the file is whole, and what follows is the same."""
    log, state = tmp_path / "log", tmp_path / "state"
    log.touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(cpt_fx.__file__).parents[1]), *sys.path])}
    command = [sys.executable, "-c", _CHILD, str(directory), str(state), str(log), str(STEPS)]
    for after in sorted(random.Random(4).sample(range(1, STEPS - 5), 2)):
        child = subprocess.Popen(command, env=environment)
        while len(log.read_text().splitlines()) < after:
            assert child.poll() is None, "the training ended by itself"
            time.sleep(0.0005)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    subprocess.run(command, env=environment, check=True)
    assert {item.name for item in tmp_path.iterdir()} == {"log", "state"}
    expected = [loss.hex() for loss in losses(trainer_of(directory), STEPS, 0)]
    lines = [line.split() for line in log.read_text().splitlines()]
    assert {int(number) for number, _ in lines} == set(range(STEPS))
    assert [loss for _, loss in lines] == [expected[int(number)] for number, _ in lines]


def test_another_schedule_may_take_over(directory: Path, tmp_path: Path) -> None:
    trainer = trainer_of(directory)
    losses(trainer, 5, 0)
    trainer.save(tmp_path / "state")
    other = trainer_of(directory, cpt_fx.schedules.Static(8))
    with pytest.raises(ValueError, match="this state is of another schedule"):
        other.load(tmp_path / "state")
    assert other.updates == 0
    other.load(tmp_path / "state", schedule=False)
    assert (other.updates, other.schedule.position) == (5, 0)


def test_a_file_can_be_read_by_whom_the_user_allows(directory: Path, tmp_path: Path) -> None:
    """As any file that a program writes; and a link stays one."""
    (tmp_path / "latest").symlink_to(tmp_path / "state")
    trainer_of(directory).save(tmp_path / "latest")
    (tmp_path / "other").touch()
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert (tmp_path / "latest").is_symlink()


# What cannot be loaded changes nothing.


def _unchanged(trainer: Trainer, path: Path, message: str, error: type[Exception] = StateFileError) -> None:
    before, position, generator = trainer.state_dict(), trainer.schedule.position, trainer.generator.get_state()
    with pytest.raises(error, match=message):
        trainer.load(path)
    after = trainer.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert trainer.schedule.position == position and torch.equal(generator, trainer.generator.get_state())


def test_damaged_files_are_refused(directory: Path, tmp_path: Path) -> None:
    trainer = trainer_of(directory)
    losses(trainer, 3, 0)
    path = tmp_path / "state"
    trainer.save(path)
    data = path.read_bytes()
    losses(trainer, 2, 3)
    for length in (len(data) - 1, len(data) // 2, 200, 40, 32):
        path.write_bytes(data[:length])
        _unchanged(trainer, path, "damaged or cut short")
    for place in (60, len(data) // 3, len(data) - 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        _unchanged(trainer, path, "damaged or cut short")
    path.write_bytes(data + b"x")
    _unchanged(trainer, path, "damaged or cut short")
    path.write_bytes(b"")
    _unchanged(trainer, path, r"was not written by Trainer\.save")
    path.write_bytes(data)
    trainer.load(path)
    assert trainer.updates == 3


def test_foreign_files_are_refused(directory: Path, tmp_path: Path) -> None:
    trainer = trainer_of(directory)
    losses(trainer, 2, 0)
    path = tmp_path / "state"
    torch.save({"a": 1}, path)
    _unchanged(trainer, path, r"was not written by Trainer\.save")
    path.write_bytes(b"cpt_fx training state, format 1\n" + b"x" * 80)
    _unchanged(trainer, path, r"was not written by Trainer\.save of this cpt_fx")
    _unchanged(trainer, tmp_path / "nowhere", "nowhere", FileNotFoundError)
    trainer_of(ort.net_directory()).save(path)
    _unchanged(trainer, path, "is of a training with sgd, this one is with adamw")
    trainer_of(ort.tied_directory()).save(path)
    _unchanged(trainer, path, r"is of another model: parameter first\.weight is not in it, and float32 \(16, 6\) here")


def test_files_of_other_shapes_are_refused(directory: Path, tmp_path: Path) -> None:
    trainer = trainer_of(directory)
    path = tmp_path / "state"
    trainer.save(path)
    facts, arrays = transfer.read(path)
    transfer.write(path, facts, arrays | {"parameter last.weight": arrays["parameter last.bias"]})
    _unchanged(trainer, path, r"parameter last\.weight is float32 \(4,\), and float32 \(4, 16\) here")
    transfer.write(path, facts, arrays | {"parameter new.weight": arrays["parameter last.bias"]})
    _unchanged(trainer, path, r"parameter new\.weight is float32 \(4,\), and not known here")
    transfer.write(path, facts | {"learning_rates": [0.1, 0.2]}, arrays)
    _unchanged(trainer, path, "has 2 parameter groups, this training 1")
    del arrays["generator"]
    transfer.write(path, facts, arrays)
    _unchanged(trainer, path, "generator is not in it")


def test_another_accumulation_may_take_over(directory: Path, tmp_path: Path) -> None:
    """What was gathered so far counts: an update is of the mean of all that there is."""
    trainer = trainer_of(directory, accumulation=4)
    losses(trainer, 2, 0)
    trainer.save(tmp_path / "state")
    other = trainer_of(directory, accumulation=3)
    other.load(tmp_path / "state")
    losses(trainer, 1, 2)
    trainer.update()
    losses(other, 1, 2)
    assert other.updates == 1
    assert losses(other, 1, 3) == losses(trainer, 1, 3)


def test_a_save_that_fails_leaves_the_file(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(directory)
    path = tmp_path / "state"
    trainer.save(path)
    data = path.read_bytes()
    losses(trainer, 2, 0)

    def full_disk(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(path)
    assert path.read_bytes() == data
    assert [item.name for item in tmp_path.iterdir()] == ["state"]


def test_there_must_be_a_place_to_save(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere"):
        trainer_of(directory).save(tmp_path / "nowhere" / "state")


def test_nothing_in_a_file_is_code(directory: Path, tmp_path: Path) -> None:
    trainer_of(directory).save(tmp_path / "state")
    assert b"pickle" not in (tmp_path / "state").read_bytes()
    facts, arrays = transfer.read(tmp_path / "state")
    assert facts["schedule"]["schedule"] == "Cyclic"
    assert all(array.dtype.kind in "fiu" for array in arrays.values())
