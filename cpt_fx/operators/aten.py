"""Convert ATen operators, as torch.export writes them, to the functions and methods of torch that passes know."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from cpt_fx.common.torch_private import OpOverload
from cpt_fx.operators.around import CONVERTED, FIRST_RESULT, SAME, SAME_METHOD
from cpt_fx.operators.row import Call
from cpt_fx.operators.table import form_of, respelled
from cpt_fx.operators.torch_private import nn_functions

Arguments = dict[str, Any]


def name_of(node: fx.Node) -> str:
    """Return `aten.linear.default` for a call of that operator, and an empty string for any other node."""
    return str(node.target) if isinstance(node.target, OpOverload) else ""


def arguments_of(node: fx.Node) -> Arguments:
    """Return the arguments of an ATen call by their names in the schema, defaults included."""
    assert isinstance(node.target, OpOverload)
    given: Arguments = dict(node.kwargs)
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args):
            given[argument.name] = node.args[place]
        elif argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given


def to_torch(graph: fx.Graph) -> None:
    """Rewrite ATen calls of a graph, in place, to the functions and methods that passes know.

    In-place operators become tensor methods, whose names show that they write. Other operators are left unchanged.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        form = form_of(node.target)
        if form is not None:
            unify(graph, node)
        elif name_of(node):
            call = _call(graph, node, name_of(node))
            if call is not None:
                _replace(node, call)


def unify(graph: fx.Graph, node: fx.Node) -> bool:
    """Bring a call of an operator of the table to normal form; return whether that changed it."""
    form = form_of(node.target) if node.op in ("call_function", "call_method") else None
    call = None if form is None else respelled(node.target, node.args, node.kwargs)
    if form is None or call is None or (form.first and not take_first(graph, node)):
        return False
    if call == (node.target, node.args, node.kwargs):
        return False
    _replace(node, call)
    return True


def _replace(node: fx.Node, call: Call) -> None:
    target, args, kwargs = call
    node.op = "call_method" if isinstance(target, str) else "call_function"
    node.target, node.args, node.kwargs = target, args, kwargs


def _call(graph: fx.Graph, node: fx.Node, name: str) -> Call | None:
    _, packet, overload = name.split(".")
    args, kwargs = node.args, dict(node.kwargs)
    if name in CONVERTED:
        if name in FIRST_RESULT and not take_first(graph, node):
            return None
        target, names = CONVERTED[name]
        given = arguments_of(node)
        return target, tuple(given[argument] for argument in names), {}
    # Out variants and overloads with named dims have other positional arguments than the function of that name.
    if not name.startswith("aten.") or "out" in overload or "dimname" in overload or "names" in overload:
        return None
    if packet.endswith("_") and not packet.endswith("__"):
        return _in_place(packet), args, kwargs
    if packet in SAME_METHOD or (packet == "to" and overload in ("dtype", "other", "device")):
        return packet, args, kwargs
    return (SAME[packet], args, kwargs) if packet in SAME else None


def _in_place(packet: str) -> Callable[..., Any] | str:
    """Return the tensor method of an in-place operator, or the function of torch if there is none."""
    if hasattr(torch.Tensor, packet):
        return packet
    function: Callable[..., Any] = getattr(torch, packet, None) or getattr(nn_functions, packet)
    return function


def take_first(graph: fx.Graph, node: fx.Node) -> bool:
    """Make a call with several results return only the first, if no other is used; return whether it does."""
    reads = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    if any(user not in reads for user in node.users if user.users or user.target is not operator.getitem):
        return False
    for user in list(node.users):
        if user in reads:
            user.replace_all_uses_with(node)
            # The node's meta then describes the first result, not the tuple.
            node.meta.update({key: user.meta[key] for key in ("val", "tensor_meta") if key in user.meta})
        graph.erase_node(user)
    return True
