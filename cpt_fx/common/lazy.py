"""Public names that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(
    module: str, homes: Mapping[str, str], first: Callable[[str], None] = lambda name: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module; `homes` maps its lazy names to the modules that define them.

    A name whose home is `<module>.<name>` is that module itself. `first` is called with the name before it is imported.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        first(name)
        home = import_module(homes[name])
        value = home if homes[name] == f"{module}.{name}" else getattr(home, name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *homes})
