"""Bring modules, methods and functions to one form: every operator a function call, every weight a graph value."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from cpt_fx.common.torch_private import has_any_global_hook
from cpt_fx.errors import TransformError
from cpt_fx.ir.meta import CALLED, get_attribute
from cpt_fx.ir.pass_base import Pass, Report
from cpt_fx.ir.result import plain_layer
from cpt_fx.operators import INLINED
from cpt_fx.operators.aten import unify


@dataclass(frozen=True)
class Normalize(Pass):
    """Bring every operator of the table (`cpt_fx.operators`) to its normal form.

    Three changes: a call of a layer (`nn.Linear`, convolutions, ...) is replaced by the trace of its own `forward`,
    so that subclasses, padding modes and hooks keep their meaning; methods and aliases become the one function they
    stand for, with positional arguments; and all reads of one parameter, under any of its names, become one value.
    """

    name: ClassVar[str] = "normalize"
    reaches: ClassVar[str | None] = "normalized"

    def run(self, module: fx.GraphModule) -> Report:
        """Inline layers, unify calls, unify parameters."""
        known: dict[Hashable, fx.Graph] = {}
        inlined = sum(_inline(module, node, known) for node in list(module.graph.nodes))
        renamed = sum(unify(module.graph, node) for node in list(module.graph.nodes))
        merged = _unify_parameters(module)
        notes = (f"{inlined} layers inlined, {renamed} calls renamed, {merged} parameter values merged",)
        return Report(self.name, inlined + renamed + merged, notes)


class _OneCall(fx.Tracer):
    """Traces one call of a layer with its hooks, and through modules inside it, such as the user's parametrizations."""

    def __init__(self, call: fx.Node) -> None:
        super().__init__()
        self.call = call

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__ == "torch.nn.utils.parametrizations"

    def create_args_for_root(self, *_: Any, **__: Any) -> tuple[Callable[..., Any], list[Any]]:
        """Call the layer as the node does, with a placeholder for each node argument and all others unchanged."""
        inputs = {used: self.create_proxy("placeholder", used.name, (), {}) for used in self.call.all_input_nodes}
        args, kwargs = fx.map_arg((self.call.args, self.call.kwargs), lambda used: inputs[used])  # type: ignore[arg-type, return-value]
        return lambda layer: layer(*args, **kwargs), [self.root]


_PLAIN = (bool, int, float, str, tuple, list, type(None))
_HOLDERS = (dict, OrderedDict, set)


def _sharing_key(layer: nn.Module, call: fx.Node) -> Hashable:
    """Return a key: calls of torch's own layers with equal keys share one graph; other calls have unique keys."""
    held = {key: value for key, value in vars(layer).items() if key not in ("_parameters", "_buffers")}
    is_own = type(layer).__module__.startswith("torch.nn.modules.") and not has_any_global_hook()
    # Not with hooks or a forward set on the instance: their repr does not show what they do.
    is_plain = all(isinstance(value, _PLAIN) or (type(value) in _HOLDERS and not value) for value in held.values())
    if call.kwargs or not (is_own and is_plain):
        return call
    tensors = tuple((name, value is None) for name, value in (*layer._parameters.items(), *layer._buffers.items()))
    inputs = call.all_input_nodes
    given = tuple(inputs.index(arg) if isinstance(arg, fx.Node) else call for arg in call.args)
    return type(layer), repr(held), tensors, given


def _inline(module: fx.GraphModule, node: fx.Node, known: dict[Hashable, fx.Graph]) -> bool:
    """Replace a call of a layer by the graph of its forward; return whether it was one."""
    if node.op != "call_module":
        return False
    path = str(node.target)
    layer = module.get_submodule(path)
    if not isinstance(layer, INLINED) or CALLED in node.meta:
        return False
    layer = plain_layer(layer)
    key = _sharing_key(layer, node)
    try:
        inner = known[key] if key in known else known.setdefault(key, _OneCall(node).trace(layer))
    except Exception as error:  # user code may raise anything on traced values: float() of one is a TypeError
        raise TransformError(f"the code of {path or type(layer).__name__} cannot be traced: {error}") from error
    stack = node.meta.get("nn_module_stack") or {path: (path, type(layer))}
    values: dict[fx.Node, Any] = {}
    inputs = iter(node.all_input_nodes)
    with module.graph.inserting_before(node):
        for item in inner.nodes:
            if item.op == "placeholder":
                values[item] = next(inputs)
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


def _unify_parameters(module: fx.GraphModule) -> int:
    """Merge all reads of a parameter or buffer into one node, under its first name; return how many were merged."""
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
