"""The precision range test of CPT: the smallest width at which a model still trains, on its own data.

Every width starts from the same weights, sees the same batches and draws the same random numbers; so does a run in
full precision. A width is judged by its progress, the drop of its loss as a share of the drop in full precision. q_min
is the smallest width such that it and all larger ones reach the threshold.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console, ConsoleRenderable, Group
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from cpt_fx.api import transform
from cpt_fx.capture.recalibrating import recalibrate
from cpt_fx.errors import check_int
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.inspection.table import as_text
from cpt_fx.ir.result import part_of
from cpt_fx.recipes import Recipe
from cpt_fx.schedules import Bits, Static
from cpt_fx.schedules.plot import new_figure

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes

Loss = Callable[[nn.Module, Any], Tensor] | Callable[..., Tensor] | nn.Module
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Evaluate = Callable[[nn.Module], Any]
Advance = Callable[[str, int], None]

TAIL = 4
"""The final loss of a run is the mean over its last quarter: a single batch says too little."""

LATEST = 10
"""How many of the last batches batch norm's statistics are estimated on."""

PASS_LOSS = "pass loss=, a function of the model and a batch"


@dataclass(frozen=True)
class RangeTest:
    """What a range test measured, and the q_min that follows from it.

    `losses` holds the training loss of every step, one tuple per width, and `full_precision` those of the run without
    quantizers. `drops` says how far each loss fell, `progress` the same as a share of the full-precision drop.
    `evaluations` holds what `evaluate` returned, for each width and last for full precision.
    """

    q_min: int
    widths: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]
    drops: tuple[float, ...]
    full_precision: tuple[float, ...]
    full_precision_drop: float
    threshold: float
    evaluations: tuple[float, ...] = ()

    @property
    def progress(self) -> tuple[float, ...]:
        """The share of the full-precision drop that each width reached."""
        return tuple(drop / self.full_precision_drop for drop in self.drops)

    @property
    def at_lower_end(self) -> bool:
        """Whether q_min may be even lower: the lowest width that was tried passes."""
        return self.q_min == self.widths[0] > 1

    def table(self) -> Table:
        """Return the measurement as a rich table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        headings = ("bits", "loss at the end", "drop", "progress", "trains", "evaluated")
        for heading in headings if self.evaluations else headings[:-1]:
            table.add_column(heading, justify="right")
        evaluated: list[tuple[str, ...]] = [(f"{value:.4f}",) for value in self.evaluations]
        evaluated = evaluated or [()] * (len(self.widths) + 1)
        runs = zip(self.widths, self.losses, self.drops, self.progress, evaluated[:-1], strict=True)
        for width, losses, drop, progress, value in runs:
            style = "bold" if width == self.q_min else "" if width > self.q_min else "dim"
            trains = "yes" if progress >= self.threshold else "no"
            cells = (f"{width}", f"{_arrived(losses):.4f}", f"{drop:.4f}", f"{100 * progress:.1f} %", trains, *value)
            table.add_row(*cells, style=style)
        table.add_section()
        full = (f"{_arrived(self.full_precision):.4f}", f"{self.full_precision_drop:.4f}", "100.0 %")
        table.add_row(f"{FULL_PRECISION}", *full, "", *evaluated[-1])
        return table

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain data; a loss that is not finite becomes None, which JSON can hold."""
        names = ("q_min", "at_lower_end", "threshold", "widths", "progress", "drops", "losses", "full_precision_drop",
                 "full_precision", "evaluations")  # fmt: skip
        return {name: _plain(getattr(self, name)) for name in names}

    def plot(self, path: str | PathLike[str] | None = None) -> Axes:
        """Draw the loss of every width over the steps, and save the picture when a path is given."""
        ax = new_figure(8, 4).subplots()
        from matplotlib import colormaps  # installed, or the line above has raised

        ax.plot(self.full_precision, color="0.5", linestyle="--", label="full precision")
        for index, (width, losses) in enumerate(zip(self.widths, self.losses, strict=True)):
            colour = colormaps["viridis"](0.9 * index / max(len(self.widths) - 1, 1))
            label = f"{width} bits" + (" (q_min)" if width == self.q_min else "")
            ax.plot(losses, color=colour, linewidth=2.4 if width == self.q_min else 1.2, label=label)
        ax.set_xlabel("step")
        ax.set_ylabel("training loss")
        ax.legend(fontsize="small", ncols=2)
        if path is not None:
            ax.figure.figure.savefig(path)
        return ax

    def __rich__(self) -> ConsoleRenderable:
        """Return the conclusion, then the measurement."""
        bound = " or less: the lowest width tried passes" if self.at_lower_end else ""
        share = f"at {100 * self.threshold:g} % of the progress in full precision"
        return Group(Text(f"range test: q_min = {self.q_min}{bound}, {share}"), self.table())

    def __str__(self) -> str:
        """Return the same as plain text."""
        return as_text(self, 100).rstrip()


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross entropy of `(inputs, labels)`; for a mapping, the `loss` that `model(**batch)` returns."""
    if isinstance(batch, Mapping):
        output = model(**batch)
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if not isinstance(value, Tensor):
            raise TypeError(f"model(**batch) returned no loss: {PASS_LOSS}")
        return value
    if isinstance(batch, Sequence) and len(batch) == 2:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    raise TypeError(f"a batch must be (inputs, labels) or a mapping, got {type(batch).__name__}: {PASS_LOSS}")


def range_test(
    model: nn.Module,
    data: Iterable[Any],
    *,
    loss: Loss = default_loss,
    optimizer: MakeOptimizer | None = None,
    evaluate: Evaluate | None = None,
    widths: Iterable[int] = range(2, 9),
    steps_per_width: int = 50,
    threshold: float = 0.8,
    gradient: int = 8,
    recipe: Recipe | str | None = None,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> RangeTest:
    """Train copies of `model` for a few steps at each width and return the smallest width that makes progress.

    Neither the model nor the global random state is changed.

    Args:
        model: any module that `cpt_fx.transform` takes.
        data: batches, of which `steps_per_width` are used, the same for every width. A list or a `DataLoader` that
            is shorter is iterated again; an iterator cannot be.
        loss: a function of the model and a batch; by default cross entropy of `(inputs, labels)` batches. One of
            torch's own (`F.mse_loss`, `nn.CrossEntropyLoss()`) is applied to the model's output and the batch's target.
        optimizer: makes an optimizer from parameters; by default Adam with a learning rate of 0.003. Preferably the
            optimizer and settings that the real training starts with.
        evaluate: a function of the model that returns a number, such as accuracy on held-out data; it does not affect
            q_min. It is called after each run, at the run's width, with batch norm statistics estimated at that width
            on the last batches.
        widths: the forward widths to try.
        steps_per_width: the length of each run.
        threshold: the share of the full-precision progress that counts as training.
        gradient: the width of gradients, in every run but the one in full precision.
        recipe: as for `cpt_fx.transform`.
        seed: for everything random, including the order of a shuffling `DataLoader`.
        progress: show a progress bar, on stderr.
        options: further arguments of `cpt_fx.transform`, such as `exclude` or `example_inputs`.
    """
    tried, steps, low = check_settings(widths, steps_per_width, threshold, gradient, seed)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    make = partial(torch.optim.Adam, lr=3e-3) if optimizer is None else optimizer
    # Rewritten once; every width trains a copy. The result itself shares the model's weights and is never run.
    rewritten = transform(model, Static(FULL_PRECISION), recipe=recipe, **options)
    part_of(rewritten).session.reminder.rest()
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    total = (len(tried) + 1) * steps
    with torch.random.fork_rng(devices=list(devices)), bar("range test", total, shown=progress) as advance:
        torch.manual_seed(seed)
        batches = _take(data, steps)
        train = partial(_train, rewritten, batches, loss, make, evaluate, seed, advance)
        full, at_last = train(Bits(*[FULL_PRECISION] * 3))
        drop = _drop(full, full[0])
        if not drop > 0:  # no drop to compare a width with
            raise ValueError(
                f"the model makes no progress in full precision: its loss goes from {full[0]:.4g} to "
                f"{_arrived(full):.4g} in {len(full)} steps. Pass an optimizer with another learning rate, or more "
                "steps_per_width"
            )
        runs = [train(Bits(width, width, low)) for width in tried]
        losses = tuple(run for run, _ in runs)
        evaluations = (*(value for _, value in runs), at_last) if evaluate is not None else ()
    drops = tuple(_drop(curve, full[0]) for curve in losses)
    q_min = _smallest(tried, [one / drop for one in drops], threshold)
    return RangeTest(q_min, tried, losses, drops, full, drop, float(threshold), evaluations)


def _train(
    rewritten: nn.Module,
    batches: list[Any],
    loss: Loss,
    make: MakeOptimizer,
    evaluate: Evaluate | None,
    seed: int,
    advance: Advance,
    bits: Bits,
) -> tuple[tuple[float, ...], float]:
    """Train a copy; return the loss of every step, NaN after one that is not finite, and the result of `evaluate`."""
    copied = copy.deepcopy(rewritten)
    copied.train()
    Static(bits).bind(copied)
    label = "full precision" if bits.weight == FULL_PRECISION else f"{bits.weight} bits"
    optimizer = make(copied.parameters())
    torch.manual_seed(seed)
    curve: list[float] = []
    for batch in batches:
        value = _criterion(loss, copied, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"loss must return a tensor with one element, got {shown}")
        curve.append(value.detach().item())
        if not math.isfinite(curve[-1]):
            advance(label, len(batches) - len(curve) + 1)
            return (*curve, *[math.nan] * (len(batches) - len(curve))), math.nan
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        advance(label, 1)
    if evaluate is None:
        return tuple(curve), math.nan
    latest = batches[-LATEST:]
    with recalibrate(copied, latest, call=lambda model, batch: _criterion(loss, model, batch)), torch.no_grad():
        return tuple(curve), float(evaluate(copied.eval()))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return value if math.isfinite(value) else None


def _arrived(losses: Sequence[float]) -> float:
    tail = losses[-max(len(losses) // TAIL, 1) :]
    return sum(tail) / len(tail)


def _drop(losses: Sequence[float], start: float) -> float:
    """Return how far the loss fell; for all widths from the same start, the first loss in full precision."""
    end = _arrived(losses)
    return start - end if math.isfinite(end) else -math.inf


def _smallest(widths: Sequence[int], progress: Sequence[float], threshold: float) -> int:
    """Return the smallest width such that it and all larger ones reach the threshold."""
    pairs = list(zip(widths, progress, strict=True))
    passing = list(takewhile(lambda pair: pair[1] >= threshold, reversed(pairs)))
    if passing:
        return passing[-1][0]
    shown = ", ".join(f"{width} bits {100 * reached:.0f} %" for width, reached in pairs)
    raise ValueError(
        f"{widths[-1]} bits do not reach {100 * threshold:g} % of the progress in full precision ({shown}): "
        "try more widths, more gradient bits or a lower threshold"
    )


def check_settings(
    widths: Iterable[int], steps: int, threshold: float, gradient: int, seed: int
) -> tuple[tuple[int, ...], int, int]:
    """Check the settings that need no model; return the widths in order, the steps and the gradient width."""
    checked = sorted({check_int("widths", width, 1, FULL_PRECISION - 1) for width in widths})
    if not checked:
        raise ValueError("widths must hold at least one number of bits, got none")
    length = check_int("steps_per_width", steps, 4)
    low = check_int("gradient", gradient, 1, FULL_PRECISION)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise ValueError(f"threshold must be a share above 0 and at most 1, got {threshold!r}")
    check_int("seed", seed)
    return tuple(checked), length, low


def _criterion(loss: Loss, model: nn.Module, batch: Any) -> Any:
    """Call the loss: torch's own take an output and a target, all others the model and the batch."""
    if isinstance(loss, type):
        raise TypeError(f"loss must be a function or an instance, got the class {loss.__name__}: call it first")
    function = loss.func if isinstance(loss, partial) else loss
    home = type(function).__module__ if isinstance(function, nn.Module) else getattr(function, "__module__", "")
    if home not in ("torch.nn.modules.loss", "torch.nn.functional"):
        return loss(model, batch)
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise TypeError(f"a loss of torch needs (inputs, targets) batches, got {type(batch).__name__}: {PASS_LOSS}")
    return loss(model(batch[0]), batch[1])


def _take(data: Iterable[Any], steps: int) -> list[Any]:
    """Return `steps` batches, iterating the data again if it ends early."""
    if not isinstance(data, Iterable):
        raise TypeError(f"data must be an iterable of batches, got {type(data).__name__}")
    batches: list[Any] = []
    while len(batches) < steps:
        more = list(islice(iter(data), steps - len(batches)))
        if not more and not batches:
            raise ValueError("data is empty: range_test needs batches to train on")
        if not more:
            raise ValueError(
                f"data ended after {len(batches)} of steps_per_width={steps} batches and cannot be started again, like "
                "every iterator: pass a list or a DataLoader, or fewer steps_per_width"
            )
        batches += more
    return batches


@contextmanager
def bar(title: str, total: int, *, shown: bool = True) -> Iterator[Advance]:
    """Show a progress bar on stderr; yield a function that takes the name of a run and the number of steps it made."""
    with Progress(console=Console(stderr=True), disable=not shown) as made:
        task = made.add_task(title, total=total)
        yield lambda label, steps: made.update(task, description=f"{title}, {label:<14}", advance=steps)
