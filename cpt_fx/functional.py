"""Quantizers as plain tensor functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpt_fx.formats import FULL_PRECISION, Rounding, Scheme, Specials, check_grid, choice, minimum_bits
from cpt_fx.quantizers.numerics import Grid, working_dtype
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, QUANTIZE_GRADIENT
from cpt_fx.quantizers.widths import host_value


def fake_quantize(
    x: Tensor,
    bits: int | Tensor,
    *,
    keep: Sequence[int] = (),
    rounding: str = "nearest",
    range: tuple[Tensor | float, Tensor | float] | None = None,
    over: Sequence[int] | None = None,
    scheme: str = "affine",
    exponent: int = 0,
    specials: str = "none",
    block: int = 0,
) -> Tensor:
    """Quantize and dequantize `x`; the gradient passes straight through.

    Args:
        x: a floating point tensor of any shape; the result has its shape and dtype.
        bits: the bit-width, an int or a 0-dim tensor. 32 (and 0) leave `x` as it is, bit for bit.
        keep: the dims that each own a range: `()` one range for the tensor, `(0,)` one per channel or row.
        rounding: `"nearest"` (ties to even codes) or `"stochastic"` (unbiased; follows `torch.manual_seed`).
        range: `(zero_point, range)`, minimum and size of the grid, broadcastable to `x`; values outside are
            clamped. None measures them on `x`.
        over: instead of `keep`, the dims that one range spans, e.g. `(-1,)` for one range per vector.
        scheme: `"affine"` (as published, with steps of at least 1e-8), `"affine_integer"`, `"symmetric"` or `"float"`.
        exponent: exponent bits of a float; the mantissa has `bits - 1 - exponent`.
        specials: which float codes are not numbers: `"none"`, `"fn"` (e4m3) or `"ieee"` (e5m2).
        block: elements per shared power-of-two scale within a range (MX formats); 0 for none.
    """
    bits, grid = _checked(x, bits, keep, over, rounding, scheme, exponent, specials, block)
    if range is None:
        rows, grid = _in_ranges(x, grid)
        return _fresh(x, FAKE_QUANTIZE(rows, bits, **grid.keywords()).view_as(x))
    if block:
        raise ValueError(f"range= cannot be combined with block={block}: every block has its own range")
    try:
        zero_point, width = range
    except (TypeError, ValueError):
        raise TypeError(f"range must be a pair (zero_point, range), got {range!r}") from None
    given = {"zero_point": _ends(zero_point, x), "range": _ends(width, x)}
    return _fresh(x, FAKE_QUANTIZE(x, bits, **grid.keywords(), **given))


def quantize_gradient(
    x: Tensor,
    bits: int | Tensor,
    *,
    keep: Sequence[int] = (),
    rounding: str = "stochastic",
    over: Sequence[int] | None = None,
    scheme: str = "affine",
    exponent: int = 0,
    specials: str = "none",
    block: int = 0,
) -> Tensor:
    """Return `x` unchanged; the gradient that comes back through the result is quantized.

    Arguments are those of `fake_quantize`, applied to the gradient. The result is a copy, so that only what flows
    through it is quantized; the op in a rewritten graph sits on the layer's own output and copies nothing.
    """
    bits, grid = _checked(x, bits, keep, over, rounding, scheme, exponent, specials, block)
    rows, grid = _in_ranges(x.clone(), grid)
    result: Tensor = QUANTIZE_GRADIENT(rows, bits, **grid.keywords())
    return result.view_as(x)


def _in_ranges(x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
    """Return a vector as one-element rows if each element is to have a range: the ops give a vector a single one."""
    alone = x.ndim == 1 and (grid.keep or grid.over == ())
    return (x[:, None], grid._replace(keep=(0,), over=None)) if alone else (x, grid)


def _ends(value: Tensor | float, x: Tensor) -> Tensor:
    """Convert one part of a given range to a tensor; refuse one that would change the shape of `x`."""
    ends = torch.as_tensor(value, dtype=working_dtype(x), device=x.device)
    trailing = x.shape[x.ndim - ends.ndim :]
    if ends.ndim > x.ndim or any(size not in (1, wanted) for size, wanted in zip(ends.shape, trailing, strict=True)):
        raise ValueError(f"range must broadcast to the shape {tuple(x.shape)} of x, got {tuple(ends.shape)}")
    return ends


def _fresh(x: Tensor, result: Tensor) -> Tensor:
    """Return a copy if the op returned its argument, as it does at full precision: a caller may write to the result."""
    return x.clone() if result is x or result._base is x else result


def _checked(
    x: Tensor, bits: int | Tensor, keep: Sequence[int], over: Sequence[int] | None, rounding: str, scheme: str,
    exponent: int, specials: str, block: int,
) -> tuple[Tensor, Grid]:  # fmt: skip
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"only floating point tensors are quantized, got {x.dtype}")
    _check_dims("keep", keep, x.ndim)
    _check_dims("over", over, x.ndim)
    if over is not None and keep:
        raise ValueError(f"give keep= or over=, not both: got keep={tuple(keep)}, over={tuple(over)}")
    kind = choice(Scheme, scheme, "scheme")
    check_grid(kind, exponent, block)
    width, over = _as_bits(bits), None if over is None else tuple(over)
    if not isinstance(bits, Tensor) and 0 < bits < minimum_bits(kind):
        raise ValueError(f"scheme={scheme!r} needs at least {minimum_bits(kind)} bits, got {bits}")
    rounds, special = choice(Rounding, rounding, "rounding"), choice(Specials, specials, "specials")
    return width, Grid(tuple(keep), over, kind, rounds, exponent, special, block, floored=True)


def _as_bits(bits: int | Tensor) -> Tensor:
    """Convert a bit-width to the 0-dim tensor that the ops take, and check its value where that is free."""
    if isinstance(bits, Tensor):
        if bits.ndim:
            raise ValueError(f"bits must be an int or a 0-dim tensor, got a tensor of shape {tuple(bits.shape)}")
        finite = not bits.is_floating_point() or host_value(bits.isfinite()) != 0
        width = host_value(bits) if bits.dtype is not torch.bool and finite else None
        if not finite or bits.dtype is torch.bool or (width is not None and (width < 0 or bool(bits != width))):
            raise ValueError(f"bits must hold a whole number that is not negative, got {bits!r}")
        return bits
    if isinstance(bits, bool) or not hasattr(bits, "__index__"):
        raise TypeError(f"bits must be an int or a 0-dim tensor, got {bits!r}")
    if not 0 <= bits <= FULL_PRECISION:
        raise ValueError(f"bits must be between 0 and {FULL_PRECISION}, got {bits}")
    return torch.tensor(int(bits), dtype=torch.int64)


def _check_dims(name: str, dims: Sequence[int] | None, ndim: int) -> None:
    """Refuse dims that the tensor does not have, naming the argument."""
    if dims is None:
        return
    if not isinstance(dims, Sequence):
        raise TypeError(f"{name} must be a sequence of dims such as (0,), got {dims!r}")
    # `over` may name a dim twice: (0, -1) are the first and the last dim, whatever the rank.
    if name == "keep" and len({dim % max(ndim, 1) for dim in dims if isinstance(dim, int)}) < len(dims):
        raise ValueError(f"keep names a dim twice: {tuple(dims)}")
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int) or not -max(ndim, 1) <= dim < max(ndim, 1):
            raise ValueError(f"{name} names dim {dim!r}, but the tensor has {ndim} dims")
