"""Models that Dynamo captures, and the one graph of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import cpt_fx
from cpt_fx import CaptureError, recipes
from cpt_fx.schedules import Schedule, Static

RECIPE = recipes.paper(gradient_rounding="nearest")


def by_dynamo(model: nn.Module, schedule: Schedule | None = None) -> nn.Module:
    return cpt_fx.transform(model, schedule or Static(4), recipe=RECIPE, capture="dynamo")


def single(model: nn.Module, *args: Any, **kwargs: Any) -> fx.GraphModule:
    return cpt_fx.single_graph(by_dynamo(model), args, kwargs)


def ranges_of(result: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in result.named_buffers() if "_range_" in name}


def refusal(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        single(model, *args, **kwargs)
    return str(caught.value)


def as_it_is(self: Any, x: Tensor) -> Tensor:
    return x


class Small(nn.Module):
    """Two layers, with what a test wants in between and after."""

    def __init__(self, end: Callable[..., Any] = as_it_is) -> None:
        super().__init__()
        self.one = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.two = nn.Linear(6, 4)
        self.end = end

    def forward(self, x: Tensor) -> Any:
        return self.end(self, self.two(self.drop(F.relu(self.one(x)))))


class Attributes(nn.Module):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.shift = nn.Linear(4, 4), torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.shift  # type: ignore[no-any-return]


class Plain(nn.Module):
    """Nothing that asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0, *more: Tensor, shift: Tensor | None = None, **rest: Any) -> Tensor:
        y: Tensor = self.layer(x) * scale
        for item in more:
            y = y + item
        return y if shift is None else y + shift


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
