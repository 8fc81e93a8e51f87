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
Dtypes = tuple[torch.dtype, torch.dtype]
"""Of floating point arithmetic, and of the result."""
_SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
_RAW = torch.uint32
"""What the floating point numbers of a compiled graph, float32 all of them, are declared as. Compilers let a buffer
that nobody reads any more hold the next value of its type. That must not happen to a blank, and no other value of a
model has this type."""
_NOT_CODES = -1.0
"""A scale that says: look at the floating point numbers. Those of codes are not negative."""


def symmetric(options: dict[str, Any], rounding: str) -> Grid:
    """Return the grid that the options of an operator speak of: which elements share a scale, how they are rounded."""
    return grid_of({**options, "scheme": "symmetric"}, rounding)


class Operand(NamedTuple):
    """Codes with their scale, or floating point numbers; in a graph that is being compiled all three."""

    codes: Tensor | None
    scale: Tensor | None
    wide: Tensor | None

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor that was quantized."""
        part = self.wide if self.codes is None else self.codes
        assert part is not None
        return part.shape

    @property
    def traced(self) -> bool:
        """Whether only the run will tell which of the two it is."""
        return self.codes is not None and self.wide is not None


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
        return exact(_simulated(x, bits, grid, record))
    width = host_value(bits)
    if width is None:
        seed = new_seed(x.device) if grid.rounding is Rounding.STOCHASTIC else None
        over = None if grid.over is None else list(grid.over)
        return Operand(*QUANTIZE(x, bits, seed, list(grid.keep), over, grid.rounding.value, record))
    return Operand(*_codes(x, width, grid, None, record), None)


class Weight(NamedTuple):
    """A parameter that codes were made of: backward makes them again, which is cheaper than to keep them."""

    parameter: Tensor
    version: int
    width: int
    grid: Grid

    def again(self) -> Operand:
        """Return the codes once more."""
        check_unchanged(self.parameter, self.version)
        return Operand(*_codes(self.parameter, self.width, self.grid, None, None), None)


_WEIGHT = "_cpt_fx_weight"


def remember_weight(operand: Operand, x: Tensor, bits: Tensor, grid: Grid) -> None:
    """Note on codes in eager execution that they are those of a parameter."""
    width = host_value(bits)
    if isinstance(x, torch.nn.Parameter) and width is not None and grid.rounding is Rounding.NEAREST:
        setattr(operand.codes, _WEIGHT, Weight(x.detach(), x._version, width, grid))


def weight_of(operand: Operand) -> Weight | None:
    """Return the parameter that an operand is made of, where that is noted."""
    return getattr(operand.codes, _WEIGHT, None)


def exact(x: Tensor) -> Operand:
    """Return a tensor that is not quantized as an operand."""
    return Operand(None, None, x)


def _simulated(x: Tensor, bits: Tensor, grid: Grid, record: Tensor | None) -> Tensor:
    result: Tensor = FAKE_QUANTIZE(x, bits, **grid.keywords(), record=record)
    return result


def _codes(x: Tensor, width: int, grid: Grid, seed: Tensor | None, record: Tensor | None) -> Codes:
    if seed is None and grid.rounding is Rounding.STOCHASTIC:
        seed = new_seed(x.device)
    codes = quantize_codes(x, width, rounding=grid.rounding, seed=seed, keep=grid.keep, over=grid.over)
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
    codes, scale, wide = operand
    if codes is None or scale is None:
        assert wide is not None
        return wide
    if wide is None:
        return Codes(codes, scale)
    if not wide.numel() or float(scale.view(-1)[0]) == _NOT_CODES:
        return wide.view(torch.float32)
    return Codes(codes, scale)


def value_of(factor: Codes | Tensor, dtype: torch.dtype) -> Tensor:
    """Return a factor as floating point numbers: those that simulated execution multiplies."""
    value = (factor.dequantized() if isinstance(factor, Codes) else factor).to(dtype)
    if LOOKING and isinstance(factor, Codes):
        show(value, None, Grid())
    return value


def _dequantize_at_run_time(codes: Tensor, scale: Tensor, wide: Tensor, dtype: torch.dtype) -> Tensor:
    value = value_of(revealed(Operand(codes, scale, wide)), dtype)
    return value.clone() if value.data_ptr() == wide.data_ptr() else value


def dequantized(operand: Operand, dtype: torch.dtype) -> Tensor:
    """Return an operand as the tensor that simulated execution has."""
    if operand.traced:
        return DEQUANTIZE(*operand, dtype)
    return value_of(revealed(operand), dtype)


def summed(operand: Operand, shape: Sequence[int], dtype: torch.dtype, channel: int) -> Tensor:
    """Add an operand up to the shape of a bias; one of a single dim belongs to the channels."""
    if operand.traced:
        return SUM(*operand, shape, dtype, channel)
    return _summed(revealed(operand), shape, dtype, channel)


def _summed(factor: Codes | Tensor, shape: Sequence[int], dtype: torch.dtype, channel: int) -> Tensor:
    values = factor.values if isinstance(factor, Codes) else factor
    if len(shape) != 1 or shape[0] != values.shape[channel]:
        return value_of(factor, dtype).sum_to_size(tuple(shape))
    if isinstance(factor, Codes):
        return bias_grad(factor, channel, dtype)
    dims = [dim for dim in range(values.ndim) if dim != channel % values.ndim]
    return (factor.sum(dims) if dims else factor.clone()).to(dtype)


def _sum_at_run_time(
    codes: Tensor, scale: Tensor, wide: Tensor, shape: list[int], dtype: torch.dtype, channel: int
) -> Tensor:
    return _summed(revealed(Operand(codes, scale, wide)), shape, dtype, channel)


def multiply(name: str, call: Call, a: Operand, b: Operand, dtypes: Dtypes, counts: Tensor | None) -> Tensor:
    """Return a product, by its name in `products`, and count how it was made."""
    if a.traced or b.traced:
        parts = ([part for part in operand if part is not None] for operand in (a, b))
        geometry = [number for pair in call.geometry for number in pair]
        return MULTIPLY(name, *parts, call.bias, call.shape, geometry, *dtypes, counts)
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
    left, right = (revealed(exact(*parts) if len(parts) == 1 else Operand(*(*parts, None)[:3])) for parts in (a, b))
    call = Call(bias, tuple(shape), Geometry(*zip(geometry[::2], geometry[1::2], strict=True)))
    # What a compiler was told: a tensor of this shape, in this order.
    return _multiply(name, call, left, right, (arithmetic, dtype), counts).reshape(shape).contiguous()


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
    "_dequantize(Tensor codes, Tensor scale, Tensor wide, ScalarType dtype) -> Tensor",
    _dequantize_at_run_time,
    lambda codes, scale, wide, dtype: codes.new_empty(codes.shape, dtype=dtype),
)
SUM = _opaque(
    "_sum(Tensor codes, Tensor scale, Tensor wide, SymInt[] shape, ScalarType dtype, int channel) -> Tensor",
    _sum_at_run_time,
    lambda codes, scale, wide, shape, dtype, channel: codes.new_empty(shape, dtype=dtype),
)
MULTIPLY = _opaque(
    "_multiply(str name, Tensor[] a, Tensor[] b, Tensor? bias, SymInt[] shape, int[] geometry, ScalarType arithmetic, "
    "ScalarType dtype, Tensor(a!)? counts) -> Tensor",
    _multiply_at_run_time,
    lambda name, a, b, bias, shape, geometry, arithmetic, dtype, counts: a[0].new_empty(shape, dtype=dtype),
)
