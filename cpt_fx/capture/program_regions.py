"""Regions under `torch.no_grad` or `torch.autocast`: torch.export keeps them as graphs of their own, here they open."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from cpt_fx.capture.base import CaptureError
from cpt_fx.meta import get_attribute, module_stack

_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(module: fx.GraphModule) -> None:
    """Replace every region by what it holds, between nodes that enter and leave it; refuse other graphs in graphs."""
    for node in list(module.graph.nodes):
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            _inline(module, node)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "get_attr" and not node.users and isinstance(get_attribute(module, node.target), fx.GraphModule):
            module.graph.erase_node(node)
    for name, child in list(module._modules.items()):
        if isinstance(child, fx.GraphModule):
            del module._modules[name]


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    graph = module.graph
    if node.target is _GRAD:
        enabled, body, *inputs = node.args
        with graph.inserting_before(node):
            before = graph.call_function(torch.is_grad_enabled)
            graph.call_function(torch._C._set_grad_enabled, (enabled,))
            results = _copy(module, node, body, inputs)
            # What it was, not what it was when the model was captured: the result may run under no_grad itself.
            graph.call_function(torch._C._set_grad_enabled, (before,))
    elif node.target is _AUTOCAST:
        device, dtype, enabled, cache, body, *inputs = node.args
        with graph.inserting_before(node):
            region = graph.call_function(_enter_autocast, (device, dtype, enabled, cache))
            results = _copy(module, node, body, inputs)
            graph.call_function(_exit_autocast, (region,))
    else:
        name = getattr(node.target, "__name__", str(node.target))
        stack = [path for path, _ in module_stack(node) if path]
        raise CaptureError(
            f"{f'module {stack[-1]!r}' if stack else 'the model'} calls {name}, which holds graphs inside the graph: "
            "what they multiply could not be quantized here"
        )
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise AssertionError(f"{user.format_node()} reads a region as a whole")
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _copy(module: fx.GraphModule, node: fx.Node, body: Any, inputs: list[Any]) -> Any:
    """Copy the nodes of a region's body in front of it and return its results."""
    inner = get_attribute(module, str(body.target))
    inline_regions(inner)
    tensor = next((item.target for item in inner.graph.nodes if item.op == "get_attr"), None)
    if tensor is not None:
        raise CaptureError(f"a region of the graph holds a tensor of its own, {tensor}")
    return module.graph.graph_copy(
        inner.graph, dict(zip(inner.graph.find_nodes(op="placeholder"), inputs, strict=True))
    )
