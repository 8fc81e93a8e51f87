"""The arithmetic of quantize-dequantize, on tensors, without autograd and without state.

Every function here can be traced: the bit-width is a 0-dim tensor, no value is read back to Python. The order of the
operations is the published one: at high bit-widths and for tiny ranges it decides the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpt_fx.common.functorch import is_transformed, outside
from cpt_fx.formats import FULL_PRECISION, Format, Range, Rounding, Scheme, Specials
from cpt_fx.quantizers.noise import new_seed, uniform
from cpt_fx.quantizers.widths import is_watched

SCALE_FLOOR = 1e-8
"""Smallest step of a grid with `floored`, as published. A range too small for it collapses to one value."""


class Grid(NamedTuple):
    """The static options of a quantizer: its granularity, and the kind of its grid."""

    keep: tuple[int, ...] = ()
    over: tuple[int, ...] | None = None
    scheme: Scheme = Scheme.AFFINE
    rounding: Rounding = Rounding.NEAREST
    exponent: int = 0
    specials: Specials = Specials.NONE
    block: int = 0
    floored: bool = False

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of the op: granularity, scheme, rounding, and others that differ from the default."""
        named = {"keep": list(self.keep)} if self.over is None else {"over": list(self.over)}
        options: dict[str, Any] = {**named, "scheme": self.scheme.value, "rounding": self.rounding.value}
        if self.exponent:
            options |= {"exponent": self.exponent, "specials": self.specials.value}
        if self.block:
            options["block"] = self.block
        if self.scheme is Scheme.AFFINE and not self.floored:
            options["floored"] = False
        return options


def keywords_of(format: Format, groups: tuple[tuple[int, ...], tuple[int, ...] | None]) -> dict[str, Any]:
    """Return the keywords of the op that quantizes to a format. The op for learned ranges has no floor."""
    floored = format.floored or format.range is Range.LEARNED
    grid = Grid(*groups, format.scheme, format.rounding, format.exponent, format.specials, format.block, floored)
    return grid.keywords()


class ValueRange(NamedTuple):
    """The ranges of a tensor: minimum (the zero point) and size, broadcastable to the tensor.

    `top` is the maximum if it was measured: zero_point + range may differ from it in the last bit.
    """

    zero_point: Tensor
    range: Tensor
    top: Tensor | None = None

    def maximum(self) -> Tensor:
        """Return the upper end of the range: the measured maximum, if there is one."""
        return self.zero_point + self.range if self.top is None else self.top


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to quantize in: float32 for half precision, whose own steps are too coarse for an 8-bit grid."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reduced_dims(ndim: int, keep: tuple[int, ...], over: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the dims that one range spans: all but `keep`, or, if given, exactly `over`.

    A tensor without all of these dims has a single range, and so has a vector: a range for every element would be
    meaningless.
    """
    named = keep if over is None else over
    if ndim < 2 or any(not -ndim <= dim < ndim for dim in named):
        return tuple(range(ndim))
    dims = {dim % ndim for dim in named}
    return tuple(dim for dim in range(ndim) if (dim in dims) is (over is not None))


def range_of(x: Tensor, keep: tuple[int, ...], over: tuple[int, ...] | None) -> ValueRange:
    """Measure the ranges of a tensor. A NaN makes its range NaN."""
    x = x.detach()
    dims = reduced_dims(x.ndim, keep, over)
    if not dims and x.ndim:
        low = high = x
    elif len(dims) == x.ndim:
        low, high = torch.aminmax(x)
    elif dims == tuple(range(x.ndim - len(dims), x.ndim)):
        flat = x.flatten(x.ndim - len(dims))
        low, high = torch.aminmax(flat, dim=-1)
        shape = (*x.shape[: x.ndim - len(dims)], *(1,) * len(dims))
        low, high = low.reshape(shape), high.reshape(shape)
    else:
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    return _between(low, high)


def percentile_range(x: Tensor, percentile: float) -> ValueRange:
    """Measure the range of the central `percentile` percent of a tensor's elements."""
    values = x.detach().flatten()
    # kthvalue, since torch.quantile refuses tensors of more than 2**24 elements.
    cut = int(values.numel() * (1 - percentile / 100) / 2)
    low, high = values.kthvalue(1 + cut).values, values.kthvalue(values.numel() - cut).values
    # kthvalue sorts NaN to the end, where a cut-off tail would lose it. This sum is NaN if any value is not finite.
    poison = (values * 0).sum()
    return _between(low + poison, high + poison)


def _between(low: Tensor, high: Tensor) -> ValueRange:
    low, high = low.to(working_dtype(low)), high.to(working_dtype(high))
    return ValueRange(low, high - low, high)


def quantize(x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange | None = None) -> Tensor:
    """Round `x` to the grid of its bit-width, in the working dtype. Return a new tensor of the dtype of `x`."""
    if grid.block:
        blocks, back = in_blocks(x, grid)
        return back(on_grid(blocks, bits, grid, range_of(blocks, (), (-1,))))
    return on_grid(x, bits, grid, value_range or range_of(x, grid.keep, grid.over))


def on_grid(x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange) -> Tensor:
    """Round `x` to the grid over given ranges, which broadcast to it; blocks already have a dim of their own."""
    values = x.to(working_dtype(x))
    if grid.scheme is not Scheme.FLOAT:
        return _UNIFORM[grid.scheme](values, bits, grid, value_range).to(x.dtype)
    largest = float_maximum(bits, grid, values.dtype)
    ends = (amplitude(value_range), largest)
    # A block's scale maps its largest power of two to that of the format: the largest values may saturate.
    reach, top = map(floor_to_power_of_two, ends) if grid.block else ends
    return _floating(values, bits, grid, reach / top, largest).to(x.dtype)


def quantize_or_pass(x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange | None = None) -> Tensor:
    """Return `quantize`, or `x` itself at bit-widths 0 and 32, decided at run time without a branch."""
    return torch.where(_once(passes(bits)), x, quantize(x, bits, grid, value_range))


def passes(bits: Tensor) -> Tensor:
    """Return whether a bit-width leaves a tensor unchanged: 0, or 32 and more."""
    return (bits >= FULL_PRECISION) | (bits <= 0)


def amplitude(value_range: ValueRange) -> Tensor:
    """Return the largest magnitude inside the range, for the schemes that are symmetric around zero."""
    return torch.maximum(-value_range.zero_point, value_range.maximum()).clamp_min(0)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exactly 2**exponent for integer tensors of any sign; exp2 may be off by an ulp."""
    one, size = torch.ones_like(exponent), exponent.abs()
    # In two factors: a shift reaches 2**62 at most, a format of 8 exponent bits 2**127.
    quarter = torch.bitwise_left_shift(one, torch.bitwise_right_shift(size, 2)).to(dtype)
    magnitude = quarter.square().square() * torch.bitwise_left_shift(one, size & 3).to(dtype)
    return torch.where(exponent < 0, 1 / magnitude, magnitude)


def levels_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the number of steps of a uniform grid: 2**bits - 1."""
    codes = torch.bitwise_left_shift(torch.ones_like(bits), bits.clamp(1, FULL_PRECISION)) - 1
    return codes.to(dtype)


def _round_(codes: Tensor, rounding: Rounding, low: Tensor, high: Tensor, seed: Tensor | None = None) -> Tensor:
    """Clamp to the grid, then round to whole codes in place: to nearest even, or up with the fraction as probability.

    The published order adds noise of up to half a step, clamps and rounds to nearest: the same distribution, since the
    ends are grid points. But the sum is rounded too, and at 16 bits that moved one grid point in 800 by a full step.
    Comparing noise with the fraction leaves grid points where they are and never moves a value by a full step.
    """
    codes.clamp_(low, high)
    if rounding is Rounding.NEAREST:
        return codes.round_()
    below = codes.floor()
    seed = _once(_seed(codes.device)) if seed is None else seed
    return below.add_(uniform(seed, codes) < codes.sub_(below))


def _seed(device: torch.device) -> Tensor:
    """Draw a seed; under a vmap that forbids random numbers, one for the whole batch."""
    try:
        return new_seed(device)
    except RuntimeError:
        with outside():
            return new_seed(device)


def _once(value: Tensor) -> Tensor:
    """Keep a compiler from computing a number that many elements share again for each of them.

    Inductor inlines what it considers cheap; a shift, two divisions and four comparisons per range took ten times as
    long as the work on the element. `as_strided` needs memory to view, so the number is stored. Its strides are those
    of one dim: inductor may store tensors of more dims in another order than the trace says. A tensor that was only
    reshaped would be viewed as it is stored, so it is negated in between.
    """
    if not is_watched() or is_transformed():
        return value
    if value.ndim < 2:
        return value.as_strided(value.shape, value.stride())
    return value.reshape(-1).neg().as_strided((value.numel(),), (1,)).view(value.shape).neg()


def affine_scale(range: Tensor, levels: Tensor, *, floored: bool) -> Tensor:
    """Return the step between two levels."""
    return (range / levels).clamp_min(SCALE_FLOOR if floored else 0)


def divisor(scale: Tensor) -> Tensor:
    """Return the divisor for a step: at least the smallest normal number, since smaller steps have no inverse.

    Only the division uses it. With a floor in the product, zeros would become subnormal numbers, and scaling a tensor
    would change how it is rounded.
    """
    return scale.clamp_min(torch.finfo(scale.dtype).tiny)


def _affine(x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange) -> Tensor:
    levels = levels_of(bits, x.dtype)
    scale = _once(affine_scale(value_range.range, levels, floored=grid.floored))
    zero_point = _once(value_range.zero_point)
    codes = (x - zero_point).div_(_once(divisor(scale)))
    return _round_(codes, grid.rounding, torch.zeros_like(levels), _once(levels)).mul_(scale).add_(zero_point)


def _affine_integer(x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange) -> Tensor:
    levels = levels_of(bits, x.dtype)
    low = value_range.zero_point.clamp_max(0)
    high = value_range.maximum().clamp_min(0)
    scale = _once((high - low) / levels)
    step = _once(divisor(scale))
    # NaN survives minimum and clamp, so a range that is NaN stays visible.
    offset = torch.minimum((-low / step).round().clamp_min(0), levels)
    codes = x / step
    # The ends are shifted instead of the codes: zero stays exactly zero.
    return _round_(codes, grid.rounding, _once(-offset), _once(levels - offset)).mul_(scale)


def symmetric_codes(
    x: Tensor, bits: Tensor, rounding: Rounding, value_range: ValueRange, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, the offset of their values in steps (half a step at one bit), and the step."""
    # At one bit the only symmetric grid of two levels is -a, +a: the values are half a step off the codes.
    half = _once((bits == 1).to(x.dtype) * 0.5)
    reach = torch.bitwise_left_shift(torch.ones_like(bits), (bits - 1).clamp(0, FULL_PRECISION)).to(x.dtype) - 1
    scale = _once(amplitude(value_range) / (reach + half))
    codes = (x / _once(divisor(scale))).sub_(half)
    return _round_(codes, rounding, _once(-reach - 2 * half), _once(reach), seed), half, scale


def _symmetric(x: Tensor, bits: Tensor, grid: Grid, value_range: ValueRange) -> Tensor:
    codes, half, scale = symmetric_codes(x, bits, grid.rounding, value_range)
    return codes.add_(half).mul_(scale)


_UNIFORM = {Scheme.AFFINE: _affine, Scheme.AFFINE_INTEGER: _affine_integer, Scheme.SYMMETRIC: _symmetric}


def float_fields(bits: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """Split a bit-width into exponent and mantissa bits: a bit-width that is too small has fewer exponent bits."""
    fields = bits.clamp(2, FULL_PRECISION) - 1
    exponent_bits = fields.clamp_max(exponent)
    return exponent_bits, fields - exponent_bits


def float_maximum(bits: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """Return the largest finite value of the format at this bit-width."""
    exponent_bits, mantissa_bits = float_fields(bits, grid.exponent)
    one = torch.ones_like(exponent_bits)
    bias = torch.bitwise_left_shift(one, exponent_bits - 1) - 1
    top = torch.bitwise_left_shift(one, exponent_bits) - 1 - bias
    ulp = power_of_two(-mantissa_bits, dtype)
    if grid.specials is Specials.IEEE:
        # A single exponent bit leaves nothing to reserve.
        top = torch.where(exponent_bits > 1, top - 1, top)
    # 8 exponent bits with nothing reserved would reach past float32; the scale makes up for the lost binade.
    top = top.clamp_max(127)
    largest = power_of_two(top, dtype) * (2 - ulp)
    if grid.specials is Specials.FN:
        # Without a mantissa the all-ones code is the whole top exponent.
        below = torch.where(mantissa_bits > 0, power_of_two(top, dtype) * (2 - 2 * ulp), power_of_two(top - 1, dtype))
        largest = torch.where(exponent_bits + mantissa_bits > 1, below, largest)
    return largest


def floor_to_power_of_two(x: Tensor) -> Tensor:
    """Return 2**floor(log2(abs(x))) exactly, by clearing sign and mantissa. Zero and subnormals give zero."""
    if x.dtype == torch.float64:
        return (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _floating(x: Tensor, bits: Tensor, grid: Grid, scale: Tensor, largest: Tensor) -> Tensor:
    exponent_bits, mantissa_bits = float_fields(bits, grid.exponent)
    bias = torch.bitwise_left_shift(torch.ones_like(exponent_bits), exponent_bits - 1) - 1
    smallest_normal = power_of_two(1 - bias, x.dtype)
    scale = scale.clamp_min(torch.finfo(x.dtype).tiny)
    scaled = (x / scale).clamp_(-largest, largest)
    step = torch.maximum(floor_to_power_of_two(scaled), smallest_normal).mul_(power_of_two(-mantissa_bits, x.dtype))
    # Rounding up may reach a power of two, where the step doubles; both ends of that last step are grid points.
    codes = scaled.div_(step)
    return _round_(codes, grid.rounding, -largest / step, largest / step).mul_(step).mul_(scale)


def in_blocks(x: Tensor, grid: Grid) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Split what shares a range into blocks of `grid.block` elements along a new last dim; also return the inverse."""
    dims = reduced_dims(x.ndim, grid.keep, grid.over)
    kept = tuple(dim for dim in range(x.ndim) if dim not in dims)
    order = (*kept, *dims)
    moved = x.permute(order)
    rows = moved.reshape(*moved.shape[: len(kept)], -1)
    length = rows.shape[-1]
    # The last block is padded with its last element: zeros would widen its range.
    filler = rows.narrow(-1, length - 1, 1).expand(*rows.shape[:-1], -length % grid.block)
    blocks = torch.cat((rows, filler), -1).unflatten(-1, (-1, grid.block))

    def back(result: Tensor) -> Tensor:
        flat = result.flatten(-2).narrow(-1, 0, length).reshape(moved.shape)
        inverse = sorted(range(x.ndim), key=order.__getitem__)
        # The operator, not the method: the method accesses the device, which fake tensors only name.
        whole: Tensor = torch.ops.aten.contiguous.default(flat.permute(inverse))
        return whole

    return blocks, back
