"""Remove redundant quantizers: quantize a shared tensor once per format, and once for all steps of a loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from cpt_fx.formats import Range, Rounding
from cpt_fx.ir.aliasing import Versions
from cpt_fx.ir.contexts import Regions
from cpt_fx.ir.layer_names import NAMES, Names
from cpt_fx.ir.meta import PASS, QUANTIZER, Quantizer, read_before
from cpt_fx.ir.pass_base import Pass, Report, unique
from cpt_fx.ir.state import Precision
from cpt_fx.ir.subgraphs import CONSTANTS, OUTER, SubgraphCall, calls_of, graphs_of, outermost, state_of


@dataclass(frozen=True)
class Share(Pass):
    """Merge quantizers that read the same version of a tensor and would return the same values.

    The merged one follows the training flag of the first layer.

    Two quantizers with running ranges merge only if the ranges see the same tensors in the same order over the whole
    graph, and thus always stay equal; a module that is called twice keeps both of its updates.
    """

    name: ClassVar[str] = "share"
    requires: ClassVar[str] = "inserted"
    whole: ClassVar[bool] = True

    def run(self, module: fx.GraphModule) -> Report:
        """Hoist loop-invariant quantizers, merge redundant ones, then remove unused reads.

        Redundant running ranges stay registered, so that references to the model's buffers remain valid.
        """
        graphs = graphs_of(module)
        state = state_of(module)
        before = _ranges(graphs)
        hoisted = sum(_hoist(graph) for graph in graphs)
        names: Names = module.meta.get(NAMES, Names())
        found = [_merge(graph, [other for other in graphs if other is not graph], state, names) for graph in graphs]
        merged, seen = sum(count for count, _ in found), sum(count for _, count in found)
        notes = [f"{merged} of {seen} quantizers merged into others"]
        notes += [f"{hoisted} quantizers of weights moved out of loops"] if hoisted else []
        unread = sorted(before - _ranges(graphs))
        notes += [f"ranges that stay, though nothing reads them now: {', '.join(unread)}"] if unread else []
        return Report(self.name, merged + hoisted, tuple(notes))


def _ranges(graphs: list[fx.GraphModule]) -> set[str]:
    """Return the running ranges that the quantizers of these graphs use."""
    nodes = (node for graph in graphs for node in graph.graph.nodes if QUANTIZER in node.meta)
    return {node.meta[QUANTIZER].ranges for node in nodes} - {""}


def _hoist(module: fx.GraphModule) -> int:
    """Move quantizers of loop constants from the subgraph of the loop to the graph around it; return how many.

    Only those that return the same at every step: they draw no noise and keep no state. Their gradient is the
    identity, so the sum over all steps reaches the weight either way.
    """
    moved = 0
    reads: dict[str, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            reads.setdefault(str(node.target), node)
        for call in calls_of(module, node):
            if call.repeats:
                moved += sum(_move(module.graph, call, inner, reads) for inner in list(call.subgraph.graph.nodes))
    return moved


def _move(graph: fx.Graph, call: SubgraphCall, inner: fx.Node, reads: dict[str, fx.Node]) -> bool:
    """Move one quantizer out of the loop if possible; return whether it was moved."""
    quantizer: Quantizer | None = inner.meta.get(QUANTIZER)
    value = inner.args[0] if inner.args else None
    if quantizer is None or quantizer.role == "gradient" or not isinstance(value, fx.Node):
        return False
    alone = value in call.given and list(value.users) == [inner]
    if not alone or quantizer.format.range is not Range.DYNAMIC or quantizer.format.rounding is Rounding.STOCHASTIC:
        return False

    def outside(used: fx.Node) -> fx.Node:
        if used in call.given:
            return call.given[used]
        path = str(used.target).removeprefix(f"{OUTER}.")
        if path not in reads:
            reads[path] = graph.create_node("get_attr", path)
            reads[path].meta = dict(used.meta)
        return reads[path]

    with graph.inserting_before(call.node):
        args, kwargs = fx.map_arg((inner.args, inner.kwargs), outside)
        made = graph.create_node("call_function", inner.target, args, kwargs, name=inner.name)
    made.meta = dict(inner.meta)
    _pass_on(call, value, made)
    inner.replace_all_uses_with(value)
    call.subgraph.graph.erase_node(inner)
    return True


def _pass_on(call: SubgraphCall, given: fx.Node, value: fx.Node) -> None:
    """Make the loop pass another value for one input of its subgraph."""
    inputs = [node for node in call.subgraph.graph.nodes if node.op == "placeholder"]
    constants: list[Any] = list(call.node.args[CONSTANTS])  # type: ignore[arg-type]
    constants[inputs.index(given) - len(inputs)] = value
    call.node.update_arg(CONSTANTS, tuple(constants))
    call.given[given] = value


def _merge(module: fx.GraphModule, others: list[fx.GraphModule], state: Precision, names: Names) -> tuple[int, int]:
    """Merge within one graph; return how many quantizers were removed, and how many were considered."""
    # This graph does not show everything that a range sees if other graphs use it, too.
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
        state.drop_counters(theirs.counters.rpartition(".")[2])
        if theirs.ranges != ours.ranges:
            names.merged_ranges[theirs.ranges] = ours.ranges
        merged += 1
    for node in kept.values():
        _follow_merged_range(module, node, names)
    _drop_dead_reads(module)
    return merged, len(keys)


def _follow_merged_range(module: fx.GraphModule, node: fx.Node, names: Names) -> None:
    """Read the range that a quantizer's own was merged into in another capture of the model, if it was.

    The graph for evaluation may keep two quantizers apart that were merged in training. In training, a quantizer that
    is not merged learns its own range.
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
    """Return a key for every quantizer of an operand; those with equal keys can be merged."""
    versions = Versions(module)
    regions = Regions()
    inputs: dict[fx.Node, Hashable] = {}
    history: dict[str, list[Hashable]] = defaultdict(list)
    for node in module.graph.nodes:
        quantizer: Quantizer | None = node.meta.get(QUANTIZER)
        if quantizer is not None and quantizer.role != "gradient":
            value = node.args[0]
            options = tuple(sorted((key, str(option)) for key, option in node.kwargs.items() if key != "counters"))
            what: Hashable = (
                value, versions.of(value), regions.current, node.target, options, quantizer.format,
                quantizer.width_source,
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
    """Remove reads that passes made and that have no users left."""
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and not node.users and PASS in node.meta:
            module.graph.erase_node(node)
