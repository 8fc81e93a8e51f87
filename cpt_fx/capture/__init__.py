"""From any model to a graph: the frontends, and the choice between them."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from cpt_fx.capture.base import Captured, CaptureError
from cpt_fx.capture.given import capture_given
from cpt_fx.capture.symbolic import capture_symbolic
from cpt_fx.errors import check_choice

__all__ = ["FRONTENDS", "CaptureError", "Captured", "capture"]

FRONTENDS = {"symbolic": capture_symbolic}
"""Every frontend by name: `(model, example_inputs, example_kwargs) -> Captured`."""


def capture(
    model: nn.Module, how: str, example_inputs: tuple[Any, ...] | None, example_kwargs: dict[str, Any] | None
) -> Captured:
    """Capture a model with the frontend asked for; `"auto"` takes the first that is faithful, or says why none is."""
    check_choice("capture", how, ("auto", *FRONTENDS))
    if isinstance(model, fx.GraphModule):
        return capture_given(model)
    if how != "auto":
        return FRONTENDS[how](model, example_inputs, example_kwargs)
    refusals = []
    for name, frontend in FRONTENDS.items():
        try:
            return frontend(model, example_inputs, example_kwargs)
        except CaptureError as error:
            refusals.append(f"{name}: {error}")
    raise CaptureError(f"no frontend captures {type(model).__name__} faithfully.\n  " + "\n  ".join(refusals))
