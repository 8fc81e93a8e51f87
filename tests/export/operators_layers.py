"""Cases of the operator table: activations, normalization, pooling, convolutions, recurrent nets, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.export.operator_case import Section

ACTIVATIONS = Section("Activations")
for module in (
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.ELU(), nn.ELU(0.7), nn.SELU(), nn.CELU(0.7), nn.GELU(),
    nn.GELU("tanh"), nn.SiLU(), nn.Mish(), nn.Sigmoid(), nn.LogSigmoid(), nn.Tanh(), nn.Hardtanh(-0.4, 0.6),
    nn.Hardswish(), nn.Hardsigmoid(), nn.Softplus(), nn.Softplus(2.0, 0.5), nn.Softsign(), nn.Tanhshrink(),
    nn.Hardshrink(0.3), nn.Softshrink(0.3), nn.Threshold(0.1, -0.2), nn.Softmax(1), nn.LogSoftmax(1), nn.Softmin(1),
    nn.GLU(1), nn.RReLU(0.1, 0.1), nn.ReLU(inplace=True),
):  # fmt: skip
    ACTIVATIONS.module(repr(module), lambda module=module: module)  # type: ignore[misc]
ACTIVATIONS.module("PReLU()", nn.PReLU)
ACTIVATIONS.module("PReLU(3)", lambda: nn.PReLU(3), 3, 4)
ACTIVATIONS.module("RReLU(), random", nn.RReLU)
ACTIVATIONS.module("Softmax2d()", nn.Softmax2d, 3, 2, 2)
ACTIVATIONS.op("softmax, float64", lambda h: h.softmax(1, dtype=torch.float64).float())
ACTIVATIONS.op("F.gumbel_softmax", lambda h: F.gumbel_softmax(h, dim=1))

NORMALIZATION = Section("Normalization")
module = NORMALIZATION.module  # type: ignore[assignment]
module("LayerNorm", lambda: nn.LayerNorm(8))
module("LayerNorm, two dims, no bias", lambda: nn.LayerNorm((3, 4), bias=False), 2, 3, 4)
module("LayerNorm, no affine", lambda: nn.LayerNorm(8, elementwise_affine=False))
module("RMSNorm", lambda: nn.RMSNorm(8))
module("GroupNorm", lambda: nn.GroupNorm(2, 4), 4, 3, 3)
module("GroupNorm, no affine", lambda: nn.GroupNorm(2, 4, affine=False), 4, 3, 3)
module("InstanceNorm1d", lambda: nn.InstanceNorm1d(3), 3, 5)
module("InstanceNorm2d, affine", lambda: nn.InstanceNorm2d(3, affine=True), 3, 4, 4)
module("InstanceNorm2d, running statistics", lambda: nn.InstanceNorm2d(3, track_running_stats=True), 3, 4, 4)
module("BatchNorm1d", lambda: nn.BatchNorm1d(8))
module("BatchNorm1d, (N, C, L)", lambda: nn.BatchNorm1d(3), 3, 5)
module("BatchNorm2d", lambda: nn.BatchNorm2d(3), 3, 4, 4)
module("BatchNorm2d, no affine", lambda: nn.BatchNorm2d(3, affine=False), 3, 4, 4)
module("BatchNorm2d, no running statistics", lambda: nn.BatchNorm2d(3, track_running_stats=False), 3, 4, 4)
module("BatchNorm2d, momentum=0.3", lambda: nn.BatchNorm2d(3, momentum=0.3), 3, 4, 4)
module("BatchNorm2d, momentum=None", lambda: nn.BatchNorm2d(3, momentum=None), 3, 4, 4, refused="momentum=None")
module("BatchNorm3d", lambda: nn.BatchNorm3d(2), 2, 3, 3, 3)
module("LocalResponseNorm", lambda: nn.LocalResponseNorm(2), 4, 3, 3)


class _Frozen(nn.Module):
    """Batch norm with statistics that are given, in a model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.norm.running_mean = torch.randn(8)
        self.norm.running_var = torch.rand(8) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last layer makes of it."""
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


def _train_but_norm(model: nn.Module) -> None:
    model.train()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.eval()


NORMALIZATION.model("BatchNorm1d in eval mode", _Frozen, prepare=_train_but_norm)
NORMALIZATION.op(
    "F.batch_norm, training=False", lambda h: F.batch_norm(h, torch.zeros(8), torch.full((8,), 2.0), training=False)
)
NORMALIZATION.module("spectral_norm", lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))
NORMALIZATION.module("weight_norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))

NORMALIZATION.module("weight_norm, dim=1",
                     lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3), dim=1), 3, 5)  # fmt: skip

POOLING = Section("Pooling")
module = POOLING.module  # type: ignore[assignment]
module("MaxPool1d", lambda: nn.MaxPool1d(2), 3, 8)
module("MaxPool2d", lambda: nn.MaxPool2d(2), 3, 8, 8)
module("MaxPool2d, overlapping, padded", lambda: nn.MaxPool2d(3, 2, 1), 3, 8, 8)
module("MaxPool2d, dilation", lambda: nn.MaxPool2d(2, 1, dilation=2), 3, 8, 8)
module("MaxPool2d, ceil_mode", lambda: nn.MaxPool2d(3, 2, ceil_mode=True), 3, 8, 8)
module("MaxPool3d", lambda: nn.MaxPool3d(2), 2, 4, 4, 4)
module("MaxPool1d, padded, dilation, ceil_mode", lambda: nn.MaxPool1d(3, 2, 1, 2, ceil_mode=True), 3, 9)
module("MaxPool3d, overlapping, padded, ceil_mode", lambda: nn.MaxPool3d(3, 2, 1, ceil_mode=True), 2, 4, 4, 4)
module("MaxPool3d, dilation", lambda: nn.MaxPool3d(2, 1, dilation=2), 2, 4, 4, 4)
POOLING.op("max_pool2d, ties", lambda h: F.max_pool2d(torch.relu(h - 0.5), 3, 2), 3, 8, 8)
POOLING.op("max_pool2d, indices returned", lambda h: F.max_pool2d(h, 2, return_indices=True)[0], 3, 8, 8)
POOLING.op("max_unpool2d", lambda h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), [2, 2]), 3, 8, 8)
POOLING.op("max_unpool1d", lambda h: F.max_unpool1d(*F.max_pool1d(h, 2, return_indices=True), [2]), 3, 8)
POOLING.op("max_unpool3d", lambda h: F.max_unpool3d(*F.max_pool3d(h, 2, return_indices=True), [2, 2, 2]), 2, 4, 4, 4)
module("AvgPool1d, padded, ceil_mode", lambda: nn.AvgPool1d(3, 2, 1, ceil_mode=True), 3, 8)
module("AvgPool1d, count_include_pad=False", lambda: nn.AvgPool1d(3, 2, 1, count_include_pad=False), 3, 8)
module("AvgPool2d, divisor_override, padded, ceil_mode",
       lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=5), 3, 8, 7)  # fmt: skip
module("AvgPool3d, divisor_override", lambda: nn.AvgPool3d(2, divisor_override=3), 2, 4, 4, 4)
module("AvgPool3d, ceil_mode, padded", lambda: nn.AvgPool3d(3, 2, 1, ceil_mode=True), 2, 4, 4, 4)
module("AdaptiveAvgPool1d, uneven", lambda: nn.AdaptiveAvgPool1d(3), 3, 8)
module("AdaptiveAvgPool3d, uneven", lambda: nn.AdaptiveAvgPool3d((3, 2, 1)), 2, 4, 3, 4)
module("AdaptiveMaxPool1d, uneven", lambda: nn.AdaptiveMaxPool1d(3), 3, 8)
module("AdaptiveMaxPool3d, uneven", lambda: nn.AdaptiveMaxPool3d((3, 2, 1)), 2, 4, 3, 4)
POOLING.op("adaptive_max_pool2d, uneven, ties", lambda h: F.adaptive_max_pool2d(torch.relu(h - 0.5), 3), 3, 7, 8)
module("LPPool1d", lambda: nn.LPPool1d(2, 3), 3, 8)
module("AvgPool1d", lambda: nn.AvgPool1d(2), 3, 8)
module("AvgPool2d", lambda: nn.AvgPool2d(2), 3, 8, 8)
module("AvgPool2d, padded", lambda: nn.AvgPool2d(3, 2, 1), 3, 8, 8)
module("AvgPool2d, count_include_pad=False", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), 3, 8, 8)
module("AvgPool2d, ceil_mode", lambda: nn.AvgPool2d(3, 2, ceil_mode=True), 3, 8, 8)
module("AvgPool2d, ceil_mode, padded", lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), 3, 8, 8)
module("AvgPool2d, divisor_override", lambda: nn.AvgPool2d(2, divisor_override=3), 3, 8, 8)
module("AvgPool3d", lambda: nn.AvgPool3d(2), 2, 4, 4, 4)
module("AvgPool3d, overlapping, padded", lambda: nn.AvgPool3d(3, 2, 1), 2, 4, 4, 4)
module("AdaptiveAvgPool1d(1)", lambda: nn.AdaptiveAvgPool1d(1), 3, 8)
module("AdaptiveAvgPool2d(1)", lambda: nn.AdaptiveAvgPool2d(1), 3, 8, 8)
module("AdaptiveAvgPool2d(2)", lambda: nn.AdaptiveAvgPool2d(2), 3, 8, 8)
module("AdaptiveAvgPool2d, uneven", lambda: nn.AdaptiveAvgPool2d((3, 5)), 3, 8, 7)
module("AdaptiveAvgPool3d(1)", lambda: nn.AdaptiveAvgPool3d(1), 2, 4, 4, 4)
module("AdaptiveMaxPool1d(1)", lambda: nn.AdaptiveMaxPool1d(1), 3, 8)
module("AdaptiveMaxPool2d(1)", lambda: nn.AdaptiveMaxPool2d(1), 3, 8, 8)
module("AdaptiveMaxPool2d(2)", lambda: nn.AdaptiveMaxPool2d(2), 3, 8, 8)
module("AdaptiveMaxPool2d, uneven", lambda: nn.AdaptiveMaxPool2d((3, 5)), 3, 8, 7)
module("LPPool2d", lambda: nn.LPPool2d(2, 2), 3, 8, 8)
module("FractionalMaxPool2d", lambda: nn.FractionalMaxPool2d(2, 3), 3, 8, 8, refused="op: aten.fractional_max_pool2d")

CONVOLUTIONS = Section("Convolutions and linear layers")
module = CONVOLUTIONS.module  # type: ignore[assignment]
module("Linear, no bias", lambda: nn.Linear(8, 5, bias=False))
module("Linear on (N, T, C)", lambda: nn.Linear(8, 5), 4, 8)
module("Linear on (N, H, W, C)", lambda: nn.Linear(4, 5), 2, 3, 4)
module("Conv1d", lambda: nn.Conv1d(4, 6, 3, padding=1), 4, 8)
module("Conv2d", lambda: nn.Conv2d(4, 6, 3, padding=1), 4, 6, 6)
module("Conv2d, no bias, stride", lambda: nn.Conv2d(4, 6, 3, 2, bias=False), 4, 7, 7)
module("Conv2d, dilation", lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=2), 4, 6, 6)
module("Conv2d, groups", lambda: nn.Conv2d(4, 6, 3, groups=2), 4, 6, 6)
module("Conv2d, depthwise, stride", lambda: nn.Conv2d(4, 4, 3, 2, 1, groups=4), 4, 6, 6)
module("Conv2d, depthwise, two kernels each", lambda: nn.Conv2d(4, 8, 3, 1, 1, groups=4), 4, 6, 6)
module("Conv2d, groups, stride, dilation", lambda: nn.Conv2d(4, 6, 3, 2, 2, 2, groups=2), 4, 8, 8)
module("Conv2d, padding='same'", lambda: nn.Conv2d(4, 6, 3, padding="same"), 4, 6, 6)
module("Conv2d, padding='same', even kernel", lambda: nn.Conv2d(4, 6, 4, padding="same"), 4, 6, 6)
module("Conv2d, padding='valid'", lambda: nn.Conv2d(4, 6, 3, padding="valid"), 4, 6, 6)
module("Conv2d, padding_mode='reflect'", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), 4, 6, 6)
module("Conv2d, padding_mode='circular'", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), 4, 6, 6)
module("Conv2d, padding_mode='replicate'", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), 4, 6, 6)
module("Conv3d", lambda: nn.Conv3d(2, 4, 3, padding=1), 2, 4, 4, 4)
module("Conv3d, stride", lambda: nn.Conv3d(2, 4, 3, 2, 1), 2, 4, 4, 4)
module("Conv3d, groups", lambda: nn.Conv3d(2, 4, 3, padding=1, groups=2), 2, 4, 4, 4)
module("Conv3d, groups, stride", lambda: nn.Conv3d(2, 4, 3, 2, 1, groups=2), 2, 4, 4, 4)
module("Conv1d, groups, stride", lambda: nn.Conv1d(4, 4, 3, 2, 1, groups=4), 4, 8)
module("ConvTranspose1d", lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1), 4, 5)
module("ConvTranspose2d", lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1), 4, 5, 5)
module("ConvTranspose2d, output_padding", lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), 4, 5, 5)
module("ConvTranspose2d, groups, dilation", lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2, dilation=2), 4, 5, 5)
module("Conv1d, dilation, padding_mode='replicate'",
       lambda: nn.Conv1d(4, 6, 3, padding=2, dilation=2, padding_mode="replicate"), 4, 8)  # fmt: skip
module("Conv3d, dilation, padding_mode='circular'",
       lambda: nn.Conv3d(2, 4, 2, dilation=2, padding=1, padding_mode="circular"), 2, 4, 4, 4)  # fmt: skip
module("ConvTranspose1d, groups, dilation, output_padding",
       lambda: nn.ConvTranspose1d(4, 6, 3, 3, 2, 1, 2, dilation=2), 4, 5)  # fmt: skip
module("ConvTranspose3d, groups, stride", lambda: nn.ConvTranspose3d(4, 6, 3, 2, 1, groups=2), 4, 3, 3, 3)
module("ConvTranspose3d", lambda: nn.ConvTranspose3d(2, 3, 2, 2), 2, 3, 3, 3)
module("Bilinear", lambda: _Twice(nn.Bilinear(8, 8, 5)))
module("Bilinear on (N, T, C)", lambda: _Twice(nn.Bilinear(4, 4, 5, bias=False)), 3, 4)
module("Unfold, stride, dilation, padded", lambda: nn.Unfold((3, 2), 2, 1, 2), 3, 6, 6)
module("Fold, stride, dilation, padded", lambda: nn.Fold((4, 4), 2, dilation=2, padding=1, stride=2), 12, 4)
module("Unfold", lambda: nn.Unfold(2), 3, 4, 4)
module("Fold", lambda: nn.Fold((4, 4), 2), 12, 9)


class _Twice(nn.Module):
    """Calls a module of two inputs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        """Return what the module makes of a tensor and its cosine."""
        out: Tensor = self.inner(h, h.cos())
        return out


class _First(nn.Module):
    """Keeps the first output of a module."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return it."""
        out: Tensor = self.inner(*inputs, **self.options)[0]
        return out


RECURRENT = Section("Recurrent nets")
cells: tuple[tuple[str, Callable[..., nn.Module]], ...] = (("LSTM", nn.LSTM), ("GRU", nn.GRU), ("RNN", nn.RNN))
for name, kind in cells:
    RECURRENT.module(name, lambda kind=kind: _First(kind(6, 5, batch_first=True)), 4, 6)  # type: ignore[misc]
RECURRENT.module("LSTM, two layers, bidirectional",
                 lambda: _First(nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)), 3, 6)  # fmt: skip
RECURRENT.module("GRU, bidirectional, no bias",
                 lambda: _First(nn.GRU(6, 5, bias=False, batch_first=True, bidirectional=True)), 3, 6)  # fmt: skip
RECURRENT.module("LSTM, projection", lambda: _First(nn.LSTM(6, 5, batch_first=True, proj_size=3)), 3, 6)
RECURRENT.module("RNN, relu", lambda: _First(nn.RNN(6, 5, batch_first=True, nonlinearity="relu")), 3, 6)
RECURRENT.module("LSTMCell", lambda: _First(nn.LSTMCell(8, 5)))
RECURRENT.module("GRUCell", lambda: nn.GRUCell(8, 5))
RECURRENT.module("RNNCell", lambda: nn.RNNCell(8, 5))

ATTENTION = Section("Attention")


def _attention(**options: Any) -> Callable[[Tensor], Tensor]:
    return lambda h: F.scaled_dot_product_attention(h, h.cos(), h.sin(), **options)


op = ATTENTION.op
op("scaled_dot_product_attention", _attention(), 2, 5, 4)
op("scaled_dot_product_attention, is_causal", _attention(is_causal=True), 2, 5, 4)
op(
    "scaled_dot_product_attention, boolean mask",
    _attention(attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()),
    2,
    5,
    4,
)
op("scaled_dot_product_attention, float mask", _attention(attn_mask=torch.randn(5, 5)), 2, 5, 4)
op("scaled_dot_product_attention, scale", _attention(scale=0.3), 2, 5, 4)
op("scaled_dot_product_attention, 3 dims", _attention(), 5, 4)
op("scaled_dot_product_attention, dropout", _attention(dropout_p=0.4), 2, 5, 4)
op("scaled_dot_product_attention, enable_gqa",
   lambda h: F.scaled_dot_product_attention(h, h[:, :2].cos(), h[:, :2].sin(), enable_gqa=True), 4, 5, 4)  # fmt: skip


class _SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.options = options

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.attention(h, h, h, **self.options)[0]
        return out


module = ATTENTION.module  # type: ignore[assignment]
module("MultiheadAttention", _SelfAttention, 5, 8)
module("MultiheadAttention, need_weights=False", lambda: _SelfAttention(need_weights=False), 5, 8)
module("MultiheadAttention, attn_mask",
       lambda: _SelfAttention(attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1)), 5, 8)  # fmt: skip
module("TransformerEncoderLayer", lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 5, 8)
module("TransformerEncoderLayer, gelu, norm_first",
       lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True, norm_first=True), 5, 8)  # fmt: skip
module("TransformerEncoderLayer, dropout", lambda: _without_attention_dropout(0.3), 5, 8)
module("TransformerDecoderLayer",
       lambda: _Twice(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)), 5, 8)  # fmt: skip
module("TransformerEncoder, two layers",
       lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2,
                                     enable_nested_tensor=False), 5, 8)  # fmt: skip


def _without_attention_dropout(p: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, p, batch_first=True)
    layer.self_attn.dropout = 0.0
    return layer


DROPOUT = Section("Random")
module = DROPOUT.module  # type: ignore[assignment]
module("Dropout", lambda: nn.Dropout(0.4))
module("Dropout(1.0)", lambda: _Residual(nn.Dropout(1.0)))
module("Dropout, inplace", lambda: nn.Dropout(0.4, inplace=True))
module("Dropout1d", lambda: nn.Dropout1d(0.4), 5, 4)
module("Dropout2d", lambda: nn.Dropout2d(0.4), 5, 3, 3)
module("Dropout3d", lambda: nn.Dropout3d(0.4), 5, 2, 2, 2)
module("AlphaDropout", lambda: nn.AlphaDropout(0.4))
module("FeatureAlphaDropout", lambda: nn.FeatureAlphaDropout(0.4), 5, 4)
DROPOUT.op("rand_like", lambda h: h + torch.rand_like(h))
DROPOUT.op("randn", lambda h: h + torch.randn(8))
DROPOUT.op("bernoulli", lambda h: h * torch.bernoulli(h.sigmoid()))
DROPOUT.op("randperm", lambda h: h[:, torch.randperm(8)])
DROPOUT.op(
    "multinomial", lambda h: h.gather(1, torch.multinomial(h.sigmoid(), 2)), refused="multinomial: draws at random"
)
DROPOUT.op("normal_", lambda h: h + torch.empty_like(h).normal_())


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = h + self.inner(h)
        return out
