"""The three graphs of a training run, bound to its memory: backward, update, evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpt_fx.errors import ExportError
from cpt_fx.export.clipping import MAX_NORM, MAX_VALUE
from cpt_fx.export.manifest import Manifest
from cpt_fx.export.program import LOSS, MORE, OUTPUT, SEEDS
from cpt_fx.export.updates import GRADIENT_SCALE, LEARNING_RATE, STEP
from cpt_fx.ort.engine import CPU, Engine, Slot, slot_of
from cpt_fx.ort.memory import Block, Memory
from cpt_fx.runtime import dial_width
from cpt_fx.schedules import Bits

Array = NDArray[Any]
Outputs = Array | tuple[Array, ...] | dict[str, Array]


class _Bound:
    """An engine with everything bound but a batch: once for each place that the running state may be in.

    What changes from step to step (widths, seeds, the learning rate) lies in small blocks on the CPU, which are written
    in place.
    """

    changing: tuple[str, ...]
    """What changes beside widths, where the graph has it."""

    def __init__(self, engine: Engine, memory: Memory, manifest: Manifest, seeds: int = 0) -> None:
        self.seeds = seeds
        self.engine = engine
        self.memory = memory
        self.manifest = manifest
        names = [name for name in (*manifest.dials, *self.changing) if name in engine.inputs]
        self.controls = {name: Block(engine.inputs[name].zeros(), CPU) for name in names}
        kept = [LOSS] if LOSS in engine.outputs else []
        self.results = {name: Block(engine.outputs[name].zeros(), CPU) for name in kept}
        self._check()
        self._bindings = {(side, update): self._bind(side, update) for side in range(2) for update in range(2)}

    def _check(self) -> None:
        """Refuse a graph that is not the one which the manifest speaks of."""
        said = self.manifest
        passed = {tensor.name: slot_of(tensor) for tensor in (*said.inputs, *said.targets)}
        passed |= dict.fromkeys(said.dials, Slot("int64", ())) | {
            SEEDS: Slot("int32", (self.seeds, 2)), MORE: Slot("bool", ()), STEP: Slot("float64", ()),
            LEARNING_RATE: Slot("float64", (len(said.optimizer.learning_rates),)), GRADIENT_SCALE: Slot("float32", ()),
            MAX_VALUE: Slot("float32", ()), MAX_NORM: Slot("float32", ()),
        }  # fmt: skip
        returned = {LOSS: Slot("float32", ())} | {tensor.name: slot_of(tensor) for tensor in said.outputs}
        places, targets = (
            {name: Slot(block.dtype, block.shape) for name, block in blocks(0, 0).items()}
            for blocks in (self.memory.places, self.memory.targets)
        )
        for kind, found, known in (
            ("takes", self.engine.inputs, passed | places), ("returns", self.engine.outputs, returned | targets)
        ):  # fmt: skip
            for name, slot in found.items():
                other = known.get(name)
                if other is None or not slot.takes(other):
                    here = f"{self.engine.path} {kind} {name}, {slot}"
                    raise ExportError(f"{here}; the manifest says {other or 'nothing of it'}: export again")

    def _bind(self, side: int, update_side: int) -> Any:
        bindings = self.engine.bindings()
        self._bind_inputs(bindings, side, update_side)
        for name, block in (self.results | self.memory.targets(side, update_side)).items():
            if name in self.engine.outputs:
                bindings.bind_ortvalue_output(name, block.ort)
        return bindings

    def _bind_inputs(self, bindings: Any, side: int, update_side: int) -> None:
        for name, block in (self.memory.places(side, update_side) | self.controls).items():
            if name in self.engine.inputs:
                bindings.bind_ortvalue_input(name, block.ort)

    def ready(self) -> Any:
        """Return the bindings for where the running state is, and for what the controls hold now."""
        sides = self.memory.side, self.memory.update_side
        bindings = self._bindings[sides]
        if self.engine.device != CPU:
            # What lies on another device than the node that reads it is copied when it is bound, not when the graph
            # runs: on a GPU, what was written since then would not be seen.
            self._bind_inputs(bindings, *sides)
        return bindings

    def set(self, name: str, value: Any) -> None:
        """Write one of the controls, if the graph has it."""
        if name in self.controls:
            self.controls[name].write(np.asarray(value))

    def feed(self, arrays: dict[str, Array], bits: Bits) -> Any:
        """Write the width of each dial, and bind a batch; return the bindings."""
        for name, dial in self.manifest.dials.items():
            self.set(name, dial_width(dial.dial, bits))
        bindings = self.ready()
        for name, array in arrays.items():
            if name in self.engine.inputs:
                bindings.bind_cpu_input(name, array)
        return bindings


class Backward(_Bound):
    """Loss and gradients of a batch; running state goes on to its next value."""

    changing = (SEEDS, MORE)

    def __call__(self, arrays: dict[str, Array], bits: Bits, generator: torch.Generator, *, fresh: bool) -> float:
        """Run on a batch and return the loss; `fresh` gradients are written over the old ones, others are added."""
        self.set(MORE, not fresh)
        if self.seeds:
            self.set(SEEDS, draw(self.seeds, generator))
        self.engine.run(self.feed(arrays, bits))
        self.memory.swap()
        return float(self.results[LOSS].read().item())


class Clipping(_Bound):
    """Limits gathered gradients, in place."""

    changing = (MAX_VALUE, MAX_NORM, GRADIENT_SCALE)

    def __call__(self, value: float | None, norm: float | None, scale: float) -> None:
        """Limit each element of what the update will make of the gradients, then the norm of all."""
        self.set(MAX_VALUE, np.inf if value is None else value)
        self.set(MAX_NORM, np.inf if norm is None else norm)
        self.set(GRADIENT_SCALE, scale)
        self.engine.run(self.ready())


class Update(_Bound):
    """One update of the parameters. New values are written over the old ones: the graph is made for that."""

    changing = (LEARNING_RATE, STEP, GRADIENT_SCALE)

    def __call__(self, rates: NDArray[np.float64], step: int, scale: float) -> None:
        """Update with a learning rate for each group, after so many updates before."""
        self.set(LEARNING_RATE, rates)
        self.set(STEP, step)
        self.set(GRADIENT_SCALE, scale)
        self.engine.run(self.ready())
        self.memory.update_side = 1 - self.memory.update_side


class Evaluation(_Bound):
    """Loss and outputs of a batch; nothing changes."""

    changing = (SEEDS,)

    def __call__(self, arrays: dict[str, Array], bits: Bits, seed: int) -> tuple[float, Outputs]:
        """Run on a batch. Where a model draws at random even then, it does so from a seed of its own."""
        if self.seeds:
            self.set(SEEDS, draw(self.seeds, torch.Generator().manual_seed(seed)))
        bindings = self.feed(arrays, bits)
        names = [tensor.name for tensor in self.manifest.outputs]
        # Anew each time: what a run leaves there would be the memory of the next one, whose batch may be larger.
        for name in names:
            bindings.bind_output(name, CPU)
        self.engine.run(bindings)
        # In the order in which they were bound; the loss was first.
        _, *values = bindings.copy_outputs_to_cpu()
        return float(self.results[LOSS].read().item()), arranged(list(zip(names, values, strict=True)))


def draw(rows: int, generator: torch.Generator) -> Array:
    """Draw the seeds of one step."""
    seeds: Array = torch.randint(-(1 << 31), 1 << 31, (rows, 2), dtype=torch.int32, generator=generator).numpy()
    return seeds


def arranged(outputs: list[tuple[str, Array]]) -> Outputs:
    """Return outputs as their names say that the model returned them."""
    prefix = f"{OUTPUT}."
    if len(outputs) == 1 and not outputs[0][0].startswith(prefix):
        return outputs[0][1]
    if all(name.startswith(prefix) for name, _ in outputs):
        return {name.removeprefix(prefix): value for name, value in outputs}
    return tuple(value for _, value in outputs)
