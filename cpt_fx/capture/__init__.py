"""Capture of a model's code as graphs: by torch.fx where that is faithful, else by Dynamo."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import fx, nn
from torch.export import ExportedProgram

from cpt_fx.capture.base import CaptureError, called_by, copy_graph, over
from cpt_fx.capture.captured import Entry
from cpt_fx.capture.program import program_module
from cpt_fx.capture.snapshot import Snapshot, is_hooked
from cpt_fx.capture.symbolic.frontend import Examples, TraceResult, is_constant, trace_symbolic
from cpt_fx.capture.tree import TreePlaces
from cpt_fx.errors import check_choice
from cpt_fx.ir.meta import CALLED, STATE, get_attribute
from cpt_fx.ir.module import ROOT, QuantizedGraphModule
from cpt_fx.operators import HIDING, is_opaque

if TYPE_CHECKING:
    from cpt_fx.capture.session import Session

__all__ = ["FRONTENDS", "CaptureError", "Examples", "TracedGraph", "prepared", "trace_module"]

FRONTENDS = ("symbolic", "export", "dynamo")
"""The values of `capture` other than `"auto"`."""


class TracedGraph(NamedTuple):
    """A traced graph over the model's own tree, what it depends on, and notes for the user."""

    view: QuantizedGraphModule
    snapshot: Snapshot
    notes: tuple[str, ...]
    loses: str


def prepared(
    how: str, model: nn.Module | ExportedProgram, examples: Examples | None
) -> tuple[str, nn.Module, tuple[str, ...]]:
    """Return the frontend for a model, the module to capture, and notes for the user."""
    check_choice("capture", how, ("auto", *FRONTENDS))
    if isinstance(model, ExportedProgram):
        if how not in ("auto", "export"):
            raise CaptureError(f'an ExportedProgram is a graph already: leave capture at "auto", got {how!r}')
        return "program", *program_module(model)
    if how == "export":
        if examples is None:
            raise CaptureError(
                f'capture="export" makes one graph of a run of {type(model).__name__}: pass example_inputs, a tuple of '
                "the arguments the model is called with, or example_kwargs"
            )
        return how, model, ('one graph for the example inputs, as capture="export" asks',)
    return how, model, ()


def trace_module(session: Session, entry: Entry, examples: Examples | None = None) -> TracedGraph:
    """Trace the code of one module of a transformed model; raise `CaptureError` if a graph would behave differently."""
    root = session.root
    module = root.get_submodule(entry.path)
    if isinstance(module, fx.GraphModule):
        traced = TraceResult(module, copy_graph(module._graph))
        for node in traced.graph.nodes:
            if node.op == "call_module" and is_hooked(module.get_submodule(str(node.target))):
                node.meta[CALLED] = True
            if entry.path and node.op in ("call_module", "get_attr"):
                node.target = f"{entry.path}.{node.target}"
    else:
        traced = trace_symbolic(session, entry, examples)
    view = over(root, session.state, session.names, traced.graph)
    _place_constants(view, traced.root)
    if entry.path:
        above = TreePlaces(root).stack(entry.path)
        for node in traced.graph.nodes:
            node.meta["nn_module_stack"] = above | (node.meta.get("nn_module_stack") or {})
    snapshot = Snapshot(module, called_by(view), traced.names)
    return TracedGraph(view, snapshot, traced.notes, traced.loses or _hidden(view))


def _place_constants(view: QuantizedGraphModule, source: nn.Module) -> None:
    """Register tensors that were created during the trace as buffers of our state, which moves with the model."""
    constants, root = view.__dict__[STATE].constants, view.__dict__[ROOT]
    known = {"training", *root._parameters, *root._buffers, *root._modules}
    for node in view.graph.find_nodes(op="get_attr"):
        if is_constant(node):
            name = f"constant_{len(constants._buffers)}"
            constants.register_buffer(name, get_attribute(source, str(node.target)), persistent=False)
            node.target = f"{STATE}.constants.{name}"
        elif "." not in str(node.target) and node.target not in known:
            # A plain attribute of the root, which the view does not have.
            node.target = f"{ROOT}.{node.target}"


def _hidden(module: fx.GraphModule) -> str:
    """Describe a call that hides products which Dynamo would capture; empty if there is none."""
    for node in module.graph.nodes:
        if node.op == "call_module" and CALLED not in node.meta:
            layer = module.get_submodule(str(node.target))
            inside = next((child for child in layer.modules() if isinstance(child, HIDING)), None)
            if inside is not None:
                return f"it calls {node.target} ({type(layer).__name__}) as a whole"
        elif node.op == "call_function" and (node.target is F.multi_head_attention_forward or is_opaque(node.target)):
            return f"it calls {getattr(node.target, '__name__', None) or node.target.name} as a whole"
    return ""
