"""The operators of a lowered graph: `torch.ops.cpt_fx.to_integer`, `integer_linear`, `integer_matmul`, `integer_conv`.

`to_integer` replaces the quantizer of an operand. It returns a list for the products that read it: a tensor that
carries the gradient, then the operand, which is codes and scale (in a compiled graph, floating point numbers as well).
A list of one tensor is an operand in simulated form: above 8 bits in eager code, and where a tensor cannot have
codes. Two such operands are multiplied by the operators of simulated execution.

A product quantizes the gradient of its result once, and multiplies it with both operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cpt_fx.common.compilers import skip_frame
from cpt_fx.common.functorch import are_gradients, each, is_transformed
from cpt_fx.integer import operands, products
from cpt_fx.integer.counts import ProductOutcome
from cpt_fx.integer.kernels import Geometry
from cpt_fx.integer.operands import Operand
from cpt_fx.integer.products import Options, Product
from cpt_fx.quantizers.counters import DIFFERENTIATED
from cpt_fx.quantizers.numerics import Grid
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, QUANTIZE_GRADIENT, define
from cpt_fx.quantizers.straight_through import Identity, arm

_GRID = "int[] keep=[], int[]? over=None, str rounding='{rounding}'"
_PRODUCT = _GRID.format(rounding="stochastic") + ", Tensor(a!)? counters=None, Tensor(b!)? counts=None) -> Tensor"
_STILL = Geometry()
"""The geometry of products other than convolutions, and of the added height of a convolution in one dim."""


class _Kind(NamedTuple):
    """One kind of product."""

    products: tuple[Product, Product, Product]
    """Forward, the gradient of the left operand, that of the right one."""
    simulated: Callable[[Tensor, Tensor, Tensor | None, Geometry], Tensor]
    shape: Callable[[Sequence[int], Sequence[int], Geometry], tuple[int, ...]]
    """Returns the shape of the result from those of the operands."""
    channel: int = -1
    """The dim of the result that a bias belongs to."""


def _add_product(a: Tensor, b: Tensor, addend: Tensor | None, geometry: Geometry) -> Tensor:
    return torch.matmul(a, b) if addend is None else torch.addmm(addend, a, b)


def _matmul_shape(a: Sequence[int], b: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    batch = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    return (*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    if w.ndim == 4:
        return torch.conv2d(x, w, bias, *geometry)
    stride, padding, dilation = (pair[1:] for pair in geometry)
    return torch.conv1d(x, w, bias, stride, padding, dilation)


_LINEAR = _Kind(
    (products.linear_forward, products.linear_grad_input, products.linear_grad_weight),
    lambda x, w, bias, geometry: F.linear(x, w, bias),
    lambda x, w, geometry: (*x[:-1], *w[:-1]),
)
_MATMUL = _Kind(
    (products.matmul_forward, products.matmul_grad_left, products.matmul_grad_right), _add_product, _matmul_shape
)
_CONV = _Kind(
    (products.conv2d_forward, products.conv2d_grad_input, products.conv2d_grad_weight),
    _convolve,
    lambda x, w, geometry: (x[0], w[0], *geometry.output_size(x[2:], w[2:])),
    channel=1,
)


def _geometry_of(dims: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Geometry:
    """Return the geometry of a convolution in one or two dims; in one dim, images have a height of 1."""
    given = (tuple(values) * dims if len(values) == 1 else tuple(values) for values in (stride, padding, dilation))
    return Geometry(*((*still[: 2 - dims], *moved) for still, moved in zip(_STILL, given, strict=True)))


def _as_images(operand: Operand, ndim: int, dims: int) -> Operand:
    """Give an operand of `ndim` dims the four of a 2d convolution; the filter moves in `dims` of them."""
    places = [0] * (ndim < dims + 2) + [2] * (dims == 1)
    for place in places:
        operand = [part.unsqueeze(place) if part.ndim else part for part in operand]
    return operand


def _without_added(shape: tuple[int, ...], ndim: int, dims: int) -> tuple[int, ...]:
    """Return the shape of a result without the dims that `_as_images` added."""
    images, channels, *sizes = shape
    return (*((images,) if ndim == dims + 2 else ()), channels, *sizes[2 - dims :])


class _Quantize(torch.autograd.Function):
    """Quantize an operand of a product; the gradient of the first output is the gradient of the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: Tensor, grid: Grid, counters: Tensor | None) -> tuple[Tensor, ...]:
        operand = operands.quantized(x, bits, grid, counters)
        ctx.mark_non_differentiable(*operand)
        ctx.set_materialize_grads(False)
        # Not the tensor itself: its autograd node changes if it is overwritten later.
        return (x.new_empty(()).expand(x.shape), *operand)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients[0], None, None, None


def _to_integer(x: Tensor, bits: Tensor, *, counters: Tensor | None = None, **options: Any) -> list[Tensor]:
    grid = operands.symmetric(options, "nearest")
    if operands.has_no_codes(x, bits):
        return [FAKE_QUANTIZE(x, bits, **grid.keywords(), counters=counters)]
    return list(_Quantize.apply(x, bits, grid, counters))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Job:
    """Everything about a product but its operands."""

    kind: _Kind
    geometry: Geometry
    bits: Tensor | None
    grid: Grid
    counters: Tensor | None
    counts: Tensor | None
    dtype: torch.dtype
    """Of the result."""


class _Multiply(torch.autograd.Function):
    """A product and its gradients. For the backward pass it saves operands as codes if it multiplies codes."""

    @staticmethod
    def forward(
        ctx: Any, left_edge: Tensor, right_edge: Tensor, bias: Tensor | None, left: Operand, right: Operand, job: _Job
    ) -> Tensor:
        needs_left, needs_right = ctx.needs_input_grad[:2]
        ctx.weights = operands.weight_of(left), operands.weight_of(right)
        kept_left = left if needs_right and ctx.weights[0] is None else ()
        kept_right = right if needs_left and ctx.weights[1] is None else ()
        ctx.save_for_backward(*kept_left, *kept_right)
        ctx.split = len(kept_left)
        # Held, not saved: a schedule may write the bit-width before the backward pass, which then uses the new one.
        ctx.job, ctx.edges = job, (left_edge, right_edge)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        left, right = _images(ctx, left, right)
        ctx.factors = left[0].shape, right[0].shape
        shape = job.kind.shape(left[0].shape, right[0].shape, job.geometry)
        call = Options(bias, shape, job.geometry)
        result = operands.multiply(job.kind.products[0], call, left, right, (job.dtype, job.dtype), job.counts)
        if job.kind is _CONV:
            shape = _without_added(shape, left_edge.ndim, right_edge.ndim - 2)
        return _no_view(result, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if are_gradients(gradient):
            return tuple(each(partial(_Multiply.backward, ctx), gradient))
        job: _Job = ctx.job
        saved = ctx.saved_tensors  # once: checkpointing counts the accesses
        left, right = (
            weight.again() if weight is not None and needed else parts
            for weight, needed, parts in zip(
                ctx.weights, ctx.needs_input_grad[1::-1], (saved[: ctx.split], saved[ctx.split :]), strict=True
            )
        )
        if torch.is_grad_enabled():
            found, factor = _differentiable(ctx, gradient, left, right)
        else:
            factor = (gradient,)
            if job.bits is not None:
                factor = operands.quantized(gradient, job.bits, job.grid, job.counters)
            found = _gradients(ctx, factor, left, right, gradient.dtype)
        bias = None
        if ctx.needs_input_grad[2]:
            # The gradient of a single image has no batch dim: its channels are one dim further to the front.
            channel = job.kind.channel - (job.kind is _CONV and ctx.edges[0].ndim < ctx.edges[1].ndim)
            shape, dtype = ctx.bias
            bias = operands.summed(factor, shape, dtype, channel)
        return *found, bias, None, None, None


def _images(ctx: Any, left: Operand, right: Operand) -> tuple[Operand, Operand]:
    """Return operands, or a gradient and an operand, with four dims for a convolution."""
    if ctx.job.kind is not _CONV:
        return left, right
    dims = ctx.edges[1].ndim - 2
    return _as_images(left, ctx.edges[0].ndim, dims), _as_images(right, ctx.edges[1].ndim, dims)


def _gradients(
    ctx: Any, factor: Operand, left: Operand, right: Operand, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Multiply the gradient of a product with its operands."""
    job: _Job = ctx.job
    found: list[Tensor | None] = []
    images, _ = _images(ctx, factor, right)
    left, right = _images(ctx, left, right)
    for which, other in enumerate((right, left)):
        if not ctx.needs_input_grad[which]:
            found.append(None)
            continue
        edge = ctx.edges[which]
        call = Options(shape=ctx.factors[which], geometry=job.geometry)
        product = job.kind.products[1 + which]
        found.append(operands.multiply(product, call, images, other, (dtype, edge.dtype), job.counts).view(edge.shape))
    return found[0], found[1]


def _differentiable(
    ctx: Any, gradient: Tensor, left: Operand, right: Operand
) -> tuple[tuple[Tensor | None, Tensor | None], Operand]:
    """Return the gradients as simulated execution computes them, so that they can be differentiated again."""
    job: _Job = ctx.job
    if job.bits is not None:
        if job.counters is not None:
            arm(job.counters, DIFFERENTIATED)
        gradient = FAKE_QUANTIZE(gradient, job.bits, **job.grid.keywords(), counters=job.counters)
    values = []
    for edge, operand in zip(ctx.edges, (left, right), strict=True):
        # An operand that was not saved does not occur in any requested gradient.
        value = _Dequantize.apply(edge, operand) if operand else torch.zeros_like(edge)  # type: ignore[no-untyped-call]
        values.append(value if value.requires_grad else value.requires_grad_())
    result = job.kind.simulated(values[0].to(job.dtype), values[1].to(job.dtype), None, job.geometry)
    needed = [which for which in (0, 1) if ctx.needs_input_grad[which]]
    made = torch.autograd.grad(result, [values[which] for which in needed], gradient, create_graph=True)
    if job.counts is not None:
        _count(job.counts, [1 + which for which in needed], ProductOutcome.DIFFERENTIATED)
    found = dict(zip(needed, made, strict=True))
    return (found.get(0), found.get(1)), (gradient,)


def _no_view(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in a shape, but not as a view: an in-place op may follow."""
    if result._base is None and tuple(result.shape) == shape:
        return result
    owned: Tensor = torch.ops.aten._unsafe_view.default(result, shape)
    return owned


class _Dequantize(Identity):
    """Dequantize an operand for a product that runs as in simulated execution."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, operand: Operand) -> Tensor:
        return operands.dequantized(operand, edge.dtype)


# If forward itself computes gradients, a compiler around it would take the backward pass for the model's code.
for _function in (_Quantize, _Multiply):
    skip_frame(_function.backward.__code__, inside=True)


def _product(
    kind: _Kind, left: list[Tensor], bits: Tensor | None, right: list[Tensor], bias: Tensor | None = None,
    geometry: Geometry = _STILL, *, counters: Tensor | None = None, counts: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    edges = left[0], right[0]
    simulated = len(left) == len(right) == 1
    supported = all(len(part) > 1 or operands.is_supported(part[0]) for part in (left, right))
    device = edges[0].device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else edges[0].dtype
    job = _Job(kind, geometry, bits, operands.symmetric(options, "stochastic"), counters, counts, dtype)
    if simulated or not supported or (edges[0].dtype != edges[1].dtype and not autocast):
        values = [part[0] if len(part) == 1 else _Dequantize.apply(part[0], _operand(part)) for part in (left, right)]  # type: ignore[no-untyped-call]
        return _simulated(job, values, bias)
    result: Tensor = _Multiply.apply(*edges, bias, _operand(left), _operand(right), job)  # type: ignore[no-untyped-call]
    if counters is not None:
        arm(counters, 1 + result.requires_grad)
    return result


def _operand(parts: list[Tensor]) -> Operand:
    """Return the operand in a list of `to_integer`; in simulated form that is the tensor itself."""
    return parts[1:] or [parts[0].detach()]


def _simulated(job: _Job, values: list[Tensor], bias: Tensor | None) -> Tensor:
    """Multiply as simulated execution does, and count it."""
    result = job.kind.simulated(values[0], values[1], bias, job.geometry)
    counts = job.counts
    # Under torch.func, counters can only be written inside an autograd function.
    if counts is not None and not is_transformed():
        outcome = ProductOutcome.WIDTH
        if not all(map(operands.is_supported, values)) or not all(value.numel() for value in values):
            outcome = ProductOutcome.NO_CODES
        counts[0, outcome].add_(1)
        needed = [1 + place for place, value in enumerate(values) if value.requires_grad]
        if needed and result.requires_grad:
            result.register_hook(lambda gradient: _count(counts, needed, outcome))
    if job.bits is None:
        return result
    quantized: Tensor = QUANTIZE_GRADIENT(result, job.bits, **job.grid.keywords(), counters=job.counters)
    return quantized


def _count(counts: Tensor, directions: list[int], outcome: ProductOutcome) -> None:
    for direction in directions:
        counts[direction, outcome].add_(1)


def _integer_conv(
    input: list[Tensor], bits: Tensor | None, weight: list[Tensor], bias: Tensor | None = None,
    stride: Sequence[int] = (1,), padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), **options: Any,
) -> Tensor:  # fmt: skip
    geometry = _geometry_of(weight[0].ndim - 2, stride, padding, dilation)
    return _product(_CONV, input, bits, weight, bias, geometry, **options)


TO_INTEGER = define(
    f"to_integer(Tensor x, Tensor bits, *, {_GRID.format(rounding='nearest')}, Tensor(a!)? counters=None) -> Tensor[]",
    _to_integer,
)
INTEGER_LINEAR = define(
    f"integer_linear(Tensor[] input, Tensor? bits, Tensor[] weight, Tensor? bias=None, *, {_PRODUCT}",
    partial(_product, _LINEAR),
)
INTEGER_MATMUL = define(
    f"integer_matmul(Tensor[] input, Tensor? bits, Tensor[] other, Tensor? addend=None, *, {_PRODUCT}",
    partial(_product, _MATMUL),
)
INTEGER_CONV = define(
    "integer_conv(Tensor[] input, Tensor? bits, Tensor[] weight, Tensor? bias=None, int[] stride=[1], "
    f"int[] padding=[0], int[] dilation=[1], *, {_PRODUCT}",
    _integer_conv,
)
INTEGER_PRODUCTS = (INTEGER_LINEAR, INTEGER_MATMUL, INTEGER_CONV)
"""Every op that multiplies on integers."""
