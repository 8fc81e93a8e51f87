"""What rewrites have in common: the run they are part of, and ways to give a value a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cpt_fx.errors import ExportError
from cpt_fx.export.functions import DETACH, SCATTER_ADD, STOP, UNIFORM, WITH_GRADIENT_OF
from cpt_fx.export.lowering import call

aten = torch.ops.aten
Rewrite = Callable[..., Any]
"""Takes the run and the arguments of one operator; `NotImplemented` leaves the call as it is."""


class Run(Protocol):
    """The run of a program that rewrites take part in."""

    def seed(self) -> tuple[Tensor | None, Tensor]:
        """Return the seeds, and which of them the next draw takes."""


def stopped(x: Tensor) -> Tensor:
    """Let no gradient pass: ORT takes `detach` for the identity, in both directions."""
    return call(STOP, (x,), x, **DETACH) if x.is_floating_point() else x


def valued(x: Tensor, value: Tensor) -> Tensor:
    """Return a value, whose gradient goes to another tensor of its shape."""
    return call(WITH_GRADIENT_OF, (x, value), value)


def smooth(value: Callable[..., Tensor], *slopes: Callable[..., Tensor]) -> Rewrite:
    """Return a rewrite with derivatives of ours: each from the arguments and the value."""

    def rewrite(run: Run, *given: Tensor) -> Any:
        if not any(x.is_floating_point() for x in given):
            return NotImplemented
        still = [stopped(x) for x in given]
        result = value(*still)
        first, *rest = (x * slope(*still, result) for x, slope in zip(given, slopes, strict=True))
        return valued(sum(rest, first), result)

    return rewrite


def scattered(like: Tensor, places: Tensor, parts: Tensor) -> Tensor:
    """Return zeros like a tensor, to which parts are added, at places along the last dim."""
    return call(SCATTER_ADD, (parts, places, stopped(like)), like)


def chosen(mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Choose between tensors, of one shape: ORT forgets to sum the gradient of one that is repeated."""
    shape = torch.broadcast_shapes(mask.shape, x.shape, y.shape)
    x, y = (part if part.shape == shape else part.expand(shape) for part in (x, y))
    result: Tensor = aten.where.self(mask, x, y)
    return result


def uniform(run: Run, like: Tensor) -> Tensor:
    """Return noise in [0, 1), from the seeds that are an input."""
    return call(UNIFORM, (like, *run.seed()), like)


def fixed(size: Any, what: str) -> int:
    """Return a size that must not vary from call to call."""
    if not isinstance(size, int):
        raise ExportError(
            f"{what} must have a fixed size: only the first dim of inputs varies, and only with dynamic_batch"
        )
    return size


def pair(values: Any, dims: int) -> list[Any]:
    """Return one value for each dim, where one may have been given for all."""
    listed = list(values) if isinstance(values, Sequence) else [values]
    return listed * dims if len(listed) == 1 else listed


def computed(function: Callable[[], Tensor]) -> Tensor:
    """Compute a constant now, and trace only the result."""
    with _disable_current_modes():
        values, dtype = function().tolist(), function().dtype
    return torch.tensor(values, dtype=dtype)


def indices(places: Sequence[int]) -> Tensor:
    """Trace a constant vector of places."""
    return torch.tensor(list(places), dtype=torch.int64)
