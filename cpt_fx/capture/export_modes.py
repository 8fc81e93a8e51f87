"""Training and evaluation in one exported graph: what an export froze becomes a value read when the graph runs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cpt_fx.aten import arguments_of, name_of
from cpt_fx.capture.modes import _differs
from cpt_fx.meta import module_path

_DROPOUTS = tuple(
    f"aten.{kind}dropout{in_place}.default" for kind in ("", "alpha_", "feature_", "feature_alpha_")
    for in_place in ("", "_")
)  # fmt: skip
"""Operators that do nothing in evaluation: some code leaves them out then."""

FLAGS: dict[str, str] = {
    **dict.fromkeys(_DROPOUTS, "train"),
    "aten.native_dropout.default": "train",
    "aten.batch_norm.default": "training",
    "aten.instance_norm.default": "use_input_stats",
    "aten.rrelu.default": "training",
    "aten.rrelu_.default": "training",
    **{f"aten.{kind}.{form}": "train" for form in ("input", "data")
       for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}  # fmt: skip
"""Operators with a training flag, by the name of that argument."""

ATTENTION = "aten.scaled_dot_product_attention.default"
_COUNT = "aten.add_.Tensor"
COUNTER = "num_batches_tracked"


class Switches:
    """Makes the nodes that read a module's mode: one for each module, and one for its opposite."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[str, bool], fx.Node] = {}

    def read(self, node: fx.Node, value: bool) -> fx.Node:
        """Return what is `value` in training and its opposite in evaluation, for the module that `node` belongs to."""
        path, _ = module_path(node)
        if (path, value) not in self._made:
            first = next(item for item in self._graph.nodes if item.op not in ("placeholder", "get_attr"))
            with self._graph.inserting_before(first):
                if value:
                    # create_node, not get_attr: the latter warns about attributes that are no tensors.
                    made = self._graph.create_node("get_attr", f"{path}.training" if path else "training")
                else:
                    made = self._graph.call_function(operator.not_, (self.read(node, True),))
            self._made[path, value] = made
        return self._made[path, value]

    def scale(self, node: fx.Node, value: float) -> fx.Node:
        """Return what is `value` in training and 0.0 in evaluation."""
        flag = self.read(node, True)
        with self._graph.inserting_before(node):
            return self._graph.call_function(operator.mul, (value, flag))


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Set an argument of an ATen call by its name in the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index(name)
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def merge(training: fx.Graph, evaluation: fx.Graph, same_constant: Callable[[str], bool]) -> None:
    """Make the training graph follow the mode at run time, or raise where the two differ by more than flags."""
    _Merge(training, same_constant).run(evaluation)


class _Merge:
    def __init__(self, graph: fx.Graph, same_constant: Callable[[str], bool]) -> None:
        self.graph = graph
        self.switches = Switches(graph)
        self.same_constant = same_constant
        self.matching: dict[fx.Node, fx.Node] = {}
        self.left_out: dict[fx.Node, fx.Node] = {}
        """Operators that only the training graph has, and the value that stands for theirs in evaluation."""

    def run(self, evaluation: fx.Graph) -> None:
        """Walk both graphs side by side."""
        inputs = ([node for node in graph.nodes if node.op == "placeholder"] for graph in (self.graph, evaluation))
        self.matching = {its: mine for mine, its in zip(*inputs, strict=True)}
        ours, theirs = ([node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
                        for graph in (self.graph, evaluation))  # fmt: skip
        theirs.reverse()
        for node in ours:
            if theirs and self._match(node, theirs[-1]):
                self.matching[theirs.pop()] = node
            elif not self._leave_out(node):
                raise _differs(node, theirs[-1] if theirs else None)
        if theirs:
            raise _differs(theirs[-1], None)

    def _match(self, node: fx.Node, other: fx.Node) -> bool:
        """Match two operators, if they are the same one; flags that differ become switches."""
        if node.op != other.op or node.target != other.target:
            return False
        mine, its = _given(node), _given(other)
        changed: dict[str, Any] = {}
        for name in mine:
            if name not in its or not self._same(mine[name], its[name]):
                kind = _kind_of_switch(node, name, mine[name], its.get(name))
                if kind is None:
                    return False
                changed[name] = kind
        for name, kind in changed.items():
            if kind == "flag":
                set_argument(node, name, self.switches.read(node, mine[name]))
            elif kind == "probability":
                set_argument(node, name, self.switches.scale(node, mine[name]))
        return mine.keys() == its.keys()

    def _same(self, mine: Any, its: Any) -> bool:
        if isinstance(mine, fx.Node) and isinstance(its, fx.Node):
            mine = self.left_out.get(mine, mine)
            if its.op == "get_attr":
                return mine.op == "get_attr" and mine.target == its.target and self.same_constant(str(its.target))
            return self.matching.get(its) is mine
        if isinstance(mine, (tuple, list)) and isinstance(its, (tuple, list)):
            return len(mine) == len(its) and all(self._same(*pair) for pair in zip(mine, its, strict=True))
        if isinstance(mine, dict) and isinstance(its, dict):
            return mine.keys() == its.keys() and all(self._same(mine[key], its[key]) for key in mine)
        return type(mine) is type(its) and (mine is its or bool(mine == its))

    def _leave_out(self, node: fx.Node) -> bool:
        """Switch off in evaluation what only the training graph has, if it is of a kind that can be switched off."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return False
        if name_of(node) in _DROPOUTS and _given(node)["train"] is True:
            set_argument(node, "train", self.switches.read(node, True))
        elif name_of(node) == "aten.contiguous.default":
            # Whether a tensor lies in memory as it should is known when the graph runs: it may be asked in both modes.
            pass
        elif counts_batches(node):
            # A flag is a number to the operator: True is one.
            set_argument(node, "other", self.switches.read(node, True))
        else:
            return False
        self.left_out[node] = self.left_out.get(source, source)
        return True


def _kind_of_switch(node: fx.Node, name: str, mine: Any, its: Any) -> str | None:
    """Say how an argument follows the mode: as a flag, as a probability that is 0 in evaluation, or not at all."""
    if isinstance(mine, bool) and isinstance(its, bool):
        return "flag"
    if name_of(node) == ATTENTION and name == "dropout_p" and its == 0.0:
        return "probability"
    # Evaluation does not use it: nn.BatchNorm passes 0.0 where it would average over all batches.
    return "unused" if name_of(node) == "aten.batch_norm.default" and name == "momentum" else None


def _given(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by name, however they are passed."""
    if name_of(node):
        return arguments_of(node)
    return {**{str(place): value for place, value in enumerate(node.args)}, **node.kwargs}


def counts_batches(node: fx.Node) -> bool:
    """Whether a node adds one to the counter of a batch norm."""
    source: Any = node
    while isinstance(source, fx.Node) and name_of(source) == _COUNT:
        source = source.args[0]
    counts = isinstance(source, fx.Node) and str(source.target).rpartition(".")[2] == COUNTER
    return source is not node and counts and bool(node.args[1] == 1)
