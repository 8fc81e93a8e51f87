"""A model of many parts, its training, and whether two of them hold the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cpt_fx.schedules import Schedule, named
from tests.training import same, train_step
from tests.zoo import Residual


class Net(nn.Module):
    """Convolution, norm, dropout, a product of activations, and parts that the graph never mentions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spare = nn.Linear(3, 3)
        self.block = Residual(3, 4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.rand(5))
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        y: Tensor = self.head(self.drop(self.block(x).mean((2, 3)))) * self.scale
        return y @ y.transpose(0, 1)


def schedule(**options: Any) -> Schedule:
    return named("LR", q_min=3, q_max=8, total_steps=12, cycles=2, q_grad=(6, 8), **options)


def batch(seed: int = 0) -> tuple[Tensor]:
    return (torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed)),)


def steps(model: nn.Module, *schedules: Schedule, first: int = 0, count: int = 2) -> list[Any]:
    """Train for some steps on seeded batches; the noise of gradients is seeded too."""
    done = []
    for step in range(first, first + count):
        done.append(train_step(model, batch(step), {}, seed=step))
        for one in schedules:
            one.step()
    return done


def check_equal_state(ours: nn.Module, theirs: nn.Module) -> None:
    left, right = ours.state_dict(), theirs.state_dict()
    assert list(left) == list(right)
    assert [key for key in right if not same(left[key], right[key])] == []
