"""Decompose attention: its two products, the projections of multi-head attention, and the code around them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.common.torch_private import native_multi_head_attention, transformer_encoder_layer
from cpt_fx.decompose.building import Builder, Decomposer, StaysFusedError, arguments, static
from cpt_fx.ir.meta import example_of

_PRODUCTS = (("scores", "attention"), ("context", "attention"))
_PROJECTIONS = tuple((name, "linear") for name in ("in_proj", "q_proj", "k_proj", "v_proj", "out_proj"))


def queries(query: Tensor, scale: float | None = None) -> Tensor:
    """Return the left operand of the scores: the scaled queries.

    Each side is multiplied by the root of the scale, as in torch: unscaled, half precision products could overflow.
    """
    root = _root_of_scale(query, scale)
    return torch.mul(query, -root if scale is not None and scale < 0 else root)


def keys(key: Tensor, query: Tensor, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """Return the right operand of the scores: the scaled keys, transposed, with a key head for every query head."""
    return torch.mul(values(key, query, enable_gqa).transpose(-2, -1), _root_of_scale(query, scale))


def values(value: Tensor, query: Tensor, enable_gqa: bool = False) -> Tensor:
    """Return the values with a head for every query head; in grouped-query attention several share one."""
    return value.repeat_interleave(query.shape[-3] // value.shape[-3], -3) if enable_gqa else value


def _root_of_scale(query: Tensor, scale: float | None) -> Any:
    if scale is not None:
        return math.sqrt(abs(scale))
    width: Any = query.shape[-1]
    if isinstance(width, int):
        return math.sqrt(1.0 / math.sqrt(width))
    return torch.sym_sqrt(1.0 / torch.sym_sqrt(width))


def probabilities(
    scores: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    training: bool = True,
    masked_rows_are_zero: bool = True,
) -> Tensor:
    """Return the attention probabilities.

    A boolean mask is True where a key takes part; any other mask is added to the scores. A row in which no key takes
    part is zero, or NaN without `masked_rows_are_zero`.
    """
    if is_causal:
        if mask is not None:
            raise RuntimeError("attention takes an attn_mask or is_causal=True, not both")
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores = (scores + mask).to(scores.dtype)
    result = torch.ops.aten._safe_softmax(scores, -1) if masked_rows_are_zero else torch.softmax(scores, -1)
    return F.dropout(result, dropout_p) if training and dropout_p > 0 else result


def split_heads(
    x: Tensor, num_heads: int, *, batch_first: bool = False, bias: Tensor | None = None, add_zero: bool = False
) -> Tensor:
    """Return `x` as (batch, head, position, feature); 2-dim input has no batch, `bias` and `add_zero` add positions."""
    if x.dim() == 2:
        x = x.unsqueeze(1)
    elif batch_first:
        x = x.transpose(0, 1)
    if bias is not None:
        x = torch.cat((x, bias.repeat(1, x.shape[1], 1)))
    if add_zero:
        x = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    return torch.unflatten(x, -1, (num_heads, -1)).permute(1, 2, 0, 3)


def join_heads(context: Tensor, query: Tensor, *, batch_first: bool = False) -> Tensor:
    """Undo `split_heads`: return the context of each position, in the layout of the query."""
    joined = context.permute(0, 2, 1, 3).flatten(2) if batch_first else context.permute(2, 0, 1, 3).flatten(2)
    return joined.squeeze(1) if query.dim() == 2 else joined


def joint_mask(
    query: Tensor, num_heads: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None, added: int = 0
) -> Tensor | None:
    """Return both masks as one additive mask for (batch, head, query, key); here True in a mask excludes a key.

    `added` is the number of positions that were appended to the keys, which are never masked.
    """
    batch = 1 if query.dim() == 2 else query.shape[1]
    result = None
    if attn_mask is not None:
        result = F.pad(_additive(attn_mask, query.dtype), (0, added))
        if result.dim() == 3:
            result = result.view(batch, num_heads, *result.shape[1:])
    if key_padding_mask is not None:
        padding = F.pad(_additive(key_padding_mask, query.dtype), (0, added)).view(batch, 1, 1, -1)
        result = padding if result is None else result + padding
    return result


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def fast_path_mask(mask: Tensor, mask_type: int | None = None) -> Tensor:
    """Convert the mask of torch's inference kernels to the boolean mask of `probabilities`."""
    taking_part = mask.to(torch.bool).logical_not()
    return taking_part[:, None, None, :] if mask_type == 1 else taking_part


def shown_weights(weights: Tensor, query: Tensor, average: bool) -> Tensor:
    """Return the probabilities in the form in which multi-head attention returns them."""
    shown = weights.mean(dim=1) if average else weights
    return shown.squeeze(0) if query.dim() == 2 else shown


def layer_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize as torch's inference kernel does: in the dtype of its input, even under autocast."""
    return torch.native_layer_norm(x, shape, weight, bias, eps)[0]


def added_to(result: Tensor, x: Tensor) -> Tensor:
    """Add as torch's inference kernel does: in place, thus in the dtype of `result`."""
    return (result + x).to(result.dtype)


def _attend(
    builder: Builder, query: Any, key: Any, value: Any, *rest: Any, scale: Any = None, enable_gqa: Any = False,
    **options: Any,
) -> tuple[fx.Node, fx.Node]:  # fmt: skip
    """Add the products of attention and the code around them; return the context and the probabilities."""
    left = builder.call(queries, query, *([] if scale is None else [scale]))
    grouped = {} if enable_gqa is False else {"enable_gqa": enable_gqa}
    right = builder.call(keys, key, query, *([] if scale is None else [scale]), **grouped)
    scores = builder.product(torch.matmul, left, right, name="scores", family="attention")
    weights = builder.call(probabilities, scores, *rest, **options)
    value = builder.call(values, value, query, **grouped) if grouped else value
    return builder.product(torch.matmul, weights, value, name="context", family="attention"), weights


def _scaled_dot_product(builder: Builder) -> None:
    given = _given(builder)
    rest = (given["attn_mask"], given["dropout_p"], given["is_causal"])
    context, _ = _attend(builder, given["query"], given["key"], given["value"], *rest,
                         scale=given["scale"], enable_gqa=given["enable_gqa"])  # fmt: skip
    builder.replace(context)


def _multi_head(builder: Builder) -> None:
    given = _given(builder, "num_heads", "add_zero_attn", "need_weights", "use_separate_proj_weight",
                   "average_attn_weights", "is_causal")  # fmt: skip
    if given["static_k"] is not None or given["static_v"] is not None:
        raise StaysFusedError("fused attention with static_k or static_v: what it multiplies was projected elsewhere")
    if given["is_causal"] and given["attn_mask"] is None:
        raise StaysFusedError("fused attention with is_causal=True and no attn_mask, which torch refuses")
    query, heads, zero = given["query"], given["num_heads"], given["add_zero_attn"]
    separate = [given[f"{name}_proj_weight"] for name in "qkv"]
    weights = separate if given["use_separate_proj_weight"] else given["in_proj_weight"]
    projected = _project(builder, given, weights, given["in_proj_bias"])
    extra = [{}, *({"bias": given[name]} if given[name] is not None else {} for name in ("bias_k", "bias_v"))]
    split = [
        builder.call(split_heads, part, heads, **more, **({"add_zero": True} if zero and index else {}))
        for index, (part, more) in enumerate(zip(projected, extra, strict=True))
    ]
    causal = given["is_causal"] and given["key_padding_mask"] is None and not given["need_weights"]
    mask = None
    if not causal and (given["attn_mask"] is not None or given["key_padding_mask"] is not None):
        added = (given["bias_k"] is not None) + bool(zero)
        mask = builder.call(joint_mask, query, heads, given["attn_mask"], given["key_padding_mask"], added)
    context, seen = _attend(
        builder, *split, mask, given["dropout_p"], bool(causal),
        training=given["training"], masked_rows_are_zero=not given["need_weights"],
    )  # fmt: skip
    joined = builder.call(join_heads, context, query)
    out = builder.linear(joined, given["out_proj_weight"], given["out_proj_bias"], "out_proj")
    shown = None
    if given["need_weights"]:
        shown = builder.call(shown_weights, seen, query, given["average_attn_weights"])
    builder.replace(out, shown)


def _project(builder: Builder, given: dict[str, Any], weights: Any, bias: Any) -> list[fx.Node]:
    """Add the projections of query, key and value; as in torch, one product if all three are the same."""
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
    given = _given(builder, "num_head", "need_weights", "average_attn_weights", "mask_type")
    out, seen = _inference_attention(builder, given, given["num_head"])
    shown = None
    if given["need_weights"]:
        shown = builder.call(shown_weights, seen, seen, given["average_attn_weights"])
    builder.replace(out, shown)


def _inference_attention(builder: Builder, given: dict[str, Any], heads: int) -> tuple[fx.Node, fx.Node]:
    """Add multi-head attention as torch's inference kernels compute it: batch first, no dropout."""
    split = [
        builder.call(split_heads, part, heads, batch_first=True)
        for part in _project(builder, given, given["qkv_weight"], given["qkv_bias"])
    ]
    mask = None
    if given["mask"] is not None:
        mask = builder.call(fast_path_mask, given["mask"], given["mask_type"])
    context, seen = _attend(builder, *split, mask, masked_rows_are_zero=False)
    joined = builder.call(join_heads, context, given["query"], batch_first=True)
    return builder.linear(joined, given["proj_weight"], given["proj_bias"], "out_proj"), seen


def _encoder_layer(builder: Builder) -> None:
    given = _given(builder, "num_heads", "use_gelu", "norm_first", "mask_type")

    def norm(x: Any, number: int) -> fx.Node:
        weight, bias = given[f"norm_weight_{number}"], given[f"norm_bias_{number}"]
        return builder.call(layer_norm, x, (given["embed_dim"],), weight, bias, given["eps"])

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
    x = builder.call(added_to, attended, x)
    if given["norm_first"]:
        x = builder.call(added_to, feed_forward(norm(x, 2)), x)
    else:
        x = norm(x, 1)
        x = norm(builder.call(added_to, feed_forward(x), x), 2)
    builder.replace(x)


def _given(builder: Builder, *known: str) -> dict[str, Any]:
    """Return the arguments of an attention operator; those named in `known` must not be run-time values."""
    given = arguments(builder.node)
    static(given, *known)
    for value in (given.get(name) for name in ("query", "key", "value", "src")):
        example = example_of(value) if isinstance(value, fx.Node) else None
        if isinstance(example, Tensor) and example.is_nested:
            raise StaysFusedError("fused attention on nested tensors: they have no shape that its products could share")
    return given


DECOMPOSERS = {
    F.scaled_dot_product_attention: Decomposer(_PRODUCTS, _scaled_dot_product),
    F.multi_head_attention_forward: Decomposer((*_PRODUCTS, *_PROJECTIONS), _multi_head),
    native_multi_head_attention: Decomposer((*_PRODUCTS, *_PROJECTIONS), _fast_path),
    transformer_encoder_layer: Decomposer((*_PRODUCTS, *_PROJECTIONS), _encoder_layer),
}
"""The attention operators, and how to decompose them."""
