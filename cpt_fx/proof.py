"""What was proven of a result, as long as it is what it was then: its graphs, its layers, the schedule it follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

from torch import fx, nn

from cpt_fx.bodies import outermost
from cpt_fx.runtime import Precision

NOT_PROVEN = "captured, not proven: call `verify(*inputs)`"


@contextmanager
def resting(graphs: Sequence[fx.GraphModule]) -> Iterator[set[int]]:
    """Yield those of some graphs that have not run inside: of another call, of a layer by itself, of another branch."""
    rested = {id(module) for module in graphs}

    def noted(module: fx.GraphModule) -> Callable[..., Any]:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            rested.discard(id(module))
            return forward(*args, **kwargs)

        return run

    for module in graphs:
        module.__dict__["forward"] = noted(module)
    try:
        yield rested
    finally:
        for module in graphs:
            module.__dict__.pop("forward", None)


class Provable(Protocol):
    """What a proof is of: a transform and its result."""

    proof: Proof | None

    @property
    def root(self) -> nn.Module:
        """The model."""

    @property
    def state(self) -> Precision:
        """What drives it."""

    def graphs(self) -> list[fx.GraphModule]:
        """Return its graphs."""


class Proof:
    """What a result was when it was proven; `rested` are the graphs that did not run then."""

    def __init__(self, of: Provable, covers: str, rested: set[int]) -> None:
        self.covers = covers
        awake = (one for one in of.graphs() if rested.isdisjoint((id(one), id(outermost(one)))))
        self.graphs = [(ref(one), _text(one.graph)) for one in awake]
        self.layers = {name: ref(module) for name, module in of.root.named_modules()}
        schedule = of.state.schedule
        self.schedule = None if schedule is None else ref(schedule)

    def changes(self, of: Provable, first: int) -> Iterator[str]:
        """Say what is another one by now; `first` is the number of the first graph."""
        known = {id(module): text for held, text in self.graphs if (module := held()) is not None}
        modules = dict(enumerate(of.graphs(), first))
        new = [place for place, module in modules.items() if id(module) not in known]
        edited = [at for at, module in modules.items() if known.get(id(module), "") not in ("", _text(module.graph))]
        if new:
            yield f"{_graphs(new)} no part of the proof"
        if edited:
            yield f"{_graphs(edited)} edited since"
        now = {name: module for name, module in of.root.named_modules()}
        others = [name for name, module in now.items() if name not in self.layers or self.layers[name]() is not module]
        others += [name for name in self.layers if name not in now]
        if others:
            named = ", ".join(repr(name) for name in others[:3]) + ", ..." * (len(others) > 3)
            yield f"{named} {'were' if others[1:] else 'was'} replaced since"
        if of.state.schedule is not (self.schedule and self.schedule()):
            yield "another schedule was bound since"


def proven_state(parts: Sequence[tuple[str, Provable]], outside: Iterable[str] = ()) -> str:
    """Say whether a model was proven, and what of that still holds."""
    first, covers, missing = 0, "", []
    for path, part in parts:
        if part.proof is None:
            return NOT_PROVEN
        covers = part.proof.covers
        missing += [f"{path}: {change}" if path else change for change in part.proof.changes(part, first)]
        first += len(part.graphs())
    if missing:
        return f"proven no more: {'; '.join(missing)}: call `verify(*inputs)`"
    named = ", ".join(outside)
    return f"proven: {covers}" + (f"; outside of what was transformed: {named}" if named else "")


def _text(graph: fx.Graph) -> str:
    """Return all that a graph says; edits change it."""
    return "\n".join(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in graph.nodes)


def _graphs(places: list[int]) -> str:
    if len(places) == 1:
        return f"graph {places[0]} was"
    return f"graphs {', '.join(map(str, places))} were"
