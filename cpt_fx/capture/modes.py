"""One graph for training and evaluation, out of a trace in each mode."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from cpt_fx.capture.base import CaptureError
from cpt_fx.meta import module_path, module_stack


def merge_modes(training: fx.Graph, evaluation: fx.Graph) -> None:
    """Make the training trace follow the mode at run time, or raise where the two differ by more than flags.

    `F.dropout(x, p, self.training)` leaves a True in one trace and a False in the other. Such a constant becomes
    `self.<module>.training`, read when the graph runs. Anything else that differs is code that took another path.
    """
    ours, theirs = list(training.nodes), list(evaluation.nodes)
    matching: dict[fx.Node, fx.Node] = {}
    for node, other in zip(ours, theirs, strict=False):
        if node.op != other.op or node.target != other.target or node.name != other.name:
            raise _differs(node, other)
        matching[other] = node
        if node.op != "placeholder":
            _merge_arguments(training, node, other, matching)
    if len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)
        raise _differs(longer[min(len(ours), len(theirs))], None)


def _merge_arguments(graph: fx.Graph, node: fx.Node, other: fx.Node, matching: dict[fx.Node, fx.Node]) -> None:
    flags: dict[bool, fx.Node] = {}

    def flag(value: bool) -> fx.Node:
        if value not in flags:
            path, _ = module_path(node)
            with graph.inserting_before(node):
                # create_node, not get_attr: the latter warns about attributes that are no tensors.
                mode = graph.create_node("get_attr", f"{path}.training" if path else "training")
                flags[value] = mode if value else graph.call_function(operator.not_, (mode,))
        return flags[value]

    def merge(mine: Any, its: Any) -> Any:
        if isinstance(mine, fx.Node) and isinstance(its, fx.Node):
            if matching.get(its) is mine:
                return mine
        elif isinstance(mine, bool) and isinstance(its, bool):
            return mine if mine is its else flag(mine)
        elif isinstance(mine, (tuple, list)) and type(mine) is type(its) and len(mine) == len(its):
            items = [merge(*pair) for pair in zip(mine, its, strict=True)]
            return type(mine)(*items) if hasattr(mine, "_fields") else type(mine)(items)
        elif isinstance(mine, dict) and isinstance(its, dict) and mine.keys() == its.keys():
            return {key: merge(mine[key], its[key]) for key in mine}
        elif isinstance(mine, slice) and isinstance(its, slice):
            return slice(merge(mine.start, its.start), merge(mine.stop, its.stop), merge(mine.step, its.step))
        elif type(mine) is type(its) and (mine is its or mine == its):
            return mine
        raise _differs(node, other)

    args, kwargs = merge(node.args, other.args), merge(node.kwargs, other.kwargs)
    if flags:
        node.args, node.kwargs = args, kwargs


def _differs(node: fx.Node, other: fx.Node | None) -> CaptureError:
    """Blame the innermost module that both operators came from: the branch is in its code."""
    both = [one for one in (node, other) if one is not None and one.op != "output"]
    stacks = [[path for path, _ in module_stack(one)] for one in both]
    common = [path for path in stacks[0] if all(path in stack for stack in stacks)] if stacks else []
    place = f"module {common[-1]!r}" if common and common[-1] else "the model's forward"
    instead = f"{_said(node)} in training, {_said(other)} in evaluation" if other is not None else _said(node)
    return CaptureError(
        f"{place} does something else in training than in evaluation ({instead}): a graph traced once would be "
        "silently wrong in one of them"
    )


def _said(node: fx.Node) -> str:
    """Name an operator for people."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name}({', '.join(map(str, (*node.args, *node.kwargs.values())))})"
