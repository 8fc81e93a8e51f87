"""Wrappers for methods that may be called directly: what they multiply is quantized, too."""

from __future__ import annotations

import functools
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cpt_fx.common.compilers import skip_frame
from cpt_fx.common.torch_private import TracingContext

if TYPE_CHECKING:
    from cpt_fx.capture.session import Session

PART = "_cpt_fx_part"
"""Attribute of a module that runs rewritten graphs: its `Part`."""


def runs_here(module: nn.Module) -> bool:
    """Return whether Dynamo is running the module's model in this thread, in which case the user's code is called."""
    part = module.__dict__.get(PART)
    return part is not None and part.session.runs_here()


def runs_plain(module: nn.Module) -> bool:
    """Return whether a call of a module should run the forward of the user's class."""
    return runs_here(module) and module.__dict__[PART].forward is None


for _asked in (runs_here, runs_plain):
    # Dynamo calls these while it traces, and treats the result as a constant: tracing into them takes far longer.
    _asked._dynamo_marked_constant = True  # type: ignore[attr-defined]
    skip_frame(_asked.__code__)


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, function, self, *args, **kwargs)

    return functools.update_wrapper(method, function)


def watched_method(cls: Any, name: str) -> Callable[..., Any]:
    """Return a wrapper of a method, so that what it multiplies itself, between calls of modules, is quantized.

    The method is looked up in the user's class at each call, since it may be replaced there.
    """

    @functools.wraps(getattr(cls, name))
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, getattr(cls, name), self, *args, **kwargs)

    return method


def _run(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if runs_here(module):
        return function(*args, **kwargs)
    part = module.__dict__.get(PART)
    if part is None:
        return function(*args, **kwargs)
    session: Session = part.session
    if session.watching > 0 and not torch.compiler.is_dynamo_compiling():
        return function(*args, **kwargs)
    return session.watch(function, args, kwargs)


def own_function(module: nn.Module, name: str, value: Any) -> Any:
    """Return what to store when a value is set on a module of a result: a wrapper, if it is a function for a method."""
    if not isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return value
    theirs = None if name != "forward" and hasattr(nn.Module, name) else getattr(type(module), name, None)
    if not isinstance(theirs, types.FunctionType):
        return value
    if isinstance(value, types.MethodType):
        if value.__self__ is not module or is_own_method(value):
            return value
        return types.MethodType(_watched(value.__func__), module)
    return functools.update_wrapper(functools.partial(_run, module, value), value)


def is_own_method(value: types.MethodType) -> bool:
    """Return whether a bound method is the one that the object's class has under its name."""
    return value.__func__ is getattr(type(value.__self__), getattr(value.__func__, "__name__", ""), None)


def plain_function(value: functools.partial[Any]) -> Any:
    """Return the function that `own_function` wrapped."""
    return value.args[1] if value.func is _run else value


OF = "_cpt_fx_of"
"""Attribute of a derived class: the user's class that it stands for."""


class Look(type):
    """Metaclass that makes a derived class equal to the user's: `if type(layer) == nn.Linear` is common code."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        """Create the class without the user's metaclass, which may keep a registry or require more arguments."""
        maker: Any = ABCMeta if issubclass(cls, ABCMeta) else type
        return maker.__new__(cls, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        type.__init__(cls, name, bases, body)

    def __eq__(cls, other: object) -> bool:
        if cls is other or not isinstance(other, type) or TracingContext.try_get() is not None:
            # Dynamo looks for a class among the bases by ==, and would find the derived one.
            return cls is other
        return vars(cls).get(OF) is vars(other).get(OF, other)

    def __hash__(cls) -> int:
        return type.__hash__(vars(cls).get(OF, cls))


@functools.cache
def look_of(metaclass: Any) -> type[Look]:
    """Return the metaclass of classes that are derived from classes with a given metaclass."""
    return Look if metaclass is type else type("Look", (Look, metaclass), {})
