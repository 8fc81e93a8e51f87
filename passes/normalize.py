"""Modules, methods and functions to one form: every operator a function call, every weight a graph value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from cpt_fx.errors import TransformError
from cpt_fx.meta import CALLED, get_attribute
from cpt_fx.optable import ALIASES, METHODS, OPENED, spec_of
from cpt_fx.pass_base import Pass, Report
from cpt_fx.result import plain_layer


@dataclass(frozen=True)
class Normalize(Pass):
    """Bring every operator that quantization knows into the form of `cpt_fx.optable.SPECS`.

    Three changes: a call of a layer (`nn.Linear`, convolutions, ...) is replaced by what its own `forward` does,
    traced, so that subclasses, padding modes and hooks keep their meaning; methods and aliases become the one
    function they stand for, with positional arguments; and several names of one parameter become one value.
    """

    name: ClassVar[str] = "normalize"
    reaches: ClassVar[str | None] = "normalized"

    def run(self, module: fx.GraphModule) -> Report:
        """Open layers, unify calls, unify parameters."""
        opened = sum(_open(module, node) for node in list(module.graph.nodes))
        renamed = sum(_unify_call(node) for node in module.graph.nodes)
        merged = _unify_parameters(module)
        notes = (f"{opened} layers opened, {renamed} calls renamed, {merged} parameter values merged",)
        return Report(self.name, opened + renamed + merged, notes)


class _OneCall(fx.Tracer):
    """Traces one call of a layer, hooks included, and through modules inside it: parametrizations of the user's own."""

    def __init__(self, call: fx.Node) -> None:
        super().__init__()
        self.call = call

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__ == "torch.nn.utils.parametrizations"

    def create_args_for_root(self, *_: Any, **__: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Give the layer what this call gives it: a placeholder for each value, everything else as it is."""
        inputs = {used: self.create_proxy("placeholder", used.name, (), {}) for used in self.call.all_input_nodes}
        args, kwargs = fx.map_arg((self.call.args, self.call.kwargs), lambda used: inputs[used])  # type: ignore[arg-type, return-value]
        return lambda layer: layer(*args, **kwargs), [self.root]


def _open(module: fx.GraphModule, node: fx.Node) -> bool:
    """Replace a call of a layer by the graph of its forward."""
    if node.op != "call_module":
        return False
    path = str(node.target)
    layer = module.get_submodule(path)
    if not isinstance(layer, OPENED) or CALLED in node.meta:
        return False
    layer = plain_layer(layer)
    try:
        inner = _OneCall(node).trace(layer)
    except Exception as error:  # whatever code makes of values that are only traced: a number of one is a TypeError
        raise TransformError(f"the code of {path or type(layer).__name__} cannot be traced: {error}") from error
    stack = node.meta.get("nn_module_stack") or {path: (path, type(layer))}
    values: dict[fx.Node, Any] = {}
    inputs = {used.name: used for used in node.all_input_nodes}
    with module.graph.inserting_before(node):
        for item in inner.nodes:
            if item.op == "placeholder":
                values[item] = inputs[str(item.target)]
            elif item.op == "output":
                result = item.args[0]
            else:
                copied = module.graph.node_copy(item, lambda used: values[used])
                if item.op in ("get_attr", "call_module"):
                    copied.target = f"{path}.{item.target}"
                copied.meta["nn_module_stack"] = stack
                values[item] = copied
    node.replace_all_uses_with(values[result])
    module.graph.erase_node(node)
    return True


def _unify_call(node: fx.Node) -> bool:
    """Turn a method or an alias into its function, and keywords into positions."""
    before = (node.op, node.target, node.args, node.kwargs)
    if node.op == "call_method" and node.target in METHODS:
        node.op, node.target = "call_function", METHODS[str(node.target)]
    elif node.op == "call_function" and node.target in ALIASES:
        node.target = ALIASES[node.target]
    spec = spec_of(node)
    if spec is None:
        return (node.op, node.target) != before[:2]
    kwargs = dict(node.kwargs)
    for other, name in _KEYWORDS.get(node.target, {}).items():  # type: ignore[arg-type]
        if other in kwargs:
            kwargs[name] = kwargs.pop(other)
    # Operands come first in every signature: whatever is given by keyword after them (stride=, alpha=) stays so.
    args: list[Any] = list(node.args)
    while len(args) < len(spec.arguments) and spec.arguments[len(args)] in kwargs:
        args.append(kwargs.pop(spec.arguments[len(args)]))
    if node.target is torch.einsum and len(args) == 2 and isinstance(args[1], (list, tuple)):
        args[1:] = args[1]
    node.args, node.kwargs = tuple(args), kwargs
    return (node.op, node.target, node.args, node.kwargs) != before


_KEYWORDS: dict[Callable[..., Any], dict[str, str]] = {
    torch.mm: {"mat2": "other"},
    torch.bmm: {"mat2": "other"},
    torch.mv: {"vec": "other"},
    torch.outer: {"vec2": "other"},
    torch.dot: {"tensor": "other"},
    torch.addbmm: {"batch1": "mat1", "batch2": "mat2"},
    torch.baddbmm: {"batch1": "mat1", "batch2": "mat2"},
    torch.addmv: {"mat": "mat1", "vec": "mat2"},
    torch.addr: {"vec1": "mat1", "vec2": "mat2"},
    torch.tensordot: {"a": "input", "b": "other"},
    torch.linalg.vecdot: {"x": "input", "y": "other"},
    torch._grouped_mm: {"mat_a": "input", "mat_b": "other", "mat2": "other", "self": "input"},
    **{target: {"self": "input"} for target in (torch.matmul, torch.addmm)},
}
"""Torch's keyword names where they differ from those of the table."""


def _unify_parameters(module: fx.GraphModule) -> int:
    """Let every parameter and buffer have one node, placed before its first use, under its first name."""
    names: dict[int, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        names.setdefault(id(tensor), name)
    first: dict[str, fx.Node] = {}
    merged = 0
    for node in list(module.graph.nodes):
        if node.op != "get_attr":
            continue
        value = get_attribute(module, str(node.target))
        if not isinstance(value, torch.Tensor):
            continue
        node.target = names.get(id(value), node.target)
        if str(node.target) in first:
            node.replace_all_uses_with(first[str(node.target)])
            module.graph.erase_node(node)
            merged += 1
        else:
            first[str(node.target)] = node
    return merged
