"""What the tests of widths share: a model that shows the widths it ran at, and others to train."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx import Format, recipes
from cpt_fx.formats import Group, Scheme
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Bits, Schedule, named
from tests.capture.captures import CAPTURES as CAPTURES
from tests.capture.captures import captures as captures

POINTS = 600

_DYNAMIC = Rule(
    input=Format(scheme=Scheme.AFFINE_INTEGER),
    weight=Format(scheme=Scheme.SYMMETRIC, group=Group.CHANNEL),
    gradient=Format(scheme=Scheme.AFFINE_INTEGER),
)
DYNAMIC = Recipe(name="dynamic", linear=_DYNAMIC, conv=_DYNAMIC, matmul=_DYNAMIC)
"""No noise and nothing learned: what runs depends on the width alone."""

OBSERVED = recipes.paper(gradient_rounding="nearest")
"""No noise, but running ranges of activations."""


class Probe(nn.Module):
    """Returns what its quantizers made of a ramp: activations of `act`, and weights of `wgt`.

    Products are with one or zero, which are on every grid, so the distinct values are the levels of the quantizers.
    """

    eye: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Linear(1, 1, bias=False)
        self.wgt = nn.Linear(POINTS, 1, bias=False)
        self.register_buffer("eye", torch.eye(POINTS), persistent=False)
        with torch.no_grad():
            self.act.weight.fill_(1.0)
            self.wgt.weight.copy_(ramp().t())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.act(x), self.wgt(self.eye)


def ramp() -> Tensor:
    """Return as many distinct values as the probe can tell apart."""
    return torch.linspace(-1.0, 1.0, POINTS).unsqueeze(1)


def width_of(values: Tensor) -> int:
    """Return the width that makes so many levels of a ramp; 32 where none were lost."""
    levels = len(torch.unique(values.detach()))
    return 32 if levels > POINTS * 0.9 else math.ceil(math.log2(levels))


def ran(model: Callable[[Tensor], Any]) -> tuple[int, int]:
    """Run a probe without autograd; return the widths of weights and activations that really ran."""
    with torch.no_grad():
        activations, weights = model(ramp())
    return width_of(weights), width_of(activations)


def ran_backward(model: Callable[[Tensor], Any], between: Callable[[], object] = lambda: None) -> Bits:
    """Run a probe forward and backward, with something in between; return all three widths that ran."""
    x = ramp().requires_grad_()
    activations, weights = model(x)
    between()
    activations.backward(ramp())
    assert x.grad is not None
    return Bits(width_of(weights), width_of(activations), width_of(x.grad))


def shown(model: nn.Module) -> dict[tuple[str, str], int]:
    """Return the widths that `inspect` shows."""
    return {(one.layer, one.role): one.bits for one in cpt_fx.inspect(model).quantizers}


def plan(**options: Any) -> Schedule:
    """Return a schedule whose widths change at nearly every step: 3 4 4 5 6 7 3 4 4 5 6 7."""
    settings: dict[str, Any] = {"q_min": 3, "q_max": 8, "total_steps": 12, "cycles": 2, "q_grad": (5, 8)}
    return named("LR", **{**settings, **options})


def probe(schedule: Schedule, capture: str = "auto", **options: Any) -> nn.Module:
    """Return a transformed probe."""
    return cpt_fx.transform(Probe(), schedule, capture=capture, **options)


def learned(schedule: Schedule, capture: str = "auto", **options: Any) -> nn.Module:
    """Return a transformed probe whose running ranges are those of the ramp."""
    result = probe(schedule, capture, **options)
    ran(result)
    return result


class Net(nn.Module):
    """Two layers, and a part that can be computed again in the backward pass."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.reentrant = reentrant

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)
        z: Tensor = self.three(y)
        return z


def net() -> Net:
    """Return the same net at every call."""
    torch.manual_seed(3)
    return Net()


def batch(seed: int = 0, size: int = 8) -> Tensor:
    """Return seeded inputs of the net."""
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))


def state_of_ours(model: nn.Module) -> dict[str, Tensor]:
    """Return what is ours in a state_dict."""
    return {key: value for key, value in model.state_dict().items() if "cpt_fx" in key}


def buffers_of_ours(model: nn.Module) -> dict[str, Tensor]:
    """Return what is ours among the buffers."""
    return {key: value for key, value in model.named_buffers() if "cpt_fx" in key}


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a state as a file format of plain tensors would: nothing but names and values."""
    return {key: value.detach().clone() for key, value in state.items()}


@contextmanager
def flags(model: nn.Module, mode: bool) -> Iterator[None]:
    """Set every module's `training` as trainers do that restore modes, and put it back."""
    before = {module: module.training for module in model.modules()}
    for module in before:
        module.training = mode
    yield
    for module, was in before.items():
        module.training = was
