"""What the tests of integer execution share: products as models, and both executions of one model side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx import recipes
from cpt_fx.capture.standalone import precision_of
from cpt_fx.formats import Rounding
from cpt_fx.integer import choice
from cpt_fx.integer.counts import RATIO
from cpt_fx.operators import MULTIPLY
from cpt_fx.recipes import Recipe
from cpt_fx.schedules import Bits, Static
from tests.passes import Apply

CODES = Bits(4, 4, 8)
"""Widths at which everything is multiplied on integers."""


def products() -> dict[str, tuple[nn.Module, Tensor]]:
    """Return a model for each kind of product, with an input. The inputs depend on all that is before a product."""
    torch.manual_seed(1)
    image, sequence = torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9)

    def of(function: Any, x: Tensor, **parts: Tensor | nn.Module) -> tuple[nn.Module, Tensor]:
        return Apply(function, **parts), x

    return {
        "linear": (nn.Sequential(nn.Linear(16, 8)), torch.randn(4, 5, 16)),
        "linear without bias": (nn.Sequential(nn.Linear(16, 8, bias=False)), torch.randn(6, 16)),
        "linear of a vector": (nn.Sequential(nn.Linear(16, 8)), torch.randn(16)),
        "addmm": of(lambda self, x: torch.addmm(self.b, x, self.w), torch.randn(5, 16),
                    w=torch.randn(16, 7), b=torch.randn(7)),
        "addmm of a matrix": of(lambda self, x: torch.addmm(self.b, x, self.w), torch.randn(5, 16),
                                w=torch.randn(16, 7), b=torch.randn(5, 7)),
        "mm": of(lambda self, x: torch.mm(x, self.w), torch.randn(5, 16), w=torch.randn(16, 7)),
        "weight on the left": of(lambda self, x: self.w @ x, torch.randn(2, 16, 5), w=torch.randn(7, 16)),
        "bmm": of(lambda self, x: torch.bmm(x, x.transpose(1, 2)), torch.randn(3, 5, 16)),
        "matmul in four dims": of(lambda self, x: x @ x.transpose(-1, -2), torch.randn(2, 3, 5, 16)),
        "matmul with broadcast batches": of(lambda self, x: x @ x[0].transpose(-1, -2), torch.randn(2, 3, 5, 16)),
        "matmul with a vector": of(lambda self, x: x @ self.v, torch.randn(3, 5, 16), v=torch.randn(16)),
        "vector with matmul": of(lambda self, x: self.v @ x, torch.randn(3, 16, 5), v=torch.randn(16)),
        "conv2d": (nn.Sequential(nn.Conv2d(3, 6, (3, 2), (2, 1), (1, 1), (1, 2))), image),
        "conv2d, 1x1": (nn.Sequential(nn.Conv2d(3, 6, 1, bias=False)), image),
        "conv2d, named padding": (nn.Sequential(nn.Conv2d(3, 6, 3, padding="same")), image),
        "conv2d of one image": (nn.Sequential(nn.Conv2d(3, 6, 3)), image[0]),
        "conv1d": (nn.Sequential(nn.Conv1d(3, 6, 3, 2, 1)), sequence),
        "conv1d of one sequence": (nn.Sequential(nn.Conv1d(3, 6, 3, bias=False)), sequence[0]),
        "linear with a vector": of(lambda self, x: F.linear(x, self.v, self.b), torch.randn(3, 5, 16),
                                   v=torch.randn(16), b=torch.randn(())),
        "linear of two vectors": of(lambda self, x: F.linear(x, self.v), torch.randn(16), v=torch.randn(16)),
    }  # fmt: skip


class Encoder(nn.Module):
    """A transformer layer between an embedding and a head."""

    def __init__(self, symbols: int = 11, width: int = 16, heads: int = 2, positions: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.place = nn.Parameter(0.1 * torch.randn(positions, width))
        self.heads = heads
        self.later: Tensor
        self.register_buffer("later", torch.ones(positions, positions, dtype=torch.bool).triu(1))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place
        y = self.norm1(x)
        projections = (self.query, self.key, self.value)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in projections)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        y = F.softmax(scores.masked_fill(self.later, float("-inf")), -1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x)  # type: ignore[no-any-return]


ENCODER_PRODUCTS = 9
"""query, key, value, scores, context, out, up, down, head"""


class Convolutions(nn.Module):
    """A residual block with a stride, batch norm and an in-place activation."""

    def __init__(self, channels: int = 1, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.shortcut = nn.Conv2d(width, width, 1, stride=2, bias=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = self.relu(self.conv(x) + self.shortcut(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


CONVOLUTIONS_PRODUCTS = 4


def nearest() -> Recipe:
    """Return the integer recipe without random numbers: compiled code draws others than eager code."""
    recipe = recipes.integer()
    for family in MULTIPLY:
        rule = recipe.rule(family)
        assert rule is not None and rule.gradient is not None
        recipe = recipe.with_rule(family, gradient=replace(rule.gradient, rounding=Rounding.NEAREST))
    return recipe


def both(
    model: nn.Module | torch.export.ExportedProgram, bits: Bits = CODES, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Return a model in integer and in simulated execution, with one recipe."""
    recipe = options.pop("recipe", recipes.integer())
    return tuple(  # type: ignore[return-value]
        cpt_fx.transform(model, Static(bits), recipe=recipe, execution=execution, **options)
        for execution in ("integer", "simulated")
    )


def counts(model: nn.Module) -> Tensor:
    """Return the counts of all products together: forward, left, right by outcome."""
    return torch.stack(list(precision_of(model).products.buffers()))[..., :RATIO].sum(0)


def set_widths(model: nn.Module, forward: int, gradient: int) -> None:
    """Let a schedule say the widths from now on."""
    Static(Bits(forward, forward, gradient)).bind(model)


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference, as a part of the largest element of its tensor."""
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
    pairs = [(x.detach(), y.detach()) for x, y in zip(ours, theirs, strict=True) if x.numel()]
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1e-30)) for x, y in pairs)


@pytest.fixture(autouse=True)
def always() -> Iterator[None]:
    """Let size be no reason for floating point: the models of the tests are small. Imported where it is needed."""
    with choice.chosen("always"):
        yield
