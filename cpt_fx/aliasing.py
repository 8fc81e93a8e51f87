"""Which nodes may share memory, and when that memory is overwritten."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from cpt_fx.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_LEARNED, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT
from cpt_fx.optable import FUSED, SPECS

VIEWS: frozenset[Any] = frozenset({
    "view", "reshape", "transpose", "permute", "t", "flatten", "unflatten", "squeeze", "unsqueeze", "expand",
    "expand_as", "view_as", "contiguous", "chunk", "split", "unbind", "narrow", "select", "swapaxes", "movedim",
    "detach", "to", "float", "half", "type_as", "mT", "T", torch.reshape, torch.transpose, torch.permute, torch.t,
    torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze, torch.chunk, torch.split, torch.unbind,
    torch.narrow, torch.select, torch.swapaxes, torch.movedim, operator.getitem, getattr, F.dropout,
    QUANTIZE_GRADIENT,
})  # fmt: skip
"""Results that may share memory with their first argument, and with no other."""

_NEW = (
    "add", "sub", "rsub", "mul", "div", "true_divide", "pow", "neg", "exp", "log", "sqrt", "rsqrt", "abs", "clamp",
    "sin", "cos", "tanh", "sigmoid", "relu", "softmax", "log_softmax", "sum", "mean", "var", "std", "cat", "stack",
    "where", "clone", "masked_fill", "square", "maximum", "minimum",
)  # fmt: skip
FRESH: frozenset[Any] = frozenset({
    *(SPECS.keys() - {torch.einsum, torch.chain_matmul}), *FUSED, *_NEW, *(getattr(torch, name) for name in _NEW),
    FAKE_QUANTIZE, FAKE_QUANTIZE_OBSERVED, FAKE_QUANTIZE_LEARNED, operator.add, operator.sub, operator.mul,
    operator.truediv, operator.pow, operator.neg, F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.softmax, F.log_softmax,
    F.layer_norm, F.batch_norm, F.group_norm, F.cross_entropy, F.mse_loss, "size", "stride", "storage_offset",
})  # fmt: skip
"""Operators whose result is always a new tensor, or a number, unless they are told to write in place."""

_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift",
              "irshift", "imatmul", "setitem")  # fmt: skip


def writes_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node overwrites its first argument."""
    if node.op == "call_module":
        return bool(getattr(modules.get(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _OPERATORS or node.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))


class Versions:
    """Walks a graph in order and knows, at each node, how often a value's memory has been overwritten so far.

    Two reads of a node see the same numbers only if its version is the same. A result counts as sharing memory with
    everything it is made of, unless its operator is known to make a new tensor (`FRESH`) or to look at its first
    argument only (`VIEWS`): the mistake that remains is a quantizer too many, never a number that is wrong.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._modules = dict(module.named_modules())
        self._parents: dict[fx.Node, fx.Node] = {}
        self._writes: dict[fx.Node, int] = {}

    def visit(self, node: fx.Node) -> None:
        """Take the next node of the graph into account."""
        if not node.op.startswith("call_"):
            return
        out = node.kwargs.get("out")
        writes = isinstance(out, fx.Node) or writes_in_place(node, self._modules)
        inputs = [out] if isinstance(out, fx.Node) else node.all_input_nodes
        if (writes or node.target in VIEWS) and node.args and isinstance(node.args[0], fx.Node):
            inputs = inputs[:1]
        # A module's path may be the name of a function: only functions and methods are known by their target.
        if writes or node.op == "call_module" or node.target not in FRESH:
            for value in inputs:
                self._join(node, value)
        if writes:
            self._writes[self._root(node)] = self.of(node) + 1

    def of(self, node: fx.Node) -> int:
        """Return how often the memory behind a node has been overwritten up to here."""
        return self._writes.get(self._root(node), 0)

    def _join(self, node: fx.Node, value: fx.Node) -> None:
        one, other = self._root(node), self._root(value)
        if one is not other:
            # The sum: a version only ever grows, and grows with every write to either of the two.
            writes = self._writes.pop(one, 0) + self._writes.get(other, 0)
            self._parents[one] = other
            if writes:
                self._writes[other] = writes

    def _root(self, node: fx.Node) -> fx.Node:
        path = []
        while node in self._parents:
            path.append(node)
            node = self._parents[node]
        for seen in path:
            self._parents[seen] = node
        return node
