"""The values of a training run elsewhere: in a file, in a PyTorch model, or as parameters on shared memory."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cpt_fx.common.arrays import Array
from cpt_fx.common.files import digest
from cpt_fx.errors import nearest
from cpt_fx.ir.layer_state import is_range
from cpt_fx.ort.engine import Block, Memory
from cpt_fx.ort.manifest import Manifest

if TYPE_CHECKING:
    from cpt_fx.ort.trainer import Trainer

_DIGEST = hashlib.sha256().digest_size
_GENERATOR = "generator"
_FACTS = "facts"
_KNOWN = {"updates", "optimizer_steps", "pending", "learning_rates", "optimizer", "schedule"}


class StateFileError(ValueError):
    """A file does not hold the state of a training run, or holds that of another one."""


def save(trainer: Trainer, path: Path) -> None:
    """Write everything that the following steps depend on.

    The file is an archive of NumPy's (`.npz`) with arrays and JSON, and a checksum at its end. It is written beside its
    target and moved there when it is complete, so that there is always a complete file, even if the process is killed.
    It holds only numbers and text, no code.
    """
    facts = {
        "updates": trainer.updates,
        "optimizer_steps": trainer.optimizer_steps,
        "pending": trainer.pending,
        "learning_rates": trainer.optimizer_view.rates(),
        "optimizer": trainer.manifest.optimizer.name,
        "schedule": trainer.schedule.state_dict(),
    }
    arrays = {name: block.read() for name, block in _blocks(trainer, trainer.pending).items()}
    arrays[_GENERATOR] = trainer.generator.get_state().numpy()
    write(path, facts, arrays)


def load(trainer: Trainer, path: Path, *, schedule: bool) -> None:
    """Restore what `save` wrote; a file that does not fit changes nothing."""
    facts, arrays = read(path)
    mine, view = trainer.manifest.optimizer.name, trainer.optimizer_view
    if facts["optimizer"] != mine:
        raise StateFileError(f"{path} is of a training with {facts['optimizer']}, this one is with {mine}")
    pending = int(facts["pending"])
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
        # The last step that may fail: from here on everything fits.
        trainer.schedule.load_state_dict(facts["schedule"])
    for name, block in blocks.items():
        block.write(arrays[name])
    trainer.generator.set_state(torch.from_numpy(arrays[_GENERATOR].copy()))
    view.write_rates(rates)
    trainer.updates, trainer.pending = int(facts["updates"]), pending
    trainer.optimizer_steps = int(facts["optimizer_steps"])


def _blocks(trainer: Trainer, pending: int) -> dict[str, Block]:
    """Return the blocks to save, by kind and name; gradients only in the middle of an update."""
    memory = trainer.memory
    kinds = {"parameter": memory.parameters, "state": memory.states, "moment": memory.moments}
    if pending:
        kinds["gradient"] = memory.gradients
    return {f"{kind} {name}": block for kind, blocks in kinds.items() for name, block in blocks.items()}


def write(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write facts (as JSON) and arrays; an existing file stays until everything is written."""
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot save to {path}: there is no directory {path.parent}")
    # Always the same name: the next save overwrites what a killed process left behind.
    working = path.with_name(f".{path.name}.partial")
    try:
        with working.open("wb") as file:
            np.savez(file, **arrays, **{_FACTS: np.array(json.dumps(facts))})  # type: ignore[arg-type]
            file.flush()
            file.write(bytes.fromhex(digest(working)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(working, path)
    except BaseException:
        working.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return facts and arrays; refuse a file that was changed."""
    data = path.read_bytes()
    if hashlib.sha256(memoryview(data)[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise StateFileError(f"{path} is damaged or cut short, or was not written by Trainer.save of this cpt_fx")
    try:
        with np.load(io.BytesIO(data)) as held:
            arrays = {name: held[name] for name in held.files}
        facts = json.loads(str(arrays.pop(_FACTS)))
        if not isinstance(facts, dict) or set(facts) != _KNOWN:
            raise ValueError("it says other things of a run")
    except Exception as error:  # by numpy, zipfile or json
        raise StateFileError(f"{path} was not written by Trainer.save of this cpt_fx: {error}") from error
    return facts, arrays


def state_dict(manifest: Manifest, values: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return copies of all values by their names in PyTorch; names of one tensor share a copy."""
    found: dict[str, Tensor] = {}
    for tensor, names in _held(manifest):
        found |= dict.fromkeys(names, torch.from_numpy(values[tensor]).clone())
    return found


def to_torch(manifest: Manifest, values: Mapping[str, Array], model: nn.Module, *, strict: bool) -> None:
    """Write all values into a model; if something does not fit, raise an error that names it and write nothing."""
    kind = type(model).__name__
    parameters = dict(model.named_parameters(remove_duplicate=False))
    targets = parameters | dict(model.named_buffers(remove_duplicate=False))
    transformed = any(is_range(name) for name in targets)
    pairs: list[tuple[Tensor, Tensor]] = []
    known: set[str] = set()
    for tensor, names in _held(manifest):
        if is_range(tensor) and not transformed:
            continue  # A plain model has no running ranges.
        # Names of one tensor in the exported model may be separate tensors in this one.
        there = [name for name in names if name in targets]
        if not there:
            raise ValueError(f"{kind} has no parameter or buffer {tensor!r}.{nearest(tensor, targets)}")
        value = torch.from_numpy(values[tensor])
        for name in there:
            here, trained = _described(targets[name]), _described(value)
            if here != trained:
                raise ValueError(f"{name} of {kind} is {here}, and was trained as {trained}: this is another model")
            pairs.append((targets[name], value))
        known |= set(names)
    missing = [name for name in parameters if name not in known]
    if strict and missing:
        raise ValueError(
            f"the training knows nothing of {missing[0]!r}, a parameter of {kind}: it is another model, or does not "
            "use that parameter (pass strict=False to leave it as it is)"
        )
    with torch.no_grad():
        for target, value in pairs:
            target.copy_(value)


def _held(manifest: Manifest) -> list[tuple[str, tuple[str, ...]]]:
    """Return the tensors that training changes: the name of each in the graphs, and all its names in PyTorch."""
    states = [(state.name, (state.name,)) for state in manifest.states]
    return [(parameter.name, parameter.names) for parameter in manifest.parameters] + states


def _described(values: Tensor | Array | Block) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {tuple(values.shape)}"


class SharedParameters:
    """Torch parameters on the memory of a training run; `.grad` is where the backward pass writes."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.parameters = {name: nn.Parameter(memory.parameters[name].tensor) for name in memory.gradients}

    def before_backward(self, *, fresh: bool) -> None:
        """Point gradients to the shared memory and copy their values there, zeros where torch set them to None.

        `fresh`: the backward pass overwrites them, so nothing is copied.
        """
        for name, parameter in self.parameters.items():
            if parameter.data_ptr() != self._memory.parameters[name].tensor.data_ptr():
                raise RuntimeError(
                    f"the parameter {name} was given other memory (parameter.data = ...), which is not trained here: "
                    "write into it instead (parameter.copy_ under torch.no_grad())"
                )
            place = self._memory.gradients[name].tensor
            if parameter.grad is None or parameter.grad.data_ptr() != place.data_ptr():
                if not fresh:
                    place.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad.detach())
                parameter.grad = place
