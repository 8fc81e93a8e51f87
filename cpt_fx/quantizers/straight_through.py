"""Quantization with the identity as gradient: by torch operators, or in eager code on CPU by one call of a kernel.

Compilers trace the torch operators of `numerics`, which give the same bits. Only the source is kept for the backward
pass (`recompute`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cpt_fx.common.compilers import skip_frame
from cpt_fx.common.functorch import is_batched, is_transformed, outside, plain
from cpt_fx.common.torch_private import forward_ad_level
from cpt_fx.formats import FULL_PRECISION, Rounding, Scheme, Specials
from cpt_fx.quantizers import kernels as simulate
from cpt_fx.quantizers.counters import ARMED, LOOKING, count_levels, show
from cpt_fx.quantizers.kernels import Running
from cpt_fx.quantizers.numerics import Grid, ValueRange, quantize, quantize_or_pass, range_of
from cpt_fx.quantizers.recompute import Source, computed_again, mark
from cpt_fx.quantizers.widths import host_value

_KINDS = {"scheme": Scheme, "rounding": Rounding, "specials": Specials}


@cache
def _grid(*options: tuple[str, Any]) -> Grid:
    return Grid(**{name: _KINDS[name](value) if name in _KINDS else value for name, value in options})


def grid_of(options: dict[str, Any], rounding: str) -> Grid:
    """Return the grid of an op call; the schema does not fill in defaults for the keywords of a Python kernel."""
    options = {"rounding": rounding, "floored": True, **options}
    return _grid(*((name, tuple(option) if isinstance(option, list) else option) for name, option in options.items()))


def straight_through(
    x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange | None, counters: Tensor | None
) -> Tensor:
    """Quantize with the identity as gradient. If the bit-width is known to be full precision, return the tensor itself.

    Without another node in the autograd graph, gradients of a tensor with several readers are added in the original's
    order, so that the last bit is the same.
    """
    served = by_kernel(x, bits, grid, value_range, counters)
    if served is not None:
        return served
    # Under torch.func, counters can only be written inside an autograd function.
    if not is_transformed() and passes(bits):
        if counters is not None:
            count(counters)
        return x
    zero_point, range, top = value_range or (None, None, None)
    # A grid is a tuple, and torch.func flattens tuples among the arguments.
    result: Tensor = _ByTorch.apply(x, bits, lambda: grid, zero_point, range, top, counters)  # type: ignore[no-untyped-call]
    return result


def by_kernel(
    x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange | None, counters: Tensor | None,
    learner: Running | None = None,
) -> Tensor | None:  # fmt: skip
    """Quantize by the kernel, in eager code on CPU at a bit-width that quantizes; otherwise return None."""
    if is_transformed() or is_batched(x) or forward_ad_level() >= 0 or (counters is not None and not counters.is_cpu):
        return None
    width = host_value(bits)
    if width is None or not 0 < width < FULL_PRECISION:
        return None
    if not simulate.serves(x, grid) or not (learner is None or learner.fits()):
        return None
    given = None
    if value_range is not None:
        given = simulate.laid_out(value_range)
        if given is None:
            return None
        # The given range is that of the whole tensor, whatever the granularity.
        grid = grid._replace(keep=(), over=None)
    how = (width, grid, given, counters, learner)
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = _ByKernel.apply(x, *how)  # type: ignore[no-untyped-call]
        return result
    return _by_kernel(x, *how, marked=torch.is_grad_enabled())


def _by_kernel(
    x: Tensor, width: int, grid: Grid, value_ranges: Tensor | None, counters: Tensor | None, learner: Running | None, *,
    marked: bool,
) -> Tensor:  # fmt: skip
    """Quantize by the kernel; if `marked`, attach the source, since an operator may want to save the result."""
    made = simulate.quantize(x, width, grid, value_ranges, None, learner, counters)
    if made.is_new and counters is not None:
        count_levels(counters, x.detach(), made.values, width, grid)
    if LOOKING:
        show(made.values, width, grid, counters)
    if marked:
        mark(made.values, Source(x, width, grid, made.value_ranges, made.seed))
    return made.values


class Identity(torch.autograd.Function):
    """Base of functions with the identity as backward pass; nothing is saved."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient on."""
        return gradient, None, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: Tensor | None) -> Tensor:
        """Pass on a copy of the tangent: forward mode refuses one that is shared with the input."""
        return tangent.clone()


class _ByKernel(Identity):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, width: int, grid: Grid, value_ranges: Tensor | None, counters: Tensor | None,
        learner: Running | None,
    ) -> Tensor:  # fmt: skip
        return _by_kernel(x, width, grid, value_ranges, counters, learner, marked=True)


class _ByTorch(Identity):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, bits: Tensor, grid: Callable[[], Grid], zero_point: Tensor | None, range: Tensor | None,
        top: Tensor | None, counters: Tensor | None,
    ) -> Tensor:  # fmt: skip
        value_range = None if zero_point is None or range is None else ValueRange(zero_point, range, top)
        return _by_torch(x, bits, grid(), value_range, counters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass


# torch inspects the signature at every call, which takes longer than the call; this attribute short-cuts it.
_ByTorch.forward.__signature__ = inspect.signature(_ByTorch.forward)  # type: ignore[attr-defined]
# If forward itself computes gradients, a compiler around it would take the backward pass for the model's code.
skip_frame(Identity.backward.__code__, inside=True)


def _by_torch(x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange | None, counters: Tensor | None) -> Tensor:
    """Return `x` on the grid of its bit-width, as a new tensor."""
    if x.numel() == 0 or passes(bits):
        result = x.clone()
    elif host_value(bits) is None:
        # Outside the block below: a range is a few numbers, and may be saved.
        value_range = value_range or (None if grid.block else range_of(x, grid.keep, grid.over))
        with nullcontext() if grid.rounding is Rounding.STOCHASTIC else computed_again():
            result = quantize_or_pass(x, bits.to(torch.int64), grid, value_range)
    else:
        result = quantize(x, bits.to(torch.int64), grid, value_range)
    note(counters, x, result, bits, grid)
    return result


def passes(bits: Tensor) -> bool:
    """Return whether a bit-width is known to leave a tensor unchanged."""
    width = host_value(bits)
    return width is not None and not 0 < width < FULL_PRECISION


def note(counters: Tensor | None, x: Tensor, result: Tensor, bits: Tensor, grid: Grid) -> None:
    """Count a run, measure its result where that is free, and pass it to everything in `LOOKING`."""
    width = host_value(bits)
    if counters is not None:
        count(counters)
        # Under vmap every element of the batch has a sample of its own, and nothing can be counted.
        if width is not None and x.numel() and not is_transformed():
            count_levels(counters, x, result, width, grid)
    if LOOKING and not passes(bits):
        show(result, width, grid, counters)


def count(counters: Tensor, place: int = 0, more: Tensor | int = 1) -> None:
    """Count a run, or add to another counter."""
    with outside() if is_transformed() else nullcontext():
        # The same as `counters[place]`, by an operator that fake tensors support.
        plain(counters).select(0, place).add_(plain(more).sum() if isinstance(more, Tensor) else more)


def arm(counters: Tensor, state: int) -> None:
    """Raise the state of a gradient quantizer to `state`: see `ARMED`."""
    with outside() if is_transformed() else nullcontext():
        plain(counters).select(0, ARMED).clamp_(min=state)
