"""From any model to a graph: the frontends, and the choice between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import fx, nn
from torch.export import ExportedProgram

from cpt_fx.capture.base import Captured, CaptureError
from cpt_fx.capture.given import capture_given
from cpt_fx.capture.program import program_module
from cpt_fx.capture.symbolic import capture_symbolic
from cpt_fx.errors import check_choice
from cpt_fx.optable import HIDING, is_opaque

__all__ = ["FRONTENDS", "CaptureError", "Captured", "Deferred", "capture"]

FRONTENDS = ("symbolic", "export", "dynamo")
"""Every frontend by name."""


@dataclass(frozen=True)
class Deferred:
    """A model whose graphs are found while it runs, and why no other frontend took it."""

    notes: tuple[str, ...] = ()
    whole: bool = False
    """Whether the example inputs must run in one graph."""


def capture(
    model: nn.Module | ExportedProgram,
    how: str,
    example_inputs: tuple[Any, ...] | None,
    example_kwargs: dict[str, Any] | None,
) -> Captured | Deferred:
    """Capture a model with the frontend asked for; `"auto"` takes the first that is faithful and hides nothing."""
    check_choice("capture", how, ("auto", *FRONTENDS))
    if isinstance(model, ExportedProgram):
        if how not in ("auto", "export"):
            raise CaptureError(f'an ExportedProgram is a graph already: leave capture at "auto", got {how!r}')
        module, notes = program_module(model)
        return replace(capture_given(module), frontend="export", notes=notes, source=module)
    if how == "export":
        if example_inputs is None and example_kwargs is None:
            raise CaptureError(
                f'capture="export" makes one graph of a run of {type(model).__name__}: pass example_inputs, a tuple of '
                "the arguments the model is called with, or example_kwargs"
            )
        return Deferred(('one graph for the example inputs, as capture="export" asks',), whole=True)
    if how == "dynamo":
        return Deferred()
    if how == "symbolic":
        return _symbolic(model, example_inputs, example_kwargs)
    try:
        captured = _symbolic(model, example_inputs, example_kwargs)
    except CaptureError as error:
        return Deferred((f"not captured by torch.fx: {error}",))
    hidden = captured.loses or _hidden(captured.module)
    return Deferred((f"not captured by torch.fx: {hidden}",)) if hidden else captured


def _symbolic(
    model: nn.Module, example_inputs: tuple[Any, ...] | None, example_kwargs: dict[str, Any] | None
) -> Captured:
    if isinstance(model, fx.GraphModule):
        return capture_given(model)
    return capture_symbolic(model, example_inputs, example_kwargs)


def _hidden(module: fx.GraphModule) -> str:
    """Return what a graph calls as a whole, though it multiplies inside: Dynamo looks into it."""
    for node in module.graph.nodes:
        if node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            inside = next((child for child in layer.modules() if isinstance(child, HIDING)), None)
            if inside is not None:
                return f"it calls {node.target} ({type(layer).__name__}) as a whole"
        elif node.op == "call_function" and (node.target is F.multi_head_attention_forward or is_opaque(node.target)):
            return f"it calls {getattr(node.target, '__name__', None) or node.target.name} as a whole"
    return ""
