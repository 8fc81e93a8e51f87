"""Decompositions of embedding bags and of their gradients; the exporter itself would write a loop over the bags."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_fx.export.refusals import UnsupportedError

SUM, MEAN, MAX = 0, 1, 2


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = SUM,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output of each bag, the bag of each index, the bag sizes, and the row that each maximum is from."""
    starts = offsets[:-1] if include_last_offset else offsets
    begun = offsets.new_zeros(indices.shape[0] + 1).index_put((starts,), torch.ones_like(starts), accumulate=True)
    bags = begun[:-1].cumsum(0) - 1
    kept = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx is not None:
        kept = indices != padding_idx % weight.shape[0]
    counts = starts.new_zeros(starts.shape[0]).index_put((bags,), kept.to(starts.dtype), accumulate=True)
    rows = weight[indices]
    largest = counts
    if mode == MAX:
        members = (torch.arange(starts.shape[0]).unsqueeze(1) == bags) & kept
        values, places = torch.where(members.unsqueeze(-1), rows, float("-inf")).max(1)
        made = torch.where((counts > 0).unsqueeze(-1), values, 0.0)
        largest = indices[places]
    else:
        share = kept.to(rows.dtype) if per_sample_weights is None else kept * per_sample_weights
        held = rows * share.unsqueeze(-1)
        made = weight.new_zeros(starts.shape[0], weight.shape[1]).index_put((bags,), held, accumulate=True)
        made = made / counts.clamp_min(1).unsqueeze(-1) if mode == MEAN else made
    return made, bags, counts, largest


def embedding_bag_of_backward(weight: Tensor, indices: Tensor, offsets: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Return the same for the operator that autograd calls, where padding_idx=-1 means none."""
    if options and options[0]:
        reason = "with scale_grad_by_freq=True PyTorch divides gradients by the counts of other rows: leave it out"
        raise UnsupportedError("aten._embedding_bag", reason)
    padding = options[5] if len(options) > 5 else -1
    own = None if padding == -1 else padding
    return embedding_bag(weight, indices, offsets, *options[:5], padding_idx=own)  # type: ignore[misc]


def embedding_bag_backward(
    gradient: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, counts: Tensor, largest: Tensor, num_weights: Any,
    scale_grad_by_freq: bool, mode: int, sparse: bool, per_sample_weights: Tensor | None, padding_idx: int = -1,
) -> Tensor:  # fmt: skip
    """Return the gradient of the embedding table."""
    made = gradient.new_zeros(num_weights, gradient.shape[1])
    if mode == MAX:
        return made.scatter_add(0, largest, torch.where((counts > 0).unsqueeze(-1), gradient, 0.0))
    share = (indices != padding_idx).to(gradient.dtype)
    share = share if per_sample_weights is None else share * per_sample_weights
    if mode == MEAN:
        share = share / counts.clamp_min(1)[bags]
    return made.index_put((indices,), gradient[bags] * share.unsqueeze(-1), accumulate=True)


def per_sample_weights_backward(
    gradient: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    """Return the gradient of the per-sample weights."""
    return (gradient[bags] * weight[indices]).sum(1) * (indices != padding_idx)
