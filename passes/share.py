"""Fewer nodes: a tensor that several layers read is quantized once per format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from cpt_fx.aliasing import Versions
from cpt_fx.formats import Range, Rounding
from cpt_fx.meta import PASS, QUANTIZER, Quantizer
from cpt_fx.pass_base import Pass, Report, unique
from cpt_fx.runtime import ensure_precision


@dataclass(frozen=True)
class Share(Pass):
    """Merge quantizers that see the same tensor at the same moment and would return the same values.

    The merged one follows the training flag of the first layer.

    Two observed quantizers merge only if their running ranges see the same tensors in the same order over the whole
    graph, so that the ranges are equal for ever; a module that is called twice keeps both of its updates.
    """

    name: ClassVar[str] = "share"
    requires: ClassVar[str] = "inserted"

    def run(self, module: fx.GraphModule) -> Report:
        """Merge, then remove state and reads that nothing uses any more."""
        keys = _keys(module)
        ranges = {node.meta[QUANTIZER].ranges for node in keys}
        state = ensure_precision(module)
        kept: dict[Hashable, fx.Node] = {}
        merged = 0
        for node, key in keys.items():
            if key not in kept:
                kept[key] = node
                continue
            first = kept[key]
            ours, theirs = first.meta[QUANTIZER], node.meta[QUANTIZER]
            first.meta[QUANTIZER] = replace(ours, layers=unique((*ours.layers, *theirs.layers)))
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
            delattr(state.records, node.name)
            merged += 1
        _drop_dead_reads(module)
        used = {node.meta[QUANTIZER].ranges for node in kept.values()}
        for path in sorted(ranges - used - {""}):
            state.drop_range(path)
        return Report(self.name, merged, (f"{merged} of {len(keys)} quantizers merged into others",))


def _keys(module: fx.GraphModule) -> dict[fx.Node, Hashable]:
    """Return, for every quantizer that may be shared, what makes two of them the same."""
    versions = Versions(module)
    inputs: dict[fx.Node, Hashable] = {}
    history: dict[str, list[Hashable]] = defaultdict(list)
    for node in module.graph.nodes:
        quantizer: Quantizer | None = node.meta.get(QUANTIZER)
        if quantizer is not None and quantizer.role != "gradient":
            value = node.args[0]
            options = tuple(sorted((key, str(option)) for key, option in node.kwargs.items() if key != "record"))
            what: Hashable = (value, versions.of(value), node.target, options, quantizer.format, quantizer.dial)
            if quantizer.ranges:
                history[quantizer.ranges].append(what)
                what = (what, len(history[quantizer.ranges]))
            if quantizer.format.rounding is Rounding.STOCHASTIC or quantizer.format.range is Range.LEARNED:
                what = node  # each draws its own noise, each learns its own range
            inputs[node] = what
        versions.visit(node)
    return {
        node: (key, tuple(history[node.meta[QUANTIZER].ranges]) if node.meta[QUANTIZER].ranges else ())
        for node, key in inputs.items()
    }


def _drop_dead_reads(module: fx.GraphModule) -> None:
    """Remove reads that insert made and that lost their last user."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users and PASS in node.meta:
            module.graph.erase_node(node)
