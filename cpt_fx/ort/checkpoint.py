"""Saving and loading a training run: what goes into the file, and what must fit when it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpt_fx.ort import state_file
from cpt_fx.ort.memory import Block
from cpt_fx.ort.state_file import StateFileError

if TYPE_CHECKING:
    from cpt_fx.ort.trainer import Trainer

Array = NDArray[Any]
_GENERATOR = "generator"


def save(trainer: Trainer, path: Path) -> None:
    """Write everything that the following steps depend on."""
    facts = {
        "updates": trainer.updates,
        "optimizer_steps": trainer.optimizer_steps,
        "pending": trainer.pending,
        "accumulation": trainer.accumulation,
        "learning_rates": trainer.rates.get(),
        "optimizer": trainer.manifest.optimizer["name"],
        "schedule": trainer.schedule.state_dict(),
    }
    arrays = {name: block.read() for name, block in _blocks(trainer, trainer.pending).items()}
    arrays[_GENERATOR] = trainer.generator.get_state().numpy()
    state_file.write(path, facts, arrays)


def load(trainer: Trainer, path: Path, *, schedule: bool) -> None:
    """Continue where a file was saved; a file that does not fit changes nothing."""
    facts, arrays = state_file.read(path)
    mine = trainer.manifest.optimizer["name"]
    if facts["optimizer"] != mine:
        raise StateFileError(f"{path} is of a training with {facts['optimizer']}, this one is with {mine}")
    pending = int(facts["pending"])
    if pending and facts["accumulation"] != trainer.accumulation:
        raise StateFileError(
            f"{path} was saved after {pending} of the {facts['accumulation']} steps of an update, and this trainer has "
            f"accumulation={trainer.accumulation}: pass accumulation={facts['accumulation']}"
        )
    rates = facts["learning_rates"]
    if len(rates) != len(trainer.rates.get()):
        raise StateFileError(f"{path} has {len(rates)} parameter groups, this training {len(trainer.rates.get())}")
    blocks = _blocks(trainer, pending)
    _check(path, blocks, arrays)
    generator = torch.from_numpy(arrays[_GENERATOR].copy())
    if schedule:
        # The last that may fail: from here on everything fits.
        trainer.schedule.load_state_dict(facts["schedule"])
    for name, block in blocks.items():
        block.write(arrays[name])
    trainer.generator.set_state(generator)
    trainer.rates.write(rates)
    trainer.updates, trainer.pending = int(facts["updates"]), pending
    trainer.optimizer_steps = int(facts["optimizer_steps"])


def _blocks(trainer: Trainer, pending: int) -> dict[str, Block]:
    """Return what is saved, by names that say what it is. Gradients count where an update is half gathered."""
    memory = trainer.memory
    kinds = {"parameter": memory.parameters, "state": memory.states, "moment": memory.moments}
    if pending:
        kinds["gradient"] = memory.gradients
    return {f"{kind} {name}": block for kind, blocks in kinds.items() for name, block in blocks.items()}


def _check(path: Path, blocks: Mapping[str, Block], arrays: Mapping[str, Array]) -> None:
    for name, block in blocks.items():
        if name not in arrays:
            raise StateFileError(f"{path} is of another model: it holds no {name}")
        array = arrays[name]
        if array.shape != block.shape or str(array.dtype) != block.dtype:
            raise StateFileError(
                f"{path} is of another model: its {name} is {array.dtype} {array.shape}, here it is {block.dtype} "
                f"{block.shape}"
            )
    extra = [name for name in arrays if name not in blocks and name != _GENERATOR]
    if extra:
        raise StateFileError(f"{path} is of another model: it holds {extra[0]}, which is not known here")
    if _GENERATOR not in arrays or arrays[_GENERATOR].dtype != np.uint8:
        raise StateFileError(f"{path} holds no state of the random generator")
