"""Models to inspect, and how to train them for a moment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Schedule, named


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.dropout(self.conv2(torch.relu(self.norm(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self, blocks: int = 2, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return result


class TakingTurns(nn.Module):
    """Two lists whose members are called in turns: folded, each would come before and after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        return x


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 8, 8)


def cyclic() -> Schedule:
    return named("CR", q_min=3, q_max=8, total_steps=80)


def transformed(model: nn.Module | None = None, **options: Any) -> nn.Module:
    return cpt_fx.transform(model or Net(), cyclic(), **options)


def train_step(model: nn.Module, x: Tensor | None = None) -> None:
    """Go forward and backward once, without keeping the gradients."""
    model(images() if x is None else x).square().mean().backward()
    model.zero_grad()


def trained(model: nn.Module | None = None, x: Tensor | None = None, **options: Any) -> nn.Module:
    result = transformed(model, **options)
    train_step(result, x)
    return result
