"""The proof of a transformed model, and whether it still holds: for its graphs, its layers and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import fx, nn

from cpt_fx.capture.base import patched
from cpt_fx.ir.subgraphs import outermost

if TYPE_CHECKING:
    from cpt_fx.capture.standalone import Result

_HOOKS = ("ward_hooks", "ward_pre_hooks")
NOT_PROVEN = "captured, not proven: call `verify(*inputs)`"


@contextmanager
def resting(graphs: Sequence[fx.GraphModule]) -> Iterator[set[int]]:
    """Yield the ids of those graphs that have not run inside the block, such as the graph of another branch."""
    rested = {id(module) for module in graphs}

    def run(number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rested.discard(number)
        return forward(*args, **kwargs)

    with patched({(module, "forward"): partial(run, id(module), module.forward) for module in graphs}):
        yield rested


class Proof:
    """Snapshot of a transformed model when it was proven; `rested` are the ids of graphs that did not run then."""

    def __init__(self, of: Result, covers: str, rested: set[int]) -> None:
        self.covers = covers
        awake = (one for one in of.graphs() if rested.isdisjoint((id(one), id(outermost(one)))))
        self.graphs = [(ref(one), _text(one)) for one in awake]
        self.layers = {name: (ref(module), _identity(module)) for name, module in of.root.named_modules()}
        schedule = of.state.schedule
        self.schedule = None if schedule is None else ref(schedule)

    def changes(self, of: Result, first: int) -> Iterator[str]:
        """Yield what has changed since the proof, as text; `first` is the number of the first graph."""
        known = {id(module): text for held, text in self.graphs if (module := held()) is not None}
        modules = dict(enumerate(of.graphs(), first))
        new = [place for place, module in modules.items() if id(module) not in known]
        edited = [at for at, module in modules.items() if known.get(id(module), "") not in ("", _text(module))]
        if new:
            yield f"{_graphs(new)} no part of the proof"
        if edited:
            yield f"{_graphs(edited)} edited since"
        now = {name: module for name, module in of.root.named_modules()}
        others = [
            name for name, module in now.items() if name not in self.layers or self.layers[name][0]() is not module
        ]
        others += [name for name in self.layers if name not in now]
        if others:
            yield f"{_named(others)} replaced since"
        changed = [name for name in now if name not in others and self.layers[name][1] != _identity(now[name])]
        if changed:
            yield f"{_named(changed)} changed since"
        schedule = of.state.schedule
        if schedule is not (self.schedule and self.schedule()):
            yield "another schedule was bound since"
        elif schedule is not None and of.state not in schedule._controllers:
            yield "the schedule was unbound since"


def proven_state(parts: Sequence[tuple[str, Result]], outside: Iterable[str] = ()) -> str:
    """Return, as text, whether a model was proven and whether the proof still holds."""
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


def _text(module: fx.GraphModule) -> str:
    """Return a graph as text, to detect edits."""
    lines = [f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}" for node in module.graph.nodes]
    return "\n".join((*lines, str(module.__dict__.get("forward", ""))))


def _identity(module: nn.Module) -> tuple[Any, ...]:
    """Return what identifies a layer apart from its values: class, own forward, hooks, shapes and dtypes."""
    own = {name: value for name, value in module.__dict__.items() if name == "forward" or name.endswith(_HOOKS)}
    hooks = tuple(tuple(map(id, value.values())) if isinstance(value, Mapping) else id(value) for value in own.values())
    held = {**module._parameters, **module._buffers}
    return type(module), hooks, {name: one if one is None else (one.shape, one.dtype) for name, one in held.items()}


def _named(layers: list[str]) -> str:
    named = ", ".join(repr(name) if name else "(root)" for name in layers[:3]) + ", ..." * (len(layers) > 3)
    return f"{named} {'were' if layers[1:] else 'was'}"


def _graphs(places: list[int]) -> str:
    several = len(places) > 1
    return f"graph{'s' * several} {', '.join(map(str, places))} {'were' if several else 'was'}"
