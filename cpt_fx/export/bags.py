"""Bags of embeddings in operators that ONNX has: the exporter writes a loop over bags, which its optimizer breaks."""

from __future__ import annotations

import torch
from torch import Tensor


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return sums (mode 0), means (1) or maxima (2) of the rows of each bag.

    The other three results are for a backward pass, which there is none of.
    """
    starts = offsets[:-1] if include_last_offset else offsets
    places = torch.arange(indices.shape[0])
    bags = (places.unsqueeze(1) >= starts.unsqueeze(0)).sum(1) - 1
    members = torch.arange(starts.shape[0]).unsqueeze(1) == bags.unsqueeze(0)
    if padding_idx is not None:
        members = members & (indices != padding_idx % weight.shape[0])
    rows = weight[indices]
    counts = members.sum(1)
    if mode == 2:
        masked = torch.where(members.unsqueeze(-1), rows.unsqueeze(0), float("-inf")).amax(1)
        made = torch.where((counts > 0).unsqueeze(-1), masked, 0.0)
    else:
        share = members.to(rows.dtype)
        made = torch.matmul(share if per_sample_weights is None else share * per_sample_weights, rows)
        made = made / counts.clamp_min(1).unsqueeze(-1).to(rows.dtype) if mode == 1 else made
    return made, bags, counts, counts
