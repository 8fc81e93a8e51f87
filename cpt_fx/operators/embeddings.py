"""Embeddings: rows that are looked up, or reduced in bags."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cpt_fx.operators.row import FIRST_DIM, Call, Row
from cpt_fx.operators.torch_private import embedding_bag

_MODES = ("sum", "mean", "max")


def _padding(index: int | None) -> int | None:
    """Convert ATen's padding index: -1 means none, but in the function of torch it means the last row."""
    return index if index is not None and index >= 0 else None


def _embedding(weight: Any, indices: Any, padding_idx: Any = -1, scale_grad_by_freq: Any = False,
               sparse: Any = False) -> Call:  # fmt: skip
    flags = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return F.embedding, (indices, weight), {"padding_idx": _padding(padding_idx), **flags}


def _bag(weight: Any, indices: Any, offsets: Any, scale_grad_by_freq: Any = False, mode: int = 0, sparse: Any = False,
         per_sample_weights: Any = None, include_last_offset: Any = False,
         padding_idx: Any = None) -> Call:  # fmt: skip
    options = {
        "offsets": offsets, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse, "mode": _MODES[mode],
        "per_sample_weights": per_sample_weights, "include_last_offset": include_last_offset,
        "padding_idx": _padding(padding_idx),
    }  # fmt: skip
    return F.embedding_bag, (indices, weight), options


def _table(function: Any, kind: type[nn.Module], **more: Any) -> Row:
    return Row(
        "embedding", function.__name__, ("input", "weight"), ((1, "weight"),), ((1, FIRST_DIM),), function=function,
        modules=(kind,), **more,
    )  # fmt: skip


_BAGS = (torch.embedding_bag, embedding_bag, "aten::embedding_bag", "aten::_embedding_bag")
ROWS = (
    _table(F.embedding, nn.Embedding, converts=dict.fromkeys((torch.embedding, "aten::embedding"), _embedding)),
    _table(F.embedding_bag, nn.EmbeddingBag, converts=dict.fromkeys(_BAGS, _bag), firsts=_BAGS),
)
