"""What a case of the operator table is: a small model around one operator, and what is expected of its export."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Op = Callable[..., Any]
FEATURES, CLASSES = 6, 3


class Between(nn.Module):
    """An operator between two linear layers: what comes before it learns only through its gradient."""

    def __init__(self, op: Op, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, math.prod(shape))
        self.shape = shape
        self.op = op
        with torch.no_grad():
            # Twice two samples: an operator across the batch must leave the batch as it was.
            width = op(torch.rand(4, *shape)).flatten(1).shape[1]
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return one row of numbers per sample."""
        hidden = self.op(self.first(x).reshape(-1, *self.shape))
        out: Tensor = self.last(hidden.flatten(1))
        return out


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    section: str
    name: str
    build: Callable[[], nn.Module]
    """Makes the model."""
    inputs: Callable[[int], tuple[Tensor, ...]]
    """Makes inputs for a number of samples."""
    targets: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[..., Tensor] | None = F.mse_loss
    refused: str = ""
    """Words of the error that is expected; "" where the export must be right."""
    prepare: Callable[[nn.Module], object] = nn.Module.train
    """Puts the model in the mode that it trains in."""

    def complaint(self, verdict: str, remark: str) -> str:
        """Say what is not as expected, or nothing."""
        if not self.refused:
            return "" if verdict == "right" else f"{verdict}: {remark}"
        if verdict != "refused":
            return f"{verdict}, but it should be refused: {remark}"
        return "" if self.refused in remark else f"refused, but without {self.refused!r}: {remark}"


def features(batch: int) -> tuple[Tensor, ...]:
    """Return what `Between` takes."""
    return (torch.randn(batch, FEATURES),)


def numbers(batch: int) -> tuple[Tensor, ...]:
    """Return targets for a mean squared error."""
    return (torch.randn(batch, CLASSES),)


def classes(batch: int) -> tuple[Tensor, ...]:
    """Return targets for a classification."""
    return (torch.randint(0, CLASSES, (batch,)),)


class Section:
    """Collects the cases of one section of the table."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.cases: list[Case] = []

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases)

    def op(self, name: str, op: Op, *shape: int, refused: str = "") -> None:
        """Add an operator between two linear layers."""
        self.model(name, lambda: Between(op, shape or (8,)), refused=refused)

    def module(self, name: str, make: Callable[[], nn.Module], *shape: int, refused: str = "") -> None:
        """Add a module between two linear layers."""
        self.model(name, lambda: Between(make(), shape or (8,)), refused=refused)

    def loss(self, name: str, loss: Callable[..., Tensor], targets: Op = numbers, refused: str = "") -> None:
        """Add a loss outside the model."""
        self.model(name, lambda: Between(lambda h: h, (8,)), targets=targets, loss=loss, refused=refused)

    def model(self, name: str, build: Callable[[], nn.Module], inputs: Op = features, **options: Any) -> None:
        """Add a whole model."""
        self.cases.append(Case(self.title, name, build, inputs, options.pop("targets", numbers), **options))
