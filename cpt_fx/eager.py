"""Quantizers in eager execution on CPU: one kernel call each, and nothing kept for the backward pass but the source.

Compilers never come here: they trace the torch operators of `numerics`, which give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_fx.evidence import witness
from cpt_fx.native import simulate
from cpt_fx.native.simulate import Learner
from cpt_fx.numerics import Extent, Grid
from cpt_fx.saving import Source, mark


def straight_through(
    x: Tensor, width: int, grid: Grid, extent: Extent | None, record: Tensor | None, learner: Learner | None = None
) -> Tensor | None:
    """Quantize by a kernel, with the identity as gradient; None where no kernel serves."""
    if not simulate.serves(x, grid) or not (learner is None or learner.fits()):
        return None
    given = None
    if extent is not None:
        given = simulate.laid_out(extent)
        if given is None:
            return None
        # One range is given: whatever groups the tensor has, they share it.
        grid = grid._replace(keep=(), over=None)
    if not torch.is_grad_enabled():
        return _quantize(x, width, grid, given, record, learner).values
    if not x.requires_grad:
        return _marked(x, width, grid, given, record, learner)
    result: Tensor = _Identity.apply(x, width, grid, given, record, learner)  # type: ignore[no-untyped-call]
    return result


def _quantize(
    x: Tensor, width: int, grid: Grid, extents: Tensor | None, record: Tensor | None, learner: Learner | None
) -> simulate.Quantized:
    made = simulate.quantize(x, width, grid, extents, None, learner, record)
    if made.is_new and record is not None:
        witness(record, x.detach(), made.values, width, grid.keep, grid.over, grid.block)
    return made


def _marked(
    x: Tensor, width: int, grid: Grid, extents: Tensor | None, record: Tensor | None, learner: Learner | None
) -> Tensor:
    """Quantize a tensor that an operator may want to save."""
    made = _quantize(x, width, grid, extents, record, learner)
    mark(made.values, Source(x, width, grid, made.extents, made.seed))
    return made.values


class _Identity(torch.autograd.Function):
    """Quantize forward, identity backward; nothing is saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, width: int, grid: Grid, extents: Tensor | None, record: Tensor | None,
        learner: Learner | None,
    ) -> Tensor:  # fmt: skip
        return _marked(x, width, grid, extents, record, learner)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        # A tangent of its own: forward mode refuses one that is shared with the input.
        return tangent.clone()
