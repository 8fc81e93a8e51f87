"""Attention: fused operators, which are decomposed into their products where possible."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cpt_fx.common.torch_private import native_multi_head_attention, transformer_encoder_layer
from cpt_fx.operators.row import Call, Row, left

_TWO = "fused attention: its two products are not separate operators in this graph"
_INSIDE = "its products are not separate operators in this graph"
_FUSED = f"fused attention: {_INSIDE}"
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _flash(query: Any, key: Any, value: Any, dropout_p: Any = 0.0, is_causal: Any = False, *, attn_mask: Any = None,
           scale: Any = None) -> Call:  # fmt: skip
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    return F.scaled_dot_product_attention, (query, key, value), options


def _forward_and_backward(*names: str) -> dict[str, tuple[int, ...]]:
    """Return the positions of what kernels multiply: query, key, value; in backward, after the output gradient."""
    return {name: (0, 1, 2, 3) if "backward" in name else (0, 1, 2) for name in names}


ROWS = (
    Row(
        "", "scaled_dot_product_attention", function=F.scaled_dot_product_attention, left=_TWO,
        names=("scaled_dot_product_attention",), converts={_FLASH: _flash}, firsts=(_FLASH,),
        kernels=_forward_and_backward(
            *(f"_scaled_dot_product_{kind}{end}"
              for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                           "fused_attention_overrideable")
              for end in ("", "_backward")),
            "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
            "_efficient_attention_backward", "_cudnn_attention_forward", "_cudnn_attention_backward",
            "_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps",
        ),
    ),
    Row(
        "", "multi_head_attention_forward", function=F.multi_head_attention_forward, left=_FUSED,
        modules=(nn.MultiheadAttention,),
    ),
    left(_FUSED, "_native_multi_head_attention", function=native_multi_head_attention),
    left(
        f"fused encoder layer: {_INSIDE}", "_transformer_encoder_layer_fwd",
        function=transformer_encoder_layer,
    ),
    left(
        _FUSED, "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
        "_cudnn_attention_forward", "_triton_scaled_dot_attention", "_triton_multi_head_attention",
        name="fused_attention",
    ),
    left(_FUSED, "_flash_attention_forward_no_dropout_inplace"),
    left(
        f"{_FUSED}: call scaled_dot_product_attention", name="flex_attention",
        others=(torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward),
    ),
)  # fmt: skip
