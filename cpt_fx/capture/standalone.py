"""A transformed model as one GraphModule that holds its state, for export and tools of torch.fx."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from cpt_fx.capture.base import assemble, copy_graph
from cpt_fx.capture.captured import WHOLE
from cpt_fx.capture.proof import Proof
from cpt_fx.capture.session import Session
from cpt_fx.errors import TransformError
from cpt_fx.ir.history import History
from cpt_fx.ir.layer_names import NAMES
from cpt_fx.ir.meta import STATE
from cpt_fx.ir.module import ROOT, QuantizedGraphModule
from cpt_fx.ir.result import PART, Part, sessions_in
from cpt_fx.ir.state import Held, Precision
from cpt_fx.ir.subgraphs import add_subgraph, graphs_of, new_subgraph, subgraphs


class Standalone:
    """A standalone graph and its history; plays the part of a `Session`."""

    looking = False
    proof: Proof | None = None

    def __init__(self, module: QuantizedGraphModule, history: History) -> None:
        self.root = module
        """The module whose mode selects the bit-widths."""
        self.kind = history.kind
        self.known = history

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the proof, which is of this object only."""
        return {key: value for key, value in self.__dict__.items() if key != "proof"}

    @property
    def state(self) -> Precision:
        """Bit-widths and counters."""
        state = self.root._modules[STATE]
        assert isinstance(state, Precision)
        return state

    def graphs(self) -> list[fx.GraphModule]:
        """Return the graph and its subgraphs."""
        return graphs_of(self.root)

    def history(self) -> History:
        """Return the history of the transform."""
        return self.known


Result = Session | Standalone


def transformed_in(model: nn.Module) -> list[tuple[str, Result]]:
    """Return every transformed part of a model with its path; raise if there is none."""
    found: list[tuple[str, Result]] = sessions_in(model)  # type: ignore[assignment]
    if len(found) == 1:
        # Inside a wrapper, or a trainer's module: layer names are relative to the transformed model.
        return [("", found[0][1])]
    if not found:
        raise TransformError(f"{type(model).__name__} is not transformed: call cpt_fx.transform(model, schedule) first")
    return found


def precision_of(model: nn.Module) -> Precision:
    """Return the state of a transformed model, or of a graph with quantizers."""
    bare = model._modules.get(STATE)
    return bare if isinstance(bare, Precision) else the_one_in(model, "this state").state


def the_one_in(model: nn.Module, what: str) -> Result:
    """Return the only transformed part of a model; raise if there are several."""
    found = transformed_in(model)
    if len(found) > 1:
        parts = ", ".join(repr(name or "(root)") for name, _ in found)
        raise TransformError(f"{what} is of one transformed model, and this one contains several, at {parts}")
    return found[0][1]


def standalone(session: Session) -> QuantizedGraphModule:
    """Return the traced graph of a whole model as a standalone module that shares parameters, buffers and ranges."""
    view = session.traced[WHOLE].view
    inside = [(name, _copied(subgraph)) for name, subgraph in subgraphs(view)]
    graph = copy_graph(view.graph)
    for node in graph.find_nodes(op="get_attr"):
        # A plain attribute of the root, which becomes one of the new module.
        node.target = str(node.target).removeprefix(f"{ROOT}.")
    module = assemble(session.root, graph, inside)
    module.meta[NAMES] = session.names
    hold_state(module, session.state)
    return finish(module, session.history(), session.state)


def _copied(subgraph: fx.GraphModule) -> QuantizedGraphModule:
    new = new_subgraph(copy_graph(subgraph.graph))
    for name, inner in subgraphs(subgraph):
        add_subgraph(new, name, _copied(inner))
    return new


def hold_state(module: QuantizedGraphModule, state: Precision) -> None:
    """Give a standalone graph its own state: the model's bit-width sources, and counters of its own runs."""
    own = Held()
    own.move_to(state.device)
    own.raises = state.raises
    module.add_module(STATE, own)
    for source in state.width_sources.values():
        own.add_width_source(source)
    for name in state.counters._buffers:
        own.add_counters(name, state.layers[f"counters.{name}"])
    for name in state.products._buffers:
        own.add_counts(name, state.layers[f"products.{name}"])
    for name, value in state.constants._buffers.items():
        own.constants.register_buffer(name, value, persistent=False)
    for graph in graphs_of(module)[1:]:
        graph.__dict__[STATE] = own


def finish(module: QuantizedGraphModule, history: History, state: Precision) -> QuantizedGraphModule:
    """Recompile a standalone graph, and bind it to the model's schedule."""
    module.recompile()
    module.__dict__[PART] = Part(Standalone(module, history))  # type: ignore[arg-type]
    own = module._modules[STATE]
    assert isinstance(own, Held)
    own.train(module.training)
    if state.schedule is not None:
        state.schedule.bind(module)
    return module
