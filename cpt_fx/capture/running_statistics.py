"""Running ranges before the first graph, and warnings before an evaluation with untrained ranges or stale norms."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import fx, nn

from cpt_fx.capture.base import over
from cpt_fx.capture.tree import TreePlaces
from cpt_fx.errors import TransformError
from cpt_fx.formats import FULL_PRECISION, Range
from cpt_fx.ir.history import LOGGER
from cpt_fx.ir.layer_names import Names
from cpt_fx.ir.layer_state import add_range, ranges
from cpt_fx.ir.meta import DECISION, QUANTIZER, Decision
from cpt_fx.ir.result import PART
from cpt_fx.ir.state import Precision
from cpt_fx.ir.subgraphs import state_of
from cpt_fx.operators import INLINED
from cpt_fx.overrides import SELECTED, Selected
from cpt_fx.pipeline import no_collection
from cpt_fx.quantizers.widths import is_free

if TYPE_CHECKING:
    from cpt_fx.capture.session import Session

LAGGING = 4
"""Bit-width up to which training may leave batch norm's running statistics too far behind for evaluation."""


@no_collection()
def create_ranges(session: Session) -> None:
    """Create the running ranges of all layers of the model, by a graph that calls each of them.

    Ranges of products in the model's own code, in recurrent layers and in attention are created at the first call.
    """
    graph = fx.Graph()
    x, called, places = graph.placeholder("x"), [], TreePlaces(session.root)
    for path, layer in session.root.named_modules():
        if isinstance(layer, INLINED) and path and PART in layer.__dict__:
            called.append(graph.call_module(path, (x, x) if isinstance(layer, nn.Bilinear) else (x,)))
            called[-1].meta["nn_module_stack"] = places.stack(path)
    graph.output(tuple(called))
    view = over(session.root, Precision(session.root), Names(), graph)
    view.meta[SELECTED] = Selected()
    try:
        for step in session.pipeline:
            if step.reaches == "inserted":
                _add_ranges(view)
                break
            step.apply(view)
    except TransformError as error:
        # For example a custom pass that needs the whole model: the first call creates the ranges instead.
        LOGGER.warning("%s: running ranges are made at the first call, not before: %s", session.kind, error)


def _add_ranges(view: fx.GraphModule) -> None:
    """Create the running ranges that the quantization decisions of a graph need."""
    decisions: list[Decision] = [node.meta[DECISION] for node in view.graph.nodes if DECISION in node.meta]
    for decision in decisions:
        for operand in decision.operands:
            if operand.format.range is not Range.DYNAMIC:
                learned = operand.format.range is Range.LEARNED
                add_range(view, decision.layer, operand.name, state_of(view).device, learned=learned)


def warn_of_ranges(session: Session) -> None:
    """Warn if evaluation is about to use untrained or non-finite ranges; skip those that need a device sync to read."""
    if session.frontend == "dynamo":
        create_ranges(session)  # creates those of new layers
    known = session.graphs()
    widths = session.state.now()
    used = {
        node.meta[QUANTIZER].ranges
        for graph in known
        for node in graph.graph.nodes
        if QUANTIZER in node.meta and 0 < widths.get(node.meta[QUANTIZER].width_source.name, 0) < FULL_PRECISION
    }
    plain = [
        found
        for found in ranges(session.root)
        if (found[0] in used or not known) and all(is_free(tensor) for tensor in found[1:])
    ]
    unlearned = [name for name, _, _, weight in plain if not float(weight.detach())]
    if unlearned:
        text = (
            f"{session.kind} is evaluated before {_some(unlearned)} learned anything: each batch's own range is used "
            "there. Train a step, or load a checkpoint that has ranges"
        )
        # Loaded weights are meant to be evaluated; without them, the results before training hardly matter.
        if session.has_lost_ranges:
            warnings.warn(text, stacklevel=2)
        else:
            LOGGER.warning("%s", text)
    broken = [name for name, low, size, _ in plain if not bool((low + size).isfinite())]
    if broken:
        warnings.warn(
            f"{_some(broken)} is not finite: a NaN or infinity went through in training, and evaluation will "
            "return NaN there",
            stacklevel=2,
        )


def warn_of_norms(session: Session) -> None:
    """Warn once if evaluation follows training at low bit-widths, where batch norm's running statistics lag behind."""
    if session.trained_at is None or session.told_norms:
        return
    sources = session.state.width_sources
    widths = [width for name, width in session.trained_at.values.items() if width and sources[name].role != "gradient"]
    if min(widths, default=FULL_PRECISION) > LAGGING:
        return
    from cpt_fx.capture.recalibrating import learns_statistics  # deferred: it imports sessions

    if learns_statistics(session.root):
        session.told_norms = True
        warnings.warn(
            f"{session.kind} is evaluated right after training at {min(widths)} bits, where batch norm's running "
            "statistics lag behind: accuracy can come out far too low. Evaluate inside "
            "`with cpt_fx.recalibrate(model, batches):  # some ten training batches`",
            stacklevel=2,
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
