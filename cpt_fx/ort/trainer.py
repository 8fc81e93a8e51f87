"""`Trainer`: train a directory of `export.ort_training` in ONNX Runtime under a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cpt_fx.common.arrays import Array
from cpt_fx.errors import ExportError, check_int
from cpt_fx.ir.state import width_from
from cpt_fx.ort import manifest as files
from cpt_fx.ort import transfer
from cpt_fx.ort.engine import CPU, BoundSession, Memory, session_providers
from cpt_fx.ort.environment import require_training
from cpt_fx.ort.feeding import arrays_of
from cpt_fx.ort.manifest import Manifest
from cpt_fx.schedules import Bits
from cpt_fx.schedules.base import Schedule

Outputs = Array | tuple[Array, ...] | dict[str, Array]
Rate = float | Sequence[float]
RateFunction = Callable[[int], Rate]


class Trainer:
    """Trains an exported model in ONNX Runtime; the bit-widths of its quantizers follow a schedule.

        trainer = cpt_fx.ort.Trainer(directory, schedule)
        for x, y in batches:
            loss = trainer.step(x, y)
        trainer.to_torch(model)

    One directory serves any schedule, since bit-widths are inputs of its graphs. For a given directory, seed and number
    of threads the results are the same in every run, bit for bit, even if training was interrupted and resumed by
    `save` and `load`. Another number of threads changes the order of sums.

    Args:
        directory: a directory that `cpt_fx.export.ort_training` wrote. Every file is compared with its checksum.
        schedule: the schedule of the bit-widths; `schedule.step()` is called after each update.
        device: `"cpu"`, `"cuda"` or `"cuda:1"`.
        accumulation: the number of steps per update, which uses the mean of their gradients.
        learning_rate: a number, one for each parameter group, or a function of the update, counted from 0, that
            returns either; None for that of the exported optimizer.
        clip_norm: the largest norm of all gradients together, as in `torch.nn.utils.clip_grad_norm_`; None: no limit.
        clip_value: the largest magnitude of a gradient's elements, as in `clip_grad_value_`; applied before the norm.
        seed: of stochastic rounding and dropout; None draws one from torch's generator (`torch.manual_seed`).
        threads: the number of threads of ONNX Runtime; None for one per core.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        schedule: Schedule,
        device: str = CPU,
        *,
        accumulation: int = 1,
        learning_rate: Rate | RateFunction | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        seed: int | None = None,
        threads: int | None = None,
    ) -> None:
        if not isinstance(schedule, Schedule):
            raise TypeError(
                f"schedule must be one of cpt_fx.schedules, got {type(schedule).__name__}: for fixed widths pass "
                "schedules.Static(8)"
            )
        self.accumulation = check_int("accumulation", accumulation, 1)
        if threads is not None:
            check_int("threads", threads, 1)
        for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name} must be a number above 0, or None, got {limit!r}")
        self.clip_norm, self.clip_value = clip_norm, clip_value
        require_training()
        session_providers(str(device))  # refuses a missing device before anything is read
        folder = Path(directory)
        self.manifest: Manifest = files.read(folder)
        """The manifest of the directory."""
        files.check_files(folder, self.manifest)
        self.schedule = schedule
        self.device = str(device)
        self.generator = torch.Generator()
        """Draws the seeds of each step: int32, `torch.randint(-2**31, 2**31, (manifest.seeds, 2))`."""
        self.generator.manual_seed(int(torch.randint(1 << 62, ())) if seed is None else check_int("seed", seed, 0))
        self._gradients, self._first_update, self._update, self._evaluation = (
            BoundSession(folder / name, self.device, threads)
            for name in (files.GRADIENTS, files.FIRST_UPDATE, files.UPDATE, files.EVALUATION)
        )
        self._clipping: BoundSession | None = None
        if clip_norm is not None or clip_value is not None:
            self._clipping = BoundSession(folder / files.CLIPPING, self.device, threads)
        self.memory = Memory(self.manifest, folder, self.device)
        """Every tensor of the training run, by name."""
        self.optimizer_view = OptimizerView(self.manifest.optimizer.learning_rates, learning_rate)
        """The optimizer to give to `torch.optim.lr_scheduler`: `CosineAnnealingLR(trainer.optimizer_view, 100)`."""
        self._shared: transfer.SharedParameters | None = None
        self.updates = 0
        """Number of updates so far."""
        self.optimizer_steps = 0
        """Number of these updates that the exported optimizer made."""
        self.pending = 0
        """Number of steps since the last update."""

    # Training.

    def step(self, *inputs_and_targets: Any, **named: Any) -> float:
        """Do one step on a batch and return its loss: forward, backward, and an update after `accumulation` steps.

        The model's inputs come first, then the targets, in the order of the manifest or by name: numpy arrays or torch
        tensors. Other float dtypes are converted, integers if every value fits.
        """
        loss = self.backward(*inputs_and_targets, **named)
        if self.pending >= self.accumulation:
            self.update()
        return loss

    def backward(self, *inputs_and_targets: Any, **named: Any) -> float:
        """Add a batch's gradients to those accumulated since the last update, and return its loss.

        Running ranges and statistics are updated. For torch optimizers see `torch_parameters`.
        """
        given = arrays_of(self.manifest, inputs_and_targets, named, training=True)
        if self._shared is not None:
            self._shared.before_backward(fresh=not self.pending)
        given |= self._widths(self.schedule.bits(self.schedule.position))
        given |= {files.SEEDS: draw(self.manifest.seeds, self.generator), files.MORE: np.array(self.pending > 0)}
        try:
            loss = self._gradients.run(given, self.memory.held(), self.memory.targets())[files.LOSS]
        except Exception:
            # Some gradients may already be written: all those accumulated so far are lost.
            self.pending = 0
            raise
        self.memory.swap_states()
        self.pending += 1
        return float(loss)

    def update(self) -> None:
        """Update the parameters now, with the mean of the accumulated gradients, even before `accumulation` steps."""
        self._require_gradients("update")
        limits = {files.MAX_VALUE: self.clip_value, files.MAX_NORM: self.clip_norm}
        given: dict[str, Array] = {
            name: np.array(np.inf if limit is None else limit, np.float32) for name, limit in limits.items()
        }
        given[files.GRADIENT_SCALE] = np.array(1 / self.pending, np.float32)
        held, targets = self.memory.held(), self.memory.targets()
        if self._clipping is not None:
            self._clipping.run(given, held, targets)
        given |= {
            files.LEARNING_RATE: self.optimizer_view.rates_at(self.updates),
            files.STEP: np.array(float(self.optimizer_steps)),
        }
        (self._update if self.optimizer_steps else self._first_update).run(given, held, targets)
        self.memory.swap_moments()
        self.optimizer_steps += 1
        self.advance()

    def advance(self) -> None:
        """Complete an update that a torch optimizer made: advance the schedule, and start new gradients."""
        self._require_gradients("advance")
        self.updates += 1
        self.pending = 0
        self.optimizer_view.step()
        self.schedule.step()

    def _widths(self, bits: Bits) -> dict[str, Array]:
        sources = self.manifest.width_sources.items()
        return {name: np.array(width_from(source, bits), np.int64) for name, source in sources}

    def _require_gradients(self, name: str) -> None:
        if not self.pending:
            raise RuntimeError(f"{name}() without gradients: there was no step or backward since the last update")

    # Evaluation.

    def evaluate(self, *inputs_and_targets: Any, **named: Any) -> tuple[float, Outputs]:
        """Return the loss and the outputs of the model in evaluation mode; training is not affected.

        Bit-widths are the schedule's for evaluation; running ranges and statistics are used as they are. Outputs are
        one array, a tuple, or a dict, as the model returns one, several, or several by name.
        """
        given = arrays_of(self.manifest, inputs_and_targets, named)
        given |= self._widths(self.schedule.evaluation_bits(self.schedule.position))
        # A model that draws random numbers in evaluation gets a seed of its own.
        given[files.SEEDS] = draw(self.manifest.evaluation_seeds, torch.Generator().manual_seed(self.updates))
        found = self._evaluation.run(given, self.memory.held(), {})
        outputs = [(tensor.name, found[tensor.name]) for tensor in self.manifest.outputs]
        return float(found[files.LOSS]), arranged(outputs)

    # Learning rates.

    @property
    def lr(self) -> float | list[float]:
        """The learning rate, or one for each parameter group if they differ. It can be set in the same forms."""
        rates = self.optimizer_view.rates()
        return rates[0] if len(set(rates)) == 1 else rates

    @lr.setter
    def lr(self, rate: Rate) -> None:
        self.optimizer_view.set_rates(rate)

    # Saving and loading.

    def save(self, path: str | PathLike[str]) -> None:
        """Write everything that the following steps depend on to one file.

        These are weights, the optimizer's state, running ranges and statistics, gradients of an incomplete update, the
        schedule's position and the random state. An existing file is replaced when everything is written. A
        learning-rate scheduler, or a torch optimizer, has a `state_dict` of its own.
        """
        transfer.save(self, Path(path))

    def load(self, path: str | PathLike[str], *, schedule: bool = True) -> None:
        """Continue from a file that `save` wrote: the steps that follow are equal, bit for bit.

        A file that is damaged, or of another model, is refused and changes nothing. `schedule=False` leaves the
        schedule where it is, to continue under another one.
        """
        transfer.load(self, Path(path), schedule=schedule)

    # PyTorch.

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of parameters, buffers and running ranges by their names in PyTorch."""
        return transfer.state_dict(self.manifest, self._values())

    def to_torch(self, model: nn.Module, *, strict: bool = True) -> nn.Module:
        """Write trained parameters, buffers and running ranges into a model, and return it.

        The model is a plain one, which has no running ranges, or a transformed one. Nothing is written if a name is
        missing or a shape differs; `strict=False` allows parameters that the training does not have.
        """
        transfer.to_torch(self.manifest, self._values(), model, strict=strict)
        return model

    def gradients(self) -> dict[str, Tensor]:
        """Return copies of the accumulated gradients, summed over the steps of an update."""
        return {name: torch.from_numpy(block.read()).clone() for name, block in self.memory.gradients.items()}

    def torch_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters, on the memory that ONNX Runtime trains, for any torch optimizer.

            optimizer = torch.optim.RMSprop(trainer.torch_parameters().values())
            for x, y in batches:
                optimizer.zero_grad()
                loss = trainer.backward(x, y)
                optimizer.step()
                trainer.advance()

        Nothing is copied: `.grad` is the memory that `backward` writes. Several calls of `backward` before `advance`
        add up, as in torch, unless `zero_grad` comes between them. On the CPU only.
        """
        if self.device != CPU:
            raise ExportError(f'parameters are shared with torch on the CPU only, this Trainer is on "{self.device}"')
        if self._shared is None:
            self._shared = transfer.SharedParameters(self.memory)
        return dict(self._shared.parameters)

    def _values(self) -> dict[str, Array]:
        return {name: np.asarray(block.read()) for name, block in (self.memory.parameters | self.memory.states).items()}


def draw(rows: int, generator: torch.Generator) -> Array:
    """Draw the seeds of one step."""
    seeds: Array = torch.randint(-(1 << 31), 1 << 31, (rows, 2), dtype=torch.int32, generator=generator).numpy()
    return seeds


def arranged(outputs: list[tuple[str, Array]]) -> Outputs:
    """Return outputs in the form that their names stand for: an array, a dict or a tuple."""
    prefix = f"{files.OUTPUT}."
    if len(outputs) == 1 and not outputs[0][0].startswith(prefix):
        return outputs[0][1]
    if all(name.startswith(prefix) for name, _ in outputs):
        return {name.removeprefix(prefix): value for name, value in outputs}
    return tuple(value for _, value in outputs)


class _Group(dict[str, Any]):
    """The options of a parameter group that schedulers may change."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an option; refuse one that is a constant of the exported update."""
        if key in ("momentum", "betas"):
            raise ValueError(
                f"{key} is a constant of the exported update, and this scheduler would change it: pass "
                "cycle_momentum=False"
            )
        super().__setitem__(key, value)


class OptimizerView(torch.optim.Optimizer):
    """What torch's learning-rate schedulers see of a `Trainer`'s optimizer: a learning rate for each group."""

    def __init__(self, rates: Sequence[float], wanted: Rate | RateFunction | None) -> None:
        groups = [_Group(params=[torch.nn.Parameter(torch.zeros(()))], lr=rate) for rate in rates]
        # Schedulers that cycle the momentum need one.
        super().__init__(groups, {"lr": 0.0, "momentum": 0.0})
        self._function = wanted if callable(wanted) else None
        if wanted is not None and not callable(wanted):
            self.write_rates(wanted)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing, since the update runs in ONNX Runtime; schedulers count the calls."""

    def rates(self) -> list[float]:
        """Return the learning rates that were set last."""
        return [float(group["lr"]) for group in self.param_groups]

    def rates_at(self, update: int) -> Array:
        """Return the learning rates of an update, counted from 0."""
        if self._function is not None:
            self.write_rates(self._function(update))
        return np.array(self.rates(), np.float64)

    def set_rates(self, rate: Rate) -> None:
        """Set one learning rate for all groups, or one for each."""
        if self._function is not None:
            raise ValueError("learning_rate is a function of the update: the Trainer asks it before each update")
        self.write_rates(rate)

    def write_rates(self, rate: Rate) -> None:
        """Set the learning rates, whether they come from the user, a function or a file."""
        rates = list(rate) if isinstance(rate, Sequence) else [rate] * len(self.param_groups)
        if len(rates) != len(self.param_groups):
            raise ValueError(f"{len(rates)} learning rates were given for {len(self.param_groups)} parameter groups")
        for value in rates:
            if not np.isfinite(value) or value < 0:
                raise ValueError(f"a learning rate must be a finite number of at least 0, got {value!r}")
        for group, value in zip(self.param_groups, rates, strict=True):
            group["lr"] = float(value)
