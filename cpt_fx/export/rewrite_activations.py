"""Activations whose operator ORT cannot differentiate, as operators that it can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_fx.export.rewriting import Rewrite, Run, aten, stopped, valued

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


def _elu(run: Run, x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    # What is not chosen must not overflow: infinity times 0 is no gradient.
    below = torch.exp(torch.where(x > 0, torch.zeros_like(x), x) * input_scale) - 1
    return torch.where(x > 0, x * scale, below * (alpha * scale))


def _softplus(run: Run, x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    scaled = stopped(x) * beta
    linear = scaled > threshold
    small = torch.where(linear, torch.zeros_like(scaled), scaled)
    value = torch.where(linear, stopped(x), torch.log1p(torch.exp(small)) / beta)
    slope = torch.where(linear, torch.ones_like(small), torch.sigmoid(small))
    return valued(x * slope, value)


def _mish(run: Run, x: Tensor) -> Tensor:
    return x * torch.tanh(_softplus(run, x))


def _hardsigmoid(run: Run, x: Tensor) -> Tensor:
    at = stopped(x)
    inside = ((at > -3) & (at < 3)).to(at.dtype)
    return valued(x * (inside * (1 / 6)), torch.clamp(at + 3, 0, 6) / 6)


def _hardswish(run: Run, x: Tensor) -> Tensor:
    at = stopped(x)
    slope = torch.where(at < 3, at / 3 + 0.5, torch.ones_like(at)) * (at > -3).to(at.dtype)
    return valued(x * slope, at * torch.clamp(at + 3, 0, 6) / 6)


def _hardtanh(run: Run, x: Tensor, low: float = -1, high: float = 1) -> Tensor:
    """Clamp; at a bound, the gradient is 0: this is where it differs from `clamp`."""
    at = stopped(x)
    return valued(x * ((at > low) & (at < high)).to(at.dtype), torch.clamp(at, low, high))


def _prelu(run: Run, x: Tensor, weight: Tensor) -> Tensor:
    slope = weight.reshape(1, -1, *(1,) * (x.ndim - 2)) if x.ndim > 1 else weight
    return torch.where(x > 0, x, x * slope)


def _hardshrink(run: Run, x: Tensor, limit: float = 0.5) -> Tensor:
    return x * (torch.abs(stopped(x)) > limit).to(x.dtype)


def _softshrink(run: Run, x: Tensor, limit: float = 0.5) -> Tensor:
    at = stopped(x)
    return (x - torch.sign(at) * limit) * (torch.abs(at) > limit).to(x.dtype)


def _rrelu(
    run: Run, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    if training and lower != upper:
        return NotImplemented
    return torch.where(x > 0, x, x * ((lower + upper) / 2))


ACTIVATIONS: dict[Any, Rewrite] = {
    aten.elu.default: _elu,
    aten.selu.default: lambda run, x: _elu(run, x, _SELU_ALPHA, _SELU_SCALE),
    aten.celu.default: lambda run, x, alpha=1.0: _elu(run, x, alpha, 1.0, 1 / alpha),
    aten.softplus.default: _softplus,
    aten.mish.default: _mish,
    aten.hardsigmoid.default: _hardsigmoid,
    aten.hardswish.default: _hardswish,
    aten.hardtanh.default: _hardtanh,
    aten.relu6.default: lambda run, x: _hardtanh(run, x, 0, 6),
    aten.prelu.default: _prelu,
    aten.hardshrink.default: _hardshrink,
    aten.softshrink.default: _softshrink,
    aten.rrelu.default: _rrelu,
}
