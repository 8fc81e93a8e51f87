"""A graph as a module that the passes understand: it reads tensors and modules from the model's own tree."""

from __future__ import annotations

from torch import fx, nn

from cpt_fx.graph_module import ROOT, QuantizedGraphModule, blank
from cpt_fx.meta import STATE, VIEW, get_attribute
from cpt_fx.names import NAMES, Names
from cpt_fx.runtime import Precision


def over(root: nn.Module, state: Precision, names: Names) -> QuantizedGraphModule:
    """Return a module without a graph that has all that a model has.

    In the model's own containers, so that whatever is put in there (a cast, a checkpoint, a layer) is seen.
    """
    view = blank()
    view.meta = {NAMES: names, VIEW: True}
    for containers in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        view.__dict__[containers] = getattr(root, containers)
    view.__dict__.update({ROOT: root, STATE: state})
    return view


def called_by(view: fx.GraphModule) -> set[int]:
    """Return the modules that a graph calls as they are, by their identity."""
    return {id(view.get_submodule(str(node.target))) for node in view.graph.nodes if node.op == "call_module"}


def resolves(view: fx.GraphModule) -> bool:
    """Whether everything that a graph reads or calls is still there."""
    for node in view.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            try:
                get_attribute(view, str(node.target))
            except AttributeError:
                return False
    return True
