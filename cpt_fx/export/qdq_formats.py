"""How QuantizeLinear and DequantizeLinear express each trained quantizer, given the values it sees on the examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from cpt_fx.capture.standalone import precision_of
from cpt_fx.errors import ExportError
from cpt_fx.export.lowering import Calls
from cpt_fx.formats import Format, Range, Rounding, Scheme
from cpt_fx.ir.meta import QUANTIZER, Quantizer
from cpt_fx.ir.subgraphs import graphs_of
from cpt_fx.operators import ROWS
from cpt_fx.quantizers.numerics import ValueRange, amplitude, percentile_range, range_of, reduced_dims
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT, QUANTIZERS

EXACT, CONVERTED, FLOAT = "exact", "converted", "float"
MOST_BITS = 8
_ARGUMENTS = ("x", "bits", "zero_point", "range", "weight", "training")


@dataclass
class Watched:
    """A quantizer, its bit-width, and what it saw on the examples."""

    quantizer: Quantizer
    bits: int
    constant: bool = False
    """Whether it quantizes a weight or a bias that is the same in every run."""
    call: tuple[Tensor, Tensor, dict[str, Any]] | None = None
    """Input, output and options of the call, for a constant."""
    value_range: ValueRange | None = None
    """The range over all calls."""
    learned: bool = False
    """Whether the range is one that the model has learned, not that of the examples."""
    difference: float = 0.0
    """Sum of the squared differences between the file's nodes and the quantizer."""
    reference: float = 0.0
    """Sum of the squares of what the quantizer returns."""

    @property
    def label(self) -> str:
        """The layer and the operand, for names and messages."""
        return f"{self.quantizer.layers[0]}.{self.quantizer.operand}".strip(".")

    def see(self, func: Any, values: dict[str, Any], y: Tensor) -> None:
        """Note the range of a call; for a constant, also the call itself."""
        # A layer may be called with different constants: they get one grid, as activations do.
        self.constant = self.constant and (self.call is None or torch.equal(self.call[0], values["x"]))
        self.call = (values["x"].detach(), y.detach(), values) if self.constant else None
        value_range, self.learned = _range_used(func, values)
        low, high = value_range.zero_point.amin(), value_range.maximum().amax()
        if self.value_range is not None:
            low, high = torch.minimum(self.value_range.zero_point, low), torch.maximum(self.value_range.maximum(), high)
        self.value_range = ValueRange(low, high - low, high)

    def compare(self, nodes: Callable[[Tensor], Tensor], func: Any, values: dict[str, Any], y: Tensor) -> None:
        """Add the error of the nodes that replace the quantizer in a call."""
        difference, reference = squares(nodes(values["x"]), y)
        self.difference += difference
        self.reference += reference


def watched_in(module: fx.GraphModule) -> dict[str, Watched]:
    """Return the quantizers of the forward pass by the names of their counters, which are unique."""
    state = precision_of(module)
    made = [node.meta[QUANTIZER] for inner in graphs_of(module) for node in inner.graph.nodes if QUANTIZER in node.meta]
    return {
        quantizer.counters.rpartition(".")[2]: Watched(quantizer, state.width(quantizer.width_source, training=False))
        for quantizer in made
        if quantizer.role != "gradient"
    }


def watching(module: fx.GraphModule, shows: Mapping[str, Callable[..., None]]) -> Calls:
    """Return a mode that runs quantizers with nearest rounding and passes their calls to functions, by name."""
    counters = precision_of(module).counters
    names: dict[int, str] = {}

    def run(func: Any, /, *args: Any, **kwargs: Any) -> Any:
        if func not in QUANTIZERS or func is QUANTIZE_GRADIENT:
            return func(*args, **kwargs)
        options = kwargs | {"counters": None, "rounding": Rounding.NEAREST.value}
        y = func(*args, **options)
        if not names:
            # Only now: the run may use copies of the buffers.
            names.update((id(counters), name) for name, counters in counters.named_buffers())
        show = shows.get(names[id(kwargs["counters"])])
        if show is not None:
            show(func, dict(zip(_ARGUMENTS, args, strict=False)) | options, y)
        return y

    return Calls(run)


def squares(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the sum of the squared differences, and that of the squares of the reference."""
    difference = (value.double() - reference.double()).square().sum()
    return float(difference), float(reference.double().square().sum())


def _range_used(func: Any, values: dict[str, Any]) -> tuple[ValueRange, bool]:
    """Return the range that a quantizer uses in evaluation, and whether it is one that the model has learned."""
    if func is FAKE_QUANTIZE or not values["weight"] > 0:
        percentile = values.get("percentile", 100.0)
        whole = percentile >= 100
        return (range_of(values["x"], (), None) if whole else percentile_range(values["x"], percentile)), False
    shared = func is FAKE_QUANTIZE_OBSERVED and values.get("corrected", True)
    share = values["weight"] if shared else torch.ones_like(values["weight"])
    return ValueRange(values["zero_point"].detach() / share, values["range"].detach() / share), True


@dataclass(frozen=True)
class Constant:
    """A quantized constant: signed integer codes of `bits` bits, and their scale."""

    codes: Tensor
    scale: Tensor
    axis: int | None
    """The dim with a scale for each index; None if there is one for all."""
    bits: int

    def values(self, x: Tensor) -> Tensor:
        """Return what DequantizeLinear computes."""
        shape = [-1 if dim == self.axis else 1 for dim in range(x.ndim)]
        return self.codes * self.scale.reshape(shape)


@dataclass(frozen=True)
class Activation:
    """One range for a tensor, in unsigned 8-bit codes. `lowest` and `highest` bound those of a narrower bit-width."""

    scale: Tensor
    zero_point: int
    lowest: int
    highest: int
    bits: int
    low: float | None = None
    """Lower end of a range above zero: codes extend down to zero, so values are clipped first."""
    high: float | None = None
    """Upper end of a range below zero, likewise."""

    def values(self, x: Tensor) -> Tensor:
        """Return what the nodes compute."""
        x = x if self.low is None and self.high is None else x.clamp(self.low, self.high)
        codes = (x.to(torch.float32) / self.scale).round() + self.zero_point
        return (codes.clamp(self.lowest, self.highest) - self.zero_point) * self.scale


@dataclass(frozen=True)
class QdqPlan:
    """How a quantizer is exported. `form` is None if the tensor stays in floating point, unchanged."""

    form: Constant | Activation | Tensor | None
    """A constant's codes, the grid of an activation, or a constant's quantized values in floating point."""
    status: str
    notes: tuple[str, ...] = ()

    def values(self, x: Tensor) -> Tensor:
        """Return what the nodes compute."""
        if isinstance(self.form, (Constant, Activation)):
            return self.form.values(x).to(x.dtype)
        return x if self.form is None else self.form


def plan_of(item: Watched) -> QdqPlan:
    """Decide how a quantizer is exported."""
    if item.bits in (0, 32):
        return QdqPlan(None, EXACT, ("full precision",))
    if item.bits > MOST_BITS:
        return QdqPlan(None, FLOAT, (f"{item.bits} bits are more than the {MOST_BITS} of the integers in the file",))
    format = item.quantizer.format
    drawn = format.rounding is Rounding.STOCHASTIC
    notes = ("rounds to the nearest code, not at random",) if drawn else ()
    return _constant(item, format, notes) if item.constant else _activation(item, format, notes)


def _constant(item: Watched, format: Format, notes: tuple[str, ...]) -> QdqPlan:
    """Plan a constant: codes for a weight, quantized values in floating point for a bias."""
    assert item.call is not None
    x, y, options = item.call
    if item.quantizer.role == "bias":
        return QdqPlan(y, EXACT, ("its quantized values", *notes))
    if not y.isfinite().all():
        raise ExportError(f"{item.label} holds a NaN or an infinity, which no integer stands for")
    over = options.get("over")
    reduced = reduced_dims(x.ndim, tuple(options.get("keep", ())), None if over is None else tuple(over))
    kept = [dim for dim in range(x.ndim) if dim not in reduced and x.shape[dim] > 1]
    uniform = not format.block and len(kept) <= 1
    axis = kept[0] if uniform and kept else None
    if uniform and format.scheme is Scheme.SYMMETRIC:
        form = _symmetric(x, y, item.bits, axis)
        # Only exact values are called exact: an unexpected difference is reported.
        if not notes and not torch.equal(form.values(x).to(y.dtype), y):
            notes = ("float rounding",)
        return QdqPlan(form, CONVERTED if notes else EXACT, notes)
    form = _symmetric(y, y, item.bits, _output_axis(item, x.ndim) if axis is None else axis)
    return QdqPlan(form, CONVERTED, (f"{_what(format)}: rounded once more, symmetric", *notes))


def _activation(item: Watched, format: Format, notes: tuple[str, ...]) -> QdqPlan:
    """Plan a tensor that changes from call to call."""
    assert item.value_range is not None
    low, high = float(item.value_range.zero_point), float(item.value_range.maximum())
    if not item.learned:
        why = "has a range of its own for every input" if format.range is Range.DYNAMIC else "has seen no training yet"
        notes = (*notes, f"it {why}: fixed to the range of the examples")
    if not item.value_range.range.isfinite():
        whose = "its running range" if item.learned else "the range of the examples"
        raise ExportError(f"{item.label} cannot be quantized: {whose} is from {low} to {high}")
    if format.scheme is Scheme.SYMMETRIC and not format.block:
        if item.bits == 1:
            return QdqPlan(None, FLOAT, ("one bit without a zero, which unsigned codes have",))
        reach, middle = 2 ** (item.bits - 1) - 1, 2 ** (MOST_BITS - 1)
        scale = _safe(amplitude(item.value_range) / reach)
        form = Activation(scale, middle, middle - reach, middle + reach, item.bits)
        return QdqPlan(form, CONVERTED if notes else EXACT, notes)
    form = _affine(item.value_range, item.bits)
    if format.scheme is Scheme.AFFINE and not format.block and (low > 0 or high < 0):
        form = replace(form, low=low if low > 0 else None, high=high if high < 0 else None)
        reaches = f"its range, {low:.3g} to {high:.3g}, does not reach zero, and codes do"
        notes = (f"{reaches}: clipped, in coarser steps", *notes)
    elif format.scheme is not Scheme.AFFINE_INTEGER or format.block:
        notes = (f"{_what(format)}: one grid with a zero point that is a whole code", *notes)
    return QdqPlan(form, CONVERTED if notes else EXACT, notes)


def _symmetric(x: Tensor, y: Tensor, bits: int, axis: int | None) -> Constant:
    """Return the codes of `y` on the symmetric grid of the range of `x`."""
    keep = () if axis is None else (axis,)
    limit = amplitude(range_of(x, keep, None)).to(torch.float32)
    # At one bit the codes are -1 and 1, and the scale is the largest magnitude.
    scale = _safe(limit / max(2 ** (bits - 1) - 1, 1))
    codes = (y.to(torch.float32) / scale).round()
    return Constant(codes, scale.flatten() if keep else scale.reshape(()), axis, bits)


def _affine(value_range: ValueRange, bits: int) -> Activation:
    """Return the grid of `numerics` with an integer zero point."""
    levels = torch.tensor(2**bits - 1, dtype=torch.float32)
    low = value_range.zero_point.to(torch.float32).clamp_max(0)
    high = value_range.maximum().to(torch.float32).clamp_min(0)
    scale = _safe((high - low) / levels)
    offset = torch.minimum((-low / scale).round().clamp_min(0), levels)
    return Activation(scale.reshape(()), int(offset), 0, int(levels), bits)


def _safe(scale: Tensor) -> Tensor:
    """Replace the scale 0 of a range of zeros by any that is small enough for biases in steps of the product."""
    return torch.where(scale > 0, scale, torch.full_like(scale, 2.0**-20))


def _what(format: Format) -> str:
    """Describe what QDQ cannot express."""
    if format.block:
        return f"blocks of {format.block}"
    if format.scheme is Scheme.FLOAT:
        return "a floating point format"
    if format.scheme is Scheme.SYMMETRIC:
        return f"ranges per {format.group.value}"
    names = {Scheme.AFFINE: "a zero point between two codes", Scheme.AFFINE_INTEGER: "a zero point"}
    return names.get(format.scheme, f"the scheme {format.scheme.value}")


def _output_axis(item: Watched, ndim: int) -> int | None:
    """Return the dim of a weight that holds the output channels, or None."""
    channels = next((row.channels for row in ROWS if row.name == item.quantizer.op and not row.left), ())
    for _, (keep, over) in channels:
        kept = [dim for dim in range(ndim) if dim not in reduced_dims(ndim, keep, over)]
        if kept:
            return kept[-1]
    return None if ndim < 2 else 0
