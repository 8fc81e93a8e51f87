"""A module whose code asks something, and the tables of all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Case:
    """A forward function, what its module holds, and what it is called with."""

    forward: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    inputs: Callable[[], tuple[Any, ...]]

    def build(self) -> nn.Module:
        """Return a module; the same one at every call."""
        torch.manual_seed(0)
        model: nn.Module = type(self.forward.__name__, (nn.Module,), {"forward": self.forward})()
        for name, value in self.make().items():
            setattr(model, name, value)
        return model

    def arguments(self) -> tuple[Any, ...]:
        """Return what to call it with."""
        torch.manual_seed(1)
        return self.inputs()


ASKING: dict[str, Case] = {}
"""What no trace can answer, or do."""

FINE: dict[str, Case] = {}
"""What looks alike and is answered truly: torch.fx keeps these."""


def a_layer() -> dict[str, Any]:
    return {"fc": nn.Linear(4, 4)}


def one() -> tuple[Any, ...]:
    return (torch.randn(3, 4),)


def two() -> tuple[Any, ...]:
    return torch.randn(3, 4), torch.randn(3, 4)


def twice() -> tuple[Any, ...]:
    x = torch.randn(3, 4)
    return x, x


def asks(
    make: Callable[[], dict[str, Any]] = a_layer, inputs: Callable[[], tuple[Any, ...]] = two, into: Any = ASKING
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        assert forward.__name__ not in into
        into[forward.__name__] = Case(forward, make, inputs)
        return forward

    return register


fine = functools.partial(asks, into=FINE)
