"""`cpt-fx demo`: a small residual net on real images, trained under a cyclic schedule and under static q_max.

Both runs start from the same weights and see the same batches in the same order; only the bits differ. The images
are the digits that scikit-learn brings along, so nothing is downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx.api import transform
from cpt_fx.costs import cost
from cpt_fx.errors import check_choice, check_int
from cpt_fx.inspection import Inspection, Verification
from cpt_fx.report import Chart, Series, page, picture, smooth, table
from cpt_fx.schedules import NAMES, Schedule, Static, named

TRAINING_IMAGES = 1200
BATCH = 64
EVALUATIONS = 40
Advance = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the demo trains, and for how long."""

    schedule: str = "CR"
    q_min: int = 3
    q_max: int = 8
    cycles: int = 8
    steps: int = 1600
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no run could be made of."""
        check_choice("schedule", self.schedule, NAMES)
        check_int("steps", self.steps, self.cycles)
        check_int("seed", self.seed, 0)

    def cyclic(self) -> Schedule:
        """Return the schedule that is tried."""
        return named(self.schedule, q_min=self.q_min, q_max=self.q_max, total_steps=self.steps, cycles=self.cycles)

    def static(self) -> Schedule:
        """Return what it is compared with."""
        return Static(self.q_max, total_steps=self.steps)


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8) between 0 and 1, and what they show."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass
class Run:
    """One training run: what was set, what was measured."""

    name: str
    schedule: Schedule
    model: nn.Module
    relative_cost: float
    mean_bits: float
    losses: list[float] = field(default_factory=list)
    accuracy_steps: list[int] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        """The share of the test images recognised after the last step."""
        return self.accuracies[-1]

    def to_dict(self) -> dict[str, object]:
        """Return the results as plain data."""
        return {
            "name": self.name,
            "schedule": repr(self.schedule),
            "accuracy": self.accuracy,
            "mean_bits": self.mean_bits,
            "relative_cost": self.relative_cost,
            "saving": 1 - self.relative_cost,
            "seconds": self.seconds,
            "losses": self.losses,
            "accuracy_steps": self.accuracy_steps,
            "accuracies": self.accuracies,
        }


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions see to what came in."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResidualNet(nn.Module):
    """A residual net for 8 x 8 images: plain torch, it knows nothing of quantization."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class."""
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


def load_digits() -> Digits:
    """Return scikit-learn's bundled digits, shuffled once and for all: the test images are the same in every demo."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError('the demo needs scikit-learn for its images: pip install "cpt_fx[demo]"') from error
    bunch = datasets.load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)[order]
    count = TRAINING_IMAGES
    return Digits(images[:count], labels[:count], images[count:], labels[count:])


def run_demo(settings: Settings, advance: Advance) -> tuple[Run, Run]:
    """Train under the schedule and under static q_max; the global random state is left as it was."""
    digits = load_digits()
    threads = torch.get_num_threads()
    # On images this small a second thread gains nothing; with one, results do not depend on the number of cores, and
    # a busy machine does not stall threads that wait for each other.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            cyclic = train(settings.schedule, settings.cyclic(), settings, digits, advance)
            static = train(f"static {settings.q_max}", settings.static(), settings, digits, advance)
    finally:
        torch.set_num_threads(threads)
    return cyclic, static


def train(name: str, schedule: Schedule, settings: Settings, digits: Digits, advance: Advance) -> Run:
    """Train a fresh net under a schedule and measure it on the way."""
    torch.manual_seed(settings.seed)
    plain = ResidualNet()
    price = cost(plain, schedule, (digits.train_images[:1],))
    model = transform(plain, schedule)
    run = Run(name, schedule, model, price.relative, float(schedule.trajectory()[:, 0].mean()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    # A generator of its own: stochastic rounding draws from the global one, how often is up to the recipe.
    batches = torch.Generator().manual_seed(settings.seed)
    every = max(settings.steps // EVALUATIONS, 1)
    began = time.perf_counter()
    for step in range(settings.steps):
        if step % every == 0:
            run.accuracy_steps.append(step)
            run.accuracies.append(accuracy(model, digits))
        chosen = torch.randint(0, len(digits.train_labels), (BATCH,), generator=batches)
        loss = F.cross_entropy(model(digits.train_images[chosen]), digits.train_labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        schedule.step()
        run.losses.append(loss.detach().item())
        advance(name, 1)
    run.accuracy_steps.append(settings.steps)
    run.accuracies.append(accuracy(model, digits))
    run.seconds = time.perf_counter() - began
    return run


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the share of the test images recognised, in eval mode: at q_max bits, whatever the schedule says now."""
    training = model.training
    model.eval()
    with torch.no_grad():
        right = (model(digits.test_images).argmax(dim=1) == digits.test_labels).float().mean().item()
    model.train(training)
    return float(right)


def headings(settings: Settings) -> tuple[str, ...]:
    """Return the headings of the results table, but for the first one, of the names."""
    return ("test accuracy", "mean bits", f"BitOps, of static {settings.q_max} bits", "saving", "seconds")


def results(run: Run) -> tuple[str, ...]:
    """Return a run's line of the results table, in the order of `headings`. Costs are relative to static q_max."""
    cost, saving = f"{run.relative_cost:.3f}", f"{100 * (1 - run.relative_cost):.1f} %"
    return (f"{100 * run.accuracy:.2f} %", f"{run.mean_bits:.2f}", cost, saving, f"{run.seconds:.1f}")


def write_report(
    runs: tuple[Run, Run], settings: Settings, inspection: Inspection, proof: Verification, folder: Path
) -> Path:
    """Write the page about both runs, and next to it the one on which the graph can be explored."""
    folder.mkdir(parents=True, exist_ok=True)
    inspection.html(folder / "graph.html")
    # One level of modules fits the width of a page; the other file opens the rest.
    drawing = inspection.svg(depth=1)
    said = f"Proven for {runs[0].name}, with evaluations among the runs: " + "; ".join(str(proof).splitlines())
    graph = (
        '<section><figcaption><h2>The rewritten graph</h2><a href="graph.html">explore the graph</a></figcaption>'
        f'{picture(drawing, "the rewritten graph")}<p class="note">{escape(said)}.</p></section>'
    )
    first, second = runs
    lead = (
        f"A small residual net on {len(load_digits().train_labels)} images of digits, trained twice for "
        f"{settings.steps} steps from the same weights on the same batches: under {first.name}, from "
        f"{settings.q_min} to {settings.q_max} bits in {settings.cycles} cycles, and at {second.name} bits throughout."
    )
    image = 100 / len(load_digits().test_labels)
    foot = (
        f"cpt-fx demo --schedule {settings.schedule} --steps {settings.steps} --seed {settings.seed} · One seed and "
        f"one small net: a single test image is {image:.2f} %, so a difference of a few tenths says little. Low "
        "precision is simulated: BitOps are counted by the published formula, and the seconds do not show the saving."
    )
    sections = [
        table(("", *headings(settings)), [(run.name, *results(run)) for run in runs]),
        *_charts(runs, settings),
        graph,
    ]
    path = folder / "index.html"
    path.write_text(page("Cyclic precision training, a demonstration", lead, sections, foot), encoding="utf-8")
    return path


def _charts(runs: tuple[Run, Run], settings: Settings) -> list[str]:
    total = settings.steps
    span = (0.0, float(total))
    marks = [total * cycle / settings.cycles for cycle in range(1, settings.cycles)]
    edges = list(range(total + 1))
    colours = list(enumerate(runs, start=1))
    window = max(total // 40, 1)
    bits = [[float(width) for width in run.schedule.trajectory(total + 1)[:, 0]] for run in runs]
    bits_chart = Chart(
        title="Bits",
        note="The width of weights and activations at each step. Gradients have "
        f"{settings.q_max} bits in both runs. Vertical lines: where a cycle starts.",
        x_label="step", y_label="bits", x_range=span, y_range=(settings.q_min - 0.6, settings.q_max + 0.6), marks=marks,
        steps=True, ticks=settings.q_max,
        series=[Series(label=run.name, x=edges, y=bits[n - 1], colour=n, dashed=n > 1) for n, run in colours],
    )  # fmt: skip
    raw = [Series(label=run.name, x=edges[1:], y=run.losses, colour=n, faint=True) for n, run in colours]
    smoothed = [Series(label=run.name, x=edges[1:], y=smooth(run.losses, window), colour=n) for n, run in colours]
    loss_chart = Chart(
        title="Training loss",
        note=f"Cross entropy, on a logarithmic scale: the mean of {window} steps, and faintly that of each batch.",
        x_label="step", y_label="loss", x_range=span, log=True, marks=marks, series=[*raw, *smoothed],
    )  # fmt: skip
    percent = [[100 * value for value in run.accuracies] for run in runs]
    # The climb from chance would flatten all that follows: the axis starts at what is left to tell apart.
    settled = [value for values in percent for value in values[len(values) // 4 :]]
    floor = 5 * (min(settled) // 5)
    accuracy_chart = Chart(
        title="Test accuracy",
        note=f"On images not trained on, always evaluated at {settings.q_max} bits. The axis starts at {floor:g} %.",
        x_label="step", y_label="accuracy, %", x_range=span, y_range=(floor, 100.5), marks=marks,
        series=[Series(label=r.name, x=r.accuracy_steps, y=percent[n - 1], colour=n) for n, r in colours],
    )  # fmt: skip
    return [chart.html() for chart in (bits_chart, loss_chart, accuracy_chart)]
