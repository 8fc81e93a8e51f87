"""A copy of a rewritten graph in which every quantizer has a name of its own, and what those see on examples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from cpt_fx.bodies import graphs_of
from cpt_fx.formats import Format, Rounding
from cpt_fx.meta import QUANTIZER, STATE, Quantizer
from cpt_fx.numerics import Extent, extent_of, percentile_extent
from cpt_fx.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_LEARNED, QUANTIZE_GRADIENT, QUANTIZERS
from cpt_fx.result import PART
from cpt_fx.runtime import Precision, width_of
from cpt_fx.schedules import Static
from cpt_fx.schedules.bits import Bits

_ARGUMENTS = ("x", "bits", "zero_point", "range", "weight", "training")


@dataclass(frozen=True)
class Tagged:
    """A quantizer of the copy. `width` is the name of the tensor that holds its width, which no other one reads."""

    width: str
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


def tagged_copy(module: fx.GraphModule, bits: Bits) -> tuple[fx.GraphModule, dict[str, Tagged]]:
    """Copy graphs, not tensors; give every quantizer of the forward pass a width of its own."""
    state = module.get_submodule(STATE)
    assert isinstance(state, Precision)
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    # The copy follows no schedule.
    position = 0 if state.schedule is None else state.schedule.position
    memo |= {id(state.schedule): None, id(module.__dict__.get(PART)): None}
    made = copy.deepcopy(module, memo)
    widths = made.get_submodule(f"{STATE}.bits")
    found: dict[str, Tagged] = {}
    for inner in graphs_of(made):
        for node in list(inner.graph.nodes):
            if node.target not in QUANTIZERS or node.target is QUANTIZE_GRADIENT:
                continue
            quantizer: Quantizer = node.meta[QUANTIZER]
            tag = Tagged(f"q{len(found)}", quantizer, width_of(quantizer.dial, Static(bits), position, training=False))
            found[tag.width] = tag
            widths.register_buffer(tag.width, torch.tensor(tag.bits, dtype=torch.int64))
            with inner.graph.inserting_before(node):
                read = inner.graph.get_attr(f"{STATE}.bits.{tag.width}")
            if len(node.args) > 1:
                node.update_arg(1, read)
            else:
                node.update_kwarg("bits", read)
        inner.recompile()
    return made, found


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

    def __init__(self, module: fx.GraphModule, tags: dict[str, Tagged], show: Callable[..., None]) -> None:
        super().__init__()
        self.module = module
        self.tags = tags
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
            widths = self.module.get_submodule(f"{STATE}.bits")
            self.names = {id(widths.get_buffer(name)): name for name in self.tags}
        self.show(self.names[id(values["bits"])], func, values, y)
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
