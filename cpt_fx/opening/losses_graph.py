"""A linear layer and its loss in one operator, opened: the product, then the loss of what it gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from cpt_fx.meta import get_attribute
from cpt_fx.opening.building import Builder, Opener, StaysFusedError, arguments


def _linear_cross_entropy(builder: Builder) -> None:
    given = arguments(builder.node)
    if _dims(builder, given["linear_weight"]) != 2:
        raise StaysFusedError("a linear layer and its loss in one, whose weight is not known to be a matrix")
    ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
    logits = builder.linear(given["input"], given["linear_weight"], given["linear_bias"], "")
    options = {"reduction": given["reduction"], "label_smoothing": given["label_smoothing"]}
    loss = builder.call(F.cross_entropy, logits, given["target"], given["weight"], ignore_index=ignored, **options)
    builder.replace(loss)


def _dims(builder: Builder, weight: object) -> int | None:
    """Return how many dims a weight has, where the graph tells."""
    if not isinstance(weight, fx.Node):
        return None
    if weight.op == "get_attr":
        return int(get_attribute(builder.module, str(weight.target)).ndim)
    example = weight.meta.get("example_value", weight.meta.get("val"))
    return example.ndim if isinstance(example, torch.Tensor) else None


OPENERS = {F.linear_cross_entropy: Opener((("linear", "linear"),), _linear_cross_entropy)}
"""The losses that multiply."""
