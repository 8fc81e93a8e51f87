"""Schedules whose widths depend on what training told them, written in every way that comes to mind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import cpt_fx
from cpt_fx.schedules import Bits, Custom, Delayed, Schedule, Sequence, Static

TOTAL = 60


class Adaptive:
    """Three bits until a loss is below a bound, then eight."""

    def __init__(self, bound: float = 0.8, low: int = 3) -> None:
        self.bound, self.low, self.seen, self.high, self.best = bound, low, [0.0], False, float("inf")

    def __call__(self, step: int) -> int:
        return 8 if self.high else self.low

    def observe(self, loss: float) -> None:
        self.seen.append(loss)
        self.high = self.high or loss < self.bound


class Saved(Adaptive):
    """It says itself what it remembers."""

    def state_dict(self) -> dict[str, Any]:
        return {"high": self.high, "seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.high, self.seen = state["high"], list(state["seen"])


@dataclasses.dataclass(eq=False)
class Data:
    """Its repr shows its state."""

    high: bool = False

    def __call__(self, step: int) -> int:
        return 8 if self.high else 3

    def observe(self, loss: float) -> None:
        self.high = self.high or loss < 0.8


class Slots:
    __slots__ = ("high",)

    def __init__(self) -> None:
        self.high = False

    __call__ = Data.__call__
    observe = Data.observe


class Method(Adaptive):
    def width(self, step: int) -> int:
        return self(step)


class Counting(Adaptive):
    """It changes whenever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __call__(self, step: int) -> int:
        self.asked += 1
        return 3 if self.asked <= 12 else 8


class OwnCustom(Custom):
    """A schedule of one's own with state."""

    def __init__(self, total_steps: int) -> None:
        self.high = False
        super().__init__(self.width, total_steps=total_steps)

    def width(self, step: int) -> int:
        return 8 if self.high else 3

    def observe(self, loss: float) -> None:
        self.high = self.high or loss < 0.8


class OwnSchedule(Schedule):
    def __init__(self, total_steps: int) -> None:
        super().__init__(total_steps, "current")
        self.high = False

    def _values(self, steps: Any) -> Any:
        return np.full((len(steps), 3), 8.0 if self.high else 3.0)

    def _config(self) -> dict[str, object]:
        return {"total_steps": self.total_steps}

    def _widest(self) -> Bits | None:
        return None

    def observe(self, loss: float) -> None:
        self.high = self.high or loss < 0.8


def closure() -> Callable[[int], int]:
    high = False

    def width(step: int) -> int:
        return 8 if high else 3

    def observe(loss: float) -> None:
        nonlocal high
        high = high or loss < 0.8

    width.observe = observe  # type: ignore[attr-defined]
    return width


def list_closure() -> Callable[[int], int]:
    losses = [1.0]
    width: Any = lambda step: 8 if losses[-1] < 0.8 else 3  # noqa: E731
    width.observe = lambda loss: losses.append(min(loss, losses[-1]))
    return width  # type: ignore[no-any-return]


def attributes(step: int) -> int:
    return 8 if getattr(attributes, "high", False) else 3


def defaults() -> Callable[[int], int]:
    def width(step: int, state: dict[str, bool] = {}) -> int:  # noqa: B006
        return 8 if state.get("high") else 3

    width.observe = lambda loss: width.__defaults__[0].update(high=True) if loss < 0.8 else None  # type: ignore
    return width


def _from_mapping(step: int, state: dict[str, Any]) -> int:
    return 8 if state["high"] else 3


def made(kind: str, total: int = TOTAL) -> Schedule:
    """A new one."""
    if kind == "own custom":
        return OwnCustom(total)
    if kind == "own schedule":
        return OwnSchedule(total)
    if kind == "delayed":
        return Delayed(Custom(Adaptive(), total_steps=total - 5, eval_bits=8), 5)
    if kind == "sequence":
        return Sequence([Static(4, total_steps=5), Custom(Adaptive(), total_steps=total - 5)])
    functions: dict[str, Callable[[], Callable[[int], int]]] = {
        "object": Adaptive, "saved": Saved, "data": Data, "slots": Slots, "method": lambda: Method().width,
        "closure": closure, "defaults": defaults,
        "list closure": list_closure, "attributes": lambda: attributes, "counting": Counting,
        "partial": lambda: functools.partial(_from_mapping, state={"high": False}),
    }  # fmt: skip
    return Custom(functions[kind](), total_steps=total)


KINDS = (
    "object", "saved", "data", "slots", "method", "closure", "list closure", "defaults", "attributes", "counting",
    "partial", "own custom", "own schedule", "delayed", "sequence",
)  # fmt: skip
PORTABLE = tuple(kind for kind in KINDS if "closure" not in kind and kind != "defaults")


def observe(schedule: Any, loss: float) -> None:
    """Tell a schedule the loss, however it is written."""
    if hasattr(schedule, "observe"):
        schedule.observe(loss)
        return
    inner = getattr(schedule, "schedule", None) or getattr(schedule, "schedules", [None])[-1] or schedule
    fn = getattr(inner, "fn", None)
    if fn is attributes:
        attributes.high = getattr(attributes, "high", False) or loss < 0.8
    elif isinstance(fn, functools.partial):
        fn.keywords["state"]["high"] |= loss < 0.8
    elif fn is not None:
        getattr(fn, "__self__", fn).observe(loss)


def loss_at(step: int, seed: int) -> float:
    """Falls below 0.8 at step 20 (seed 0) or 30 (seed 1)."""
    return 0.5 if step >= 20 + 10 * seed else 1.0


def train(schedule: Schedule, seed: int, steps: int = TOTAL) -> dict[str, float]:
    """Read the widths, tell the loss, step on; returns what the widths cost."""
    cost = 0.0
    for step in range(steps):
        weight, activation, gradient = schedule.current
        observe(schedule, loss_at(step, seed))
        cost += (weight * activation + (weight + activation) * gradient) / (3 * 64) / steps
        schedule.step()
    return {"accuracy": 0.5, "cost": cost}


def train_model(schedule: Schedule, seed: int) -> dict[str, float]:
    """The same with a model, whose own widths are what counts."""
    model = cpt_fx.transform(nn.Linear(4, 3), schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cost, bits = 0.0, []
    for step in range(TOTAL):
        seen = model.__dict__["_cpt_fx_part"].session.state.now()
        bits.append(seen)
        weight = next(width for name, width in seen.items() if "weight" in name)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        observe(schedule, loss_at(step, seed))
        schedule.step()
        cost += weight * weight / 64 / TOTAL
    return {"accuracy": 0.5, "cost": cost}
