"""ATen operators, as torch.export writes them, in the form that the passes know: functions and methods of torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

Arguments = dict[str, Any]
Call = tuple[Callable[..., Any] | str, tuple[Any, ...], dict[str, Any]]
"""A function, or the name of a method, and its arguments."""

RESHAPING = (
    "reshape", "transpose", "permute", "t", "flatten", "unflatten", "squeeze", "unsqueeze", "chunk", "split", "unbind",
    "narrow", "select", "swapaxes", "movedim",
)  # fmt: skip
"""Functions and methods whose results may share memory with their argument."""

COMPUTING = (
    "add", "sub", "rsub", "mul", "div", "pow", "neg", "exp", "log", "sqrt", "rsqrt", "abs", "clamp", "sin", "cos",
    "tanh", "sigmoid", "relu", "softmax", "log_softmax", "sum", "mean", "var", "std", "cat", "stack", "where", "clone",
    "masked_fill", "square", "maximum", "minimum",
)  # fmt: skip
"""Functions and methods whose results are new tensors."""

_SAME_FUNCTION = (
    # products
    "matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "ger", "addmm", "addbmm", "baddbmm", "addmv", "cdist",
    "tensordot", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm",
    "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    # aggregations
    "index_add", "scatter_add", "scatter_reduce", "index_reduce", "segment_reduce", "scatter", "index_put",
    # what stands around them
    *COMPUTING, *RESHAPING, "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "index_select", "gather",
)  # fmt: skip
"""Operators that `torch.<name>` takes with the same arguments in the same order."""

_SAME_METHOD = ("view", "expand", "expand_as", "view_as", "contiguous", "detach", "type_as", "new_zeros", "new_ones",
                "new_full")  # fmt: skip
"""Operators that only tensors have, with the same arguments in the same order."""

_SAME: dict[str, Callable[..., Any]] = {
    **{name: getattr(F, name) for name in ("linear", "bilinear", "gelu", "silu", "leaky_relu", "dropout")},
    "linalg_multi_dot": torch.linalg.multi_dot,
    "linalg_matmul": torch.linalg.matmul,
    "scaled_dot_product_attention": F.scaled_dot_product_attention,
    "_sparse_mm": torch.sparse.mm,
    "_sparse_addmm": torch.sparse.addmm,
    "_grouped_mm": torch._grouped_mm,
    **{name: getattr(torch, name) for name in _SAME_FUNCTION},
}
"""Operators by name, whatever the overload, and the function that takes the same positional arguments."""

_IN_PLACE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch.Tensor, name)
    for name in ("index_add_", "scatter_add_", "scatter_reduce_", "index_reduce_", "scatter_", "index_put_")
}

_BAG_MODES = ("sum", "mean", "max")


def _convolution(given: Arguments) -> Call:
    dims = len(given["stride"])
    args = (given["input"], given["weight"], given["bias"], given["stride"], given["padding"])
    if given["transposed"]:
        more = (given["output_padding"], given["groups"], given["dilation"])
        return getattr(torch, f"conv_transpose{dims}d"), (*args, *more), {}
    return getattr(torch, f"conv{dims}d"), (*args, given["dilation"], given["groups"]), {}


def _embedding(given: Arguments) -> Call:
    # ATen says -1 for "none"; to the function of torch, -1 is the last row.
    padding = given["padding_idx"] if given["padding_idx"] >= 0 else None
    flags = {"scale_grad_by_freq": given["scale_grad_by_freq"], "sparse": given["sparse"]}
    return F.embedding, (given["indices"], given["weight"]), {"padding_idx": padding, **flags}


def _embedding_bag(given: Arguments) -> Call:
    kwargs = {key: given[key] for key in ("offsets", "scale_grad_by_freq", "sparse", "per_sample_weights",
                                          "include_last_offset")}  # fmt: skip
    padding = given.get("padding_idx")
    kwargs |= {"mode": _BAG_MODES[given["mode"]], "padding_idx": padding if padding is None or padding >= 0 else None}
    return F.embedding_bag, (given["indices"], given["weight"]), kwargs


def _flash_attention(given: Arguments) -> Call:
    options = {key: given[key] for key in ("attn_mask", "dropout_p", "is_causal", "scale")}
    return F.scaled_dot_product_attention, (given["query"], given["key"], given["value"]), options


def _in_order(target: Callable[..., Any] | str, *names: str) -> Callable[[Arguments], Call]:
    """Return what calls a function or a method with these arguments, in this order."""
    return lambda given: (target, tuple(given[name] for name in names), {})


def _einsum(given: Arguments) -> Call:
    return torch.einsum, (given["equation"], *given["tensors"]), {}


_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
_REWRITTEN: dict[str, Callable[[Arguments], Call]] = {
    "aten.convolution.default": _convolution,
    "aten.embedding.default": _embedding,
    "aten.batch_norm.default": _in_order(F.batch_norm, *_STATISTICS, "training", "momentum", "eps"),
    "aten.instance_norm.default": _in_order(F.instance_norm, *_STATISTICS, "use_input_stats", "momentum", "eps"),
    "aten.layer_norm.default": _in_order(F.layer_norm, "input", "normalized_shape", "weight", "bias", "eps"),
    "aten.group_norm.default": _in_order(F.group_norm, "input", "num_groups", "weight", "bias", "eps"),
    "aten.einsum.default": _einsum,
    "aten.sym_size.int": _in_order("size", "self", "dim"),
}
"""Operators whose arguments stand in another order, or are spelled differently."""

_FIRST_RESULT: dict[str, Callable[[Arguments], Call]] = {
    "aten.embedding_bag.default": _embedding_bag,
    "aten.embedding_bag.padding_idx": _embedding_bag,
    "aten.native_dropout.default": _in_order(F.dropout, "input", "p", "train"),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _flash_attention,
}
"""Operators that return several tensors, of which the function of torch returns the first."""

PRODUCTS: dict[str, str] = {
    **dict.fromkeys(
        ("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_scaled_dot_product_flash_attention",
         "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
         "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
         "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
         "_efficient_attention_forward"),
        "fused attention: its products are not separate operators in this graph",
    ),
    **dict.fromkeys(
        ("mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "quantized_lstm", "quantized_gru",
         "_cudnn_rnn", "miopen_rnn"),
        "fused recurrent kernel: its products are not separate operators in this graph",
    ),
    **dict.fromkeys(
        ("_grouped_mm", "_scaled_grouped_mm", "_scaled_mm", "_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm",
         "addr", "kron", "chain_matmul", "linalg_vecdot", "vdot", "_trilinear", "cdist", "_cdist_forward", "pdist",
         "tensordot", "_addmm_activation", "convolution_overrideable", "mkldnn_convolution", "_convolution",
         "_embedding_bag", "linalg_matrix_power", "_sparse_mm_reduce_impl", "hspmm", "smm", "sspaddmm",
         "sparse_sampled_addmm"),
        "an ATen operator that is not in the operator table",
    ),
}  # fmt: skip
"""ATen operators that multiply and that have no torch-level form: by name, with the reason that inspect shows."""


def name_of(node: fx.Node) -> str:
    """Return `aten.linear.default` for a call of that operator, and an empty string for any other node."""
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def arguments_of(node: fx.Node) -> Arguments:
    """Return the arguments of an ATen call by the names of its schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given: Arguments = dict(node.kwargs)
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args):
            given[argument.name] = node.args[place]
        elif argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given


def hides_product(node: fx.Node) -> str:
    """Return why the product inside an ATen call stays in full precision, or an empty string."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    namespace, _, name = node.target._schema.name.partition("::")
    if namespace not in ("aten", "prims", "prim", "cpt_fx", "profiler"):
        return "a custom operator; what it multiplies is not seen"
    return PRODUCTS.get(name, "")


def to_torch(graph: fx.Graph) -> None:
    """Rewrite a graph of ATen calls, in place: what the passes know gets the form they know it in.

    Whatever overwrites a tensor becomes the tensor's method, so that every reader of the graph sees that it does.
    Other operators stay as they are.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = name_of(node)
        if name in _FIRST_RESULT:
            if take_first(graph, node):
                _replace(node, _FIRST_RESULT[name](arguments_of(node)))
        elif name:
            call = _call(node, name)
            if call is not None:
                _replace(node, call)


def _replace(node: fx.Node, call: Call) -> None:
    target, args, kwargs = call
    node.op = "call_method" if isinstance(target, str) else "call_function"
    node.target, node.args, node.kwargs = target, args, kwargs


def _call(node: fx.Node, name: str) -> Call | None:
    _, packet, overload = name.split(".")
    if name in _REWRITTEN:
        return _REWRITTEN[name](arguments_of(node))
    # Out variants and overloads with named dims are not what the function of the same name takes by position.
    if not name.startswith("aten.") or "out" in overload or "dimname" in overload or "names" in overload:
        return None
    args, kwargs = node.args, dict(node.kwargs)
    if packet in _IN_PLACE_FUNCTIONS:
        return _IN_PLACE_FUNCTIONS[packet], args, kwargs
    if packet.endswith("_") and not packet.endswith("__"):
        return _in_place(packet), args, kwargs
    if packet in _SAME_METHOD or (packet == "to" and overload in ("dtype", "other", "device")):
        return packet, args, kwargs
    return (_SAME[packet], args, kwargs) if packet in _SAME else None


def _in_place(packet: str) -> Callable[..., Any] | str:
    """Return what overwrites its first argument, by a name that says so: a method, or one of torch's functions."""
    if hasattr(torch.Tensor, packet):
        return packet
    function: Callable[..., Any] = getattr(torch, packet, None) or getattr(torch._C._nn, packet)
    return function


def take_first(graph: fx.Graph, node: fx.Node) -> bool:
    """Let an operator that returns several tensors stand for its first, where no other is used; say whether it does."""
    reads = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    if any(user not in reads for user in node.users if user.users or user.target is not operator.getitem):
        return False
    for user in list(node.users):
        if user in reads:
            user.replace_all_uses_with(node)
            # Whoever asks what made the value should find its sizes, not those of a tuple.
            node.meta.update({key: user.meta[key] for key in ("val", "tensor_meta") if key in user.meta})
        graph.erase_node(user)
    return True
