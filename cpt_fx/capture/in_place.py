"""`x += y` and its like as nodes. torch.fx records them as `x + y`, which loses the update where memory is shared."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

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
