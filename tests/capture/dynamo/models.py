"""Small models that Dynamo captures in one graph, in several, or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cpt_fx import recipes

EXACT = recipes.paper(gradient_rounding="nearest")
"""A recipe without noise: two runs are equal to the last bit."""


class Block(nn.Module):
    """Two layers and two products without weights; with a break, Dynamo has to stop between them."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x)) @ x.t()
        if self.breaks:
            torch._dynamo.graph_break()
        z: Tensor = torch.tanh(self.two(x + y.mean())) @ x.t() @ x
        return z


class Blocks(nn.Module):
    """Three blocks of one class: compiled code is shared between them, ranges must not be."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(breaks=breaks) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Checkpointed(nn.Module):
    """A part that is computed again in the backward pass, in any of its forms."""

    def __init__(self, *, reentrant: bool | None, breaks: bool) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.3)
        self.reentrant = reentrant
        self.breaks = breaks

    def part(self, x: Tensor) -> Tensor:
        y = self.one(x).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        z: Tensor = self.drop(self.two(y)) @ y.t()
        return z

    def forward(self, x: Tensor) -> Any:
        x = x * 1
        return self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)


class Modes(nn.Module):
    """Takes another way in training than in evaluation, and has both kinds of products."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.3, eps=0.01), nn.Dropout(0.4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        y = self.fc(self.fc(x))
        if self.training:
            y = y * 2
        return {"y": self.drop(self.norm(y)) * scale, "xx": x @ x.t(), "nothing": None}


def seeded(kind: type[nn.Module], **options: Any) -> nn.Module:
    """Return a model with the same weights at every call."""
    torch.manual_seed(0)
    return kind(**options)
