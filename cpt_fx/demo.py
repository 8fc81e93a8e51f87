"""`cpt-fx demo`: a small residual net on real images, trained under a cyclic schedule and under static q_max.

Both runs start from the same weights and see the same batches in the same order; only the bits differ. The images
are the digits that scikit-learn brings along, so nothing is downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx.api import transform
from cpt_fx.costs import cost
from cpt_fx.errors import check_choice, check_int
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
    steps: int = 800
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
    with torch.random.fork_rng(devices=[]):
        cyclic = train(settings.schedule, settings.cyclic(), settings, digits, advance)
        static = train(f"static {settings.q_max}", settings.static(), settings, digits, advance)
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
    # A generator of its own: stochastic rounding draws from the global one, and would change the batches.
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
        loss.backward()  # type: ignore[no-untyped-call]
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
