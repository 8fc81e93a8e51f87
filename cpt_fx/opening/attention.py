"""What attention does before, between and after its products."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def queries(query: Tensor, scale: float | None = None) -> Tensor:
    """Return the left factor of the scores.

    Half of the scale is on each side, as in torch: in half precision unscaled products could overflow.
    """
    root = _root_of_scale(query, scale)
    return torch.mul(query, -root if scale is not None and scale < 0 else root)


def keys(key: Tensor, query: Tensor, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
    """Return the right factor of the scores: every query head has its key head."""
    return torch.mul(values(key, query, enable_gqa).transpose(-2, -1), _root_of_scale(query, scale))


def values(value: Tensor, query: Tensor, enable_gqa: bool = False) -> Tensor:
    """Return a head of values for every query head: in grouped attention several of them share one."""
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
    """Return how much each query attends to each key.

    A boolean mask says what takes part, any other mask is added. Where nothing takes part, the row is zero, or NaN
    without `masked_rows_are_zero`.
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
    """Return (batch, head, position, feature). Batches of one may lack their dim; extra positions come last."""
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
    """Undo `split_heads`: return what attention gives for each position, in the layout of the query."""
    joined = context.permute(0, 2, 1, 3).flatten(2) if batch_first else context.permute(2, 0, 1, 3).flatten(2)
    return joined.squeeze(1) if query.dim() == 2 else joined


def joint_mask(
    query: Tensor, num_heads: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None, added: int = 0
) -> Tensor | None:
    """Return one mask that is added, for (batch, head, query, key). In these masks, True is what does not take part.

    `added` is the number of positions that were appended to the keys: they take part.
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
    """Return the boolean mask for `probabilities` from the one that torch's inference kernels take."""
    taking_part = mask.to(torch.bool).logical_not()
    return taking_part[:, None, None, :] if mask_type == 1 else taking_part


def shown_weights(weights: Tensor, query: Tensor, average: bool) -> Tensor:
    """Return the probabilities as multi-head attention returns them."""
    shown = weights.mean(dim=1) if average else weights
    return shown.squeeze(0) if query.dim() == 2 else shown
