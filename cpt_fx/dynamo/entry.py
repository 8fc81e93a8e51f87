"""The way into a transformed model while a compiler is at work around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cpt_fx.capture.captured import AsItIs
from cpt_fx.dynamo.engine import outer_compiler
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.session import ACTIVE, Session


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a `torch.compile` around the model from tracing what leads to a graph; the graph itself is compiled."""
    reason = "the model inside is transformed by cpt_fx, which captures it itself: call it outside, or compile it alone"
    return torch.compiler.disable(function, recursive=False, reason=reason)  # type: ignore[no-any-return]


@_uncompiled
def enter(session: Session, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the rewritten graph of a module."""
    before = session.state.handed
    view = _ready(session, module)
    if view is None:
        return _run(session, module, outer_compiler(), args, kwargs)
    try:
        return session.run(view, args, kwargs)
    finally:
        session.state.handed = before


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ready(session: Session, module: nn.Module) -> QuantizedGraphModule | AsItIs | None:
    view = session.view_for(module)
    if view is not None:
        session.state.hand()
    return view


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(session: Session, module: nn.Module, outer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave the compiler around the model for good: what is compiled from here on, the engine hands to it."""
    return session.engine.run(module, args, kwargs, *outer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def watch(session: Session, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a method of the model: what it multiplies by itself, between modules that it calls, is quantized."""
    session.watching += 1
    ACTIVE.append(session)
    try:
        with session.engine.net:
            return function(*args, **kwargs)
    finally:
        session.watching -= 1
        ACTIVE.remove(session)
