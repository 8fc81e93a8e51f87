"""A transformed model as one GraphModule that holds its state, for export and tools of torch.fx."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from cpt_fx.bodies import add_body, bodies, graphs_of, new_body
from cpt_fx.capture.base import assemble, copy_graph
from cpt_fx.capture.captured import WHOLE
from cpt_fx.errors import TransformError
from cpt_fx.graph_module import ROOT, QuantizedGraphModule
from cpt_fx.history import History
from cpt_fx.meta import STATE
from cpt_fx.names import NAMES
from cpt_fx.proof import Proof
from cpt_fx.result import PART, Part, sessions_in
from cpt_fx.runtime import Held, Precision
from cpt_fx.session import Session


class Standalone:
    """A graph that stands alone, and how it came about: what a `Session` is for a model's own tree."""

    looking = False
    proof: Proof | None = None

    def __init__(self, module: QuantizedGraphModule, history: History) -> None:
        self.module = module
        self.known = history

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was proven of this very object."""
        return {key: value for key, value in self.__dict__.items() if key != "proof"}

    @property
    def root(self) -> nn.Module:
        """The module whose mode decides."""
        return self.module

    @property
    def kind(self) -> str:
        """The name of the model's class."""
        return self.known.kind

    @property
    def state(self) -> Precision:
        """Widths and records."""
        state = self.module._modules[STATE]
        assert isinstance(state, Precision)
        return state

    def graphs(self) -> list[fx.GraphModule]:
        """Return the graph, and those inside it."""
        return graphs_of(self.module)

    def history(self) -> History:
        """Return how it came about."""
        return self.known


Result = Session | Standalone


def transformed_in(model: nn.Module) -> list[tuple[str, Result]]:
    """Return everything transformed in a model, each with its path; raise where there is nothing."""
    found: list[tuple[str, Result]] = sessions_in(model)  # type: ignore[assignment]
    if len(found) == 1:
        # A wrapper, or a trainer's module around the model: names are the model's own.
        return [("", found[0][1])]
    if not found:
        raise TransformError(f"{type(model).__name__} is not transformed: call cpt_fx.transform(model, schedule) first")
    return found


def precision_of(model: nn.Module) -> Precision:
    """Return the state of a transformed model, or of a graph with quantizers."""
    bare = model._modules.get(STATE)
    return bare if isinstance(bare, Precision) else the_one_in(model, "this state").state


def the_one_in(model: nn.Module, what: str) -> Result:
    """Return the transform of a model that has one."""
    found = transformed_in(model)
    if len(found) > 1:
        parts = ", ".join(repr(name or "(root)") for name, _ in found)
        raise TransformError(f"{what} is of one transformed model, and this one contains several, at {parts}")
    return found[0][1]


def standalone(session: Session) -> QuantizedGraphModule:
    """Return a traced graph as a module of its own. It shares parameters, buffers and ranges with the model."""
    view = session.traced[WHOLE].view
    inside = [(name, _copied(body)) for name, body in bodies(view)]
    graph = copy_graph(view.graph)
    for node in graph.find_nodes(op="get_attr"):
        # A plain attribute of the root, which is to stand in the new module.
        node.target = str(node.target).removeprefix(f"{ROOT}.")
    module = assemble(session.root, graph, inside)
    module.training = session.root.training
    module.meta[NAMES] = session.names
    hold_state(module, session.state)
    return finish(module, session.history(), session.state)


def _copied(body: fx.GraphModule) -> QuantizedGraphModule:
    new = new_body(copy_graph(body.graph))
    for name, inner in bodies(body):
        add_body(new, name, _copied(inner))
    return new


def hold_state(module: QuantizedGraphModule, state: Precision) -> None:
    """Give a graph a state of its own: the widths of the model's dials, records of its own runs."""
    own = Held()
    own.stand_on(state.device)
    own.raises = state.raises
    module.add_module(STATE, own)
    for dial in state.dials.values():
        own.add_dial(dial)
    for name in state.records._buffers:
        own.add_record(name, state.layers[f"records.{name}"])
    for name in state.products._buffers:
        own.add_counts(name, state.layers[f"products.{name}"])
    for name, value in state.constants._buffers.items():
        own.constants.register_buffer(name, value, persistent=False)
    for graph in graphs_of(module)[1:]:
        graph.__dict__[STATE] = own


def finish(module: QuantizedGraphModule, history: History, state: Precision) -> QuantizedGraphModule:
    """Compile the code of a graph that stands alone, and let it follow the model's schedule."""
    module.recompile()
    module.__dict__[PART] = Part(Standalone(module, history))  # type: ignore[arg-type]
    own = module._modules[STATE]
    assert isinstance(own, Held)
    own.train(module.training)
    if state.schedule is not None:
        state.schedule.bind(module)
    return module
