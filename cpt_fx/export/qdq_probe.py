"""The quantizers of a rewritten graph by the names of their records, and what they see on examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from cpt_fx.bodies import graphs_of
from cpt_fx.formats import Rounding
from cpt_fx.meta import QUANTIZER, Quantizer
from cpt_fx.numerics import Extent, extent_of, percentile_extent
from cpt_fx.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT, QUANTIZERS
from cpt_fx.standalone import precision_of

_ARGUMENTS = ("x", "bits", "zero_point", "range", "weight", "training")


@dataclass
class Watched:
    """A quantizer, its width, and what it saw on the examples."""

    quantizer: Quantizer
    bits: int
    constant: bool = False
    """Whether it quantizes a weight or a bias that is the same in every run."""
    call: tuple[Tensor, Tensor, dict[str, Any]] | None = None
    """Input, output and options, of a constant."""
    extent: Extent | None = None
    """The range over all calls."""
    learned: bool = False
    """The range is one that the model has learned, not that of the examples."""
    difference: float = 0.0
    """Sum of the squares of what the file's nodes do to it."""
    reference: float = 0.0
    """Sum of the squares of what it returns."""

    @property
    def label(self) -> str:
        """What to call it."""
        return f"{self.quantizer.layers[0]}.{self.quantizer.operand}".strip(".")

    def see(self, func: Any, values: dict[str, Any], y: Tensor) -> None:
        """Note a call."""
        # A layer may be called with one constant, then with another: for these there is one grid, as for what changes.
        self.constant = self.constant and (self.call is None or torch.equal(self.call[0], values["x"]))
        self.call = (values["x"].detach(), y.detach(), values) if self.constant else None
        extent, self.learned = _extent_used(func, values)
        low, high = extent.zero_point.amin(), extent.maximum().amax()
        if self.extent is not None:
            low, high = torch.minimum(self.extent.zero_point, low), torch.maximum(self.extent.maximum(), high)
        self.extent = Extent(low, high - low, high)

    def compare(self, nodes: Callable[[Tensor], Tensor], func: Any, values: dict[str, Any], y: Tensor) -> None:
        """Note what the nodes in its place make of a call."""
        difference, reference = squares(nodes(values["x"]), y)
        self.difference += difference
        self.reference += reference


def watched_in(module: fx.GraphModule) -> dict[str, Watched]:
    """Return the quantizers of the forward pass by the names of their records, which no two of them share."""
    state = precision_of(module)
    made = [node.meta[QUANTIZER] for inner in graphs_of(module) for node in inner.graph.nodes if QUANTIZER in node.meta]
    return {
        quantizer.record.rpartition(".")[2]: Watched(quantizer, state.width(quantizer.dial, training=False))
        for quantizer in made
        if quantizer.role != "gradient"
    }


class Watch(TorchFunctionMode):
    """Runs quantizers, at their widths and to the nearest code, and shows their calls to functions, by name."""

    def __init__(self, module: fx.GraphModule, shows: Mapping[str, Callable[..., None]]) -> None:
        super().__init__()
        self.records = precision_of(module).records
        self.shows = shows
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
        if not self.names:
            # Not before the run: it may go on copies of the buffers.
            self.names = {id(record): name for name, record in self.records.named_buffers()}
        show = self.shows.get(self.names[id(kwargs["record"])])
        if show is not None:
            show(func, dict(zip(_ARGUMENTS, args, strict=False)) | options, y)
        return y


def squares(value: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the squares of a difference and of what it is compared with, each summed up."""
    difference = (value.double() - reference.double()).square().sum()
    return float(difference), float(reference.double().square().sum())


def _extent_used(func: Any, values: dict[str, Any]) -> tuple[Extent, bool]:
    """Return the range that a quantizer uses in evaluation, and whether it is one that the model has learned."""
    if func is FAKE_QUANTIZE or not values["weight"] > 0:
        percentile = values.get("percentile", 100.0)
        whole = percentile >= 100
        return (extent_of(values["x"], (), None) if whole else percentile_extent(values["x"], percentile)), False
    shared = func is FAKE_QUANTIZE_OBSERVED and values.get("corrected", True)
    share = values["weight"] if shared else torch.ones_like(values["weight"])
    return Extent(values["zero_point"].detach() / share, values["range"].detach() / share), True
