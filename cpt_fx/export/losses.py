"""Losses by name, module or function, and example targets for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx.errors import ExportError, nearest

LossLike = str | Callable[..., Tensor] | None
NAMES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "l1": F.l1_loss,
}
_LABELLED = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)
_ALIKE = (
    F.mse_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    nn.MSELoss, nn.BCEWithLogitsLoss, nn.BCELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss,
)  # fmt: skip
"""Losses whose targets are class labels, and losses whose targets have the shape of the outputs."""
INSIDE = "the model's own"


def resolve(loss: LossLike) -> tuple[Callable[..., Tensor], str]:
    """Return the function that computes the loss from the model's outputs and the targets, and its name."""
    if loss is None:
        return own_loss, INSIDE
    if isinstance(loss, str):
        if loss not in NAMES:
            listed = ", ".join(f'"{name}"' for name in NAMES)
            raise ExportError(
                f"loss must be one of {listed}, None for the model's own, or a function of output and targets, got "
                f"{loss!r}.{nearest(loss, NAMES)}"
            )
        return NAMES[loss], loss
    if not callable(loss):
        raise ExportError(f"loss must be a name, None, or a function of output and targets, got {loss!r}")
    name = getattr(loss, "__name__", type(loss).__name__)
    return loss, str(name)


def example_targets(loss: LossLike, outputs: Any) -> tuple[Tensor, ...]:
    """Return example targets that a known loss accepts for a model's outputs."""
    function, name = resolve(loss)
    if loss is None:
        return ()
    if not isinstance(outputs, Tensor):
        raise ExportError(
            f"the model returns {type(outputs).__name__}, and loss={name!r} takes a tensor: pass a function of the "
            "output and the targets, and example_targets"
        )
    plain = function.func if isinstance(function, functools.partial) else function
    kinds = type(plain).__mro__ if isinstance(plain, nn.Module) else (plain,)
    if any(kind in _LABELLED for kind in kinds):
        if outputs.ndim < 2:
            raise ExportError(
                f"{name} needs scores of shape (batch, classes, ...), the model returns {tuple(outputs.shape)}"
            )
        return (torch.zeros(outputs.shape[0], *outputs.shape[2:], dtype=torch.int64, device=outputs.device),)
    if any(kind in _ALIKE for kind in kinds):
        return (torch.zeros_like(outputs),)
    raise ExportError(f"what targets {name} takes is not known: pass example_targets, a tensor or a tuple of tensors")


def own_loss(outputs: Any) -> Tensor:
    """Return the loss that a model computed itself: its only output, its output `loss`, or its first one."""
    found = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", outputs)
    if isinstance(found, (tuple, list)):
        found = found[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ExportError(
            f"loss=None says that the model returns its loss (alone, first, or as `loss`), but it returns {what}: pass "
            f"loss={next(iter(NAMES))!r} or another one"
        )
    return found.reshape(())
