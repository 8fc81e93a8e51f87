"""One graph of a model that Dynamo captured, with the model's own signature: for export and for tools of torch.fx."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from cpt_fx.bodies import graphs_of
from cpt_fx.capture.base import CaptureError, assemble
from cpt_fx.dynamo.checks import check_modes
from cpt_fx.dynamo.interface import Interface
from cpt_fx.dynamo.recording import Recording, record
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.history import History, check_coverage
from cpt_fx.layer_state import PARTS, ranges
from cpt_fx.names import NAMES
from cpt_fx.overrides import SELECTED
from cpt_fx.result import PART, plain_class
from cpt_fx.session import Session
from cpt_fx.standalone import finish, hold_state
from cpt_fx.trial import trial


def single_graph_of(
    session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool
) -> QuantizedGraphModule:
    """Capture a model in one graph and rewrite it; what the model has learned is read, and stays as it is."""
    with trial(session.root):
        recording = record(session.engine, args, kwargs, dynamic)
    # Not before the trial is over: until then, copies stand in the place of the buffers.
    module, interface = _assembled(session, recording)
    module.training = session.root.training
    hold_state(module, session.state)
    module.meta[SELECTED] = session.selected
    with session.engine.net.asleep():
        reports = session.pipeline.run(module)
    _share_ranges(module, session.root)
    # The passes saw the outputs as they see those of any graph of Dynamo's.
    interface.restore_outputs(module)
    for graph in graphs_of(module):
        _keep_gradient_mode(graph)
    _check_modes(module, recording.modes)
    notes = (*session.notes, *_notes(recording))
    history = History("dynamo", notes, reports, repr(session.pipeline), session.kind)
    check_coverage(history, graphs_of(module), strict=session.strict)
    return finish(module, history, session.state)


def _assembled(session: Session, recording: Recording) -> tuple[QuantizedGraphModule, Interface]:
    """Make a module of its own of a recorded graph: the model's tensors under their names."""
    root, view = session.root, recording.view
    graph = view.graph
    tree: nn.Module = object.__new__(plain_class(type(root)))
    tree.__dict__ = {key: value for key, value in root.__dict__.items() if not key.startswith(PART)}
    inner: dict[str, fx.GraphModule] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in view.__dict__:
            value = view.__dict__[name]
            (inner if isinstance(value, fx.GraphModule) else tree.__dict__)[name] = value
    interface = Interface(graph, tree, recording)
    interface.restore_inputs(session.engine.forward_of(root))
    module = assemble(tree, graph, inner.items())
    module.meta[NAMES] = session.names
    return module, interface


def _share_ranges(module: nn.Module, root: nn.Module) -> None:
    """Let the model have the ranges that this capture was the first to need."""
    for name, _, _, _ in ranges(module):
        path, _, key = name.rpartition(".")
        ours, theirs = module.get_submodule(path), root.get_submodule(path)
        for part in PARTS:
            for held in ("_parameters", "_buffers"):
                tensor = getattr(ours, held).get(f"{key}_{part}")
                if tensor is not None:
                    getattr(theirs, held).setdefault(f"{key}_{part}", tensor)


def _keep_gradient_mode(module: fx.GraphModule) -> None:
    """Where a graph switches gradients on again after a stretch without, go back to what the caller has.

    Dynamo writes down what was on at the time of capture: in a call under `no_grad` it would switch gradients on. In a
    graph that was captured under `no_grad`, such a stretch is like any other.
    """
    graph = module.graph
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    if not switches:
        return
    if torch.is_grad_enabled():
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            outer = graph.call_function(torch.is_grad_enabled)
        for node in switches:
            node.args = (outer,) if node.args == (True,) else node.args
    elif any(node.args == (True,) for node in switches):
        raise CaptureError(
            "forward switches gradients on, and single_graph was called under torch.no_grad(): call it outside"
        )
    else:
        for node in switches:
            graph.erase_node(node)
    module.recompile()


def _check_modes(module: fx.GraphModule, modes: dict[str, bool]) -> None:
    if not modes:
        return
    graph = module.graph
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        # create_node, not get_attr: the latter warns about attributes that are no tensors.
        flags = [graph.create_node("get_attr", f"{path}.training" if path else "training") for path in modes]
        names = tuple(path or "the model" for path in modes)
        graph.call_function(check_modes, (tuple(flags), tuple(modes.values()), names))


def _notes(recording: Recording) -> tuple[str, ...]:
    modes = sorted(set(recording.modes.values()), reverse=True)
    named = " and ".join("training" if mode else "evaluation" for mode in modes or (True, False))
    return (f"one graph, for {named}",)
