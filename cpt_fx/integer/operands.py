"""Operands of products at run time: codes at 8 bits or less, floating point numbers above.

In eager code the bit-width is known, and an operand is one or the other. A compiled graph serves all bit-widths: there
an operator that compilers do not trace into reads the bit-width at run time, and fills one of two tensors whose shapes
are known before. The other one is a `blank`: it has the shape, and no memory of its own.

Two operands are multiplied on integers if both are codes and that is faster, else in floating point; this is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cpt_fx.common.functorch import is_transformed
from cpt_fx.common.torch_private import forward_ad_level
from cpt_fx.formats import Rounding
from cpt_fx.integer import choice
from cpt_fx.integer.codes import WIDEST, Codes, quantize_codes, scale_shape
from cpt_fx.integer.counts import RATIO, ProductOutcome
from cpt_fx.integer.kernels import Geometry
from cpt_fx.integer.products import PRODUCTS, Options, Product, bias_grad
from cpt_fx.quantizers.counters import LOOKING, count_levels, show
from cpt_fx.quantizers.noise import new_seed
from cpt_fx.quantizers.numerics import Grid
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, LIBRARY, define
from cpt_fx.quantizers.recompute import check_unchanged
from cpt_fx.quantizers.straight_through import grid_of
from cpt_fx.quantizers.widths import host_value, is_free

R = TypeVar("R")
Operand = Sequence[Tensor]
"""Floating point numbers alone; codes and their scale; in a compiled graph codes, scale and numbers."""
Dtypes = tuple[torch.dtype, torch.dtype]
"""The dtypes of floating point arithmetic, and of the result."""
_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
_RAW = torch.uint32
"""The declared dtype of the floating point numbers of a compiled graph, all of them float32. Compilers reuse a buffer
that is not read any more for the next value of its dtype. That must not happen to a blank, and no other value of a
model has this dtype."""
_TRACED = 3
"""The length of an operand of a compiled graph, whose kind is known only at run time."""
_NOT_CODES = -1.0
"""The scale that marks an operand as floating point numbers. Scales of codes are not negative."""


def symmetric(options: dict[str, Any], rounding: str) -> Grid:
    """Return the symmetric grid of an operator's options: its granularity and rounding."""
    return grid_of({**options, "scheme": "symmetric"}, rounding)


def is_supported(x: Tensor) -> bool:
    """Return whether a tensor can have codes: others, on other devices or under transforms, are simulated."""
    ordinary = x.layout is torch.strided and x.dtype in _SUPPORTED and x.device.type == "cpu"
    return ordinary and not is_transformed() and forward_ad_level() < 0


def _has_codes(x: Tensor, width: int) -> bool:
    """Return whether a tensor is multiplied by its codes at a bit-width."""
    return 1 <= width <= WIDEST and x.numel() > 0


def has_no_codes(x: Tensor, bits: Tensor) -> bool:
    """Return whether a tensor is known to be quantized as in simulated execution."""
    width = host_value(bits)
    return not is_supported(x) or (width is not None and not _has_codes(x, width))


def quantized(x: Tensor, bits: Tensor, grid: Grid, counters: Tensor | None) -> Operand:
    """Quantize a tensor at its bit-width: to codes, or, if it cannot have them, as in simulated execution."""
    if has_no_codes(x, bits):
        return (_simulated(x, bits, grid, counters),)
    width = host_value(bits)
    if width is None:
        seed = new_seed(x.device) if grid.rounding is Rounding.STOCHASTIC else None
        return QUANTIZE(x, bits, seed, grid.keep, grid.over, grid.rounding.value, counters)
    codes = _codes(x, width, grid, None, counters)
    if isinstance(x, torch.nn.Parameter) and grid.rounding is Rounding.NEAREST:
        setattr(codes.values, _WEIGHT, Weight(x.detach(), x._version, width, grid))
    return codes


class Weight(NamedTuple):
    """A parameter whose codes the backward pass computes again instead of saving them, in eager code."""

    parameter: Tensor
    version: int
    width: int
    grid: Grid

    def again(self) -> Codes:
        """Compute the codes again."""
        check_unchanged(self.parameter, self.version)
        return _codes(self.parameter, self.width, self.grid, None, None)


_WEIGHT = "_cpt_fx_weight"


def weight_of(operand: Operand) -> Weight | None:
    """Return the parameter that an operand is made of, if there is one."""
    return getattr(operand[0], _WEIGHT, None)


def _simulated(x: Tensor, bits: Tensor, grid: Grid, counters: Tensor | None) -> Tensor:
    result: Tensor = FAKE_QUANTIZE(x, bits, **grid.keywords(), counters=counters)
    return result


def _codes(x: Tensor, width: int, grid: Grid, seed: Tensor | None, counters: Tensor | None) -> Codes:
    codes = quantize_codes(x, width, grid, seed)
    if counters is not None:
        counters[0].add_(1)
        if is_free(counters) and not int(counters[width]):
            count_levels(counters, x, codes.dequantized(), width, grid)
    if LOOKING:
        show(codes.values, width, grid, counters)
    return codes


@cache
def _blank_memory(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=_RAW, device=device)


def blank(shape: torch.Size, device: torch.device) -> Tensor:
    """Return a tensor that is never read. All of one size share memory, which is never written."""
    return _blank_memory(shape.numel(), device)[: shape.numel()].view(shape)


def _quantize_at_run_time(
    x: Tensor, bits: Tensor, seed: Tensor | None, keep: list[int], over: list[int] | None, rounding: str,
    counters: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grid = symmetric({"keep": keep, "over": over}, rounding)
    width = int(bits)
    if _has_codes(x, width):
        codes, scale = _codes(x, width, grid, seed, counters)
        return codes.contiguous(), scale, blank(x.shape, x.device)
    # A copy if nothing was rounded: an operator must not return one of its arguments.
    wide = _simulated(x, bits, grid, counters).to(torch.float32).contiguous()
    wide = wide.clone() if wide.data_ptr() == x.data_ptr() else wide
    scale = x.new_full(scale_shape(grid, x.shape), _NOT_CODES, dtype=torch.float32)
    # Never written, so that it takes no memory on a CPU.
    return torch.empty(x.shape, dtype=torch.int8, device=x.device), scale, wide.view(_RAW)


def _quantize_shapes(
    x: Tensor, bits: Tensor, seed: Tensor | None, keep: list[int], over: list[int] | None, rounding: str,
    counters: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grid = symmetric({"keep": keep, "over": over}, rounding)
    codes, wide = (torch.empty(x.shape, dtype=dtype, device=x.device) for dtype in (torch.int8, _RAW))
    return codes, x.new_empty(scale_shape(grid, x.shape), dtype=torch.float32), wide


def revealed(operand: Operand) -> Codes | Tensor:
    """Return the codes or the floating point numbers that an operand holds at run time."""
    first, *rest = operand
    if not rest:
        return first
    scale, *wide = rest
    if wide and (not first.numel() or float(scale.view(-1)[0]) == _NOT_CODES):
        return wide[0].view(torch.float32)
    return Codes(first, scale)


def value_of(factor: Codes | Tensor, dtype: torch.dtype) -> Tensor:
    """Return a factor as floating point numbers, as simulated execution multiplies them."""
    value = (factor.dequantized() if isinstance(factor, Codes) else factor).to(dtype)
    if LOOKING and isinstance(factor, Codes):
        show(value, None, Grid())
    return value


def _dequantize_at_run_time(operand: Operand, dtype: torch.dtype) -> Tensor:
    value = value_of(revealed(operand), dtype)
    return value.clone() if value.data_ptr() == operand[-1].data_ptr() else value


def dequantized(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand as the tensor that simulated execution multiplies."""
    return DEQUANTIZE(operand, dtype) if len(operand) == _TRACED else value_of(revealed(operand), dtype)


def summed(operand: Operand, shape: Sequence[int], dtype: torch.dtype, channel: int) -> Tensor:
    """Sum an operand to the shape of a bias; a shape with one dim is that of the channels."""
    return (SUM if len(operand) == _TRACED else _summed)(operand, shape, dtype, channel)


def _summed(operand: Operand, shape: Sequence[int], dtype: torch.dtype, channel: int) -> Tensor:
    factor = revealed(operand)
    values = factor.values if isinstance(factor, Codes) else factor
    if len(shape) != 1 or shape[0] != values.shape[channel]:
        return value_of(factor, dtype).sum_to_size(tuple(shape))
    if isinstance(factor, Codes):
        return bias_grad(factor, channel, dtype)
    dims = [dim for dim in range(values.ndim) if dim != channel % values.ndim]
    return (factor.sum(dims) if dims else factor.clone()).to(dtype)


def multiply(product: Product, call: Options, a: Operand, b: Operand, dtypes: Dtypes, counts: Tensor | None) -> Tensor:
    """Return a product, and count how it ran."""
    if _TRACED in (len(a), len(b)):
        geometry = [number for pair in call.geometry for number in pair]
        return MULTIPLY(product.name, a, b, call.bias, call.shape, geometry, *dtypes, counts)
    return _multiply(product, call, revealed(a), revealed(b), dtypes, counts)


def _multiply(
    product: Product, call: Options, a: Codes | Tensor, b: Codes | Tensor, dtypes: Dtypes, counts: Tensor | None
) -> Tensor:
    outcome = _outcome(product, call, a, b, counts)
    if counts is not None:
        counts[product.direction, outcome].add_(1)
    if outcome is not ProductOutcome.INTEGER:
        a, b = value_of(a, dtypes[0]), value_of(b, dtypes[0])
    return product(a, b, call, dtypes[1])


def _outcome(
    product: Product, call: Options, a: Codes | Tensor, b: Codes | Tensor, counts: Tensor | None
) -> ProductOutcome:
    """Decide how a product runs, and record the measurement behind that."""
    if not isinstance(a, Codes) or not isinstance(b, Codes):
        empty = any(isinstance(factor, Tensor) and not factor.numel() for factor in (a, b))
        return ProductOutcome.NO_CODES if empty else ProductOutcome.WIDTH
    if product.misfit(a, b):
        return ProductOutcome.GROUPS
    decision = choice.decide(product.name, a.values.shape, b.values.shape, call)
    if counts is not None and decision.measured:
        counts[product.direction, RATIO].fill_(round(1000 * decision.ratio))
    return ProductOutcome.INTEGER if decision.worth else ProductOutcome.SIZE


def _multiply_at_run_time(
    name: str, a: list[Tensor], b: list[Tensor], bias: Tensor | None, shape: list[int], geometry: list[int],
    arithmetic: torch.dtype, dtype: torch.dtype, counts: Tensor | None,
) -> Tensor:  # fmt: skip
    call = Options(bias, tuple(shape), Geometry(*zip(geometry[::2], geometry[1::2], strict=True)))
    # As declared to the compiler: this shape, contiguous.
    result = _multiply(PRODUCTS[name], call, revealed(a), revealed(b), (arithmetic, dtype), counts)
    return result.reshape(shape).contiguous()


def _opaque(schema: str, run: Callable[..., R], shapes: Callable[..., Any]) -> Callable[..., R]:
    """Define an operator that compilers do not trace into; `shapes` is its fake implementation."""
    operator = define(schema, run, "CPU")
    torch.library.register_fake(f"cpt_fx::{schema.partition('(')[0]}", shapes, lib=LIBRARY)
    return operator


QUANTIZE = _opaque(
    "_quantize(Tensor x, Tensor bits, Tensor? seed, int[] keep, int[]? over, str rounding, Tensor(a!)? counters) "
    "-> (Tensor codes, Tensor scale, Tensor wide)",
    _quantize_at_run_time,
    _quantize_shapes,
)
DEQUANTIZE = _opaque(
    "_dequantize(Tensor[] operand, ScalarType dtype) -> Tensor",
    _dequantize_at_run_time,
    lambda operand, dtype: operand[0].new_empty(operand[0].shape, dtype=dtype),
)
SUM = _opaque(
    "_sum(Tensor[] operand, SymInt[] shape, ScalarType dtype, int channel) -> Tensor",
    _summed,
    lambda operand, shape, dtype, channel: operand[0].new_empty(shape, dtype=dtype),
)
MULTIPLY = _opaque(
    "_multiply(str name, Tensor[] a, Tensor[] b, Tensor? bias, SymInt[] shape, int[] geometry, ScalarType arithmetic, "
    "ScalarType dtype, Tensor(a!)? counts) -> Tensor",
    _multiply_at_run_time,
    lambda name, a, b, bias, shape, geometry, arithmetic, dtype, counts: a[0].new_empty(shape, dtype=dtype),
)
