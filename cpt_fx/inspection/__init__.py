"""Inspect a transformed model: what is quantized, what is not, and proof that the quantizers ran."""

from __future__ import annotations

from torch import nn

from cpt_fx.api import history_of
from cpt_fx.inspection.model import CaptureInfo, Inspection
from cpt_fx.inspection.verification import Verification, VerificationError
from cpt_fx.inspection.views import ProductView, QuantizerView

__all__ = ["CaptureInfo", "Inspection", "ProductView", "QuantizerView", "Verification", "VerificationError", "inspect"]


def inspect(result: nn.Module) -> Inspection:
    """Return an inspection of a transformed model, which may be wrapped or compiled.

    The inspection is live: widths, counts and ranges are read on access.
    """
    if not isinstance(result, nn.Module):
        raise TypeError(f"inspect takes what cpt_fx.transform returned, got {type(result).__name__}")
    history_of(result)  # raises, with advice, if the model is not transformed
    return Inspection(result)
