"""What the code reads from attributes counts when it is changed; what it does not read costs no new graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ir.result.models import QUIET, Heard, batch, equal, far, made, ways

pytestmark = QUIET


@dataclass(slots=True)
class Slots:
    gain: float = 1.0


class Scale:
    """An object that is called."""

    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.gain


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)
        self.read = read
        self.slots, self.scale, self.scales = Slots(), Scale(), [Scale()]
        self.queue = deque([1.0])
        self.part = partial(torch.mul, other=1.0)
        self.config = SimpleNamespace(model=SimpleNamespace(attention=SimpleNamespace(gain=1.0)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.read(self, self.one(x)))
        return y


READ: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], object]]] = {
    "slots": (lambda m, x: x * m.slots.gain, lambda m: setattr(m.slots, "gain", 3.0)),
    "called": (lambda m, x: m.scale(x), lambda m: setattr(m.scale, "gain", 3.0)),
    "called, in a list": (lambda m, x: m.scales[0](x), lambda m: setattr(m.scales[0], "gain", 3.0)),
    "queue": (lambda m, x: x * m.queue[0], lambda m: m.queue.appendleft(3.0)),
    "partial": (lambda m, x: m.part(x), lambda m: m.part.keywords.update(other=3.0)),
    "deep": (
        lambda m, x: x * m.config.model.attention.gain,
        lambda m: setattr(m.config.model.attention, "gain", 3.0),
    ),
    "by name": (lambda m, x: x * getattr(m, "la" + "te", 1.0), lambda m: setattr(m, "late", 3.0)),
    "asked for": (lambda m, x: x * 3 if hasattr(m, "late") else x, lambda m: setattr(m, "late", 3.0)),
}


@ways
@pytest.mark.parametrize("name", READ)
def test_what_is_read_counts(name: str, way: str) -> None:
    read, change = READ[name]
    model, result, low = Reading(read), made(Reading(read), way, 32), made(Reading(read), way)
    result(batch())
    low(batch())
    for one in (model, result, low):
        change(one)
    assert equal(result(batch()), model(batch()))
    assert far(low(batch()), model(batch()))


UNREAD: dict[str, Callable[[Any, int], object]] = {
    "a counter": lambda m, n: setattr(m, "steps_so_far", n),
    "a list": lambda m, n: m.losses.append(n),
    "a trainer": lambda m, n: setattr(m.trainer, "global_step", n),
    "a tensor": lambda m, n: setattr(m, "latest", torch.ones(n)),
}


@ways
@pytest.mark.parametrize("name", UNREAD)
def test_what_a_loop_keeps_on_a_model_costs_no_new_graph(name: str, way: str, heard: Heard) -> None:
    model: Any = Reading(lambda m, x: x * m.slots.gain)
    model.losses, model.trainer = [], SimpleNamespace(global_step=0)
    result = made(model, way)
    expected = result(batch())
    for step in range(3):
        UNREAD[name](result, step)
        assert equal(result(batch()), expected)
    assert "captured again" not in heard.text()
