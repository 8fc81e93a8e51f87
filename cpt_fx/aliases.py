"""The names of modules that stand in several places: layers are named after the first, and found by every one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


class Aliases:
    """For each module of a tree that has several names: its first one, and the others."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self._others: dict[str, list[str]] = {}
        firsts: dict[nn.Module, str] = {}
        for path, module in () if root is None else root.named_modules(remove_duplicate=False):
            first = firsts.setdefault(module, path)
            if path != first:
                self._others.setdefault(first, []).append(path)

    def is_module(self, name: str) -> bool:
        """Whether a first name is that of a module with others, not of an operator in one."""
        return name in self._others

    def of(self, name: str) -> Iterator[str]:
        """Return the other names of a module, or of an operator by those of the module it is in."""
        above = name
        while above not in self._others:
            above = above.rpartition(".")[0]
            if not above:
                return
        for other in self._others[above]:
            yield other + name[len(above) :]
