"""Losses in operators whose gradients ORT computes rightly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpt_fx.export.rewriting import Rewrite, Run, aten, stopped, valued

_NONE, _MEAN, _SUM = 0, 1, 2
_IGNORED = -100


def _reduced(values: Tensor, reduction: int) -> Tensor:
    return values if reduction == _NONE else values.mean() if reduction == _MEAN else values.sum()


def _cross_entropy(
    run: Run, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN,
    ignore_index: int = _IGNORED, label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    dim = 0 if x.ndim == 1 else 1
    likely = torch.log_softmax(x, dim)
    count = x.shape[dim]
    if target.is_floating_point():
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / count
        terms = -(likely * target if weight is None else likely * target * _by_class(weight, x.ndim)).sum(dim)
        return _reduced(terms, reduction)
    loss = _nll(run, likely, target, weight, reduction, ignore_index)
    if not label_smoothing:
        return loss
    smooth = -(likely if weight is None else likely * _by_class(weight, x.ndim)).sum(dim)
    kept, shares = _shares(x, target, weight, ignore_index)
    smooth = smooth * kept
    if reduction == _MEAN:
        smooth = smooth.sum() / shares.sum()
    elif reduction == _SUM:
        smooth = smooth.sum()
    return loss * (1 - label_smoothing) + smooth * (label_smoothing / count)


def _nll(
    run: Run, likely: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN,
    ignore_index: int = _IGNORED,
) -> Tensor:  # fmt: skip
    dim = 0 if likely.ndim == 1 else 1
    _, shares = _shares(likely, target, weight, ignore_index)
    valid = torch.where(target == ignore_index, torch.zeros_like(target), target)
    terms = -torch.gather(likely, dim, valid.unsqueeze(dim)).squeeze(dim) * shares
    return terms if reduction == _NONE else terms.sum() if reduction == _SUM else terms.sum() / shares.sum()


def _shares(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return which targets count, as 0 and 1, and what each of them weighs."""
    kept = (target != ignore_index).to(x.dtype)
    valid = torch.where(target == ignore_index, torch.zeros_like(target), target)
    return kept, kept if weight is None else kept * weight[valid]


def _by_class(weight: Tensor, dims: int) -> Tensor:
    return weight if dims == 1 else weight.reshape(1, -1, *(1,) * (dims - 2))


def _huber(run: Run, x: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    error = x - target
    at = stopped(error)
    size = torch.abs(at)
    value = torch.where(size < delta, 0.5 * at * at, delta * (size - 0.5 * delta))
    return _reduced(valued(error * torch.clamp(at, -delta, delta), value), reduction)


def _smooth_l1(run: Run, x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    error = x - target
    at = stopped(error)
    size = torch.abs(at)
    if beta == 0:
        return _reduced(valued(error * torch.sign(at), size), reduction)
    value = torch.where(size < beta, 0.5 * at * at / beta, size - 0.5 * beta)
    return _reduced(valued(error * torch.clamp(at / beta, -1, 1), value), reduction)


def _l1(run: Run, x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    error = x - target
    at = stopped(error)
    return _reduced(valued(error * torch.sign(at), torch.abs(at)), reduction)


def _binary(run: Run, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Any:
    """Return the cross entropy of probabilities: logarithms from -100 up, and a slope that stays finite."""
    at, wanted = stopped(x), stopped(target)
    low, high = torch.clamp(torch.log(at), min=-100), torch.clamp(torch.log(1 - at), min=-100)
    slope = (at - wanted) / torch.clamp((1 - at) * at, min=1e-12)
    terms = valued(x * slope + target * (high - low), (wanted - 1) * high - wanted * low)
    return _reduced(terms if weight is None else terms * weight, reduction)


def _binary_with_logits(
    run: Run, x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Tensor:  # fmt: skip
    at = stopped(x)
    # log(1 + exp(-x)) without overflow.
    tail = torch.log1p(torch.exp(-torch.abs(at))) + torch.clamp(-at, min=0)
    minus = valued(x * (torch.sigmoid(at) - 1), tail)
    factor = 1.0 if pos_weight is None else (pos_weight - 1) * target + 1
    terms = (1 - target) * x + factor * minus
    return _reduced(terms if weight is None else terms * weight, reduction)


LOSSES: dict[Any, Rewrite] = {
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _nll,
    aten.nll_loss_nd.default: _nll,
    aten.nll_loss2d.default: _nll,
    aten.huber_loss.default: _huber,
    aten.smooth_l1_loss.default: _smooth_l1,
    aten.l1_loss.default: _l1,
    aten.binary_cross_entropy.default: _binary,
    aten.binary_cross_entropy_with_logits.default: _binary_with_logits,
}
