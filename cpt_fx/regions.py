"""Which stretches of a graph run under another gradient mode or autocast than the rest."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

_SET_GRAD: frozenset[Any] = frozenset({torch._C._set_grad_enabled, torch.set_grad_enabled})
_ENTER: frozenset[Any] = frozenset({
    torch.amp.autocast_mode._enter_autocast, torch.autograd.grad_mode._enter_inference_mode,
})  # fmt: skip
_EXIT: frozenset[Any] = frozenset({
    torch.amp.autocast_mode._exit_autocast, torch.autograd.grad_mode._exit_inference_mode,
})  # fmt: skip


TRANSFORMED = "under torch.vmap or another transform of torch.func: running ranges and hooks have no place there"
"""Why a product stays in full precision where a function is transformed."""


class Regions:
    """Walks a graph in order and knows, at each node, the contexts it runs in.

    Two calls of one operator on one value are the same only if their contexts are: without gradients a result has no
    history, and under autocast it may have another dtype.
    """

    def __init__(self) -> None:
        self._gradients: Any = None
        self._entered: tuple[fx.Node, ...] = ()
        self._levels = 0

    @property
    def transformed(self) -> bool:
        """Whether the present operators run under `torch.vmap` or another transform of `torch.func`."""
        return self._levels > 0

    @property
    def current(self) -> Hashable:
        """What the present contexts are: equal where they are equal."""
        return self._gradients, self._entered, self._levels

    def visit(self, node: fx.Node) -> None:
        """Take the next node of the graph into account."""
        if node.op != "call_function":
            return
        if node.target in _SET_GRAD:
            self._gradients = node.args[0] if node.args else node.kwargs.get("mode")
        elif node.target in _ENTER:
            self._entered = (*self._entered, node)
        elif node.target in _EXIT:
            self._entered = tuple(entered for entered in self._entered if entered is not node.args[0])
        else:
            name = getattr(node.target, "__name__", "")
            self._levels += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
