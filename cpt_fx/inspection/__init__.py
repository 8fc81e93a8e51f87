"""Look at a transformed model: what is quantized, what is not, and proof that it ran."""

from __future__ import annotations

from torch import nn

from cpt_fx.api import history_of
from cpt_fx.inspection.model import CaptureInfo, Inspection
from cpt_fx.inspection.verification import Verification, VerificationError
from cpt_fx.inspection.views import ProductView, QuantizerView

__all__ = ["CaptureInfo", "Inspection", "ProductView", "QuantizerView", "Verification", "VerificationError", "inspect"]


def inspect(result: nn.Module) -> Inspection:
    """Return what there is to know about a transformed model, wrapped or compiled or not.

    The inspection is live: it reads widths, counts and ranges when it is asked, not when it is made.
    """
    if not isinstance(result, nn.Module):
        raise TypeError(f"inspect takes what cpt_fx.transform returned, got {type(result).__name__}")
    history_of(result)  # says what to do where the model is not transformed
    return Inspection(result)
