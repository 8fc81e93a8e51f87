"""Cases of the operator table: element by element, and reductions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.export.operator_case import Section

ELEMENTWISE = Section("Element by element")
op = ELEMENTWISE.op
op("add, alpha", lambda h: torch.add(h, h.sin(), alpha=0.5))
op("add, broadcast over the batch", lambda h: h + h[:1])
op("sub, rsub", lambda h: 1 - (h - 0.3 * h.cos()))
op("mul, broadcast", lambda h: h * h[:, :1])
op("div", lambda h: h / (h.abs() + 1))
op("div, rounding_mode", lambda h: h + torch.div(h, 0.5, rounding_mode="floor"))
op("floor_divide", lambda h: h + h.detach() // 0.3)
op("remainder", lambda h: torch.remainder(h, 0.7))
op("fmod", lambda h: torch.fmod(h, 0.7))
op("neg", torch.neg)
op("abs", torch.abs)
op("sign", lambda h: h * torch.sign(h))
op("floor", lambda h: h * torch.floor(3 * h))
op("ceil", lambda h: h * torch.ceil(3 * h))
op("round", lambda h: h * torch.round(3 * h))
op("trunc", lambda h: h * torch.trunc(3 * h))
op("frac", lambda h: torch.frac(3 * h))
op("exp", torch.exp)
op("exp2", torch.exp2)
op("expm1", torch.expm1)
op("log", lambda h: torch.log(h.abs() + 1))
op("log2", lambda h: torch.log2(h.abs() + 1))
op("log10", lambda h: torch.log10(h.abs() + 1))
op("log1p", lambda h: torch.log1p(h.abs()))
op("sqrt", lambda h: torch.sqrt(h.abs() + 1))
op("rsqrt", lambda h: torch.rsqrt(h.abs() + 1))
op("square", torch.square)
op("reciprocal", lambda h: torch.reciprocal(h.abs() + 1))
op("pow, exponent 2", lambda h: h**2)
op("pow, exponent 3", lambda h: h**3)
op("pow, exponent 0.5", lambda h: (h.abs() + 0.1) ** 0.5)
op("pow, number to a tensor", lambda h: 2.0**h)
op("pow, tensor exponent", lambda h: (h.abs() + 0.5) ** h)
op("pow, tensor exponent, negative base", lambda h: h ** torch.full_like(h, 2.0))
op("float_power", lambda h: torch.float_power(h.abs() + 0.5, 2.0).float())
op("sin", torch.sin)
op("cos", torch.cos)
op("tan", lambda h: torch.tan(h.tanh()))
op("asin", lambda h: torch.asin(0.9 * h.tanh()))
op("acos", lambda h: torch.acos(0.9 * h.tanh()))
op("atan", torch.atan)
op("atan2", lambda h: torch.atan2(h, h.flip(1) + 0.1))
op("sinh", torch.sinh)
op("cosh", torch.cosh)
op("asinh", torch.asinh)
op("acosh", lambda h: torch.acosh(h.abs() + 1.5))
op("atanh", lambda h: torch.atanh(0.9 * h.tanh()))
op("erf", torch.erf)
op("erfc", torch.erfc)
op("sinc", torch.sinc)
op("lerp", lambda h: torch.lerp(h, h.cos(), 0.3))
op("lerp, tensor weight", lambda h: torch.lerp(h, h.cos(), h.sigmoid()))
op("addcmul, addcdiv", lambda h: torch.addcmul(h, h.sin(), h.cos(), value=0.5).addcdiv(h, h.abs() + 1, value=0.2))
op("hypot", lambda h: torch.hypot(h, h + 1))
op("logit", lambda h: torch.logit(0.8 * h.sigmoid() + 0.1))
op("logaddexp", lambda h: torch.logaddexp(h, h.flip(1)))
op("xlogy", lambda h: torch.xlogy(h, h.abs() + 0.5))
op("maximum, minimum", lambda h: torch.maximum(h, h.flip(1)) + torch.minimum(h, h.cos()))
op("maximum, ties", lambda h: torch.maximum(h, torch.relu(h)))
op("max of two tensors", lambda h: torch.max(h, 0.2 * h) + torch.fmin(h, h.sin()))
op("clamp", lambda h: h.clamp(-0.3, 0.4))
op("clamp, one bound", lambda h: h.clamp(min=-0.1).clamp_max(0.5))
op("clamp, tensor bounds", lambda h: torch.clamp(h, 0.1 * h.cos() - 0.3, 0.2 * h.sin() + 0.3))
op("clamp, at the bound", lambda h: torch.clamp(torch.relu(h), 0.0, 0.5))
op("where", lambda h: torch.where(h > 0, h, 0.1 * h))
op("where, a number", lambda h: torch.where(h > 0, h.exp(), 0.5))
op("where, broadcast", lambda h: torch.where(h > 0, h.mean(0, keepdim=True), h) + torch.where(h > 0.2, h.mean(), h))
op("masked_fill", lambda h: h.masked_fill(h < 0, -0.5))
op("masked_fill, tensor value", lambda h: h.masked_fill(h < 0, h.mean()))
op("comparisons, logical operators", lambda h: h * ((h > 0) & ~(h >= 0.5) | (h == 0) ^ (h != 1)).float())
op("isnan, isinf, isfinite", lambda h: h * (~(h.isnan() | h.isinf()) & h.isfinite()).float())
op("nan_to_num", lambda h: torch.nan_to_num(h.clamp(-1, 1)))
op("threshold", lambda h: F.threshold(h, 0.1, -0.2))
op("copysign", lambda h: torch.copysign(h, h.flip(1)), refused="signbit")
op("heaviside", lambda h: h * torch.heaviside(h.detach(), h.new_tensor(0.5)))
op("detach", lambda h: h * h.sigmoid().detach())
op("data", lambda h: h * h.sigmoid().data)
op("detach, no gradient beyond it", lambda h: h * torch.sqrt(h.detach().relu()))


def _without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.abs().amax(1, keepdim=True)
    return h / (scale + 0.1)


def _in_place(h: Tensor) -> Tensor:
    h = h.clone()
    h.mul_(2).add_(0.1)
    h[:, :2] += 1
    return F.elu(h, inplace=True)


op("torch.no_grad() in forward", _without_gradient)
op("in-place operators", _in_place)
op("to(float64) and back", lambda h: (h.double() * 1.5).float())
op("to(bfloat16) and back", lambda h: (h.bfloat16() * 1.5).float(), refused="16 bits")
op("to(float16) and back", lambda h: (h.half() * 1.5).float(), refused="16 bits")
op("to(int64)", lambda h: h * h.long())
op("complex numbers", lambda h: torch.fft.fft(h).abs(), refused="complex numbers")
op("lgamma", lambda h: torch.lgamma(h.abs() + 1), refused="lgamma")
op("digamma", lambda h: torch.digamma(h.abs() + 1), refused="digamma")
op("erfinv", lambda h: torch.erfinv(0.9 * h.tanh()), refused="erf_inv")
op("i0", torch.i0, refused="i0")


class _TwoWays(nn.Module):
    """A layer that gradients reach by one of two ways only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last layer makes of both."""
        out: Tensor = self.last(self.a(x) * self.b(x).detach())
        return out


ELEMENTWISE.model("detach, all of a layer", _TwoWays)

REDUCTIONS = Section("Reductions")
op = REDUCTIONS.op
op("sum", lambda h: h * h.sum())
op("sum, dims", lambda h: h.sum((1, 2)), 4, 3, 2)
op("mean", lambda h: h - h.mean())
op("mean, dims, keepdim", lambda h: h * h.mean((1, 3), keepdim=True), 4, 3, 2)
op("mean over the batch", lambda h: h * h.mean(0))
op("prod, dim", lambda h: (h + 1).prod(1), 3, 4)
op("prod", lambda h: h * (0.2 * h[:2] + 1).prod())
op("prod, with zeros", lambda h: torch.relu(h).prod(1), 3, 4)
op("amax", lambda h: h.amax(1), 4, 3)
op("amax, ties", lambda h: torch.relu(h - 0.5).amax(1), 4, 3)
op("amax, two dims, keepdim", lambda h: h - h.amax((1, 2), keepdim=True), 4, 3)
op("amin, ties", lambda h: torch.relu(h).amin((1, 2), keepdim=True) + h, 4, 3)
op("max, dim", lambda h: h.max(1).values, 4, 3)
op("max, dim, ties", lambda h: torch.relu(h - 0.5).max(1).values, 4, 3)
op("min, dim, keepdim", lambda h: h.min(2, keepdim=True)[0], 4, 3)
op("max of all", lambda h: h * h.max())
op("min of all, ties", lambda h: h * (torch.relu(h).min() + 1))
op("aminmax", lambda h: torch.aminmax(h, dim=1).max - torch.aminmax(h, dim=1).min, 4, 3)
op("argmax, argmin", lambda h: h * (h.argmax(1, keepdim=True) + h.argmin(1, keepdim=True)))
op("median", lambda h: h.median(1).values, 5, 3)
op("mode", lambda h: h.mode(1).values, 5, 3, refused="mode")
op("std", lambda h: h.std(1), 4, 3)
op("var", lambda h: h.var((1, 2), keepdim=True) * h, 4, 3)
op("var, unbiased=False", lambda h: h.var(1, unbiased=False), 4, 3)
op("std over the batch", lambda h: h / h.std(0))
op("var_mean", lambda h: sum(torch.var_mean(h, 1)), 4, 3)
op("std_mean", lambda h: sum(torch.std_mean(h, 1, correction=0)), 4, 3)
op("norm, 2", lambda h: h.norm(dim=1), 4, 3)
op("norm, of all", lambda h: h / h.norm())
op("norm, 1", lambda h: torch.linalg.vector_norm(h, 1, 1), 4, 3)
op("norm, infinity", lambda h: torch.linalg.vector_norm(h, float("inf"), 1), 4, 3)
op("norm, 3", lambda h: torch.linalg.vector_norm(h, 3, 1), 4, 3)
op("norm, Frobenius", lambda h: torch.linalg.matrix_norm(h)[:, None], 4, 3)
op("F.normalize", lambda h: F.normalize(h, dim=1))
op("logsumexp", lambda h: h.logsumexp(1), 4, 3)
op("cumsum", lambda h: h.cumsum(1), 4, 3)
op("cumprod", lambda h: (h + 1).cumprod(1), 4, 3)
op("cummax", lambda h: h.cummax(1).values, 4, 3, refused="cummax")
op("logcumsumexp", lambda h: h.logcumsumexp(1), 4, 3)
op("any, all", lambda h: h * ((h > 0).any(1, keepdim=True) & ~(h > 0).all(1, keepdim=True)).float())
op("count_nonzero", lambda h: h * (torch.count_nonzero(h > 0, dim=1)[:, None]))
op("nansum, nanmean", lambda h: h * (h.nansum(1, keepdim=True) + h.nanmean(1, keepdim=True)))
