"""A model with batch norm, its batches, and what its statistics ought to be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cpt_fx
from tests.ir.state.models import CAPTURES, DYNAMIC, plan

captures = pytest.mark.parametrize("capture", CAPTURES)


class Net(nn.Module):
    """Convolutions with batch norm and dropout, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.again, self.shared = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        for _ in range(2):
            y = F.relu(self.shared(self.again(y)))
        result: Tensor = self.last(self.head(self.drop(y.mean((2, 3)))))
        return result


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def images(count: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 6, 6, generator=torch.Generator().manual_seed(seed)) + 0.3


def few() -> list[Tensor]:
    return [images(8, 1), images(8, 2), images(4, 3)]


def transformed(capture: str = "auto", model: nn.Module | None = None, **options: Any) -> nn.Module:
    options = {"recipe": DYNAMIC, **options}
    return cpt_fx.transform(net() if model is None else model, plan(), capture=capture, **options)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items() if ".running_" in key}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def seen(model: Any, batches: list[Tensor], norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the weighted means of what the first norm is given in evaluation."""
    model.eval()
    with torch.no_grad():
        given = [model.conv(batch).double() for batch in batches]
    dims = (0, 2, 3)
    total = sum(len(batch) for batch in batches)
    mean = sum(len(batch) * y.mean(dims) for batch, y in zip(batches, given, strict=True)) / total
    variance = sum(len(batch) * y.var(dims) for batch, y in zip(batches, given, strict=True)) / total
    assert isinstance(mean, Tensor) and isinstance(variance, Tensor)
    return mean.float(), variance.float()


class Frozen(Net):
    """Keeps a layer in evaluation mode, as one does in fine-tuning."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self
