"""Fewer nodes: a tensor that several layers read is quantized once per format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from cpt_fx.aliasing import Versions
from cpt_fx.bodies import graphs_of, outermost, state_of
from cpt_fx.formats import Range, Rounding
from cpt_fx.meta import PASS, QUANTIZER, Quantizer, read_before
from cpt_fx.names import NAMES, Names
from cpt_fx.opening.hoist import hoist
from cpt_fx.pass_base import Pass, Report, unique
from cpt_fx.regions import Regions
from cpt_fx.runtime import Precision


@dataclass(frozen=True)
class Share(Pass):
    """Merge quantizers that see the same tensor at the same moment and would return the same values.

    The merged one follows the training flag of the first layer.

    Two observed quantizers merge only if their running ranges see the same tensors in the same order over the whole
    graph, so that the ranges are equal for ever; a module that is called twice keeps both of its updates.
    """

    name: ClassVar[str] = "share"
    requires: ClassVar[str] = "inserted"
    whole: ClassVar[bool] = True

    def run(self, module: fx.GraphModule) -> Report:
        """Take out of loops what is the same at every step, merge, then remove reads that nothing uses.

        Running ranges that become redundant stay where they are: who holds on to a model's buffers finds them again.
        """
        graphs = graphs_of(module)
        state = state_of(module)
        before = _ranges(graphs)
        hoisted = sum(hoist(graph) for graph in graphs)
        names: Names = module.meta.get(NAMES, Names())
        found = [_merge(graph, [other for other in graphs if other is not graph], state, names) for graph in graphs]
        merged, seen = sum(count for count, _ in found), sum(count for _, count in found)
        notes = [f"{merged} of {seen} quantizers merged into others"]
        notes += [f"{hoisted} quantizers of weights moved out of loops"] if hoisted else []
        unread = sorted(before - _ranges(graphs))
        notes += [f"ranges that stay, though nothing reads them now: {', '.join(unread)}"] if unread else []
        return Report(self.name, merged + hoisted, tuple(notes))


def _ranges(graphs: list[fx.GraphModule]) -> set[str]:
    """Return the running ranges that the quantizers of some graphs use."""
    nodes = (node for graph in graphs for node in graph.graph.nodes if QUANTIZER in node.meta)
    return {node.meta[QUANTIZER].ranges for node in nodes} - {""}


def _merge(module: fx.GraphModule, others: list[fx.GraphModule], state: Precision, names: Names) -> tuple[int, int]:
    """Merge within one graph; return how many quantizers went, and how many were looked at."""
    # One graph does not tell all that a range sees, if others of its family use it.
    keys = _keys(module, _ranges(others))
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
        state.drop_record(theirs.record.rpartition(".")[2])
        if theirs.ranges != ours.ranges:
            names.merged_ranges[theirs.ranges] = ours.ranges
        merged += 1
    for node in kept.values():
        _follow_merged_range(module, node, names)
    _drop_dead_reads(module)
    return merged, len(keys)


def _follow_merged_range(module: fx.GraphModule, node: fx.Node, names: Names) -> None:
    """Read the range that learned for a layer in another capture of the model, where its own was merged into it.

    The graph for evaluation may keep two quantizers apart that were one in training. In training a quantizer that
    stands alone learns a range of its own.
    """
    quantizer: Quantizer = node.meta[QUANTIZER]
    kept = names.merged_ranges.get(quantizer.ranges)
    if kept is None:
        return
    if outermost(module).training:
        del names.merged_ranges[quantizer.ranges]
        return
    for read in node.all_input_nodes:
        if read.op == "get_attr" and quantizer.ranges in str(read.target):
            other = read_before(node, str(read.target).replace(quantizer.ranges, kept, 1))
            node.replace_input_with(read, other)
    node.meta[QUANTIZER] = replace(quantizer, ranges=kept)


def _keys(module: fx.GraphModule, elsewhere: set[str]) -> dict[fx.Node, Hashable]:
    """Return, for every quantizer that may be shared, what makes two of them the same."""
    versions = Versions(module)
    regions = Regions()
    inputs: dict[fx.Node, Hashable] = {}
    history: dict[str, list[Hashable]] = defaultdict(list)
    for node in module.graph.nodes:
        quantizer: Quantizer | None = node.meta.get(QUANTIZER)
        if quantizer is not None and quantizer.role != "gradient":
            value = node.args[0]
            options = tuple(sorted((key, str(option)) for key, option in node.kwargs.items() if key != "record"))
            what: Hashable = (
                value, versions.of(value), regions.current, node.target, options, quantizer.format, quantizer.dial,
            )  # fmt: skip
            if quantizer.ranges:
                history[quantizer.ranges].append(what)
                what = (what, len(history[quantizer.ranges]))
            if quantizer.format.rounding is Rounding.STOCHASTIC or quantizer.format.range is Range.LEARNED:
                what = node  # each draws its own noise, each learns its own range
            if quantizer.ranges in elsewhere:
                what = node
            inputs[node] = what
        versions.visit(node)
        regions.visit(node)
    return {
        node: (key, tuple(history[node.meta[QUANTIZER].ranges]) if node.meta[QUANTIZER].ranges else ())
        for node, key in inputs.items()
    }


def _drop_dead_reads(module: fx.GraphModule) -> None:
    """Remove reads that insert made and that lost their last user."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users and PASS in node.meta:
            module.graph.erase_node(node)
