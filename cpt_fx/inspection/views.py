"""A view of each quantizer, read from the graph's metadata, its width, its running range and its counters.

And of each quantized product: how often it ran on integers, and why the rest did not.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.capture.standalone import transformed_in
from cpt_fx.formats import FULL_PRECISION, Format
from cpt_fx.integer.counts import COUNTS, DIRECTIONS, RATIO, REASONS, ProductOutcome
from cpt_fx.integer.ops import INTEGER_PRODUCTS
from cpt_fx.ir.layer_state import PARTS, has_value
from cpt_fx.ir.meta import DECISION, QUANTIZER, SIMULATED, STATE, Decision, Quantizer, WidthSource, get_attribute
from cpt_fx.ir.subgraphs import outermost, state_of
from cpt_fx.operators import MULTIPLY
from cpt_fx.quantizers.counters import ARMED, DIFFERENTIATED, SKIPPED, SPARSE

OF_A_SECOND = "a product of a second backward pass: gradients of gradients are not quantized"
SPARSE_OPERAND = "a sparse operand is passed on as it is"
HEADS = ("layer", "product", *DIRECTIONS, "in floating point because")


@dataclass(frozen=True)
class QuantizerView:
    """One quantize node as it is now."""

    node: str
    """Its name in the graph."""
    layer: str
    """The layer it serves, the first one if several share it."""
    layers: tuple[str, ...]
    role: str
    """`weight`, `activation`, `bias` or `gradient`."""
    op: str
    """The operator it serves, such as `conv2d`."""
    operand: str
    """The operator's name for the operand, such as `input`; `gradient` for its output gradient."""
    format: Format
    group: str
    """The granularity, which elements share a range: `tensor`, `channel`, ..."""
    bits: int
    """The current width."""
    width_source: WidthSource
    """The bit-width source: which width of the schedule it follows, and how."""
    times_run: int
    levels: dict[int, int]
    """Width -> distinct levels seen in a sample at the first eager run at that width."""
    error: dict[int, float]
    """Width -> rounding error of that sample relative to its root mean square."""
    range: tuple[float, float] | None
    """The running (lowest, highest) value; None unless the format has an observer that has seen a batch."""
    waited: int = 0
    """Of a gradient quantizer: 1 after a forward pass, 2 after one whose value requires a gradient, 3 after a gradient
    that may be differentiated itself."""
    skipped: int = 0
    """How many batches its running range ignored because they were not finite."""
    left: str = ""
    """Why some of its inputs stayed in full precision."""
    graph: int = 0
    """Index of its graph in `cpt_fx.graphs(result)`."""

    @property
    def seen(self) -> int | None:
        """The width to report on: the current one if levels were counted at it, else the largest counted."""
        return self.bits if self.bits in self.levels else max(self.levels, default=None)

    def __str__(self) -> str:
        """Describe it in one line."""
        return f"{self.layer}: {self.role} quantizer {self.node} ({self.op}, {self.operand})"


@dataclass(frozen=True)
class ProductView:
    """One quantized product as it is now; counts are (forward, gradient of the left, of the right operand)."""

    layer: str
    op: str
    """The operator of the model, such as `linear`."""
    node: str
    integer: tuple[int, ...] = (0, 0, 0)
    """How often it ran on integers."""
    floating: tuple[int, ...] = (0, 0, 0)
    """How often it ran in floating point; a product that is not lowered has no counts."""
    reasons: tuple[str, ...] = ()
    """Why it does not run on integers, or did not in all runs."""
    ratios: tuple[float | None, ...] = (None, None, None)
    """The measured speed-up on integers of the last run of each; None where the choice was not made by measuring."""
    lowered: bool = False
    """Whether it is an integer operator in the graph."""
    graph: int = 0
    """Index of its graph in `cpt_fx.graphs(result)`."""

    @property
    def on_integers(self) -> bool:
        """Whether it ran, and on integers every time."""
        return self.lowered and sum(self.integer) > 0 and not sum(self.floating)

    def __str__(self) -> str:
        """Describe it in one line."""
        runs = ", ".join(f"{name} {text}" for name, text in zip(DIRECTIONS, self.ran(), strict=True))
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"{self.layer or '(root)'}: {self.op}: {f'on integers: {runs}' if self.lowered else 'simulated'}{why}"

    def ran(self) -> tuple[str, ...]:
        """Return for each direction how many of its runs were on integers."""
        both = zip(self.integer, self.floating, strict=True)
        return tuple(f"{integer} of {integer + floating}" if floating else str(integer) for integer, floating in both)

    def cells(self) -> tuple[str, ...]:
        """Return its table cells, in the order of `HEADS`."""
        ran = self.ran() if self.lowered else ("–",) * 3
        return self.layer or "(root)", self.op, *ran, "; ".join(self.reasons)


def fields(item: object, *names: str) -> dict[str, Any]:
    """Return some attributes of an object as plain data."""
    return {name: _plain(getattr(item, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return {str(key): part for key, part in value.items()}
    return str(value) if isinstance(value, Format) else value


def quantizer_nodes(graph: fx.Graph) -> list[tuple[fx.Node, Quantizer]]:
    """Return the quantize nodes of a graph."""
    return [(node, node.meta[QUANTIZER]) for node in graph.nodes if QUANTIZER in node.meta]


def views_in(model: nn.Module, rested: Set[int] = frozenset()) -> tuple[QuantizerView, ...]:
    """Return a view of every quantizer; one that several graphs share is read once, if possible from one that ran."""
    found: dict[Any, QuantizerView] = {}
    for path, index, module in _graphs_in(model, rested):
        for node, quantizer in quantizer_nodes(module.graph):
            key = id(state_of(module)), quantizer.counters
            if key not in found:
                found[key] = _view(path, index, module, node, quantizer)
    return tuple(found.values())


def _graphs_in(model: nn.Module, rested: Set[int] = frozenset()) -> Iterator[tuple[str, int, fx.GraphModule]]:
    """Yield all graphs with their part's path and their number in the model; those of a part that did not run last."""
    number = count()
    for path, part in transformed_in(model):
        numbered = [(path, next(number), module) for module in part.graphs()]
        yield from sorted(numbered, key=lambda each: id(each[-1]) in rested)


def named_below(path: str, layer: str) -> str:
    """Return the name in the model of a layer of a part."""
    return ".".join(filter(None, (path, layer)))


def _view(path: str, index: int, module: fx.GraphModule, node: fx.Node, quantizer: Quantizer) -> QuantizerView:
    layers = tuple(named_below(path, layer) for layer in quantizer.layers)
    counters = _counters(module, quantizer)
    levels = {bits: counters[bits] for bits in range(1, FULL_PRECISION) if counters[bits]}
    waited = counters[ARMED] if quantizer.role == "gradient" else 0
    return QuantizerView(
        node=node.name,
        layer=layers[0],
        layers=layers,
        role=quantizer.role,
        op=quantizer.op,
        operand=quantizer.operand,
        format=quantizer.format,
        group=quantizer.format.group.value,
        bits=width_read_by(module, node, quantizer),
        width_source=quantizer.width_source,
        times_run=counters[0],
        waited=waited,
        skipped=counters[SKIPPED] % -SPARSE,
        left=SPARSE_OPERAND if counters[SKIPPED] < 0 else OF_A_SECOND if waited == DIFFERENTIATED else "",
        levels=levels,
        error={bits: counters[FULL_PRECISION + bits] / 1e9 for bits in levels},
        range=_range(module, quantizer),
        graph=index,
    )


def width_read_by(module: fx.GraphModule, node: fx.Node, quantizer: Quantizer) -> int:
    """Return the width that a node's argument reads, which should be that of its bit-width source."""
    read: Any = node.args[1] if len(node.args) > 1 else None
    if isinstance(read, fx.Node) and read.op == "get_attr":
        name = str(read.target).removeprefix(f"{STATE}.bits.")
        now = state_of(module).now()
        return now[name] if name in now else int(get_attribute(module, str(read.target)))
    return state_of(module).now()[quantizer.width_source.name]


def _counters(module: fx.GraphModule, quantizer: Quantizer) -> list[int]:
    counters = get_attribute(module, quantizer.counters)
    assert isinstance(counters, torch.Tensor)
    return counters.tolist() if has_value(counters) else [0] * counters.numel()


def _range(module: fx.GraphModule, quantizer: Quantizer) -> tuple[float, float] | None:
    """Return the range that evaluation would use; None before anything was observed."""
    if not quantizer.ranges:
        return None
    try:
        tensors = [get_attribute(outermost(module), f"{quantizer.ranges}_{part}") for part in PARTS]
    except AttributeError:  # the layer was removed since
        return None
    if not all(map(has_value, tensors)):
        return None
    low, width, weight = (float(tensor.detach()) for tensor in tensors)
    if not (weight or low or width):
        return None
    scale = weight if quantizer.format.corrected and weight else 1.0
    return low / scale, (low + width) / scale


def products_in(model: nn.Module) -> tuple[ProductView, ...]:
    """Return a view of every quantized product, a single one for graphs of one layer that share their counts."""
    found: dict[Any, ProductView] = {}
    for path, index, module in _graphs_in(model):
        for node in module.graph.nodes:
            if DECISION not in node.meta or node.meta[DECISION].family not in MULTIPLY:
                continue
            counts: Any = node.kwargs.get("counts") if node.target in INTEGER_PRODUCTS else None
            own = (node.meta[DECISION].layer, node.target) if counts is None else counts.target
            key = id(state_of(module)), own
            if key not in found:
                found[key] = _product(path, index, module, node, counts)
    return tuple(found.values())


def _product(path: str, index: int, module: fx.GraphModule, node: fx.Node, counts: fx.Node | None) -> ProductView:
    decision: Decision = node.meta[DECISION]
    layer = named_below(path, decision.layer)
    static = [node.meta[SIMULATED]] if SIMULATED in node.meta else []
    if counts is None:
        reasons = static or ["the model was transformed with execution='simulated'"]
        return ProductView(layer, decision.op, node.name, reasons=tuple(reasons), graph=index)
    counted = get_attribute(module, str(counts.target))
    table = (counted if has_value(counted) else torch.zeros(COUNTS, dtype=torch.int64)).tolist()
    ran = [sum(row[:RATIO]) for row in table]
    ratios = tuple(row[RATIO] / 1000 if row[RATIO] else None for row in table)
    seen = [
        f"{DIRECTIONS[place]}: {_because(outcome, ratios[place])} ({row[outcome]} of {ran[place]})"
        for place, row in enumerate(table)
        for outcome in REASONS
        if row[outcome]
    ]
    return ProductView(
        layer=layer,
        op=decision.op,
        node=node.name,
        integer=tuple(row[ProductOutcome.INTEGER] for row in table),
        floating=tuple(total - row[ProductOutcome.INTEGER] for total, row in zip(ran, table, strict=True)),
        reasons=(*static, *seen),
        ratios=ratios,
        lowered=True,
        graph=index,
    )


def _because(outcome: ProductOutcome, ratio: float | None) -> str:
    measured = f", {ratio:.2g} times as fast" if outcome is ProductOutcome.SIZE and ratio is not None else ""
    return REASONS[outcome] + measured
