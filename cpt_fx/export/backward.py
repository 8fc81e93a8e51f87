"""Decompositions of PyTorch's backward operators into operators that ONNX has.

Operators that are linear along each dim (average pooling, interpolation) multiply the gradient by one matrix per dim.
A dynamic size that a matrix depends on is specialized to its value in the examples, by `int(size)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from cpt_fx.common.torch_private import disable_current_modes
from cpt_fx.export.refusals import UnsupportedError
from cpt_fx.export.torch_private import decomposition_table

aten = torch.ops.aten
Sizes = Sequence[Any]
_MEAN, _MAX = 1, 2
"""Modes of an embedding bag; 0 is the sum."""


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Decompose batch norm: the exporter assumes evaluation mode, and the schema hides that it writes buffers."""
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1, *(1,) * (x.ndim - 2)]
    if training:
        mean = x.mean(dims)
        centered = x - mean.view(shape)
        var = (centered * centered).mean(dims)
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1]
            running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
            running_var.copy_(running_var * (1 - momentum) + var * (count / (count - 1)) * momentum)
    else:
        assert running_mean is not None and running_var is not None
        mean, var = running_mean, running_var
        centered = x - mean.view(shape)
    inverse = torch.rsqrt(var + eps)
    y = centered * (inverse if weight is None else inverse * weight).view(shape)
    y = y if bias is None else y + bias.view(shape)
    return (y, mean, inverse) if training else (y, x.new_empty(0), x.new_empty(0))


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sizes | None, stride: Sizes, padding: Sizes,
    dilation: Sizes, transposed: bool, output_padding: Sizes, groups: int, output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Express the gradients of a convolution as convolutions."""
    dims = x.ndim - 2
    stride, padding, dilation = (each(value, dims) for value in (stride, padding, dilation))
    to_x = to_weight = to_bias = None
    if output_mask[0] and transposed:
        to_x = _convolution(gradient, weight, stride, padding, dilation, False, [0] * dims, groups)
    elif output_mask[0]:
        to_x = _back_through(gradient, weight, x.shape[2:], stride, padding, dilation, groups)
    if output_mask[1]:
        # A transposed convolution is the backward pass of a convolution from `gradient` to `x`: swap the two.
        given, taken = (gradient, x) if transposed else (x, gradient)
        to_weight = _weight_gradient(given, taken, weight.shape[2:], stride, padding, dilation, groups)
    if output_mask[2]:
        to_bias = gradient.sum([0, *range(2, gradient.ndim)])
    return to_x, to_weight, to_bias


def _convolution(x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    made: Tensor = aten.convolution.default(x, weight, None, *options)
    return made


def _back_through(
    gradient: Tensor, weight: Tensor, sizes: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """Return the input gradient of a convolution, which is a transposed convolution."""
    dims = len(sizes)
    reach = [dilation[dim] * (weight.shape[2 + dim] - 1) for dim in range(dims)]
    if all(step == 1 for step in stride) and all(reach[dim] >= padding[dim] for dim in range(dims)):
        # Equal to a convolution with the flipped filter, for which runtimes have their fastest kernels.
        own = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(list(range(2, 2 + dims)))
        left = [reach[dim] - padding[dim] for dim in range(dims)]
        return _convolution(gradient, own, stride, left, dilation, False, [0] * dims, groups)
    return transposed_convolution(gradient, weight, sizes, stride, padding, dilation, groups)


def transposed_convolution(
    x: Tensor, weight: Tensor, sizes: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """Return a transposed convolution with given output sizes, which may be dynamic."""
    dims = len(sizes)
    none = [0] * dims
    reach = [dilation[dim] * (weight.shape[2 + dim] - 1) for dim in range(dims)]
    whole = [(x.shape[2 + dim] - 1) * stride[dim] + reach[dim] + 1 for dim in range(dims)]
    missing = [sizes[dim] + 2 * padding[dim] - whole[dim] for dim in range(dims)]
    if all(isinstance(size, int) for size in missing):
        return _convolution(x, weight, stride, padding, dilation, True, missing, groups)
    # With dynamic sizes the output padding is dynamic too, which the operator does not accept: pad and crop instead.
    made = _convolution(x, weight, stride, none, dilation, True, none, groups)
    for dim in range(dims):
        made = aten.constant_pad_nd.default(made, [0, 0] * (dims - 1 - dim) + [0, missing[dim]])
        made = made.narrow(2 + dim, padding[dim], sizes[dim])
    return made


def _weight_gradient(
    x: Tensor, gradient: Tensor, sizes: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:
    """Return the gradient of a filter: the input convolved with the gradient, with channel and batch dims swapped."""
    dims = len(sizes)
    place = list(range(3, 3 + dims))
    given = x.unflatten(1, (groups, -1)).permute(2, 1, 0, *place).flatten(1, 2)
    filters = gradient.unflatten(1, (groups, -1)).permute(1, 2, 0, *place).flatten(0, 1)
    made = _convolution(given, filters, dilation, padding, stride, False, [0] * dims, groups)
    for dim in range(dims):
        made = made.narrow(2 + dim, 0, sizes[dim])
    return made.transpose(0, 1)


def _to_places(gradient: Tensor, x: Tensor, indices: Tensor, dims: int) -> Tensor:
    flat = torch.zeros_like(x).flatten(-dims)
    return flat.scatter_add(-1, indices.flatten(-dims), gradient.flatten(-dims)).view(x.shape)


def _average_pool_backward(dims: int, gradient: Tensor, x: Tensor, *options: Any) -> Tensor:
    return through(gradient, average_pooling(x.shape[-dims:], *options))


def average_pooling(
    sizes: Sizes, kernel: Sizes, stride: Sizes = (), padding: Sizes = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the matrix of an average pooling along each dim."""
    dims = len(sizes)
    kernel, padding = each(kernel, dims), each(padding, dims)
    matrices = []
    for dim, (size, step) in enumerate(zip(sizes, each(stride, dims) if stride else kernel, strict=True)):
        options = ([kernel[dim]], [step], [padding[dim]], ceil_mode, count_include_pad)
        matrix = _matrix(size, aten.avg_pool1d.default, *options)
        if divisor_override is not None:
            matrix = (matrix > 0) * (1.0 if dim else 1 / divisor_override)
        matrices.append(matrix)
    return matrices


def _adaptive_average_pool_backward(dims: int, gradient: Tensor, x: Tensor) -> Tensor:
    return through(gradient, [adaptive_pooling(x.shape[dim], gradient.shape[dim]) for dim in range(-dims, 0)])


def adaptive_pooling(size: Any, out: Any) -> Tensor:
    """Return the matrix of an adaptive average pooling along one dim."""
    return _matrix(size, aten.adaptive_avg_pool1d.default, [int(out)])


def _matrix(size: Any, operator: Any, *options: Any) -> Tensor:
    """Return the matrix of an operator that is linear along a dim: its results for the unit vectors."""
    with disable_current_modes():
        made: Tensor = operator(torch.eye(int(size)).unsqueeze(0), *options)[0].T.contiguous()
        return made


def _antialias_backward(forward: Any) -> Callable[..., Tensor]:
    """Return the backward pass of an interpolation; each dim's matrix is the operator applied to unit vectors."""

    def backward(
        gradient: Tensor, output_size: Sizes, input_size: Sizes, corners: bool, *scales: float | None
    ) -> Tensor:
        matrices = []
        for dim in range(2):
            size, out = int(input_size[2 + dim]), int(output_size[dim])
            # Size 2 along the other dim, which stays as it is: with size 1, torch mixes up the dims.
            place, shape, sizes = [1, 1], [2, 2], [2, 2]
            place[dim], shape[dim], sizes[dim] = size, size, out
            factors = [scale if other == dim else None for other, scale in enumerate(scales)]
            with disable_current_modes():
                units = torch.eye(size).view(1, size, *place).expand(1, size, *shape).contiguous()
                made = forward(units, sizes, corners, *factors)
                matrices.append(made[0].movedim(1 + dim, 1).flatten(2)[..., 0].T.contiguous())
        return through(gradient, matrices)

    return backward


def _by_autograd(forward: Any, count: int = 1) -> Callable[..., Any]:
    """Return a backward pass: autograd applied to torch's own decomposition of the forward operator."""

    def backward(gradient: Tensor, *arguments: Any) -> Any:
        with enable_reentrant_dispatch(), torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in arguments[:count]]
            made = decomposition_table[forward](*leaves, *arguments[count:])
            found = torch.autograd.grad(made, leaves, gradient, materialize_grads=True)
        return found[0] if count == 1 else found

    return backward


def _masked_scatter_backward(gradient: Tensor, mask: Tensor, sizes: Sizes) -> Tensor:
    """Scatter each gradient element to the source element that it came from; those are taken in order."""
    mask = mask.expand(gradient.shape).flatten()
    places = (mask.to(torch.int64).cumsum(0) - 1).clamp_min(0)
    taken = torch.where(mask, gradient.flatten(), 0.0)
    return gradient.new_zeros(sizes).flatten().scatter_add(0, places, taken).view(sizes)


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output of each bag, the bag of each index, the bag sizes, and the row that each maximum comes from."""
    starts = offsets[:-1] if include_last_offset else offsets
    begun = offsets.new_zeros(indices.shape[0] + 1).index_put((starts,), torch.ones_like(starts), accumulate=True)
    bags = begun[:-1].cumsum(0) - 1
    kept = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx is not None:
        kept = indices != padding_idx % weight.shape[0]
    counts = starts.new_zeros(starts.shape[0]).index_put((bags,), kept.to(starts.dtype), accumulate=True)
    rows = weight[indices]
    largest = counts
    if mode == _MAX:
        members = (torch.arange(starts.shape[0]).unsqueeze(1) == bags) & kept
        values, places = torch.where(members.unsqueeze(-1), rows, float("-inf")).max(1)
        made = torch.where((counts > 0).unsqueeze(-1), values, 0.0)
        largest = indices[places]
    else:
        share = kept.to(rows.dtype) if per_sample_weights is None else kept * per_sample_weights
        held = rows * share.unsqueeze(-1)
        made = weight.new_zeros(starts.shape[0], weight.shape[1]).index_put((bags,), held, accumulate=True)
        made = made / counts.clamp_min(1).unsqueeze(-1) if mode == _MEAN else made
    return made, bags, counts, largest


def _embedding_bag_of_backward(weight: Tensor, indices: Tensor, offsets: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """Return the same as `embedding_bag` for the operator that autograd calls, where padding_idx=-1 means none."""
    if options and options[0]:
        reason = "with scale_grad_by_freq=True PyTorch divides gradients by the counts of other rows: leave it out"
        raise UnsupportedError("aten._embedding_bag", reason)
    padding = options[5] if len(options) > 5 else -1
    own = None if padding == -1 else padding
    return embedding_bag(weight, indices, offsets, *options[:5], padding_idx=own)  # type: ignore[misc]


def _embedding_bag_backward(
    gradient: Tensor, indices: Tensor, offsets: Tensor, bags: Tensor, counts: Tensor, largest: Tensor, num_weights: Any,
    scale_grad_by_freq: bool, mode: int, sparse: bool, per_sample_weights: Tensor | None, padding_idx: int = -1,
) -> Tensor:  # fmt: skip
    """Return the gradient of the embedding table."""
    made = gradient.new_zeros(num_weights, gradient.shape[1])
    if mode == _MAX:
        return made.scatter_add(0, largest, torch.where((counts > 0).unsqueeze(-1), gradient, 0.0))
    share = (indices != padding_idx).to(gradient.dtype)
    share = share if per_sample_weights is None else share * per_sample_weights
    if mode == _MEAN:
        share = share / counts.clamp_min(1)[bags]
    return made.index_put((indices,), gradient[bags] * share.unsqueeze(-1), accumulate=True)


def through(gradient: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply a tensor by one matrix along each of its last dims."""
    for number, matrix in enumerate(matrices):
        dim = number - len(matrices)
        gradient = torch.matmul(gradient.transpose(dim, -1), matrix).transpose(dim, -1)
    return gradient


def each(values: Sizes, dims: int) -> list[Any]:
    """Return one number per dim; a single number is repeated for all."""
    return list(values) * dims if len(values) == 1 else list(values)


BACKWARD: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit.default: _batch_norm,
    aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, training, momentum, eps: _batch_norm(
        x, weight, bias, None, None, training, momentum, eps
    ),
    aten._batch_norm_with_update.default: lambda x, weight, bias, mean, var, momentum, eps: (
        *_batch_norm(x, weight, bias, mean, var, True, momentum, eps),
        x.new_empty(0, dtype=torch.uint8),
    ),
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices_backward.default: lambda g, x, *o: _to_places(g, x, o[-1], 2),
    aten.max_pool3d_with_indices_backward.default: lambda g, x, *o: _to_places(g, x, o[-1], 3),
    aten.adaptive_max_pool2d_backward.default: lambda g, x, places: _to_places(g, x, places, 2),
    aten.adaptive_max_pool3d_backward.default: lambda g, x, places: _to_places(g, x, places, 3),
    aten.avg_pool2d_backward.default: partial(_average_pool_backward, 2),
    aten.avg_pool3d_backward.default: partial(_average_pool_backward, 3),
    aten._adaptive_avg_pool2d_backward.default: partial(_adaptive_average_pool_backward, 2),
    aten._adaptive_avg_pool3d_backward.default: partial(_adaptive_average_pool_backward, 3),
    aten._embedding_bag.default: _embedding_bag_of_backward,
    aten._embedding_bag_forward_only.default: _embedding_bag_of_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: lambda g, weight, indices, _, bags, mode, padding=-1: (
        (g[bags] * weight[indices]).sum(1) * (indices != padding)
    ),
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten._weight_norm_interface_backward.default: aten._weight_norm_differentiable_backward.default,
    aten.replication_pad1d_backward.default: _by_autograd(aten.replication_pad1d.default),
    aten.replication_pad2d_backward.default: _by_autograd(aten.replication_pad2d.default),
    aten.replication_pad3d_backward.default: _by_autograd(aten.replication_pad3d.default),
    aten.grid_sampler_2d_backward.default: lambda *a: _by_autograd(aten.grid_sampler_2d.default, 2)(*a[:-1]),
    # Torch itself decomposes all other interpolations.
    aten._upsample_bilinear2d_aa_backward.default: _antialias_backward(aten._upsample_bilinear2d_aa.default),
    aten._upsample_bicubic2d_aa_backward.default: _antialias_backward(aten._upsample_bicubic2d_aa.default),
}
