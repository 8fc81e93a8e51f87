"""What is known of each quantizer, read from the graph's metadata, its widths, its running range and its record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.bodies import outermost
from cpt_fx.evidence import ARMED, SKIPPED
from cpt_fx.formats import FULL_PRECISION, Format
from cpt_fx.layer_state import PARTS, has_value
from cpt_fx.meta import QUANTIZER, STATE, Dial, Quantizer, get_attribute
from cpt_fx.runtime import Precision
from cpt_fx.standalone import transformed_in


@dataclass(frozen=True)
class QuantizerView:
    """One quantize node as it stands now."""

    node: str
    """Its name in the graph."""
    layer: str
    """The layer it serves, the first one where several share it."""
    layers: tuple[str, ...]
    role: str
    """`weight`, `activation`, `bias` or `gradient`."""
    op: str
    """The operator it serves, such as `conv2d`."""
    operand: str
    """The operator's name for the operand, such as `input`; `gradient` for its output gradient."""
    format: Format
    group: str
    """Which elements share one range: `tensor`, `channel`, ..."""
    bits: int
    """The current width."""
    dial: Dial
    """Which width of the schedule it follows, and how."""
    times_run: int
    levels: dict[int, int]
    """Width -> distinct levels seen in a sample at the first eager run at that width."""
    error: dict[int, float]
    """Width -> rounding error of that sample relative to its root mean square."""
    range: tuple[float, float] | None
    """The running (lowest, highest) value, where the format has an observer that has seen something."""
    waited: int = 0
    """Of a gradient quantizer: 1 once a forward pass went through it, 2 once it waited for a gradient."""
    skipped: int = 0
    """How many batches its running range learned nothing from, since they were not finite."""
    graph: int = 0
    """Index of its graph in `cpt_fx.graphs(result)`."""

    @property
    def current_bits(self) -> int:
        """The current width."""
        return self.bits

    @property
    def runs(self) -> int:
        """How often it ran."""
        return self.times_run

    @property
    def seen(self) -> int | None:
        """The width to speak of: the current one if levels were seen there, else the largest one seen."""
        return self.bits if self.bits in self.levels else max(self.levels, default=None)

    def __str__(self) -> str:
        """Name it in one line."""
        return f"{self.layer}: {self.role} quantizer {self.node} ({self.op}, {self.operand})"


def quantizer_nodes(graph: fx.Graph) -> Iterator[tuple[fx.Node, Quantizer]]:
    """Walk over the quantize nodes of a graph."""
    for node in graph.nodes:
        quantizer = node.meta.get(QUANTIZER)
        if quantizer is not None:
            yield node, quantizer


def state_of(module: fx.GraphModule) -> Precision:
    """Return the widths, ranges and records of one graph."""
    state = module.__dict__.get(STATE) or module._modules[STATE]
    assert isinstance(state, Precision)
    return state


def views_of(modules: list[fx.GraphModule]) -> tuple[QuantizerView, ...]:
    """Read every quantizer of every graph, once where several captures of one layer share it."""
    found: dict[str, QuantizerView] = {}
    for index, module in enumerate(modules):
        for node, quantizer in quantizer_nodes(module.graph):
            if quantizer.record not in found:
                found[quantizer.record] = _view(module, node, quantizer, index)
    return tuple(found.values())


def views_in(model: nn.Module) -> tuple[QuantizerView, ...]:
    """Read every quantizer of a model, with its place in the whole where that contains several transformed parts."""
    found: list[QuantizerView] = []
    first = 0
    for path, result in transformed_in(model):
        graphs = result.graphs()
        found += (_below(path, view, first) for view in views_of(graphs))
        first += len(graphs)
    return tuple(found)


def _below(path: str, view: QuantizerView, first: int) -> QuantizerView:
    layers = tuple(named_below(path, layer) for layer in view.layers)
    return replace(view, layer=layers[0], layers=layers, graph=view.graph + first)


def named_below(path: str, layer: str) -> str:
    """Return the name of a layer of a part in the whole."""
    return ".".join(filter(None, (path, layer)))


def _view(module: fx.GraphModule, node: fx.Node, quantizer: Quantizer, index: int) -> QuantizerView:
    record = _record(module, quantizer)
    levels = {bits: record[bits] for bits in range(1, FULL_PRECISION) if record[bits]}
    return QuantizerView(
        node=node.name,
        layer=quantizer.layers[0],
        layers=quantizer.layers,
        role=quantizer.role,
        op=quantizer.op,
        operand=quantizer.operand,
        format=quantizer.format,
        group=quantizer.format.group.value,
        bits=width_read_by(module, node, quantizer),
        dial=quantizer.dial,
        times_run=record[0],
        waited=record[ARMED] if quantizer.role == "gradient" else 0,
        skipped=record[SKIPPED],
        levels=levels,
        error={bits: record[FULL_PRECISION + bits] / 1e9 for bits in levels},
        range=_range(module, quantizer),
        graph=index,
    )


def width_read_by(module: fx.GraphModule, node: fx.Node, quantizer: Quantizer) -> int:
    """Return the width a node gets: what its argument reads, which ought to be its dial."""
    read: Any = node.args[1] if len(node.args) > 1 else None
    if isinstance(read, fx.Node) and read.op == "get_attr":
        name = str(read.target).removeprefix(f"{STATE}.bits.")
        now = state_of(module).now()
        return now[name] if name in now else int(get_attribute(module, str(read.target)))
    return state_of(module).now()[quantizer.dial.name]


def _record(module: fx.GraphModule, quantizer: Quantizer) -> list[int]:
    record = get_attribute(module, quantizer.record)
    assert isinstance(record, torch.Tensor)
    if not has_value(record):
        return [0] * record.numel()
    return [int(value) for value in record.tolist()]


def _range(module: fx.GraphModule, quantizer: Quantizer) -> tuple[float, float] | None:
    """Return the range that evaluation would use, None before anything was observed."""
    if not quantizer.ranges:
        return None
    try:
        tensors = [get_attribute(outermost(module), f"{quantizer.ranges}_{part}") for part in PARTS]
    except AttributeError:  # of a layer that was taken away since
        return None
    if not all(map(has_value, tensors)):
        return None
    low, width, weight = (float(tensor.detach()) for tensor in tensors)
    if weight == 0.0 and low == 0.0 and width == 0.0:
        return None
    scale = weight if quantizer.format.corrected and weight else 1.0
    return low / scale, (low + width) / scale
