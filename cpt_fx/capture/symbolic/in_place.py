"""Functions that represent `x += y` and the like in a graph.

torch.fx itself records `x + y`, which loses the update where memory is shared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

NAMES = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift")
"""Augmented assignments. `@=` is not among them: tensors have no such update, so Python makes a new tensor."""


def _function(name: str) -> Callable[[Any, Any], Any]:
    """Return a function around that of `operator`, for which fx would print `n += 1`, which is wrong for integers."""
    operation = getattr(operator, name)

    def update(target: Any, value: Any) -> Any:
        return operation(target, value)

    update.__name__ = update.__qualname__ = name
    return update


globals().update({name: _function(name) for name in NAMES})  # graphs are pickled by these names
