"""One file that holds a training run: what goes into it, how it is written, and what must fit when it comes back.

It has a line that says what it is, a line of JSON, arrays, and a checksum. It is written beside its target and moved
there when it is complete, so that there is always a whole file, also when the process is killed. Nothing in it is code:
numbers and JSON only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cpt_fx.ort.memory import Block
    from cpt_fx.ort.trainer import Trainer

Array = NDArray[Any]

_MAGIC = b"cpt_fx training state, format 1\n"
_DIGEST = hashlib.sha256().digest_size
_KINDS = "fiub"
_GENERATOR = "generator"


class StateFileError(ValueError):
    """A file does not hold the state of a training run, or not that of this one."""


def save(trainer: Trainer, path: Path) -> None:
    """Write everything that the following steps depend on."""
    facts = {
        "updates": trainer.updates,
        "optimizer_steps": trainer.optimizer_steps,
        "pending": trainer.pending,
        "accumulation": trainer.accumulation,
        "learning_rates": trainer.optimizer_view.rates(),
        "optimizer": trainer.manifest.optimizer.name,
        "schedule": trainer.schedule.state_dict(),
    }
    arrays = {name: block.read() for name, block in _blocks(trainer, trainer.pending).items()}
    arrays[_GENERATOR] = trainer.generator.get_state().numpy()
    write(path, facts, arrays)


def load(trainer: Trainer, path: Path, *, schedule: bool) -> None:
    """Continue where a file was saved; a file that does not fit changes nothing."""
    facts, arrays = read(path)
    mine, view = trainer.manifest.optimizer.name, trainer.optimizer_view
    if facts["optimizer"] != mine:
        raise StateFileError(f"{path} is of a training with {facts['optimizer']}, this one is with {mine}")
    pending = int(facts["pending"])
    if pending and facts["accumulation"] != trainer.accumulation:
        raise StateFileError(
            f"{path} was saved after {pending} of the {facts['accumulation']} steps of an update, and this trainer has "
            f"accumulation={trainer.accumulation}: pass accumulation={facts['accumulation']}"
        )
    rates = facts["learning_rates"]
    if len(rates) != len(view.rates()):
        raise StateFileError(f"{path} has {len(rates)} parameter groups, this training {len(view.rates())}")
    blocks = _blocks(trainer, pending)
    here = {name: _described(block) for name, block in blocks.items()}
    here[_GENERATOR] = _described(trainer.generator.get_state().numpy())
    there = {name: _described(array) for name, array in arrays.items()}
    for name in here | there:
        if here.get(name) != there.get(name):
            raise StateFileError(
                f"{path} is of another model: {name} is {there.get(name, 'not in it')}, and "
                f"{here.get(name, 'not known')} here"
            )
    if schedule:
        # The last that may fail: from here on everything fits.
        trainer.schedule.load_state_dict(facts["schedule"])
    for name, block in blocks.items():
        block.write(arrays[name])
    trainer.generator.set_state(torch.from_numpy(arrays[_GENERATOR].copy()))
    view.write_rates(rates)
    trainer.updates, trainer.pending = int(facts["updates"]), pending
    trainer.optimizer_steps = int(facts["optimizer_steps"])


def _described(array: Array | Block) -> str:
    return f"{array.dtype} {array.shape}"


def _blocks(trainer: Trainer, pending: int) -> dict[str, Block]:
    """Return what is saved, by names that say what it is. Gradients count where an update is half gathered."""
    memory = trainer.memory
    kinds = {"parameter": memory.parameters, "state": memory.states, "moment": memory.moments}
    if pending:
        kinds["gradient"] = memory.gradients
    return {f"{kind} {name}": block for kind, blocks in kinds.items() for name, block in blocks.items()}


def write(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write facts (what JSON can say) and arrays; what was at the path stays until all is written."""
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot save to {path}: there is no directory {path.parent}")
    listed = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"facts": facts, "arrays": listed}).encode()
    # One array after the other: together they may be much.
    parts = itertools.chain((_MAGIC, header, b"\n"), (array.tobytes() for array in arrays.values()))
    # Always the same name: what a killed process left behind is written over by the next one.
    working = path.with_name(f".{path.name}.partial")
    try:
        with working.open("wb") as file:
            summed = hashlib.sha256()
            for part in parts:
                summed.update(part)
                file.write(part)
            file.write(summed.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(working, path)
    except BaseException:
        working.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return facts and arrays, if every byte is as it was written."""
    data = memoryview(Path(path).read_bytes())
    if data[: len(_MAGIC)] != _MAGIC:
        found = bytes(data[: len(_MAGIC) + 4])
        raise StateFileError(f"{path} was not written by Trainer.save of this cpt_fx: it begins with {found!r}")
    body, digest = data[:-_DIGEST], bytes(data[-_DIGEST:])
    if hashlib.sha256(body).digest() != digest:
        raise StateFileError(f"{path} is damaged or cut short: its checksum does not fit. Load an earlier one")
    start = len(_MAGIC)
    end = bytes(body).index(b"\n", start)
    arrays: dict[str, Array] = {}
    place = end + 1
    try:
        header = json.loads(bytes(body[start:end]))
        for name, kind, shape in header["arrays"]:
            dtype = np.dtype(kind)
            if dtype.kind not in _KINDS:
                raise ValueError(f"{name} is of the kind {kind}, not of numbers")
            count = math.prod(shape)
            arrays[name] = np.frombuffer(body, dtype, count, place).reshape(shape)
            place += count * dtype.itemsize
        return dict(header["facts"]), arrays
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise StateFileError(f"{path} has a checksum that fits, but was not written by Trainer.save: {error}") from None
