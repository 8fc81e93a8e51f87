"""A product and its factors while the graph runs: codes at 8 bits or less, floating point numbers above.

In eager execution the width is known and an operand is one or the other. A compiled graph is made for all widths: there
an operator that no compiler looks into reads the width when the graph runs, and fills one of two tensors whose shapes
are known before. The other one is a `blank`: it has the shape, and no memory of its own.

Two operands are multiplied on integers where both are codes and that pays, else in floating point; it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cpt_fx.evidence import LOOKING, show, witness
from cpt_fx.formats import Rounding
from cpt_fx.integer import choice
from cpt_fx.integer.codes import WIDEST, Codes, quantize_codes, scale_shape
from cpt_fx.integer.counts import RATIO, Outcome
from cpt_fx.integer.kernels import Geometry
from cpt_fx.integer.products import PRODUCTS, Call, Product, bias_grad
from cpt_fx.noise import new_seed
from cpt_fx.numerics import Grid
from cpt_fx.ops import FAKE_QUANTIZE, LIBRARY, define
from cpt_fx.saving import check_unchanged
from cpt_fx.straight_through import grid_of
from cpt_fx.transformed import is_transformed
from cpt_fx.widths import host_value, is_free

R = TypeVar("R")
Operand = Sequence[Tensor]
"""Floating point numbers alone; codes and their scale; in a graph that is being compiled codes, scale and numbers."""
Dtypes = tuple[torch.dtype, torch.dtype]
"""Of floating point arithmetic, and of the result."""
_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
_RAW = torch.uint32
"""What the floating point numbers of a compiled graph, float32 all of them, are declared as. Compilers let a buffer
that nobody reads any more hold the next value of its type. That must not happen to a blank, and no other value of a
model has this type."""
_TRACED = 3
"""The length of an operand of which only the run will tell what it is."""
_NOT_CODES = -1.0
"""A scale that says: look at the floating point numbers. Those of codes are not negative."""


def symmetric(options: dict[str, Any], rounding: str) -> Grid:
    """Return the grid that the options of an operator speak of: which elements share a scale, how they are rounded."""
    return grid_of({**options, "scheme": "symmetric"}, rounding)


def is_supported(x: Tensor) -> bool:
    """Whether a tensor can have codes: others, on other devices or under transforms, are quantized as in simulation."""
    ordinary = x.layout is torch.strided and x.dtype in _SUPPORTED and x.device.type == "cpu"
    return ordinary and not is_transformed() and forward_ad._current_level < 0


def _has_codes(x: Tensor, width: int) -> bool:
    """Whether a tensor is multiplied by its codes at a width."""
    return 1 <= width <= WIDEST and x.numel() > 0


def has_no_codes(x: Tensor, bits: Tensor) -> bool:
    """Whether it is known that a tensor is quantized as in simulation."""
    width = host_value(bits)
    return not is_supported(x) or (width is not None and not _has_codes(x, width))


def quantized(x: Tensor, bits: Tensor, grid: Grid, record: Tensor | None) -> Operand:
    """Quantize a tensor to what its width says; what is not multiplied by codes is what simulated execution has."""
    if has_no_codes(x, bits):
        return (_simulated(x, bits, grid, record),)
    width = host_value(bits)
    if width is None:
        seed = new_seed(x.device) if grid.rounding is Rounding.STOCHASTIC else None
        return QUANTIZE(x, bits, seed, grid.keep, grid.over, grid.rounding.value, record)
    codes = _codes(x, width, grid, None, record)
    if isinstance(x, torch.nn.Parameter) and grid.rounding is Rounding.NEAREST:
        setattr(codes.values, _WEIGHT, Weight(x.detach(), x._version, width, grid))
    return codes


class Weight(NamedTuple):
    """A parameter that codes were made of in eager execution: backward makes them again, instead of keeping them."""

    parameter: Tensor
    version: int
    width: int
    grid: Grid

    def again(self) -> Codes:
        """Return the codes once more."""
        check_unchanged(self.parameter, self.version)
        return _codes(self.parameter, self.width, self.grid, None, None)


_WEIGHT = "_cpt_fx_weight"


def weight_of(operand: Operand) -> Weight | None:
    """Return the parameter that an operand is made of, where that is noted."""
    return getattr(operand[0], _WEIGHT, None)


def _simulated(x: Tensor, bits: Tensor, grid: Grid, record: Tensor | None) -> Tensor:
    result: Tensor = FAKE_QUANTIZE(x, bits, **grid.keywords(), record=record)
    return result


def _codes(x: Tensor, width: int, grid: Grid, seed: Tensor | None, record: Tensor | None) -> Codes:
    codes = quantize_codes(x, width, grid, seed)
    if record is not None:
        record[0].add_(1)
        if is_free(record) and not int(record[width]):
            witness(record, x, codes.dequantized(), width, grid.keep, grid.over, 0)
    if LOOKING:
        show(codes.values, width, grid, record)
    return codes


@cache
def _emptiness(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=_RAW, device=device)


def blank(shape: torch.Size, device: torch.device) -> Tensor:
    """Return a tensor that nobody reads. All of one shape share one piece of memory, which is never written."""
    return _emptiness(shape.numel(), device)[: shape.numel()].view(shape)


def _quantize_at_run_time(
    x: Tensor, bits: Tensor, seed: Tensor | None, keep: list[int], over: list[int] | None, rounding: str,
    record: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grid = symmetric({"keep": keep, "over": over}, rounding)
    width = int(bits)
    if _has_codes(x, width):
        codes, scale = _codes(x, width, grid, seed, record)
        return codes.contiguous(), scale, blank(x.shape, x.device)
    # A copy where nothing is rounded: an operator returns none of its arguments.
    wide = _simulated(x, bits, grid, record).to(torch.float32).contiguous()
    wide = wide.clone() if wide.data_ptr() == x.data_ptr() else wide
    scale = x.new_full(scale_shape(grid, x.shape), _NOT_CODES, dtype=torch.float32)
    # Never written, which on a CPU means that it takes no memory.
    return torch.empty(x.shape, dtype=torch.int8, device=x.device), scale, wide.view(_RAW)


def _quantize_shapes(
    x: Tensor, bits: Tensor, seed: Tensor | None, keep: list[int], over: list[int] | None, rounding: str,
    record: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grid = symmetric({"keep": keep, "over": over}, rounding)
    codes, wide = (torch.empty(x.shape, dtype=dtype, device=x.device) for dtype in (torch.int8, _RAW))
    return codes, x.new_empty(scale_shape(grid, x.shape), dtype=torch.float32), wide


def revealed(operand: Operand) -> Codes | Tensor:
    """Return what an operand is, now that the graph runs."""
    first, *rest = operand
    if not rest:
        return first
    scale, *wide = rest
    if wide and (not first.numel() or float(scale.view(-1)[0]) == _NOT_CODES):
        return wide[0].view(torch.float32)
    return Codes(first, scale)


def value_of(factor: Codes | Tensor, dtype: torch.dtype) -> Tensor:
    """Return a factor as floating point numbers: those that simulated execution multiplies."""
    value = (factor.dequantized() if isinstance(factor, Codes) else factor).to(dtype)
    if LOOKING and isinstance(factor, Codes):
        show(value, None, Grid())
    return value


def _dequantize_at_run_time(operand: Operand, dtype: torch.dtype) -> Tensor:
    value = value_of(revealed(operand), dtype)
    return value.clone() if value.data_ptr() == operand[-1].data_ptr() else value


def dequantized(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand as the tensor that simulated execution has."""
    return DEQUANTIZE(operand, dtype) if len(operand) == _TRACED else value_of(revealed(operand), dtype)


def summed(operand: Operand, shape: Sequence[int], dtype: torch.dtype, channel: int) -> Tensor:
    """Add an operand up to the shape of a bias; one of a single dim belongs to the channels."""
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


def multiply(name: str, call: Call, a: Operand, b: Operand, dtypes: Dtypes, counts: Tensor | None) -> Tensor:
    """Return a product, by its name in `products`, and count how it was made."""
    if _TRACED in (len(a), len(b)):
        geometry = [number for pair in call.geometry for number in pair]
        return MULTIPLY(name, a, b, call.bias, call.shape, geometry, *dtypes, counts)
    return _multiply(name, call, revealed(a), revealed(b), dtypes, counts)


def _multiply(
    name: str,
    call: Call,
    a: Codes | Tensor,
    b: Codes | Tensor,
    dtypes: Dtypes,
    counts: Tensor | None,
) -> Tensor:
    product = PRODUCTS[name]
    outcome = _outcome(product, call, a, b, counts)
    if counts is not None:
        counts[product.direction, outcome].add_(1)
    if outcome is not Outcome.INTEGER:
        a, b = value_of(a, dtypes[0]), value_of(b, dtypes[0])
    return product.run(a, b, call, dtypes[1])


def _outcome(product: Product, call: Call, a: Codes | Tensor, b: Codes | Tensor, counts: Tensor | None) -> Outcome:
    """Decide how a product is made, and note the measurement that it rests on."""
    if not isinstance(a, Codes) or not isinstance(b, Codes):
        empty = any(isinstance(factor, Tensor) and not factor.numel() for factor in (a, b))
        return Outcome.NO_CODES if empty else Outcome.WIDTH
    if product.misfit(a, b):
        return Outcome.GROUPS
    decision = choice.decide(product.run.__name__, a.values.shape, b.values.shape, call)
    if counts is not None and decision.measured:
        counts[product.direction, RATIO].fill_(round(1000 * decision.ratio))
    return Outcome.INTEGER if decision.worth else Outcome.SIZE


def _multiply_at_run_time(
    name: str, a: list[Tensor], b: list[Tensor], bias: Tensor | None, shape: list[int], geometry: list[int],
    arithmetic: torch.dtype, dtype: torch.dtype, counts: Tensor | None,
) -> Tensor:  # fmt: skip
    call = Call(bias, tuple(shape), Geometry(*zip(geometry[::2], geometry[1::2], strict=True)))
    # What a compiler was told: a tensor of this shape, in this order.
    return _multiply(name, call, revealed(a), revealed(b), (arithmetic, dtype), counts).reshape(shape).contiguous()


def _opaque(schema: str, run: Callable[..., R], shapes: Callable[..., Any]) -> Callable[..., R]:
    """Make an operator that no compiler looks into. `shapes` returns what a compiler is told of the results."""
    operator = define(schema, run, "CPU")
    torch.library.register_fake(f"cpt_fx::{schema.partition('(')[0]}", shapes, lib=LIBRARY)
    return operator


QUANTIZE = _opaque(
    "_quantize(Tensor x, Tensor bits, Tensor? seed, int[] keep, int[]? over, str rounding, Tensor(a!)? record) "
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
