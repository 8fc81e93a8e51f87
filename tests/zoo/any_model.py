"""The register of the zoo for "any model": real families and nasty code, which torch.fx alone cannot capture."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from tests.zoo.layers import Built

Inputs = Callable[[int], "tuple[Any, ...] | dict[str, Any]"]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo. Its weights do not depend on the size of the batch that is asked for."""

    family: str
    model: Callable[[], nn.Module]
    inputs: Inputs
    """Batch size -> positional arguments, or a dict of keyword arguments."""
    needs: str | None = None
    """The package it comes from, where that is not torch."""
    refused: str | None = None
    """A part of the sentence with which `transform` refuses it, where that is the right thing."""
    rounding: bool = False
    """Equal up to rounding only: its own code does the same in another order where it is compiled."""

    def build(self, size: int = 2) -> Built:
        """Return the model and its arguments, the same ones at every call."""
        seed_everything(0)
        model = self.model()
        seed_everything(size)
        given = self.inputs(size)
        return (model, (), given) if isinstance(given, dict) else (model, given, {})


ANY_MODEL: dict[str, Entry] = {}
"""Every model by name."""


def add(
    family: str, name: str, model: Callable[[], nn.Module], inputs: Inputs, *, needs: str | None = None,
    refused: str | None = None, rounding: bool = False,
) -> None:  # fmt: skip
    """Register a model."""
    assert name not in ANY_MODEL, name
    ANY_MODEL[name] = Entry(family, model, inputs, needs, refused, rounding)


def written_out(
    family: str, inputs: Inputs, make: Callable[[], dict[str, Any]], *, needs: str | None = None,
    refused: str | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Register a forward function with the attributes it needs as a model of its own class."""

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        kind = type(f"Zoo_{forward.__name__}", (nn.Module,), {"forward": forward})

        def model() -> nn.Module:
            new: nn.Module = kind()
            for name, value in make().items():
                setattr(new, name, value)
            return new

        add(family, forward.__name__, model, inputs, needs=needs, refused=refused)
        return forward

    return register


def seed_everything(seed: int) -> None:
    """Seed the three generators that models draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def normal(*shape: int) -> Inputs:
    """One tensor whose first dim is the batch."""
    return lambda size: (torch.randn(size, *shape),)


def integers(limit: int, *shape: int) -> Tensor:
    """Random indices below a limit."""
    return torch.randint(0, limit, shape)


def package(name: str) -> Any:
    """An optional package, untyped: the zoo can be listed and type-checked without it."""
    return importlib.import_module(name)


@cache
def missing(name: str | None) -> str | None:
    """Say why an optional package cannot be used, or None. Importing runs its code, which may fail in many ways."""
    if name is None:
        return None
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        return f"{name} cannot be imported: {error}".splitlines()[0]
    return None
