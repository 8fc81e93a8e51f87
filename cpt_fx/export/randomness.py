"""Decompositions of ATen's random operators, which draw from the seeds of a step.

An exported graph has no generator. All random numbers are computed from one kind of noise in [0, 1): a hash of a seed
that is an input of the graph, the same in PyTorch and in every runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_STEPS = 2**24
"""How many values the noise takes."""
Uniform = Callable[[Tensor], Tensor]
"""Returns noise in [0, 1) of the shape of a tensor."""


def drawing(uniform: Uniform) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of random operators, given a source of noise."""

    def of(x: Tensor) -> Tensor:
        return uniform(x.detach().to(torch.float32))

    def normal(x: Tensor) -> Tensor:
        # Box-Muller: the noise may be 0, one minus it cannot.
        return torch.sqrt(torch.log(1.0 - of(x)) * -2.0) * torch.cos(of(x) * (2 * math.pi))

    def shaped(size: Any, dtype: torch.dtype | None) -> Tensor:
        return torch.zeros(size, dtype=dtype or torch.get_default_dtype())

    def bernoulli(x: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
        return (of(x) < (x if p is None else p)).to(x.dtype)

    def dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        kept = of(x) < 1 - p if train is not False else torch.ones_like(x, dtype=torch.bool)
        scale = 1.0 if train is False else 0.0 if p == 1 else 1 / (1 - p)
        return x * kept.to(x.dtype) * scale, kept

    def between(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Tensor:
        return of(x) * (high - low) + low

    def gauss(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
        return normal(x) * std + mean

    def whole(x: Tensor, low: Any, high: Any) -> Tensor:
        # The noise has 24 bits, and a sum in float32 no more.
        count = high - low
        if isinstance(count, int) and count > _STEPS:
            first, second = (of(torch.stack((x, x))) * _STEPS).to(torch.int64)
            place = (first * _STEPS + second) % count
        else:
            place = torch.floor(of(x) * count).to(torch.int64)
        made: Tensor = (place + low).to(x.dtype)
        return made

    def rrelu(
        x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any
    ) -> Tensor:
        if not training:
            return torch.where(x > 0, x, x * ((lower + upper) / 2))
        noise.copy_(torch.where(x <= 0, between(x, lower, upper), 1.0))
        return x * noise

    def like(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        return x if dtype is None else torch.zeros_like(x, dtype=dtype)

    return {
        aten.bernoulli.default: bernoulli,
        aten.bernoulli.p: bernoulli,
        aten.bernoulli_.float: lambda x, p=0.5, *, generator=None: x.copy_(bernoulli(x, p)),
        aten.bernoulli_.Tensor: lambda x, p, *, generator=None: x.copy_(bernoulli(x, p)),
        aten.native_dropout.default: dropout,
        aten.rrelu_with_noise.default: rrelu,
        aten.rand.default: lambda size, *, dtype=None, **_: of(shaped(size, dtype)).to(dtype or torch.float32),
        aten.randn.default: lambda size, *, dtype=None, **_: normal(shaped(size, dtype)).to(dtype or torch.float32),
        aten.rand_like.default: lambda x, *, dtype=None, **_: of(x).to(dtype or x.dtype),
        aten.randn_like.default: lambda x, *, dtype=None, **_: normal(x).to(dtype or x.dtype),
        aten.randint.default: lambda high, size, *, dtype=torch.int64, **_: whole(shaped(size, dtype), 0, high),
        aten.randint.low: lambda low, high, size, *, dtype=torch.int64, **_: whole(shaped(size, dtype), low, high),
        aten.randint_like.default: lambda x, high, *, dtype=None, **_: whole(like(x, dtype), 0, high),
        aten.randint_like.low_dtype: lambda x, low, high, *, dtype=None, **_: whole(like(x, dtype), low, high),
        aten.uniform_.default: lambda x, low=0.0, high=1.0, *, generator=None: x.copy_(between(x, low, high)),
        aten.uniform.default: between,
        aten.normal_.default: lambda x, mean=0.0, std=1.0, *, generator=None: x.copy_(gauss(x, mean, std)),
        aten.normal_functional.default: gauss,
        aten.exponential_.default: lambda x, lambd=1.0, *, generator=None: x.copy_(torch.log(1.0 - of(x)) / -lambd),
        aten.randperm.default: lambda n, *, dtype=torch.int64, **_: torch.argsort(of(torch.zeros(n))).to(dtype),
    }
