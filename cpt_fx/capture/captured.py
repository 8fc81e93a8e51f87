"""What a session keeps of each graph it has found, and when it traces one anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.watch import Watch, has_global_hooks
from cpt_fx.errors import TransformError
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.history import LOGGER
from cpt_fx.meta import ENTRY
from cpt_fx.pass_base import Report
from cpt_fx.result import plain_class

if TYPE_CHECKING:
    from cpt_fx.session import Session


class Entry(NamedTuple):
    """What a traced graph is of."""

    path: str
    """That of the module whose forward it is."""
    every_module: bool
    """Whether it calls every module inside, since hooks are set that run for all."""


WHOLE = Entry("", False)
"""The model."""


@dataclass(frozen=True)
class Capture:
    """One rewritten graph, and why it ends where it ends."""

    view: QuantizedGraphModule
    reports: tuple[Report, ...]
    broken_by: str = ""
    """Why the code could not go on in this graph, with file and line; empty where it returned."""
    is_whole: bool = False
    """Whether Dynamo made it of all of the model's code."""
    watch: Watch | None = None
    """What the code of a traced graph has read; None where Dynamo guards it."""

    def is_outdated(self) -> bool:
        """Whether the code of a traced graph would make another one by now."""
        return self.watch is not None and not self.view.is_edited() and self.watch.changed()


class AsItIs:
    """In place of a graph: a layer of torch that one calls as a whole, and that torch.fx cannot look into."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run its own code, in full precision."""
        return plain_class(type(self.module)).forward(self.module, *args, **kwargs)


_CLOSED = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
"""Layers whose code calls no other layer."""


def traced_view(session: Session, module: nn.Module) -> QuantizedGraphModule | AsItIs | None:
    """Return the graph of a module's code as it is now; None where torch.fx cannot trace it any more."""
    every_module = has_global_hooks()
    view = session.views.get((id(module), every_module))
    if isinstance(view, AsItIs):
        return view
    if view is not None:
        entry: Entry = view.meta[ENTRY]
        watch = session.traced[entry].watch
        if watch is None or not watch.changed():
            return view
    else:
        path = next((name for name, found in session.root.named_modules() if found is module), None)
        if path is None:
            raise TransformError(
                f"this {type(module).__name__} is no part of the transformed {session.kind} any more: its graph is "
                "not known. Transform it anew, or put it back"
            )
        entry = Entry(path, every_module)
    return _traced_again(session, module, entry)


def _traced_again(session: Session, module: nn.Module, entry: Entry) -> QuantizedGraphModule | AsItIs | None:
    known = session.traced.get(entry)
    if known is not None and known.watch is not None and not known.watch.changed():
        # In a copy, or out of a pickle: the graph came along.
        session.views[id(module), entry.every_module] = known.view
        return known.view
    session.adopt_new()
    if known is not None and known.watch is not None:
        session.refuse_to_drop(known.view)
        name = f"{session.kind}.{entry.path}" if entry.path else session.kind
        LOGGER.warning("%s is captured again, since %s; ranges are kept", name, known.watch.said())
    try:
        session.trace(entry)
    except CaptureError as error:
        if not session.auto:
            if isinstance(module, _CLOSED) and plain_class(type(module)).__module__.startswith("torch.nn."):
                session.views[id(module), entry.every_module] = AsItIs(module)
                return session.views[id(module), entry.every_module]
            # What the changed model would raise itself is for its author to see.
            own = error.__cause__
            raise own if isinstance(own, AttributeError) and "Proxy" not in str(own) else error from None
        if entry.path == "":
            session.traced.clear()
            session.views.clear()
            session.frontend = "dynamo"
            session.notes = (*session.notes, f"not captured by torch.fx any more: {error}")
            LOGGER.warning("%s is captured by Dynamo from now on: %s", session.kind, error)
        return None
    return session.views[id(module), entry.every_module]
