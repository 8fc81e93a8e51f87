"""Running ranges of layers whose graphs are not known yet: made before the first call, so that who looks finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx, nn

from cpt_fx.capture.views import over
from cpt_fx.errors import TransformError
from cpt_fx.history import LOGGER
from cpt_fx.names import Names
from cpt_fx.optable import OPENED
from cpt_fx.overrides import SELECTED, Selected
from cpt_fx.pass_base import Pass
from cpt_fx.pipeline import Pipeline
from cpt_fx.result import PART
from cpt_fx.runtime import Precision

if TYPE_CHECKING:
    from cpt_fx.session import Session


def expect_ranges(session: Session) -> None:
    """Make the ranges of all layers that the model has, by a graph that calls each of them.

    What the code multiplies by itself, and what is inside recurrent layers and attention, only a call can tell.
    """
    view = over(session.root, Precision(session.root), Names())
    view.meta[SELECTED] = Selected()
    graph = fx.Graph()
    called, places = [], session.places
    for path, layer in session.root.named_modules():
        if isinstance(layer, OPENED) and path and PART in layer.__dict__:
            inputs = [graph.placeholder(f"x{len(graph.nodes)}") for _ in range(1 + isinstance(layer, nn.Bilinear))]
            called.append(graph.call_module(path, tuple(inputs)))
            called[-1].meta["nn_module_stack"] = {name: (name, kind) for name, kind in places.ancestors(path)}
    graph.output(tuple(called))
    view._graph = graph
    graph.owning_module = view
    steps: list[Pass] = []
    for step in session.pipeline:
        steps.append(step)
        if step.reaches == "inserted":
            break
    try:
        Pipeline(tuple(steps)).run(view)
    except TransformError as error:
        # Perhaps a pass of the user's own that wants the whole model: the first call makes what there is to make.
        LOGGER.warning("%s: running ranges are made at the first call, not before: %s", session.kind, error)
