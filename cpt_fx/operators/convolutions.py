"""Convolutions and transposed convolutions, for all numbers of dims."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from cpt_fx.operators.row import Call, Places, Row, left
from cpt_fx.operators.torch_private import convolution

_KERNELS: dict[str, Places] = {
    **dict.fromkeys(
        ("convolution", "convolution_overrideable", "_convolution", "_convolution_mode", "mkldnn_convolution",
         "cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu", "cudnn_convolution_add_relu",
         "miopen_convolution", "miopen_convolution_transpose", "miopen_depthwise_convolution",
         "miopen_convolution_relu", "miopen_convolution_add_relu", "_mps_convolution", "_mps_convolution_transpose",
         "_nnpack_spatial_convolution", "_conv_depthwise2d", "conv_depthwise3d", "slow_conv3d", "slow_conv3d_forward",
         "slow_conv_dilated2d", "slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d",
         "_slow_conv2d_forward", "thnn_conv2d"), (0, 1)),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable", "_slow_conv2d_backward",
                     "mps_convolution_backward", "mps_convolution_transpose_backward"), (0, 1, 2)),
    "_convolution_double_backward": (0, 1, 3, 4, 5),
}  # fmt: skip
"""Convolutions below autograd: positions of input and weight, in backward passes after the gradient."""


def _general(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: Any, *flags: Any,
) -> Call:  # fmt: skip
    """Convert a convolution in its general form to the function for its number of dims."""
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


_GENERAL = {spelling: _general for spelling in (torch.convolution, "aten::convolution", convolution,
                                                "aten::_convolution", "aten::convolution_overrideable")}  # fmt: skip
_GRADIENTS: Any = importlib.import_module("torch.nn.grad")

ROWS = (
    _conv("conv1d", nn.Conv1d, integer="conv"),
    # This row lists the kernels and the general forms for any number of dims.
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
        "the gradient of a convolution, called as a function", "convolution_backward", "_convolution_double_backward",
        "convolution_backward_overrideable", name="convolution_gradient",
        others=tuple(getattr(_GRADIENTS, f"conv{dims}d_{of}") for dims in (1, 2, 3) for of in ("input", "weight")),
    ),
    left(
        "a convolution of one backend: call conv1d, conv2d, ...", "_convolution_mode", "mkldnn_convolution",
        "cudnn_convolution", "cudnn_convolution_transpose", "miopen_convolution", "miopen_convolution_transpose",
        "miopen_depthwise_convolution", "_nnpack_spatial_convolution", "thnn_conv2d", "slow_conv3d",
        "slow_conv_dilated2d", "slow_conv_dilated3d", "slow_conv_transpose2d", "slow_conv_transpose3d",
        "_conv_depthwise2d", "conv_depthwise3d", "_mps_convolution", name="convolution",
    ),
)  # fmt: skip
