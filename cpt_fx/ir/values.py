"""Which values of a graph are parameters, or computed from them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.ir.meta import WEIGHT, asks_for_size, example_of, get_attribute, is_transposed
from cpt_fx.ir.subgraphs import SubgraphCall


class WeightTracker:
    """Tracks which values of a graph and its subgraphs are weights, and which depend on a parameter."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        """The graph that is being walked."""
        self.weights: set[fx.Node] = set()
        """Parameters, and what is computed from parameters alone."""
        self.trained: set[fx.Node] = set()
        """Values that depend on a parameter: coefficients do, an adjacency matrix does not."""
        self._tensors: dict[fx.Node, Any] = {}

    def visit(self, node: fx.Node) -> None:
        """Process the next node."""
        if self.is_weight(node):
            self.weights.add(node)
        calls = node.op == "call_module"
        owns = calls and any(True for _ in self.module.get_submodule(str(node.target)).parameters())
        if owns or node in self.weights or any(used in self.trained for used in node.all_input_nodes):
            self.trained.add(node)

    def enter(self, call: SubgraphCall) -> None:
        """Pass on to the inputs of a subgraph what is known about their values."""
        for given, value in call.given.items():
            if value in self.weights:
                given.meta[WEIGHT] = True
            if value in self.trained:
                self.trained.add(given)
            self._tensors[given] = self.tensor(value)

    def is_weight(self, node: fx.Node) -> bool:
        """Return whether a value is a parameter, or computed from parameters alone."""
        if node.op == "get_attr":
            return isinstance(self.tensor(node), nn.Parameter)
        if node.op == "placeholder":
            return bool(node.meta.get(WEIGHT))
        if node.op not in ("call_function", "call_method"):
            return False
        used = [value for value in node.all_input_nodes if not _is_size(value)]
        return bool(used) and all(value in self.weights for value in used)

    def tensor(self, node: fx.Node) -> Any:
        """Return the tensor (or an example) of a value that is read from a module or passed in; None for others."""
        if node.op == "get_attr":
            return get_attribute(self.module, str(node.target))
        return self._tensors.get(node, node.meta.get("example_value") if node.op == "placeholder" else None)

    def is_transposed(self, value: fx.Node) -> bool:
        """Return whether a value is the transpose of a stored matrix."""
        if value.op == "placeholder":
            return is_transposed(self.tensor(value))
        source = value.args[0] if value.args else None
        if not (isinstance(source, fx.Node) and is_read(source) and getattr(self.tensor(source), "ndim", None) == 2):
            return False
        if value.target is getattr:
            return value.args[1] in ("T", "mT")
        exchanging = value.target in ("transpose", "permute", "swapaxes", torch.transpose, torch.permute)
        return exchanging or value.target in ("t", torch.t)


def is_read(node: fx.Node) -> bool:
    """Return whether a value is read from a module or passed in, not computed by an operator."""
    return node.op in ("get_attr", "placeholder")


def _is_size(node: fx.Node) -> bool:
    """Return whether a value is a size: a parameter expanded to the size of a batch is still a weight."""
    known = example_of(node)
    if known is not None:
        return isinstance(known, (int, torch.SymInt, torch.Size))
    # Traces of torch.fx hold no examples: a size is read from a tensor, or computed from such numbers.
    parts = node.all_input_nodes
    return asks_for_size(node) or (node.target in _ARITHMETIC and bool(parts) and all(map(_is_size, parts)))


_ARITHMETIC = (operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv)
