"""What a rewritten model might do otherwise than the plain one: pairs of forward functions, the right one first."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[[Any, Any], Any]


class Base(nn.Module):
    """A layer, dropout, batch norm and buffers, for code that does something with them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(6), persistent=False)
        self.register_buffer("weighed", torch.ones(6, requires_grad=True))
        self.learned = torch.ones(6, requires_grad=True)
        self.scale = nn.Parameter(torch.ones(6))
        self.calls = 0
        self.last: Any = None
        self.log: list[Any] = []


def model(forward: Forward) -> nn.Module:
    """Return a model with a forward of its own."""
    made: nn.Module = type("Net", (Base,), {"forward": forward})()
    return made


@dataclass
class Output:
    """What models of transformers return."""

    logits: Tensor
    loss: Tensor | None = None


@dataclass
class Scored(Output):
    """The same, of another type."""


class Custom:
    """An object of somebody's."""

    def __init__(self, value: Tensor, **more: Any) -> None:
        self.value = value
        self.__dict__.update(more)


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


def _store(self: Any, **values: Any) -> bool:
    for name, value in values.items():
        setattr(self, name, value)
    return True


def _twice(self: Any, x: Tensor, name: str, value: Any) -> Tensor:
    setattr(self, name, value)
    y: Tensor = self.fc(x)
    return y


PAIRS: dict[str, tuple[Forward, Forward, str]] = {}
"""Name -> what the plain model does, what the other one does, and a part of the sentence that tells them apart."""


def pair(name: str, said: str, right: Forward, wrong: Forward) -> None:
    """Register a fault."""
    PAIRS[name] = right, wrong, said


def _buffers() -> None:
    pair(
        "a buffer that is not updated",
        "buffer count is off by",
        lambda s, x: (s.count.add_(1), s.fc(x))[1],
        lambda s, x: s.fc(x),
    )
    pair(
        "a buffer that is not persistent",
        "buffer seen is off by",
        lambda s, x: (s.seen.copy_(x.detach().mean(0)), s.fc(x))[1],
        lambda s, x: s.fc(x),
    )
    pair(
        "a buffer updated in training only",
        "in evaluation: buffer count",
        lambda s, x: (s.count.add_(1), s.fc(x))[1],
        lambda s, x: (s.count.add_(1) if s.training else None, s.fc(x))[1],
    )
    pair(
        "running statistics that stand still",
        "buffer norm.running_mean",
        lambda s, x: s.norm(s.fc(x)),
        lambda s, x: F.batch_norm(
            s.fc(x), s.norm.running_mean.clone(), s.norm.running_var.clone(), s.norm.weight, s.norm.bias, s.training
        ),
    )
    pair(
        "another momentum",
        "buffer norm.running_mean",
        lambda s, x: s.norm(s.fc(x)),
        lambda s, x: (
            s.norm.num_batches_tracked.add_(int(s.training)),
            F.batch_norm(s.fc(x), s.norm.running_mean, s.norm.running_var, s.norm.weight, s.norm.bias, s.training, 0.2),
        )[1],
    )
    pair(
        "a buffer that is used before it is written",
        "the output",
        lambda s, x: (s.fc(x) + s.count, s.count.add_(1))[0],
        lambda s, x: (s.count.add_(1), s.fc(x) + s.count)[1],
    )
    pair(
        "a parameter that is written",
        "parameter scale",
        lambda s, x: (s.scale.detach().clamp_(max=0.5), s.fc(x))[1],
        lambda s, x: s.fc(x),
    )
    pair(
        "a parameter that is written past its version",
        "without gradients: the output",
        lambda s, x: (s.fc(x) * s.scale, s.scale.data.mul_(0.5))[0],
        lambda s, x: s.fc(x) * s.scale,
    )


def _branches() -> None:
    pair(
        "a branch on training",
        "in evaluation: the output",
        lambda s, x: s.fc(x) if s.training else s.other(x),
        lambda s, x: s.fc(x),
    )
    pair(
        "a branch on training that only gradients show",
        "in evaluation: the gradient of fc.weight",
        lambda s, x: s.fc(x) if s.training else s.fc(x.detach()) * 1 + s.fc(x).detach() * 0,
        lambda s, x: s.fc(x) if s.training else s.fc(x).detach() + 0 * s.other(x),
    )
    pair(
        "a branch on the gradient mode",
        "in training without gradients: the output",
        lambda s, x: s.fc(x) if torch.is_grad_enabled() else s.other(x),
        lambda s, x: s.fc(x),
    )
    pair(
        "a branch on the gradient mode of evaluation",
        "in evaluation without gradients: the output",
        lambda s, x: s.fc(x) if torch.is_grad_enabled() or s.training else s.other(x),
        lambda s, x: s.fc(x),
    )
    pair(
        "a value that is baked in",
        "the output is off by",
        lambda s, x: s.fc(x) * (2 if s.count > 0 else 1),
        lambda s, x: s.fc(x) * 3,
    )
    pair(
        "a branch on what was run before",
        "the output is off by",
        lambda s, x: (s.count.add_(1), s.fc(x) * (2 if s.count > 1 else 1))[1],
        lambda s, x: (s.count.add_(1), s.fc(x))[1],
    )
    pair(
        "a random number of Python that is baked in",
        "the output is off by",
        lambda s, x: s.fc(x) * random.random(),
        lambda s, x: s.fc(x) * 0.37,
    )
    pair(
        "a random number of numpy that is baked in",
        "the output is off by",
        lambda s, x: s.fc(x) * float(numpy.random.rand()),
        lambda s, x: s.fc(x) * 0.37,
    )


def _randomness() -> None:
    pair(
        "dropout that draws twice",
        "the state of torch's random numbers",
        lambda s, x: F.dropout(s.fc(x), 0.5, s.training),
        lambda s, x: (F.dropout(s.fc(x), 0.5, s.training), torch.rand(1))[0],
    )
    pair(
        "dropout from another state",
        "the output is off by",
        lambda s, x: (F.dropout(s.fc(x), 0.5, s.training), torch.rand(1))[0],
        lambda s, x: (torch.rand(1), F.dropout(s.fc(x), 0.5, s.training))[1],
    )
    pair(
        "dropout that is on in evaluation",
        "in evaluation: the output",
        lambda s, x: F.dropout(s.fc(x), 0.5, s.training),
        lambda s, x: F.dropout(s.fc(x), 0.5, True),
    )
    pair(
        "noise of another scale",
        "in training: the output",
        lambda s, x: s.fc(x) + torch.rand_like(x),
        lambda s, x: s.fc(x) + torch.rand_like(x) * 0.999,
    )


def _gradients() -> None:
    pair(
        "a gradient that is missing",
        "the gradient of other.weight",
        lambda s, x: s.fc(x) + s.other(x),
        lambda s, x: s.fc(x) + s.other(x).detach(),
    )
    pair(
        "zeros in the place of no gradient",
        "the gradient of other.weight",
        lambda s, x: s.fc(x),
        lambda s, x: s.fc(x) + 0 * s.other(x),
    )
    pair(
        "a gradient that is twice as large",
        "the gradient of fc.weight is off by",
        lambda s, x: s.fc(x),
        lambda s, x: 2 * s.fc(x) - s.fc(x).detach(),
    )
    pair(
        "a gradient of the input that is lost",
        "the gradient of input 0",
        lambda s, x: s.fc(x) + x,
        lambda s, x: s.fc(x) + x.detach(),
    )
    pair("a hook on a tensor that is dropped", "the gradient of fc.weight", _hooked, lambda s, x: s.fc(x))
    pair(
        "a gradient through an attribute that is lost",
        "the gradient of other.weight",
        lambda s, x: (_store(s, last=s.other(x)), s.fc(x))[1],
        lambda s, x: (_store(s, last=s.other(x).detach().requires_grad_(torch.is_grad_enabled())), s.fc(x))[1],
    )


def _held_gradients() -> None:
    pair(
        "a gradient of a buffer that is lost",
        "the gradient of weighed",
        lambda s, x: s.fc(x) * s.weighed,
        lambda s, x: s.fc(x) * s.weighed.detach(),
    )
    pair(
        "a gradient of a tensor in an attribute that is lost",
        "the gradient of attribute learned",
        lambda s, x: s.fc(x) * s.learned,
        lambda s, x: s.fc(x) * s.learned.detach(),
    )


def _hooked(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.fc(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


def _within(value: Any, depth: int) -> Any:
    return [_within(value, depth - 1)] if depth else value


def _outputs() -> None:
    pair(
        "an attribute of the output that is missing",
        "the output.loss",
        lambda s, x: Output(s.fc(x), s.fc(x).sum()),
        lambda s, x: Output(s.fc(x)),
    )
    pair("an output of another class", "instead of a", lambda s, x: Output(s.fc(x)), lambda s, x: Scored(s.fc(x)))
    pair(
        "a list for a tuple", "the output is a list instead of a tuple", lambda s, x: (s.fc(x),), lambda s, x: [s.fc(x)]
    )
    pair(
        "an entry of a dict that is missing",
        "the output.hidden is missing",
        lambda s, x: {"logits": s.fc(x), "hidden": x},
        lambda s, x: {"logits": s.fc(x)},
    )
    pair(
        "an entry too many",
        "the output.hidden is there, and not in the plain model",
        lambda s, x: {"logits": s.fc(x)},
        lambda s, x: {"logits": s.fc(x), "hidden": x},
    )
    pair("a plain number", "the output[1] is 4 instead of 3", lambda s, x: (s.fc(x), 3), lambda s, x: (s.fc(x), 4))
    pair(
        "a number for a tensor", "the output[1]", lambda s, x: (s.fc(x), x.new_tensor(3.0)), lambda s, x: (s.fc(x), 3.0)
    )
    pair("True for 1", "the output[1] is True instead of 1", lambda s, x: (s.fc(x), 1), lambda s, x: (s.fc(x), True))
    pair("a string", "the output[1]", lambda s, x: (s.fc(x), "a"), lambda s, x: (s.fc(x), "b"))
    pair("None for zeros", "the output[1]", lambda s, x: (s.fc(x), None), lambda s, x: (s.fc(x), torch.zeros(1)))
    pair(
        "another dtype",
        "has dtype=torch.float64 instead of torch.float32",
        lambda s, x: s.fc(x),
        lambda s, x: s.fc(x).double(),
    )
    pair(
        "another shape", "has shape=(4, 6, 1) instead of (4, 6)", lambda s, x: s.fc(x), lambda s, x: s.fc(x)[..., None]
    )
    pair(
        "an output without its history",
        "has requires_grad=False instead of True",
        lambda s, x: (s.fc(x), s.other(x)),
        lambda s, x: (s.fc(x), s.other(x).detach()),
    )
    pair("a tensor in an object", "the output.value", lambda s, x: Custom(s.fc(x)), lambda s, x: Custom(s.fc(x) + 1))
    pair(
        "a tensor deep in an object",
        "the output.more.a[0]",
        lambda s, x: Custom(s.fc(x), more={"a": [x]}),
        lambda s, x: Custom(s.fc(x), more={"a": [x * 2]}),
    )
    pair(
        "a tensor in many lists",
        "the output[0][0][0][0][0][0][0][0][0][0][0][0] is off by",
        lambda s, x: _within(s.fc(x), 12),
        lambda s, x: _within(s.fc(x) * 2, 12),
    )
    pair(
        "a tensor after a thousand others",
        "the output[1200]",
        lambda s, x: [s.fc(x), *[torch.ones(())] * 1300],
        lambda s, x: [s.fc(x), *[torch.ones(())] * 1199, torch.zeros(()), *[torch.ones(())] * 100],
    )
    pair(
        "a tensor in an object with slots",
        "the output.value",
        lambda s, x: Slotted(s.fc(x)),
        lambda s, x: Slotted(s.fc(x) * 2),
    )
    pair(
        "an array of numpy",
        "the output[1]",
        lambda s, x: (s.fc(x), numpy.ones(3)),
        lambda s, x: (s.fc(x), numpy.zeros(3)),
    )
    pair(
        "the last bit",
        "in evaluation: the output is off by",
        lambda s, x: s.fc(x),
        lambda s, x: s.fc(x).nextafter(torch.tensor(9.0)) if not s.training else s.fc(x),
    )
    pair(
        "the sign of a zero",
        "the output[1] differs in the sign of a zero",
        lambda s, x: (s.fc(x), torch.zeros(3)),
        lambda s, x: (s.fc(x), -torch.zeros(3)),
    )
    pair("a NaN for an infinity", "the output[1]", lambda s, x: (s.fc(x), x / 0), lambda s, x: (s.fc(x), x * 0 / 0))
    pair(
        "one index of many",
        "the output[1] differs in 1 of 4 elements",
        lambda s, x: (s.fc(x), torch.arange(4)),
        lambda s, x: (s.fc(x), torch.tensor([0, 1, 2, 4])),
    )


def _effects() -> None:
    pair(
        "an effect on the input that is lost",
        "the input[0][0]",
        lambda s, x: (x.detach().add_(1), s.fc(x))[1],
        lambda s, x: s.fc(x + 1),
    )
    pair(
        "an attribute that is not stored",
        "attribute last",
        lambda s, x: _twice(s, x, "last", x.detach() * 2),
        lambda s, x: s.fc(x),
    )
    pair(
        "a counter that stands still",
        "attribute calls",
        lambda s, x: _twice(s, x, "calls", s.calls + 1),
        lambda s, x: s.fc(x),
    )
    pair(
        "a list that is not filled",
        "attribute log",
        lambda s, x: (s.log.append(x.detach()), s.fc(x))[1],
        lambda s, x: s.fc(x),
    )
    pair("an error that is swallowed", "the result runs, the plain model raises", _raising, lambda s, x: s.fc(x))


def _raising(self: Any, x: Tensor) -> Tensor:
    if not self.training:
        raise RuntimeError("this only trains")
    y: Tensor = self.fc(x)
    return y


for _family in (_buffers, _branches, _randomness, _gradients, _held_gradients, _outputs, _effects):
    _family()
