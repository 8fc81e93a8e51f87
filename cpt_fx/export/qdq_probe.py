"""The quantizers of a rewritten graph by the names of their records, and what they see on examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from cpt_fx.bodies import graphs_of
from cpt_fx.formats import Format, Rounding
from cpt_fx.meta import QUANTIZER, Quantizer
from cpt_fx.numerics import Extent, extent_of, percentile_extent
from cpt_fx.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_LEARNED, QUANTIZE_GRADIENT, QUANTIZERS
from cpt_fx.standalone import precision_of

_ARGUMENTS = ("x", "bits", "zero_point", "range", "weight", "training")


@dataclass(frozen=True)
class Tagged:
    """A quantizer, and the width that it has."""

    quantizer: Quantizer
    bits: int

    @property
    def label(self) -> str:
        """What to call it."""
        return f"{self.quantizer.layers[0]}.{self.quantizer.operand}".strip(".")

    @property
    def format(self) -> Format:
        """How it quantizes."""
        return self.quantizer.format


def tagged(module: fx.GraphModule) -> dict[str, Tagged]:
    """Return the quantizers of the forward pass by the names of their records, which no two of them share."""
    state = precision_of(module)
    made = [node.meta[QUANTIZER] for inner in graphs_of(module) for node in inner.graph.nodes if QUANTIZER in node.meta]
    return {
        quantizer.record.rpartition(".")[2]: Tagged(quantizer, state.width(quantizer.dial, training=False))
        for quantizer in made
        if quantizer.role != "gradient"
    }


@dataclass
class Seen:
    """What a quantizer saw: its range over all calls, and where that comes from."""

    low: Tensor | None = None
    high: Tensor | None = None
    fixed: bool = False
    """The range is one that the model has learned, not that of the examples."""
    calls: list[tuple[Tensor, Tensor, dict[str, Any]]] = field(default_factory=list)
    """Input, output and options of each call, for those that quantize constants."""

    def add(self, extent: Extent) -> None:
        """Widen the range."""
        low, high = extent.zero_point.amin(), extent.maximum().amax()
        self.low = low if self.low is None else torch.minimum(self.low, low)
        self.high = high if self.high is None else torch.maximum(self.high, high)


class Watch(TorchFunctionMode):
    """Runs quantizers, at their widths and to the nearest code, and shows each call to a function."""

    def __init__(self, module: fx.GraphModule, show: Callable[..., None]) -> None:
        super().__init__()
        self.records = precision_of(module).records
        self.show = show
        self.names: dict[int, str] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Watch one call."""
        kwargs = kwargs or {}
        if func not in QUANTIZERS or func is QUANTIZE_GRADIENT:
            return func(*args, **kwargs)
        options = dict(kwargs) | {"record": None, "rounding": Rounding.NEAREST.value}
        y = func(*args, **options)
        values = dict(zip(_ARGUMENTS, args, strict=False)) | options
        if not self.names:
            # Not before the run: it may go on copies of the buffers.
            self.names = {id(record): name for name, record in self.records.named_buffers()}
        self.show(self.names[id(kwargs["record"])], func, values, y)
        return y


def extent_used(func: Any, values: dict[str, Any]) -> tuple[Extent, bool]:
    """Return the range that a quantizer uses in evaluation, and whether it is one that the model has learned."""
    x: Tensor = values["x"]
    low, width = values.get("zero_point"), values.get("range")
    if low is None or width is None:
        return extent_of(x, (), None), False
    low, width = low.detach(), width.detach()
    if func is FAKE_QUANTIZE:
        return Extent(low, width), True
    weight = values["weight"]
    if func is FAKE_QUANTIZE_LEARNED:
        return Extent(low, width), bool(weight > 0)
    if weight > 0:
        share = weight if values.get("corrected", True) else torch.ones_like(weight)
        return Extent(low / share, width / share), True
    percentile = values.get("percentile", 100.0)
    return (extent_of(x, (), None) if percentile >= 100 else percentile_extent(x, percentile)), False
