"""Which nodes may share memory, and when that memory is overwritten."""

from __future__ import annotations

from torch import fx, nn

from cpt_fx.meta import VIEWS


def writes_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node overwrites its first argument."""
    if node.op == "call_module":
        return bool(getattr(modules.get(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place_operator = name in ("iadd", "isub", "imul", "itruediv", "imatmul", "ifloordiv", "ipow", "setitem")
    return in_place_operator or node.kwargs.get("inplace") is True or (name.endswith("_") and not name.endswith("__"))


class Versions:
    """Walks a graph in order and knows, at each node, how often a value's memory has been overwritten so far.

    Two reads of a node see the same numbers only if its version is the same. What may be a view counts as one.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._modules = dict(module.named_modules())
        self._roots: dict[fx.Node, fx.Node] = {}
        self._writes: dict[fx.Node, int] = {}

    def visit(self, node: fx.Node) -> None:
        """Take the next node of the graph into account."""
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            return
        writes = writes_in_place(node, self._modules)
        if writes or node.op == "call_module" or node.target in VIEWS:
            self._roots[node] = self._root(first)
        if writes:
            self._writes[self._root(first)] = self._writes.get(self._root(first), 0) + 1

    def of(self, node: fx.Node) -> int:
        """Return how often the memory behind a node has been overwritten up to here."""
        return self._writes.get(self._root(node), 0)

    def _root(self, node: fx.Node) -> fx.Node:
        return self._roots.get(node, node)
