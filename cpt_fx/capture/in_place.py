"""`x += y` and its like as nodes. torch.fx records them as `x + y`, which loses the update where memory is shared."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

NAMES = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift")
"""Operators with an assignment. `@=` is not among them: tensors have no such update, Python makes a new one."""


def _function(name: str) -> Callable[[Any, Any], Any]:
    """Make a function of our own: for those of `operator`, fx prints `n += 1`, which is wrong for integers."""
    operation = getattr(operator, name)

    def update(target: Any, value: Any) -> Any:
        return operation(target, value)

    update.__name__ = update.__qualname__ = name
    return update


globals().update({name: _function(name) for name in NAMES})  # by these names graphs are pickled


@contextmanager
def recording_updates() -> Iterator[None]:
    """Let traced values record in-place operators and `x[i] = y` while the block runs."""

    def recorded(function: Callable[..., Any]) -> Callable[..., fx.Proxy]:
        return lambda self, *args: self.tracer.create_proxy("call_function", function, (self, *args), {})

    functions = {f"__{name}__": globals()[name] for name in NAMES} | {"__setitem__": operator.setitem}
    try:
        for name, function in functions.items():
            setattr(fx.Proxy, name, recorded(function))
        yield
    finally:
        for name in functions:
            delattr(fx.Proxy, name)
