"""What QuantizeLinear and DequantizeLinear can say of a trained format: codes of constants, grids of activations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cpt_fx.errors import ExportError
from cpt_fx.export.qdq_probe import Seen, Tagged
from cpt_fx.formats import Format, Range, Rounding, Scheme
from cpt_fx.numerics import Extent, amplitude, extent_of, reduced_dims
from cpt_fx.operators import ROWS

EXACT, CONVERTED, FLOAT = "exact", "converted", "float"
MOST_BITS = 8


@dataclass(frozen=True)
class Constant:
    """A quantized constant: whole numbers of `bits` bits, and what one step of them is worth."""

    codes: Tensor
    scale: Tensor
    zero_point: int
    axis: int | None
    """The dim along which scales differ; None where there is one for all."""
    bits: int

    def values(self) -> Tensor:
        """Return what DequantizeLinear makes of it."""
        shape = [1] * self.codes.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        return (self.codes - self.zero_point) * self.scale.reshape(shape if self.codes.ndim else ())


@dataclass(frozen=True)
class Activation:
    """One range for a tensor, on unsigned codes of 8 bits. `lowest` and `highest` are the codes of a narrower width."""

    scale: Tensor
    zero_point: int
    lowest: int
    highest: int
    bits: int
    low: float | None = None
    """Where a range above zero begins: the codes reach down to zero, so that values have to be clipped before."""
    high: float | None = None
    """Where a range below zero ends."""

    @property
    def clips(self) -> bool:
        """Whether codes of 8 bits have to be clipped to those of the width."""
        return self.lowest > 0 or self.highest < 255

    def values(self, x: Tensor) -> Tensor:
        """Return what the nodes make of a tensor."""
        x = x if self.low is None and self.high is None else x.clamp(self.low, self.high)
        codes = (x.to(torch.float32) / self.scale).round() + self.zero_point
        return ((codes.clamp(self.lowest, self.highest) - self.zero_point) * self.scale).to(x.dtype)


@dataclass(frozen=True)
class Plan:
    """What becomes of a quantizer. `form` is None where the tensor stays in floating point, as it is."""

    form: Constant | Activation | Tensor | None
    """Codes; a grid; or a constant's quantized values, in floating point."""
    status: str
    notes: tuple[str, ...] = field(default=())


def constant_plan(tag: Tagged, x: Tensor, y: Tensor, options: dict[str, Any]) -> Plan:
    """Decide for a constant: codes where it is a weight, quantized values in floating point where it is a bias."""
    left = _left(tag)
    if left is not None:
        return left
    if tag.quantizer.role == "bias":
        return Plan(y.detach(), EXACT, ("its quantized values", *_rounding(tag.format)))
    x, y = x.detach(), y.detach()
    if not y.isfinite().all():
        raise ExportError(f"{tag.label} holds a NaN or an infinity, which no integer stands for")
    notes = _rounding(tag.format)
    over = options.get("over")
    reduced = reduced_dims(x.ndim, tuple(options.get("keep", ())), None if over is None else tuple(over))
    kept = [dim for dim in range(x.ndim) if dim not in reduced and x.shape[dim] > 1]
    uniform = not tag.format.block and len(kept) <= 1
    form = None
    if uniform and tag.format.scheme is Scheme.SYMMETRIC:
        form = _symmetric(x, y, tag.bits, kept[0] if kept else None)
    elif uniform and tag.format.scheme is Scheme.AFFINE_INTEGER and not kept:
        grid = _affine_grid(extent_of(x, (), None), tag.bits)
        codes = (y.to(torch.float32) / grid.scale).round() + grid.zero_point
        form = Constant(codes, grid.scale, grid.zero_point, None, tag.bits)
    if form is not None:
        # Exact is said only of what is: a difference where there should be none is shown as what it is.
        if not notes and not torch.equal(form.values().to(y.dtype), y):
            notes = ("float rounding",)
        return Plan(form, CONVERTED if notes else EXACT, notes)
    axis = kept[0] if uniform and kept else _output_axis(tag, x.ndim)
    group = "as a whole" if axis is None else "per output channel"
    note = f"{_what(tag.format)}: rounded once more, symmetric {group}"
    return Plan(_symmetric(y, y, tag.bits, axis), CONVERTED, (note, *notes))


def activation_plan(tag: Tagged, seen: Seen) -> Plan:
    """Decide for a tensor that changes from call to call."""
    left = _left(tag)
    if left is not None:
        return left
    format, bits = tag.format, tag.bits
    assert seen.low is not None and seen.high is not None
    notes = [*_rounding(format)]
    if not seen.fixed:
        why = "has a range of its own for every input" if format.range is Range.DYNAMIC else "has seen no training yet"
        notes.append(f"it {why}: fixed to the range of the examples")
    if not (seen.low.isfinite() and seen.high.isfinite()):
        whose = "its running range" if seen.fixed else "the range of the examples"
        raise ExportError(f"{tag.label} cannot be quantized: {whose} is from {float(seen.low)} to {float(seen.high)}")
    extent = Extent(seen.low, seen.high - seen.low, seen.high)
    if format.scheme is Scheme.SYMMETRIC and not format.block:
        if bits == 1:
            note = "one bit without a zero, which unsigned codes have"
            return Plan(None, FLOAT, (note,))
        reach = 2 ** (bits - 1) - 1
        scale = _safe(amplitude(extent) / reach)
        middle = 2 ** (MOST_BITS - 1)
        form = Activation(scale, middle, middle - reach, middle + reach, bits)
    else:
        if format.scheme is not Scheme.AFFINE_INTEGER or format.block:
            notes.insert(0, f"{_what(format)}: one grid with a zero point that is a whole code")
        form = _affine_grid(extent, bits)
        if format.scheme is Scheme.AFFINE and not format.block:
            low, high = float(seen.low), float(seen.high)
            form = replace(form, low=low if low > 0 else None, high=high if high < 0 else None)
            if low > 0 or high < 0:
                notes[0] = (
                    f"its range, {low:.3g} to {high:.3g}, does not reach zero, and codes do: clipped, in coarser steps"
                )
    return Plan(form, CONVERTED if notes else EXACT, tuple(notes))


def _left(tag: Tagged) -> Plan | None:
    if tag.bits in (0, 32):
        return Plan(None, EXACT, ("full precision",))
    if tag.bits > MOST_BITS:
        return Plan(None, FLOAT, (f"{tag.bits} bits are more than the {MOST_BITS} of the integers in the file",))
    return None


def _symmetric(x: Tensor, y: Tensor, bits: int, axis: int | None) -> Constant:
    """Return the codes of `y` on the symmetric grid of the range of `x`."""
    keep = () if axis is None else (axis,)
    limit = amplitude(extent_of(x, keep, None)).to(torch.float32)
    # At one bit the codes are -1 and 1, and one of them is worth the whole reach.
    scale = _safe(limit / max(2 ** (bits - 1) - 1, 1))
    codes = (y.to(torch.float32) / scale).round()
    return Constant(codes, scale.flatten() if keep else scale.reshape(()), 0, axis, bits)


def _affine_grid(extent: Extent, bits: int) -> Activation:
    """Return the grid of `numerics`, with its integer zero point."""
    levels = torch.tensor(2**bits - 1, dtype=torch.float32)
    low = extent.zero_point.to(torch.float32).clamp_max(0)
    high = extent.maximum().to(torch.float32).clamp_min(0)
    scale = _safe((high - low) / levels)
    offset = torch.minimum((-low / scale).round().clamp_min(0), levels)
    return Activation(scale.reshape(()), int(offset), 0, int(levels), bits)


def _safe(scale: Tensor) -> Tensor:
    """A range of zeros has no step: any will do that is small enough for biases in steps of the product."""
    return torch.where(scale > 0, scale, torch.full_like(scale, 2.0**-20))


def _rounding(format: Format) -> tuple[str, ...]:
    return ("rounds to the nearest code, not at random",) if format.rounding is Rounding.STOCHASTIC else ()


def _what(format: Format) -> str:
    """Say what QDQ has no words for."""
    if format.block:
        return f"blocks of {format.block}"
    if format.scheme is Scheme.FLOAT:
        return "a floating point format"
    if format.scheme is Scheme.AFFINE:
        return "a zero point between two codes"
    return f"ranges per {format.group.value}"


def _output_axis(tag: Tagged, ndim: int) -> int | None:
    """Return the dim of a weight that is the output's, as far as there is one."""
    channels = next((row.channels for row in ROWS if row.name == tag.quantizer.op and not row.left), ())
    for _, (keep, over) in channels:
        kept = [dim for dim in range(ndim) if dim not in reduced_dims(ndim, keep, over)]
        if kept:
            return kept[-1]
    return None if ndim < 2 else 0


def squares(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the squares of a difference and of what it is compared with, each summed up."""
    difference = (value.double() - reference.double()).square().sum()
    return float(difference), float(reference.double().square().sum())
