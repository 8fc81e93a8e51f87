"""Operators that torch has layers for: convolutions in all dims to both sides, linear layers, embeddings.

And fused ones, attention and recurrent layers, which are opened into their products where they can be.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cpt_fx.operators.row import FIRST_DIM, Call, Places, Row, left

_KERNELS: dict[str, Places] = {
    **dict.fromkeys(
        ("convolution", "convolution_overrideable", "_convolution", "cudnn_convolution_relu",
         "cudnn_convolution_add_relu", "miopen_convolution_relu", "miopen_convolution_add_relu",
         "_mps_convolution_transpose", "slow_conv3d_forward", "_slow_conv2d_forward"), (0, 1)),
    **dict.fromkeys(("_slow_conv2d_backward", "mps_convolution_backward", "mps_convolution_transpose_backward"),
                    (0, 1, 2)),
}  # fmt: skip
"""What a convolution is below autograd: the input and the weight, in backward passes the gradient before them."""


def _general(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: Any, *flags: Any,
) -> Call:  # fmt: skip
    """Spell a convolution in its general form as that of its dims."""
    dims = len(stride)
    if transposed:
        args = (input, weight, bias, stride, padding, output_padding, groups, dilation)
        return getattr(torch, f"conv_transpose{dims}d"), args, {}
    return getattr(torch, f"conv{dims}d"), (input, weight, bias, stride, padding, dilation, groups), {}


def _conv(name: str, kind: type[nn.Module], *, transposed: bool = False, **more: Any) -> Row:
    extra = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    # Transposed weights are stored (in, out / groups, ...), the others (out, in / groups, ...).
    output_axis = 1 if transposed else 0
    return Row(
        "conv", name, ("input", "weight", "bias", "stride", "padding", *extra),
        ((0, "input"), (1, "weight"), (2, "bias")), ((1, ((output_axis,), None)),),
        names=(name,), modules=(kind,), **more,
    )  # fmt: skip


def _tbc_flops(input: Any, weight: Any, bias: Any = None, pad: int = 0, *, out_shape: Any) -> int:
    return 2 * torch.Size(out_shape).numel() * int(weight[0]) * int(weight[1])


def _tbc_backward_flops(self: Any, input: Any, weight: Any, *rest: Any, out_shape: Any) -> int:
    return 4 * torch.Size(self).numel() * int(weight[0]) * int(weight[1])


_GENERAL = {spelling: _general for spelling in (torch.convolution, "aten::convolution", torch._convolution,
                                                "aten::_convolution", "aten::convolution_overrideable")}  # fmt: skip
_GRADIENTS: Any = importlib.import_module("torch.nn.grad")

_CONVOLUTIONS = (
    _conv("conv1d", nn.Conv1d, integer="conv"),
    # One of them speaks for all of them, whatever the dims.
    _conv("conv2d", nn.Conv2d, integer="conv", kernels=_KERNELS, converts=_GENERAL),
    _conv("conv3d", nn.Conv3d),
    _conv("conv_transpose1d", nn.ConvTranspose1d, transposed=True),
    _conv("conv_transpose2d", nn.ConvTranspose2d, transposed=True),
    _conv("conv_transpose3d", nn.ConvTranspose3d, transposed=True),
    Row(
        "conv", "conv_tbc", ("input", "weight", "bias", "pad"), ((0, "input"), (1, "weight"), (2, "bias")),
        ((1, ((2,), None)),), names=("conv_tbc",), keywords=(("self", "input"),),
        kernels={"conv_tbc_backward": (0, 1, 2)},
        flops={"aten::conv_tbc": _tbc_flops, "aten::conv_tbc_backward": _tbc_backward_flops},
    ),
    left(
        "the gradient of a convolution, called as a function", name="convolution_gradient",
        others=tuple(getattr(_GRADIENTS, f"conv{dims}d_{of}") for dims in (1, 2, 3) for of in ("input", "weight")),
    ),
    left(
        "a convolution of one backend: call conv1d, conv2d, ...", "_convolution_mode", "mkldnn_convolution",
        "cudnn_convolution", "cudnn_convolution_transpose", "miopen_convolution", "miopen_convolution_transpose",
        "miopen_depthwise_convolution", "_nnpack_spatial_convolution", "thnn_conv2d", "slow_conv3d",
        "slow_conv_dilated2d", "slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d",
        "_conv_depthwise2d", "conv_depthwise3d", "_mps_convolution", "convolution_backward",
        "_convolution_double_backward", "convolution_backward_overrideable", name="convolution",
    ),
)  # fmt: skip


def _linear(name: str, *inputs: str, **more: Any) -> Row:
    kinds = (*["input"] * len(inputs), "weight", "bias")
    arguments = (*inputs, "weight", "bias")
    return Row("linear", name, arguments, tuple(enumerate(kinds)), ((len(inputs), FIRST_DIM),), names=(name,), **more)


_LINEAR = (
    _linear(
        "linear", "input", modules=(nn.Linear,), integer="linear",
        kernels={
            "linear_backward": (0, 1, 2), "mkldnn_linear_backward": (0, 1, 2),
            "mkldnn_linear_backward_input": (1, 2), "mkldnn_linear_backward_weights": (0, 1),
        },
    ),
    _linear("bilinear", "input1", "input2", modules=(nn.Bilinear,)),
    Row(
        "", "linear_cross_entropy", function=F.linear_cross_entropy, modules=(nn.LinearCrossEntropyLoss,),
        left="a linear layer and its loss in one: the product is not a separate operator in this graph",
    ),
    left(
        "a linear layer of one backend: call torch.nn.functional.linear", "mkldnn_linear", "_mixed_dtypes_linear",
        "fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight_fp32_activation", "fbgemm_linear_int8_weight",
        "fbgemm_linear_int8_weight_fp32_activation", "_wrapped_quantized_linear_prepacked",
        "_sparse_semi_structured_linear",
    ),
    left("a product of three tensors: call torch.bilinear", "_trilinear"),
)  # fmt: skip


_MODES = ("sum", "mean", "max")


def _padding(index: int | None) -> int | None:
    """Return what the function of torch takes: ATen says -1 for "none", which to the function is the last row."""
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


_BAGS = (torch.embedding_bag, torch._embedding_bag, "aten::embedding_bag", "aten::_embedding_bag")
_EMBEDDINGS = (
    _table(F.embedding, nn.Embedding, converts=dict.fromkeys((torch.embedding, "aten::embedding"), _embedding)),
    _table(F.embedding_bag, nn.EmbeddingBag, converts=dict.fromkeys(_BAGS, _bag), firsts=_BAGS),
)

_FUSED = "fused attention: its two products are not separate operators in this graph"
_INSIDE = "its products are not separate operators in this graph"
_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _flash(query: Any, key: Any, value: Any, dropout_p: Any = 0.0, is_causal: Any = False, *, attn_mask: Any = None,
           scale: Any = None) -> Call:  # fmt: skip
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    return F.scaled_dot_product_attention, (query, key, value), options


def _forward_and_backward(*names: str) -> dict[str, tuple[int, ...]]:
    """The gradient of the result comes before query, key and value."""
    return {name: (0, 1, 2, 3) if "backward" in name else (0, 1, 2) for name in names}


_ATTENTION = (
    Row(
        "", "scaled_dot_product_attention", function=F.scaled_dot_product_attention, left=_FUSED,
        names=("scaled_dot_product_attention",), converts={_FLASH: _flash}, firsts=(_FLASH,),
        kernels=_forward_and_backward(
            *(f"_scaled_dot_product_{kind}_backward"
              for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
                           "fused_attention_overrideable")),
            *(f"_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn")),
            "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math_for_mps",
        ),
    ),
    Row(
        "", "multi_head_attention_forward", function=F.multi_head_attention_forward,
        left=f"fused attention: {_INSIDE}", modules=(nn.MultiheadAttention,),
    ),
    left(f"fused attention: {_INSIDE}", "_native_multi_head_attention", function=torch._native_multi_head_attention),
    left(
        f"fused encoder layer: {_INSIDE}", "_transformer_encoder_layer_fwd",
        function=torch._transformer_encoder_layer_fwd,
    ),
    left(
        f"fused attention: {_INSIDE}", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward",
        "_cudnn_attention_forward", "_triton_scaled_dot_attention", "_triton_multi_head_attention",
        name="fused_attention",
    ),
    left(f"fused attention: {_INSIDE}", "_flash_attention_forward_no_dropout_inplace"),
    left(
        f"fused attention: {_INSIDE}: call scaled_dot_product_attention", name="flex_attention",
        others=(torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward),
    ),
)  # fmt: skip


_CELL = f"fused recurrent cell: {_INSIDE}"
_KERNEL = f"fused recurrent kernel: {_INSIDE}"

_RECURRENT = (
    left(_KERNEL, "lstm", function=torch.lstm, modules=(nn.RNNBase,)),
    *(left(_KERNEL, name, function=getattr(torch, name)) for name in ("gru", "rnn_tanh", "rnn_relu")),
    left(_CELL, "lstm_cell", function=torch.lstm_cell, modules=(nn.RNNCellBase,)),
    *(left(_CELL, name, function=getattr(torch, name)) for name in ("gru_cell", "rnn_tanh_cell", "rnn_relu_cell")),
    left(
        _KERNEL, "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn",
        "miopen_rnn_backward", "_lstm_mps", "lstm_mps_backward", "quantized_lstm", "quantized_gru",
        "quantized_lstm_cell", "quantized_gru_cell", "quantized_rnn_relu_cell", "quantized_rnn_tanh_cell",
        name="fused_recurrent",
    ),
)  # fmt: skip

ROWS = (*_CONVOLUTIONS, *_LINEAR, *_EMBEDDINGS, *_ATTENTION, *_RECURRENT)
