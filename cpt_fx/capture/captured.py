"""The captured graphs that a session keeps, and when a module is traced again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.snapshot import Snapshot, has_global_hooks
from cpt_fx.errors import TransformError
from cpt_fx.ir.history import LOGGER
from cpt_fx.ir.meta import ENTRY
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.ir.pass_base import Report
from cpt_fx.ir.result import plain_class

if TYPE_CHECKING:
    from cpt_fx.capture.session import Session


class Entry(NamedTuple):
    """Key of a traced graph: which module was traced, and how."""

    path: str
    """Path of the module whose forward was traced."""
    every_module: bool
    """Whether every module inside is called as a module, because global module hooks are set."""


WHOLE = Entry("", False)
"""The whole model."""


@dataclass(frozen=True)
class Capture:
    """One rewritten graph, and why it ends where it does."""

    view: QuantizedGraphModule
    reports: tuple[Report, ...]
    broken_by: str = ""
    """Reason for the graph break at its end, with file and line; empty if the code returned."""
    is_whole: bool = False
    """Whether Dynamo captured the whole model in it."""
    snapshot: Snapshot | None = None
    """What a traced graph depends on; None for a Dynamo graph, which has guards."""

    def changed(self) -> str:
        """Return what has changed in the model since the trace, as text; empty if nothing has."""
        return "" if self.snapshot is None else self.snapshot.changed()


@dataclass(frozen=True)
class AsItIs:
    """Stands in for the graph of a torch layer that is called on its own and that torch.fx cannot trace."""

    module: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own code, in full precision."""
        return plain_class(type(self.module)).forward(self.module, *args, **kwargs)


_CLOSED = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
"""Layers whose code calls no other layer."""


def traced_view(session: Session, module: nn.Module) -> QuantizedGraphModule | AsItIs | None:
    """Return the up-to-date graph of a module, tracing it if needed; None if torch.fx can no longer trace it."""
    every_module = has_global_hooks()
    view = session.views.get((id(module), every_module))
    if isinstance(view, AsItIs):
        return view
    entry: Entry = Entry(_path_of(session, module), every_module) if view is None else view.meta[ENTRY]
    known = session.traced.get(entry)
    if known is None or known.changed():
        return _traced_again(session, module, entry, known)
    # A copied or unpickled session keeps `traced`, but not `views`, whose keys are ids.
    return session.views.setdefault((id(module), every_module), known.view)


def _path_of(session: Session, module: nn.Module) -> str:
    for path, found in session.root.named_modules():
        if found is module:
            return str(path)
    raise TransformError(
        f"this {type(module).__name__} is no part of the transformed {session.kind} any more: its graph is not known. "
        "Transform it anew, or put it back"
    )


def _traced_again(
    session: Session, module: nn.Module, entry: Entry, known: Capture | None
) -> QuantizedGraphModule | AsItIs | None:
    why = "" if known is None else known.changed()
    session.adopt_new()
    if known is not None:
        session.refuse_to_drop(known.view)
        name = f"{session.kind}.{entry.path}" if entry.path else session.kind
        LOGGER.warning("%s is captured again, since there is a change in %s; ranges are kept", name, why)
    try:
        session.trace(entry)
    except CaptureError as error:
        if not session.auto:
            if isinstance(module, _CLOSED) and plain_class(type(module)).__module__.startswith("torch.nn."):
                session.views[id(module), entry.every_module] = AsItIs(module)
                return session.views[id(module), entry.every_module]
            # The model's own AttributeError is raised unchanged.
            own = error.__cause__
            raise own if isinstance(own, AttributeError) and "Proxy" not in str(own) else error from None
        if entry.path == "":
            session.fall_back(f"not captured by torch.fx any more: {error}")
            LOGGER.warning("%s is captured by Dynamo from now on: %s", session.kind, error)
        return None
    return session.views[id(module), entry.every_module]
