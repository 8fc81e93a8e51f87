"""One graph of a model that Dynamo captured, with the model's own signature: for export and for tools of torch.fx."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from cpt_fx.bodies import OUTER, graphs_of
from cpt_fx.capture.base import CaptureError, assemble
from cpt_fx.dynamo.checks import check_modes
from cpt_fx.dynamo.engine import ATTEMPTS, Engine
from cpt_fx.dynamo.interface import Interface
from cpt_fx.dynamo.recording import Recording, not_one_graph, record
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.history import HISTORY, History, check_coverage
from cpt_fx.meta import STATE
from cpt_fx.names import NAMES
from cpt_fx.overrides import SELECTED
from cpt_fx.runtime import Precision
from cpt_fx.trial import trial


def single_graph_of(
    model: nn.Module, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool
) -> QuantizedGraphModule:
    """Capture a model in one graph and rewrite it; what the model has learned is read, and stays as it is."""
    with trial(model):
        recording = record(engine, args, kwargs, dynamic)
    # Not before the trial is over: until then, copies stand in the place of the buffers.
    module, interface = _assembled(engine, recording)
    _share_state(module, engine.state)
    module.meta[SELECTED] = engine.selected
    with engine.net.asleep():
        reports = engine.pipeline.run(module)
    # The passes saw the outputs as they see those of any graph of Dynamo's.
    interface.restore_outputs(module)
    module.recompile()
    engine.state.pin()
    for graph in graphs_of(module):
        _keep_gradient_mode(graph)
    _check_modes(module, recording.modes)
    state = module.get_submodule(STATE)
    state.train(engine.state.training)
    if engine.state.schedule is not None:
        engine.state.schedule.bind(module)
    history = History("dynamo", (*engine.notes, *_notes(recording)), reports, repr(engine.pipeline), engine.source)
    module.__dict__[HISTORY] = history
    check_coverage(history, graphs_of(module), strict=engine.strict)
    return module


def demand_one_graph(model: nn.Module, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a model that has run in several graphs twice, naming the places where its code breaks."""
    if engine.breaks_because:
        model(*args, **kwargs)
    if engine.breaks_because:
        raise not_one_graph(engine, args, kwargs)
    # What a trial undoes, the first real call does again.
    engine.attempts = ATTEMPTS


def _assembled(engine: Engine, recording: Recording) -> tuple[QuantizedGraphModule, Interface]:
    """Make a module of its own of a recorded graph: the model's tensors under their names, shells for its layers."""
    root, view = engine.root, recording.view
    graph = view.graph
    tree: nn.Module = object.__new__(type(root))
    tree.__dict__ = dict(root.__dict__)
    inner: dict[str, fx.GraphModule] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in view.__dict__:
            tree.__dict__[name] = view.__dict__[name]
            if isinstance(view.__dict__[name], fx.GraphModule):
                inner[name] = view.__dict__[name]
    interface = Interface(graph, tree, recording)
    interface.restore_inputs(engine.forward)
    module = assemble(tree, graph)
    for name, body in inner.items():
        # Beside the modules, as `add_body` puts it.
        module._modules.pop(name, None)
        module.__dict__[name] = body
        body.__dict__[OUTER] = module
    module.meta[NAMES] = engine.names
    return module, interface


def _share_state(module: nn.Module, state: Precision) -> None:
    """Give a graph the ranges that the model learns. Widths follow its own mode, records are of its own runs."""
    own = Precision()
    own.grows = True
    own.ranges = state.ranges
    own.pin()
    for dial in state.dials.values():
        own.add_dial(dial)
    module.add_module(STATE, own)


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
    module.recompile()


def _notes(recording: Recording) -> tuple[str, ...]:
    modes = sorted(set(recording.modes.values()), reverse=True)
    named = " and ".join("training" if mode else "evaluation" for mode in modes or (True, False))
    return (f"one graph, for {named}",)
