"""The operators that rewritten graphs are made of: `torch.ops.cpt_fx.*`.

Each is one readable node. The Autograd kernel is composite: compilers trace through it, so it fuses with its
neighbours. Eager code runs the same, or on CPU a native kernel with the same bits. Bit-widths are 0-dim tensors and
never read while tracing; in eager code, where reading a CPU tensor is free, full precision skips the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from cpt_fx.common.compilers import skip_frame
from cpt_fx.common.functorch import are_gradients, each, is_transformed, plain, write
from cpt_fx.common.resources import digest_of_code
from cpt_fx.formats import Range
from cpt_fx.quantizers import numerics
from cpt_fx.quantizers.counters import DIFFERENTIATED, SKIPPED, SPARSE
from cpt_fx.quantizers.kernels import Running
from cpt_fx.quantizers.numerics import Grid, ValueRange, percentile_range, range_of
from cpt_fx.quantizers.recompute import is_recomputing, keep_sources
from cpt_fx.quantizers.straight_through import Identity, arm, by_kernel, count, grid_of, note, passes, straight_through
from cpt_fx.quantizers.widths import host_value, on_device

_GRID = (
    "int[] keep=[], int[]? over=None, str scheme='affine', str rounding='{rounding}', int exponent=0, "
    "str specials='none', int block=0, bool floored=True"
)
# No argument is called `mode`: torch passes arguments by name to internal functions that have one of that name.
_RUNNING = (
    "(Tensor x, Tensor bits, Tensor(a!) zero_point, Tensor(b!) range, Tensor(c!) weight, bool training, *, "
    f"{_GRID.format(rounding='nearest')}, "
)


class _GradientThrough(Identity):
    """Identity forward, a hook backward; for torch.func, which ignores tensor hooks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.hook = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.hook(gradient), None


def _for_any_tensor(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Extend a kernel to complex tensors, whose real and imaginary parts share ranges, and to sparse ones.

    A sparse tensor (an adjacency matrix) is returned unquantized, and counted as skipped.
    """

    @wraps(kernel)
    def run(x: Tensor, bits: Tensor, *args: Any, **options: Any) -> Tensor:
        if x.layout is not torch.strided:
            if options.get("counters") is not None:
                count(options["counters"])
                count(options["counters"], SKIPPED, SPARSE)
            return x
        bits = on_device(bits, x.device)
        if args and args[0].device != x.device:
            *held, training = args
            return _with_range_near(run, x, bits, held, training, options)
        if not x.is_complex():
            return kernel(x, bits, *args, **options)
        parts = torch.view_as_real(x.resolve_conj())
        result = kernel(parts, bits, *args, **options | _with_parts(options, x.ndim))
        return x if result is parts else torch.view_as_complex(result)

    return run


def _with_range_near(
    run: Callable[..., Tensor], x: Tensor, bits: Tensor, held: Sequence[Tensor], training: bool, options: dict[str, Any]
) -> Tensor:
    """Quantize with a running range that is on another device, as it may be for a product without a layer."""
    near = [state.to(x.device) for state in held]
    result = run(x, bits, *near, training, **options)
    with torch.no_grad():
        for state, learned in zip(held, near, strict=True):
            state.copy_(learned)
    return result


def _with_parts(options: dict[str, Any], ndim: int) -> dict[str, Any]:
    """Return `keep` and `over` for a complex tensor viewed as real: the parts are a last dim, negative dims shift."""
    if ndim < 2:
        return {"keep": [], "over": None}  # a vector has one range
    keep, over = options.get("keep", ()), options.get("over")
    moved: dict[str, Any] = {"keep": [dim - (dim < 0) for dim in keep]}
    if over is not None:
        moved["over"] = [*(dim - (dim < 0) for dim in over), -1]
    return moved


@_for_any_tensor
def _fake_quantize(
    x: Tensor, bits: Tensor, *, zero_point: Tensor | None = None, range: Tensor | None = None,
    counters: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    value_range = None if zero_point is None or range is None else ValueRange(zero_point, range)
    return straight_through(x, bits, grid_of(options, "nearest"), value_range, counters)


def _quantized_gradient(bits: Tensor, grid: Grid, counters: Tensor | None, gradient: Tensor) -> Tensor:
    """Quantize a gradient in the backward pass."""
    if counters is not None and torch.is_grad_enabled() and (plain(gradient).requires_grad or not is_transformed()):
        arm(counters, DIFFERENTIATED)
    if gradient.layout is not torch.strided:
        return gradient
    if are_gradients(gradient):
        whole: Tensor = each(partial(_quantized_gradient, bits, grid, counters), gradient)
        return whole
    parts = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    quantized = straight_through(parts, bits, grid, None, counters)
    return torch.view_as_complex(quantized) if gradient.is_complex() else quantized


def _quantize_gradient(x: Tensor, bits: Tensor, *, counters: Tensor | None = None, **options: Any) -> Tensor:
    if counters is not None:
        arm(counters, 1 + x.requires_grad)
    if not (x.requires_grad or is_transformed()):
        return x
    bits = on_device(bits, x.device)
    grid = grid_of(options | _with_parts(options, x.ndim) if x.is_complex() else options, "stochastic")

    hook = partial(_quantized_gradient, bits, grid, counters)
    if is_transformed():
        transformed: Tensor = _GradientThrough.apply(x, hook)  # type: ignore[no-untyped-call]
        return transformed
    if x.is_leaf:
        # A hook on a leaf would outlive this call, and there would be one more after every step.
        x = x.view_as(x)
    if host_value(bits) is not None:
        keep_sources(x)
    if x._is_view():
        # A linear layer returns a batch of sequences as a view. A following in-place op would bypass the hook of a view
        # and write to its base; nothing else reads the base here, so the view can be cut off from it.
        x = torch.ops.aten._unsafe_view(x, x.shape)
    # On the layer's own output: one quantized gradient serves input, weight and bias, no node is added to the autograd
    # graph, and the hook stays in place when an in-place op follows.
    x.register_hook(hook)
    return x


@_for_any_tensor
def _fake_quantize_observed(
    x: Tensor, bits: Tensor, zero_point: Tensor, range: Tensor, weight: Tensor, training: bool, *,
    momentum: float = 0.9, corrected: bool = True, when_off: bool = False, percentile: float = 100.0,
    trains: Tensor | None = None, counters: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    running = Running(zero_point, range, weight, momentum)
    if trains is not None and (known := host_value(trains)) is not None:
        training, trains = bool(known), None
    learn = partial(_learn, x, bits, running, when_off, percentile, counters)
    grid = grid_of(options, "nearest")
    if trains is not None:
        # First, since `learn` overwrites the running range.
        recalled = _recall(x, running, corrected, percentile)
        used = _by_mode(trains, learn(trains), recalled)
    elif training:
        if percentile >= 100:
            running = running._replace(momentum=-1.0 if is_recomputing() else momentum)
            served = by_kernel(x, bits, grid, None, counters, running)
            if served is not None:
                return served
        used = learn()
    else:
        used = _recall(x, running, corrected, percentile)
    return straight_through(x, bits, grid, used, counters)


@torch.no_grad()
def _learn(
    x: Tensor, bits: Tensor, running: Running, when_off: bool, percentile: float, counters: Tensor | None,
    trains: Tensor | None = None,
) -> ValueRange:  # fmt: skip
    """Return the batch's own range, and update the running range with it; with `trains`, only where that is True.

    A batch that is not finite is ignored: the training loop skips it, too.
    """
    if x.numel() == 0:
        return ValueRange(running.zero_point, running.range)
    batch = _value_range(x, percentile)
    if is_recomputing():
        return batch
    on = torch.ones_like(bits, dtype=torch.bool) if when_off else bits > 0
    if trains is not None:
        on = on & trains
    zero_point, range, weight, momentum = running
    values = (batch.zero_point.to(zero_point.dtype), batch.range.to(range.dtype), torch.ones_like(weight))
    # Checked in the dtype of the running range.
    finite = (values[0] + values[1]).isfinite()
    for state, value in zip((zero_point, range, weight), values, strict=True):
        # The published expression, in its order: float addition is not associative.
        updated = state * momentum + value * (1 - momentum)
        write(state, torch.where(on & finite, updated, state), "a running range")
    if counters is not None:
        count(counters, SKIPPED, on & finite.logical_not())
    return batch


@torch.no_grad()
def _recall(x: Tensor, running: Running, corrected: bool, percentile: float) -> ValueRange:
    """Return the running range; before any training there is none, and the tensor's own range is used."""
    zero_point, range, weight, _ = running
    if x.numel() == 0:
        return ValueRange(zero_point.clone(), range.clone())
    share = weight if corrected else torch.ones_like(weight)
    learned = host_value(weight > 0)
    if learned:
        return ValueRange(zero_point / share, range / share)
    batch = _value_range(x, percentile)
    if learned is not None:
        return batch
    dtype = zero_point.dtype
    own = ValueRange(batch.zero_point.to(dtype), batch.range.to(dtype), batch.maximum().to(dtype))
    return _by_mode(weight > 0, ValueRange(zero_point / share, range / share), own)


def _by_mode(first: Tensor, one: ValueRange, other: ValueRange) -> ValueRange:
    """Return one of two ranges, chosen by a tensor."""
    return ValueRange(
        torch.where(first, one.zero_point, other.zero_point),
        torch.where(first, one.range, other.range),
        torch.where(first, one.maximum(), other.maximum()),
    )


def _value_range(x: Tensor, percentile: float) -> ValueRange:
    return range_of(x, (), None) if percentile >= 100 else percentile_range(x, percentile)


class LearnedRange(torch.autograd.Function):
    """Quantize over a given range, with gradients to the tensor and to both ends of the range.

    With u = (x - z) / s, s = r / L and k the code, the result is k * s + z. Rounding passes the gradient through, so
    inside the range d/dx = 1, d/dr = (k - u) / L, d/dz = 0; outside d/dx = 0, d/dz = 1, and d/dr is 1 above, 0 below.
    The gradients of the range are divided by sqrt(N * L), N the number of elements: otherwise they grow with the size
    of the tensor, and one learning rate would not do for weights and ranges.
    """

    @staticmethod
    def forward(x: Tensor, zero_point: Tensor, range: Tensor, bits: Tensor, grid: Grid) -> Tensor:
        """Quantize. If the bit-width is known to be full precision, draw no random numbers."""
        if passes(bits):
            # The layout is kept, for the last bits of products. A view must not be written in place, as addmm_ does.
            copied = torch.empty_like(x)
            return copied.copy_(x) if copied.stride() == x.stride() else x.view_as(x)
        return numerics.quantize_or_pass(x, bits.to(torch.int64), grid, ValueRange(zero_point, range))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensor: the backward pass computes again which elements were clamped."""
        x, zero_point, range, bits, grid = inputs
        ctx.floored = grid.floored
        # Copies: a layer that is called twice, or an optimizer, may write the range before the backward pass.
        ctx.save_for_backward(x, zero_point.clone(), range.clone(), bits.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensor, the zero point and the range."""
        x, zero_point, range, bits = ctx.saved_tensors
        if passes(bits):  # as it came: another memory layout would change the last bits of products
            return gradient, torch.zeros_like(zero_point), torch.zeros_like(range), None, None
        dtype = numerics.working_dtype(x)
        width = bits.to(torch.int64)
        full = numerics.passes(width)
        levels = numerics.levels_of(width, dtype)
        u = (x.to(dtype) - zero_point) / numerics.divisor(numerics.affine_scale(range, levels, floored=ctx.floored))
        above, below = u > levels, u < 0
        inside = ~(above | below)
        upstream = gradient.to(dtype)
        to_x = torch.where(inside | full, upstream, torch.zeros_like(upstream)).to(gradient.dtype)
        slope = torch.where(inside, (u.round() - u) / levels, above.to(dtype))
        share = torch.where(full, torch.zeros_like(levels), torch.rsqrt(levels * max(x.numel(), 1)))
        to_range = ((upstream * slope).sum() * share).to(range.dtype).reshape(range.shape)
        to_zero = ((upstream * ~inside).sum() * share).to(zero_point.dtype).reshape(zero_point.shape)
        return to_x, to_zero, to_range, None, None


@_for_any_tensor
def _fake_quantize_learned(
    x: Tensor, bits: Tensor, zero_point: Tensor, range: Tensor, weight: Tensor, training: bool, *,
    trains: Tensor | None = None, counters: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    grid = grid_of(options | {"floored": False}, "nearest")
    if x.numel():
        # The first finite tensor initializes the range.
        _learn(x, bits, Running(zero_point, range, weight, 0.0), True, 100.0, counters, weight <= 0)
        known = torch.where(weight > 0, 0.0, torch.nan).to(range.dtype)
        range = range + known  # NaN while there is none: tensors that are not finite stay visible
    result: Tensor = LearnedRange.apply(x, zero_point, range, bits, grid)  # type: ignore[no-untyped-call]
    note(counters, x, result, bits, grid)
    return result


# If forward itself computes gradients, a compiler around it would take the backward pass for the model's code.
for _function in (_quantized_gradient, LearnedRange.backward):
    skip_frame(_function.__code__, inside=True)


# Compilers cache compiled graphs on disk, under keys with the names of operators. They trace through ours, whose code
# may change from one version to the next: so a hash of our code becomes part of the keys.
torch.compiler.config.cache_key_tag += f" cpt_fx:{digest_of_code()}"
LIBRARY = torch.library.Library("cpt_fx", "DEF")


def define(schema: str, kernel: Callable[..., Any], *keys: str) -> Callable[..., Any]:
    """Define an operator. Composite ones have one implementation for all dispatch keys.

    There are three default keys: `inference_mode` skips Autograd, and torch.func decomposes the operator first.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    for key in keys or ("FuncTorchDynamicLayerFrontMode", "Autograd", "CompositeExplicitAutograd"):
        LIBRARY.impl(name, kernel, key)
    operator: Callable[..., Any] = getattr(torch.ops.cpt_fx, name).default
    return operator


FAKE_QUANTIZE = define(
    f"fake_quantize(Tensor x, Tensor bits, *, {_GRID.format(rounding='nearest')}, Tensor? zero_point=None, "
    "Tensor? range=None, Tensor(a!)? counters=None) -> Tensor",
    _fake_quantize,
)
QUANTIZE_GRADIENT = define(
    f"quantize_gradient(Tensor(a) x, Tensor bits, *, {_GRID.format(rounding='stochastic')}, Tensor? counters=None) "
    "-> Tensor(a)",
    _quantize_gradient,
)
FAKE_QUANTIZE_OBSERVED = define(
    f"fake_quantize_observed{_RUNNING}float momentum=0.9, bool corrected=True, bool when_off=False, "
    "float percentile=100., Tensor? trains=None, Tensor(d!)? counters=None) -> Tensor",
    _fake_quantize_observed,
)
FAKE_QUANTIZE_LEARNED = define(
    f"fake_quantize_learned{_RUNNING}Tensor? trains=None, Tensor(d!)? counters=None) -> Tensor", _fake_quantize_learned
)
QUANTIZERS = (FAKE_QUANTIZE, FAKE_QUANTIZE_OBSERVED, FAKE_QUANTIZE_LEARNED, QUANTIZE_GRADIENT)
"""Every op that quantizes."""
OP_OF_RANGE = {
    Range.DYNAMIC: FAKE_QUANTIZE,
    Range.OBSERVER: FAKE_QUANTIZE_OBSERVED,
    Range.PERCENTILE: FAKE_QUANTIZE_OBSERVED,
    Range.LEARNED: FAKE_QUANTIZE_LEARNED,
}
"""The op for each source of ranges. All but the first keep state in the layer."""
