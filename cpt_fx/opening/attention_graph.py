"""Attention opened: the two products of every head, and the projections of multi-head attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from cpt_fx.opening import attention
from cpt_fx.opening.building import Builder, Opener, StaysFusedError, arguments, static

_PRODUCTS = (("scores", "attention"), ("context", "attention"))
_PROJECTIONS = tuple((name, "linear") for name in ("in_proj", "q_proj", "k_proj", "v_proj", "out_proj"))


def _attend(
    builder: Builder, query: Any, key: Any, value: Any, *rest: Any, scale: Any = None, enable_gqa: Any = False,
    **options: Any,
) -> tuple[fx.Node, fx.Node]:  # fmt: skip
    """Add the products of attention; return what it gives, and its probabilities."""
    left = builder.call(attention.queries, query, *([] if scale is None else [scale]))
    grouped = {} if enable_gqa is False else {"enable_gqa": enable_gqa}
    right = builder.call(attention.keys, key, query, *([] if scale is None else [scale]), **grouped)
    scores = builder.product(torch.matmul, left, right, name="scores", family="attention")
    weights = builder.call(attention.probabilities, scores, *rest, **options)
    value = builder.call(attention.values, value, query, **grouped) if grouped else value
    return builder.product(torch.matmul, weights, value, name="context", family="attention"), weights


def _scaled_dot_product(builder: Builder) -> None:
    given = arguments(builder.node)
    _refuse_nested(given, "query", "key", "value")
    rest = (given["attn_mask"], given["dropout_p"], given["is_causal"])
    context, _ = _attend(builder, given["query"], given["key"], given["value"], *rest,
                         scale=given["scale"], enable_gqa=given["enable_gqa"])  # fmt: skip
    builder.replace(context)


def _multi_head(builder: Builder) -> None:
    given = arguments(builder.node)
    static(given, "num_heads", "add_zero_attn", "need_weights", "use_separate_proj_weight", "average_attn_weights",
           "is_causal")  # fmt: skip
    if given["static_k"] is not None or given["static_v"] is not None:
        raise StaysFusedError("fused attention with static_k or static_v: what it multiplies was projected elsewhere")
    if given["is_causal"] and given["attn_mask"] is None:
        raise StaysFusedError("fused attention with is_causal=True and no attn_mask, which torch refuses")
    _refuse_nested(given, "query", "key", "value")
    query, heads, zero = given["query"], given["num_heads"], given["add_zero_attn"]
    separate = [given[f"{name}_proj_weight"] for name in "qkv"]
    weights = separate if given["use_separate_proj_weight"] else given["in_proj_weight"]
    projected = _project(builder, given, weights, given["in_proj_bias"])
    extra = [{}, *({"bias": given[name]} if given[name] is not None else {} for name in ("bias_k", "bias_v"))]
    split = [
        builder.call(attention.split_heads, part, heads, **more, **({"add_zero": True} if zero and index else {}))
        for index, (part, more) in enumerate(zip(projected, extra, strict=True))
    ]
    causal = given["is_causal"] and given["key_padding_mask"] is None and not given["need_weights"]
    mask = None
    if not causal and (given["attn_mask"] is not None or given["key_padding_mask"] is not None):
        added = (given["bias_k"] is not None) + bool(zero)
        mask = builder.call(attention.joint_mask, query, heads, given["attn_mask"], given["key_padding_mask"], added)
    context, seen = _attend(
        builder, *split, mask, given["dropout_p"], bool(causal),
        training=given["training"], masked_rows_are_zero=not given["need_weights"],
    )  # fmt: skip
    joined = builder.call(attention.join_heads, context, query)
    out = builder.linear(joined, given["out_proj_weight"], given["out_proj_bias"], "out_proj")
    shown = None
    if given["need_weights"]:
        shown = builder.call(attention.shown_weights, seen, query, given["average_attn_weights"])
    builder.replace(out, shown)


def _project(builder: Builder, given: dict[str, Any], weights: Any, bias: Any) -> list[fx.Node]:
    """Add the projections of query, key and value: one product where all three are the same, as torch has it."""
    inputs = [given[name] for name in ("query", "key", "value")]
    if not isinstance(weights, list):
        if inputs[0] is inputs[1] is inputs[2]:
            return _thirds(builder, builder.linear(inputs[0], weights, bias, "in_proj"), -1)
        weights = _thirds(builder, weights)
    biases = [None] * 3 if bias is None else _thirds(builder, bias)
    return [
        builder.linear(x, weight, its_bias, f"{name}_proj")
        for x, weight, its_bias, name in zip(inputs, weights, biases, "qkv", strict=True)
    ]


def _thirds(builder: Builder, packed: fx.Node, *dim: int) -> list[fx.Node]:
    chunks = builder.call(torch.chunk, packed, 3, *dim)
    return [builder.item(chunks, index) for index in range(3)]


def _fast_path(builder: Builder) -> None:
    given = arguments(builder.node)
    static(given, "num_head", "need_weights", "average_attn_weights", "mask_type")
    _refuse_nested(given, "query", "key", "value")
    out, seen = _inference_attention(builder, given, given["num_head"])
    shown = None
    if given["need_weights"]:
        shown = builder.call(attention.shown_weights, seen, seen, given["average_attn_weights"])
    builder.replace(out, shown)


def _inference_attention(builder: Builder, given: dict[str, Any], heads: int) -> tuple[fx.Node, fx.Node]:
    """Add what torch's inference kernels of multi-head attention do: batch first, no dropout."""
    split = [
        builder.call(attention.split_heads, part, heads, batch_first=True)
        for part in _project(builder, given, given["qkv_weight"], given["qkv_bias"])
    ]
    mask = None
    if given["mask"] is not None:
        mask = builder.call(attention.fast_path_mask, given["mask"], given["mask_type"])
    context, seen = _attend(builder, *split, mask, masked_rows_are_zero=False)
    joined = builder.call(attention.join_heads, context, given["query"], batch_first=True)
    return builder.linear(joined, given["proj_weight"], given["proj_bias"], "out_proj"), seen


def _encoder_layer(builder: Builder) -> None:
    given = arguments(builder.node)
    static(given, "num_heads", "use_gelu", "norm_first", "mask_type")
    _refuse_nested(given, "src")

    def norm(x: Any, number: int) -> fx.Node:
        weight, bias = given[f"norm_weight_{number}"], given[f"norm_bias_{number}"]
        return builder.call(F.layer_norm, x, (given["embed_dim"],), weight, bias, given["eps"])

    def feed_forward(x: Any) -> fx.Node:
        first, second = (builder.inside(given[f"ffn_weight_{number}"], nn.Linear) for number in (1, 2))
        inner = first.linear(x, given["ffn_weight_1"], given["ffn_bias_1"], "")
        active = builder.call(F.gelu if given["use_gelu"] else F.relu, inner)
        builder.products += 2
        return second.linear(active, given["ffn_weight_2"], given["ffn_bias_2"], "")

    x = given["src"]
    start = norm(x, 1) if given["norm_first"] else x
    attending = builder.inside(given["qkv_weight"], nn.MultiheadAttention)
    inputs = {"query": start, "key": start, "value": start}
    attended, _ = _inference_attention(attending, given | inputs, given["num_heads"])
    builder.products += attending.products
    x = builder.call(torch.add, x, attended)
    if given["norm_first"]:
        x = builder.call(torch.add, x, feed_forward(norm(x, 2)))
    else:
        x = norm(x, 1)
        x = norm(builder.call(torch.add, x, feed_forward(x)), 2)
    builder.replace(x)


def _refuse_nested(given: dict[str, Any], *names: str) -> None:
    for name in names:
        example = given[name].meta.get("example_value") if isinstance(given[name], fx.Node) else None
        if isinstance(example, torch.Tensor) and example.is_nested:
            raise StaysFusedError("fused attention on nested tensors: they have no shape that its products could share")


OPENERS = {
    F.scaled_dot_product_attention: Opener(_PRODUCTS, _scaled_dot_product),
    F.multi_head_attention_forward: Opener((*_PRODUCTS, *_PROJECTIONS), _multi_head),
    torch._native_multi_head_attention: Opener((*_PRODUCTS, *_PROJECTIONS), _fast_path),
    torch._transformer_encoder_layer_fwd: Opener((*_PRODUCTS, *_PROJECTIONS), _encoder_layer),
}
"""The operators that attend."""
