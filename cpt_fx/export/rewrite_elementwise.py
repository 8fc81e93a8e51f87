"""Operators that work element by element, with gradients that ORT lacks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cpt_fx.export.rewriting import Rewrite, Run, aten, chosen, smooth, stopped, valued

_Number = Tensor | float


def _flat(op: Any) -> Rewrite:
    """Return a rewrite whose gradient is 0, as torch has it: not none, which an optimizer would take differently."""

    def rewrite(run: Run, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.is_floating_point():
            return NotImplemented
        return valued(x * 0.0, op(stopped(x), *args, **kwargs))

    return rewrite


def _still(x: Any) -> Any:
    return stopped(x) if isinstance(x, Tensor) else x


def _floats(*operands: Any) -> bool:
    return all(not isinstance(x, Tensor) or x.is_floating_point() for x in operands)


def _divided(run: Run, x: Tensor, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None or not _floats(x, y):
        return NotImplemented
    return _whole_quotient(x, y, rounding_mode)


def _whole_quotient(x: Any, y: Any, mode: str) -> Tensor:
    quotient = _still(x) / _still(y)
    value = torch.floor(quotient) if mode == "floor" else torch.trunc(quotient)
    return valued(x * 0.0 + y * 0.0, value)


def _rest(mode: str) -> Rewrite:
    """Return what is left by a division: the quotient's gradient is 0, which leaves those of the rest."""

    def rewrite(run: Run, x: Any, y: Any) -> Any:
        if not _floats(x, y):
            return NotImplemented
        return x - y * _whole_quotient(_still(x), _still(y), mode)

    return rewrite


def _frac(run: Run, x: Tensor) -> Tensor:
    return x - torch.trunc(stopped(x))


def _power(run: Run, base: Tensor, exponent: Tensor) -> Any:
    """Both gradients; that of the exponent is 0 where the base is not positive: no real power lies beside it."""
    if not _floats(base, exponent):
        return NotImplemented
    x, e = stopped(base), stopped(exponent)
    value = torch.pow(x, e)
    slope = torch.where(e == 0, torch.zeros_like(value), e * torch.pow(x, e - 1))
    growth = torch.where(x > 0, value * torch.log(torch.where(x > 0, x, torch.ones_like(x))), torch.zeros_like(value))
    return valued(base * slope + exponent * growth, value)


def _power_of_number(run: Run, base: Any, exponent: Any) -> Any:
    if isinstance(base, Tensor):
        # In place it is the base that is a tensor: `pow_.Scalar`.
        return _power_to_number(run, base, exponent)
    if not exponent.is_floating_point() or base <= 0:
        return NotImplemented
    value = torch.exp(stopped(exponent) * math.log(base))
    return valued(exponent * (value * math.log(base)), value)


def _power_to_number(run: Run, base: Tensor, exponent: float) -> Any:
    if not base.is_floating_point() or exponent in (1, 2, 3):
        return NotImplemented
    x = stopped(base)
    value = torch.pow(x, exponent)
    return valued(base * (exponent * torch.pow(x, exponent - 1) if exponent else x * 0.0), value)


logaddexp = smooth(
    lambda a, b: torch.maximum(a, b) + torch.log1p(torch.exp(-torch.abs(a - b))),
    lambda a, b, value: torch.exp(a - value),
    lambda a, b, value: torch.exp(b - value),
)


def _extreme(op: Any, share: float) -> Rewrite:
    """Return the larger or smaller of two; where they are equal, the first takes a share of the gradient."""

    def rewrite(run: Run, x: Tensor, y: Tensor) -> Any:
        if not _floats(x, y):
            return NotImplemented
        a, b = stopped(x), stopped(y)
        first = (a > b if op is torch.maximum else a < b).to(a.dtype) + share * (a == b).to(a.dtype)
        return valued(x * first + y * (1 - first), op(a, b))

    return rewrite


def _clamp(run: Run, x: Tensor, low: _Number | None = None, high: _Number | None = None) -> Any:
    """Clamp; at a bound, the gradient is the tensor's, as torch has it."""
    if not _floats(x, low, high):
        return NotImplemented
    value = at = stopped(x)
    inside = torch.ones_like(at)
    through: Any = None
    for bound, limit, beyond in ((low, torch.maximum, torch.lt), (high, torch.minimum, torch.gt)):
        if bound is None:
            continue
        still = _still(bound)
        outside = beyond(at, still)
        if isinstance(bound, Tensor):
            # Where the bounds are crossed, the upper one counts.
            other = _still(high) if limit is torch.maximum else None
            takes = outside if other is None else outside & (still < other)
            if limit is torch.minimum and isinstance(low, Tensor):
                takes = takes | (_still(low) > still)
            part = bound * takes.to(at.dtype)
            through = part if through is None else through + part
            value = limit(value, still)
        else:
            value = torch.clamp(value, **{"min" if limit is torch.maximum else "max": still})
        inside = inside * (~outside).to(at.dtype)
    mine = x * inside
    return valued(mine if through is None else mine + through, value)


def _masked_fill(run: Run, x: Tensor, mask: Tensor, value: _Number) -> Tensor:
    filled = value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype)
    return chosen(mask, filled, x)


def _where(run: Run, mask: Tensor, x: Tensor, y: Tensor) -> Any:
    return chosen(mask, x, y) if x.dtype == y.dtype and x.is_floating_point() and x.shape != y.shape else NotImplemented


def _sinc(run: Run, x: Tensor) -> Tensor:
    at = stopped(x) * math.pi
    zero = at == 0
    safe = torch.where(zero, torch.ones_like(at), at)
    value = torch.where(zero, torch.ones_like(at), torch.sin(safe) / safe)
    slope = torch.where(zero, torch.zeros_like(at), (torch.cos(safe) - value) / safe * math.pi)
    return valued(x * slope, value)


def _xlogy(run: Run, x: Tensor, y: Tensor) -> Any:
    """Multiply by a logarithm; where the factor is 0, so is the product, whatever the logarithm."""
    if not _floats(x, y):
        return NotImplemented
    a, b = stopped(x), stopped(y)
    zero = (a == 0) & (b <= 0)
    growth = torch.where(zero, torch.zeros_like(a + b), torch.log(b) + torch.zeros_like(a))
    value = torch.where((a == 0) & (b == b), torch.zeros_like(a + b), a * torch.log(b))
    return valued(x * growth + y * (a / b), value)


def _hypotenuse_below(x: Tensor) -> Tensor:
    return torch.rsqrt(1 - x * x)


_ERFC = smooth(lambda x: 1 - torch.erf(x), lambda x, y: torch.exp(-x * x) * (-2 / math.sqrt(math.pi)))

UNARY: dict[Any, Rewrite] = {
    aten.tan.default: smooth(torch.tan, lambda x, y: 1 + y * y),
    aten.asin.default: smooth(torch.asin, lambda x, y: _hypotenuse_below(x)),
    aten.acos.default: smooth(torch.acos, lambda x, y: -_hypotenuse_below(x)),
    aten.atan.default: smooth(torch.atan, lambda x, y: 1 / (1 + x * x)),
    aten.sinh.default: smooth(torch.sinh, lambda x, y: torch.cosh(x)),
    aten.cosh.default: smooth(torch.cosh, lambda x, y: torch.sinh(x)),
    aten.asinh.default: smooth(torch.asinh, lambda x, y: torch.rsqrt(x * x + 1)),
    aten.acosh.default: smooth(torch.acosh, lambda x, y: torch.rsqrt(x * x - 1)),
    aten.atanh.default: smooth(torch.atanh, lambda x, y: 1 / (1 - x * x)),
    aten.erfc.default: _ERFC,
    aten.special_erfc.default: _ERFC,
    aten.expm1.default: smooth(lambda x: torch.exp(x) - 1, lambda x, y: y + 1),
    aten.exp2.default: smooth(lambda x: torch.exp(x * math.log(2)), lambda x, y: y * math.log(2)),
    aten.abs.default: smooth(torch.abs, lambda x, y: torch.sign(x)),
}

ELEMENTWISE: dict[Any, Rewrite] = UNARY | {
    **{
        getattr(aten, op.__name__).default: _flat(op)
        for op in (torch.floor, torch.ceil, torch.round, torch.trunc, torch.sign)
    },
    aten.round.decimals: _flat(torch.round),
    aten.frac.default: _frac,
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode), _divided),
    **dict.fromkeys(
        (aten.floor_divide.default, aten.floor_divide.Scalar),
        lambda run, x, y: _divided(run, x, y, rounding_mode="floor"),
    ),
    **dict.fromkeys((aten.remainder.Tensor, aten.remainder.Scalar), _rest("floor")),
    **dict.fromkeys((aten.fmod.Tensor, aten.fmod.Scalar), _rest("trunc")),
    aten.pow.Tensor_Tensor: _power,
    aten.pow.Scalar: _power_of_number,
    aten.pow.Tensor_Scalar: _power_to_number,
    aten.atan2.default: smooth(
        torch.atan2, lambda a, b, value: b / (a * a + b * b), lambda a, b, value: -(a / (a * a + b * b))
    ),
    aten.hypot.default: smooth(
        lambda a, b: torch.sqrt(a * a + b * b), lambda a, b, value: a / value, lambda a, b, value: b / value
    ),
    aten.logaddexp.default: logaddexp,
    **dict.fromkeys((aten.maximum.default, aten.max.other), _extreme(torch.maximum, 0.5)),
    **dict.fromkeys((aten.minimum.default, aten.min.other), _extreme(torch.minimum, 0.5)),
    aten.fmax.default: _extreme(torch.maximum, 1.0),
    aten.fmin.default: _extreme(torch.minimum, 1.0),
    **dict.fromkeys((aten.clamp.default, aten.clamp.Tensor, aten.clip.default, aten.clip.Tensor), _clamp),
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_min.Tensor), _clamp),
    **dict.fromkeys((aten.clamp_max.default, aten.clamp_max.Tensor), lambda run, x, high: _clamp(run, x, None, high)),
    aten.where.self: _where,
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _masked_fill),
    **dict.fromkeys((aten.sinc.default, aten.special_sinc.default), _sinc),
    **dict.fromkeys((aten.xlogy.Tensor, aten.special_xlogy.default), _xlogy),
    **dict.fromkeys((aten.lerp.Scalar, aten.lerp.Tensor), lambda run, x, y, weight: x + weight * (y - x)),
    aten.addcmul.default: lambda run, x, a, b, *, value=1: x + value * (a * b),
    aten.addcdiv.default: lambda run, x, a, b, *, value=1: x + value * (a / b),
}
