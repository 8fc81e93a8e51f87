"""`cpt-fx demo`: a small residual net on real images, trained under a cyclic schedule and under static q_max.

Both runs start from the same weights and see the same batches in the same order; only the bits differ. The images
are the digits that come with scikit-learn, so nothing is downloaded.
"""

from __future__ import annotations

import math
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx.api import transform
from cpt_fx.capture.recalibrating import recalibrate
from cpt_fx.errors import check_choice, check_int
from cpt_fx.inspection import Inspection, Verification
from cpt_fx.schedules import NAMES, Schedule, Static, mean_costs, named, relative_cost
from cpt_fx.study import figures
from cpt_fx.study.page import inlined, page, table
from cpt_fx.study.writing import VARIABLES

Q_MIN, Q_MAX, CYCLES = 3, 8, 8
TRAINING_IMAGES, TEST_IMAGES = 1200, 597
BATCH = 64
EVALUATIONS = 40
HEADINGS = ("", "test accuracy", "mean bits", f"BitOps, of static {Q_MAX} bits", "saving", "seconds")
Advance = Callable[[str, int], None]
MARK = "#b4bcc8"
_COLOURS = {"#1f5fd0": "--c1", "#c8500a": "--c2", MARK: "--mark"}
"""Colours of the drawings -> CSS variables of the page, which have other values in dark mode."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What the demo trains, and for how long."""

    schedule: str = "CR"
    steps: int = 1600
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate the settings."""
        check_choice("schedule", self.schedule, NAMES)
        check_int("steps", self.steps, CYCLES)
        check_int("seed", self.seed, 0)


class Digits(NamedTuple):
    """Images of shape (n, 1, 8, 8) with values between 0 and 1, and their labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass
class DemoRun:
    """One training run: its schedule, its model and what was measured."""

    name: str
    schedule: Schedule
    model: nn.Module
    losses: list[float] = field(default_factory=list)
    accuracies: dict[int, float] = field(default_factory=dict)
    """Step -> the share of test images recognised before it."""
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """The share of test images recognised after the last step."""
        return self.accuracies[max(self.accuracies)]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as plain data. Costs are relative to static q_max."""
        names = ("name", "accuracy", "seconds", "losses", "accuracies")
        cost = relative_cost(self.schedule, Q_MAX)
        plan = {"schedule": repr(self.schedule), "mean_bits": mean_costs(self.schedule).mean_bits}
        return {name: getattr(self, name) for name in names} | plan | {"relative_cost": cost, "saving": 1 - cost}


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the convolutions' output and the shortcut, rectified."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResidualNet(nn.Module):
    """A residual net for 8 x 8 images, in plain torch without any quantization."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1), ResidualBlock(width, 2 * width, 2), ResidualBlock(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class."""
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def load_digits() -> Digits:
    """Return scikit-learn's digits, shuffled with a fixed seed: the test images are the same in every demo."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError('the demo needs scikit-learn for its images: pip install "cpt_fx[demo]"') from error
    bunch = datasets.load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)[order]
    sizes = (TRAINING_IMAGES, TEST_IMAGES)
    (train_images, test_images), (train_labels, test_labels) = images.split(sizes), labels.split(sizes)
    return Digits(train_images, train_labels, test_images, test_labels)


def run_demo(settings: DemoSettings, advance: Advance) -> tuple[DemoRun, DemoRun]:
    """Train under the schedule and under static q_max, without changing the global random state."""
    digits = load_digits()
    if find_spec("matplotlib") is None:
        raise ImportError('the demo needs matplotlib for its report: pip install "cpt_fx[demo]"')
    steps = settings.steps
    schedule = named(settings.schedule, q_min=Q_MIN, q_max=Q_MAX, total_steps=steps, cycles=CYCLES)
    threads = torch.get_num_threads()
    # On images this small a second thread gains nothing; with one, results do not depend on the number of cores, and
    # a busy machine does not stall threads that wait for each other.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            cyclic = train(settings.schedule, schedule, settings, digits, advance)
            static = train(f"static {Q_MAX}", Static(Q_MAX, total_steps=steps), settings, digits, advance)
    finally:
        torch.set_num_threads(threads)
    return cyclic, static


def train(name: str, schedule: Schedule, settings: DemoSettings, digits: Digits, advance: Advance) -> DemoRun:
    """Train a new net under a schedule, with evaluations during training."""
    torch.manual_seed(settings.seed)
    model = transform(ResidualNet(), schedule, example_inputs=(digits.train_images[:BATCH],))
    run = DemoRun(name, schedule, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    # A separate generator: stochastic rounding draws from the global one, and how often depends on the recipe.
    batches = torch.Generator().manual_seed(settings.seed)
    every = max(settings.steps // EVALUATIONS, 1)
    began = time.perf_counter()
    for step in range(settings.steps):
        if step and step % every == 0:
            run.accuracies[step] = accuracy(model, digits)
        chosen = torch.randint(0, len(digits.train_labels), (BATCH,), generator=batches)
        loss = F.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        schedule.step()
        run.losses.append(loss.detach().item())
        advance(name, 1)
    run.accuracies[settings.steps] = accuracy(model, digits)
    run.seconds = time.perf_counter() - began
    return run


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the share of test images recognised at q_max bits, with batch norm statistics of that width."""
    model.eval()
    with recalibrate(model, digits.train_images[: 10 * BATCH].split(BATCH)), torch.no_grad():
        right = (model(digits.test_images).argmax(dim=1) == digits.test_labels).float().mean().item()
    model.train()
    return float(right)


def results(run: DemoRun) -> tuple[str, ...]:
    """Return a run's row of the results table, below `HEADINGS`."""
    of = run.to_dict()
    costs = (f"{of['mean_bits']:.2f}", f"{of['relative_cost']:.3f}", f"{100 * of['saving']:.1f} %")
    return run.name, f"{100 * run.accuracy:.2f} %", *costs, f"{run.seconds:.1f}"


def write_report(
    runs: tuple[DemoRun, DemoRun], settings: DemoSettings, inspection: Inspection, proof: Verification, folder: Path
) -> Path:
    """Write the page about both runs, and beside it the page on which the graph can be explored."""
    folder.mkdir(parents=True, exist_ok=True)
    inspection.html(folder / "graph.html")
    # One expanded level fits the width of a page; graph.html shows the rest. An image keeps its styles to itself.
    drawing = b64encode(inspection.svg(depth=1).encode()).decode()
    said = f"Proven for {runs[0].name}, with evaluations among the runs: " + "; ".join(str(proof).splitlines())
    graph = (
        '<section><figcaption><h2>The rewritten graph</h2><a href="graph.html">explore the graph</a></figcaption>'
        f'<div class="scroll graph"><img alt="the rewritten graph" src="data:image/svg+xml;base64,{drawing}"></div>'
        f'<p class="note">{escape(said)}.</p></section>'
    )
    first, second = runs
    lead = (
        f"A small residual net on {TRAINING_IMAGES} images of digits, trained twice for {settings.steps} steps from "
        f"the same weights on the same batches: under {first.name}, from {Q_MIN} to {Q_MAX} bits in {CYCLES} cycles, "
        f"and at {second.name} bits throughout."
    )
    foot = (
        f"cpt-fx demo --schedule {settings.schedule} --steps {settings.steps} --seed {settings.seed} · One seed and "
        f"one small net: a single test image is {100 / TEST_IMAGES:.2f} %, so a difference of a few tenths says "
        "little. Low precision is simulated: BitOps are counted by the published formula, and the seconds do not show "
        "the saving."
    )
    sections = [table(HEADINGS, [*map(results, runs)]), curves(runs, settings), graph]
    path = folder / "index.html"
    path.write_text(page("Cyclic precision training, a demonstration", lead, sections, foot), encoding="utf-8")
    return path


def curves(runs: tuple[DemoRun, DemoRun], settings: DemoSettings) -> str:
    """Draw both runs: bits, losses and accuracies over the steps."""
    import matplotlib

    window = max(settings.steps // 40, 1)
    edges = range(settings.steps + 1)
    # The rise from chance level would flatten the rest: the axis starts just below the later accuracies.
    settled = [100 * value for run in runs for step, value in run.accuracies.items() if 4 * step >= settings.steps]
    floor = 5 * (min(settled) // 5)
    with matplotlib.rc_context(figures.STYLE):
        figure, (bits, loss, accuracy) = figures.new(3, height=2.5)
        for run, colour, style in zip(runs, _COLOURS, ("-", "--"), strict=False):
            bits.stairs(run.schedule.trajectory()[:, 0], edges, baseline=None, color=colour, linestyle=style,
                        label=run.name)  # fmt: skip
            loss.plot(edges[1:], run.losses, color=colour, alpha=0.28, linewidth=0.8)
            loss.plot(edges[1:], smooth(run.losses, window), color=colour, label=run.name)
            shares = [100 * value for value in run.accuracies.values()]
            accuracy.plot(list(run.accuracies), shares, color=colour, label=run.name)
        bits.set(title="Bits", ylabel="bits", ylim=(Q_MIN - 0.6, Q_MAX + 0.6), yticks=range(Q_MIN, Q_MAX + 1))
        loss.set(title="Training loss", ylabel="loss", yscale="log")
        loss.yaxis.set_major_formatter("{x:g}")
        loss.yaxis.set_minor_formatter("")
        accuracy.set(title="Test accuracy", ylabel="accuracy, %", ylim=(floor, 100.5), xlabel="step")
        for ax in (bits, loss, accuracy):
            for cycle in range(1, CYCLES):
                ax.axvline(settings.steps * cycle / CYCLES, color=MARK, linewidth=1, zorder=0.9)
            ax.set_xlim(0, settings.steps)
            ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
        svg = figures.save(figure, "svg").decode()
    svg = inlined(svg, "curves", "Bits, training loss and test accuracy over the steps", VARIABLES | _COLOURS)
    note = (
        f"Bits: the width of weights and activations at each step. Gradients have {Q_MAX} bits in both runs. Vertical "
        f"lines: where a cycle starts. Loss: cross entropy, on a logarithmic scale: the mean of {window} steps, and "
        f"faintly that of each batch. Accuracy: on images not trained on, always evaluated at {Q_MAX} bits, with batch "
        f"norm's statistics at that width. The axis starts at {floor:g} %."
    )
    return f'<figure>{svg}<p class="note">{note}</p></figure>'


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the moving average of the last `window` values, fewer at the start, without those that are not finite."""
    windows = (values[max(end - window, 0) : end] for end in range(1, len(values) + 1))
    finite = ([value for value in recent if math.isfinite(value)] for recent in windows)
    return [sum(recent) / len(recent) if recent else math.nan for recent in finite]
