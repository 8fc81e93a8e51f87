"""Models for the tests of devices, with the inputs they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx

RECIPES = ("default", "paper", "integer", "fp8", "mx")


class Convolutional(nn.Module):
    def __init__(self, *, bare: bool = False) -> None:
        super().__init__()
        self.drop = 0.0 if bare else 0.1
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.Identity() if bare else nn.BatchNorm2d(4)
        self.deep, self.head = nn.Conv2d(4, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        z: Tensor = self.head(F.dropout(self.deep(y), self.drop, self.training and self.drop > 0.0).mean((2, 3)))
        return z


class Attending(nn.Module):
    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.words, self.qkv, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        qkv = self.qkv(x).unflatten(-1, (3, 2, 4)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        shares = torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1)
        sums = shares @ v
        if self.fused:
            sums = sums + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(sums.transpose(1, 2).flatten(2))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(x)
        z: Tensor = self.head(y)
        return z


class Broken(nn.Module):
    """Two graphs, with code in between that no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        torch._dynamo.graph_break()
        z: Tensor = self.two(y)
        return z


class Split(nn.Module):
    """Two halves that may lie on two devices; nothing flows back from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(6, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, self.second(y.detach().to(self.second[0].weight.device))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "conv": (Convolutional, lambda: torch.randn(2, 3, 6, 6)),
    "attention": (Attending, lambda: torch.randint(0, 11, (2, 5))),
    "gru": (Recurrent, lambda: torch.randn(2, 3, 4)),
    "break": (Broken, lambda: torch.randn(4, 6)),
}


def train(result: nn.Module, x: Tensor, schedule: Any, steps: int = 3) -> None:
    """Train for some steps, without reading a value."""
    optimizer = torch.optim.AdamW(result.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        result(x).square().sum().backward()
        optimizer.step()
        schedule.step()


def devices(model: nn.Module) -> dict[str, str]:
    """Return where every parameter and buffer lies, ours among them."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.device.type for name, tensor in named}


def transformed(model: nn.Module, schedule: Any, **options: Any) -> nn.Module:
    """Return a transformed model."""
    return cpt_fx.transform(model, schedule, **options)
