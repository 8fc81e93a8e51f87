"""Normalization, convolutions, attention, embeddings and dropout in a form whose gradients ORT computes rightly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.onnx import ops as onnx_ops

from cpt_fx.errors import ExportError
from cpt_fx.export.rewrite_indexing import INDEXING
from cpt_fx.export.rewriting import Rewrite, Run, aten, fixed, pair, stopped, uniform


def _batch_norm(
    run: Run, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    """Normalize over the batch, and learn the running statistics as torch does: ORT's are of the biased variance.

    With statistics that are given, as multiplication and addition: ORT turns every such operator of a training graph
    to training.
    """
    channels = (1, -1, *(1,) * (x.ndim - 2))
    if not training and running_mean is not None and running_var is not None:
        scale = torch.rsqrt(running_var + eps)
        scale = scale if weight is None else scale * weight
        shift = -running_mean * scale if bias is None else bias - running_mean * scale
        return x * scale.reshape(channels) + shift.reshape(channels)
    size = x.shape[1]
    scale = x.new_ones(size) if weight is None else weight
    shift = x.new_zeros(size) if bias is None else bias
    # With a momentum of 0, what comes out as new running statistics are those of the batch alone. They are written
    # over those that go in, so these must not be shared: they are computed for this, each in its own way, since ORT
    # makes one of two that are computed alike; and not from constants, since ORT would compute them once and for all.
    held = stopped(x)[0].reshape(size, -1)[:, 0] if weight is None else stopped(weight)
    old = (held * 0, held - held)
    y, mean, var = onnx_ops.symbolic_multi_out(
        "::BatchNormalization", (x, scale, shift, *old), attrs={"epsilon": eps, "momentum": 0.0, "training_mode": 1},
        dtypes=(x.dtype,) * 3, shapes=(x.shape, scale.shape, scale.shape), version=15,
    )  # fmt: skip
    if running_mean is not None and running_var is not None:
        count = x.numel() // size
        running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
        running_var.copy_(running_var * (1 - momentum) + var * momentum * (count / (count - 1)))
    return y


def _layer_norm(
    run: Run, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Any:  # fmt: skip
    """Normalize with a weight and a bias, which ORT's gradient wants, even where the layer has none."""
    weight = torch.ones(list(normalized_shape), dtype=x.dtype) if weight is None else weight
    bias = torch.zeros(list(normalized_shape), dtype=x.dtype) if bias is None else bias
    return aten.layer_norm.default(x, normalized_shape, weight, bias, eps)


def _group_norm(
    run: Run, x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    size = fixed(math.prod(x.shape[1:]) // groups, "what a group is normalized over")
    y = _layer_norm(run, x.reshape(-1, groups, size), [size], eps=eps).reshape(x.shape)
    channels = (1, -1, *(1,) * (x.ndim - 2))
    y = y if weight is None else y * weight.reshape(channels)
    return y if bias is None else y + bias.reshape(channels)


def _instance_norm(
    run: Run, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    if not use_input_stats:
        return _batch_norm(run, x, weight, bias, running_mean, running_var, False, momentum, eps)
    if running_mean is not None and running_var is not None:
        at, dims = stopped(x), tuple(range(2, x.ndim))
        running_mean.copy_(running_mean * (1 - momentum) + at.mean(dims).mean(0) * momentum)
        running_var.copy_(running_var * (1 - momentum) + at.var(dims).mean(0) * momentum)
    return _group_norm(run, x, x.shape[1], weight, bias, eps)


def _conv3d(
    run: Run, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    """Convolve group by group: ORT's gradient of grouped convolutions in 3-d is wrong with a stride."""
    if groups == 1:
        return NotImplemented
    parts = [
        torch.conv3d(part, kernel, None, stride, padding, dilation)
        for part, kernel in zip(_parts(x, groups, 1), _parts(weight, groups, 0), strict=True)
    ]
    y = torch.cat(parts, 1)
    return y if bias is None else y + bias.reshape(-1, 1, 1, 1)


def _parts(x: Tensor, count: int, dim: int) -> list[Tensor]:
    size = x.shape[dim] // count
    return [x.narrow(dim, place * size, size) for place in range(count)]


def _same(dims: int) -> Rewrite:
    """Return a convolution whose padding is a word, with numbers in its place."""
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]

    def rewrite(
        run: Run, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: str = "valid",
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if padding == "same":
            both: list[int] = []
            for length, step in zip(weight.shape[2:], pair(dilation, dims), strict=True):
                total = step * (length - 1)
                both = [total // 2, total - total // 2, *both]
            x = torch.nn.functional.pad(x, both)
        rest = (weight, bias, stride, [0] * dims, dilation, groups)
        made = _conv3d(run, x, *rest) if dims == 3 else NotImplemented
        return convolve(x, *rest) if made is NotImplemented else made

    return rewrite


def _transposed(dims: int) -> Rewrite:
    """Return a transposed convolution as a convolution of what is spread out: ORT's CPU kernels lack its gradient."""
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[dims - 1]

    def rewrite(
        run: Run, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
    ) -> Any:  # fmt: skip
        steps, edges, more, apart = (pair(value, dims) for value in (stride, padding, output_padding, dilation))
        unbatched = x.ndim == dims + 1
        x = x[None] if unbatched else x
        around: list[int] = []
        for place in range(dims):
            dim = place + 2
            size = fixed(x.shape[dim], "what is convolved")
            if steps[place] > 1:
                x = torch.nn.functional.pad(x.unsqueeze(dim + 1), (0, 0) * (dims - 1 - place) + (0, steps[place] - 1))
                x = x.flatten(dim, dim + 1).narrow(dim, 0, (size - 1) * steps[place] + 1)
            edge = apart[place] * (weight.shape[dim] - 1) - edges[place]
            around = [edge, edge + more[place], *around]
        x = torch.nn.functional.pad(x, around)
        inputs, outputs, *kernel = weight.shape
        turned = INDEXING[aten.flip.default](run, weight, list(range(2, dims + 2)))
        turned = turned.reshape(groups, inputs // groups, outputs, *kernel).transpose(1, 2)
        turned = turned.reshape(groups * outputs, inputs // groups, *kernel)
        rest = (turned, bias, [1] * dims, [0] * dims, apart, groups)
        made = _conv3d(run, x, *rest) if dims == 3 else NotImplemented
        y = convolve(x, *rest) if made is NotImplemented else made
        return y[0] if unbatched else y

    return rewrite


def _attention(
    run: Run, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, torch.full((), float("-inf"), dtype=scores.dtype))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(_dropout(run, torch.softmax(scores, -1), dropout_p), value)


def _embedding(
    run: Run, weight: Tensor, places: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:  # fmt: skip
    if scale_grad_by_freq:
        raise ExportError("embeddings with scale_grad_by_freq=True: ONNX Runtime does not scale their gradients")
    found = aten.embedding.default(weight, places)
    if padding_idx < 0:
        return found
    return torch.where((places == padding_idx).unsqueeze(-1), stopped(found), found)


def _dropout(run: Run, x: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    """Drop by noise of a seed that is an input: ORT's own generator cannot be set back to where it was."""
    return x * (_kept(run, x, p) * (0.0 if p == 1 else 1 / (1 - p))) if train and p else x


def _feature_dropout(run: Run, x: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    if not train or not p:
        return x
    return x * (_kept(run, _one_of_each(x), p) * (0.0 if p == 1 else 1 / (1 - p)))


def _alpha_dropout(run: Run, x: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    return _alpha(run, x, x, p) if train and p else x


def _feature_alpha_dropout(run: Run, x: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
    return _alpha(run, x, _one_of_each(x), p) if train and p else x


def _alpha(run: Run, x: Tensor, like: Tensor, p: float) -> Tensor:
    if p == 1:
        return x * 0.0
    alpha = 1.7580993408473766
    scale = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    kept = _kept(run, like, p)
    return x * (kept * scale) + ((kept - 1) * (alpha * scale) + alpha * scale * p)


def _one_of_each(x: Tensor) -> Tensor:
    first = (slice(None), slice(None), *(slice(0, 1),) * (x.ndim - 2))
    return x[first]


def _kept(run: Run, x: Tensor, p: float) -> Tensor:
    return (uniform(run, stopped(x)) >= p).to(x.dtype)


LAYERS: dict[Any, Rewrite] = {
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _layer_norm,
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _instance_norm,
    aten.conv3d.default: _conv3d,
    aten.conv1d.padding: _same(1),
    aten.conv2d.padding: _same(2),
    aten.conv3d.padding: _same(3),
    aten.conv_transpose1d.default: _transposed(1),
    aten.conv_transpose2d.input: _transposed(2),
    aten.conv_transpose3d.input: _transposed(3),
    aten.scaled_dot_product_attention.default: _attention,
    aten.embedding.default: _embedding,
    aten.dropout.default: _dropout,
    aten.feature_dropout.default: _feature_dropout,
    aten.alpha_dropout.default: _alpha_dropout,
    aten.feature_alpha_dropout.default: _feature_alpha_dropout,
    aten.rand_like.default: lambda run, x, **options: uniform(run, stopped(x)),
    aten.bernoulli.default: lambda run, p, generator=None: (uniform(run, stopped(p)) < stopped(p)).to(p.dtype),
}
DRAWING = frozenset(
    {
        aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default, aten.scaled_dot_product_attention.default, aten.rand_like.default,
        aten.bernoulli.default,
    }
)  # fmt: skip
"""Operators whose rewrite may draw from the seeds, once."""
