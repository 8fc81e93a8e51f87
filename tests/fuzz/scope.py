"""A class in the making: every line that is drawn runs at once, so that the next one knows what shapes there are."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

LARGEST = 3_000
"""Elements of a tensor. Small ones show as much, and are fast."""

HEADER = """\
import contextlib
import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
"""

Item = TypeVar("Item")
Production = Callable[["Scope"], "str | None"]


class Unfit(Exception):  # noqa: N818
    """What was drawn does not go with what is there."""


class Shared:
    """What all classes of one model have in common: chance, the text above them, and the names in use."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.preamble: list[str] = []
        self.names: dict[str, Any] = {"__name__": __name__}
        self.counts: dict[str, int] = {}
        exec(HEADER, self.names)

    def name(self, prefix: str) -> str:
        """Return a name that nothing has."""
        self.counts[prefix] = self.counts.get(prefix, 0) + 1
        return f"{prefix}{self.counts[prefix]}"

    def define(self, text: str) -> None:
        """Put a class or a function above the model, once."""
        if text not in self.preamble:
            exec(text, self.names)
            self.preamble.append(text)


class Scope:
    """One class: what its `__init__` and its `forward` say so far, alive. The value at hand is always called `h`."""

    def __init__(self, shared: Shared, h: Tensor, depth: int = 0, **others: Any) -> None:
        self.shared, self.chance, self.depth = shared, shared.chance, depth
        self.init: list[str] = []
        self.lines: list[str] = []
        self.live = nn.Module()
        self.values: dict[str, Any] = {"self": self.live, "h": h, **others}
        self.pending: list[str] = []
        self.calls: list[str] = []
        """Layers that map the value's last dim, or its channels, to itself: they may be called again."""

    @property
    def h(self) -> Tensor:
        value: Tensor = self.values["h"]
        return value

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.h.shape)

    @property
    def last(self) -> int:
        """The size of the last dim."""
        self.need(self.h.ndim >= 1 and self.h.shape[-1] > 0)
        return self.h.shape[-1]

    @property
    def dtype(self) -> str:
        """How to ask for the dtype of the value: nothing where it is the usual one."""
        return "" if self.h.dtype is torch.float32 else f", dtype={self.h.dtype}"

    def need(self, condition: object) -> None:
        """Give up what is being drawn unless a condition holds."""
        if not condition:
            raise Unfit

    def one(self, items: Sequence[Item]) -> Item:
        """Draw one of some things."""
        return self.chance.choice(items)

    def often(self, probability: float) -> bool:
        """Draw yes or no."""
        return self.chance.random() < probability

    def size(self) -> int:
        """Draw a size: mostly one that shows four levels for what they are, now and then an odd one."""
        return self.one((5, 6, 7, 8, 9)) if self.often(0.85) else self.one((1, 2, 3, 4, 11, 13))

    def make(self, prefix: str, text: str) -> str:
        """Let `__init__` set an attribute; return how `forward` calls it."""
        name = self.shared.name(prefix)
        self.start(f"self.{name} = {text}")
        return f"self.{name}"

    def start(self, line: str) -> None:
        """Add a line to `__init__`, and run it."""
        exec(line, self.shared.names, self.values)
        self.pending.append(line)

    def parameter(self, *sizes: int) -> str:
        """Make a parameter of a size, in the dtype of the value."""
        shape = ", ".join(map(str, sizes))
        return self.make("w", f"nn.Parameter(torch.randn({shape}{self.dtype}) * 0.5)")

    def layer(self, prefix: str, text: str) -> str:
        """Make a layer in the dtype of the value."""
        return self.make(prefix, text if not self.dtype else f"{text}.to({self.h.dtype})")

    def value(self, text: str) -> Any:
        """Return what an expression is now."""
        return eval(text, self.shared.names, self.values)

    def attempt(self, production: Production) -> bool:
        """Draw some lines, run them, and keep them if what they leave is a value to go on from."""
        before, self.pending = dict(self.values), []
        try:
            text = production(self)
            if text:
                with torch.random.fork_rng(devices=[]):
                    exec(text, self.shared.names, self.values)
            self._check()
        except Exception:
            self.values = before
            return False
        finally:
            self.values.pop("__builtins__", None)
        self.init += self.pending
        self.lines += (text or "").splitlines()
        return True

    def _check(self) -> None:
        h = self.h
        self.need(isinstance(h, Tensor) and h.is_floating_point() and h.numel() <= LARGEST and h.ndim <= 6)
        self.need(h.layout is torch.strided and bool(h.isfinite().all()))
        if h.numel() and float(h.detach().abs().max()) > 30:
            self.values["h"] = torch.tanh(h)
            raise Unfit

    def text(self, name: str, arguments: str = "h", result: str = "h") -> str:
        """Return the class."""
        body = "\n".join(self.lines)
        used = [line for line in self.init if _attribute(line) is None or f"self.{_attribute(line)}" in body + result]
        init = "".join(f"        {line}\n" for line in used)
        body = "".join(f"        {line}\n" for line in self.lines)
        return (
            f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n"
            f"    def forward(self, {arguments}):\n{body}        return {result}\n"
        )


def _attribute(line: str) -> str | None:
    """Return the name of the attribute that a line of `__init__` makes; None of one that does something else."""
    match = re.match(r"self\.(\w+) = ", line)
    return match[1] if match else None
