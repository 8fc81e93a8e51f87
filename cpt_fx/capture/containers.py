"""Lists and dicts that a model's code fills while it is traced: put back as they were, and noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from typing import Any

from torch import nn

from cpt_fx.capture.base import MODULE_OWN, CaptureError

CONTAINERS = (MutableMapping, MutableSequence, MutableSet, deque)


@contextmanager
def unchanged_containers(model: nn.Module) -> Iterator[None]:
    """Refuse code that changes a container of a module on every call: a graph would not do it.

    Whatever happens, the model's containers hold afterwards what they held before: no tracing value stays in them.
    """
    before = {id(found): (place, found, _content(found)) for place, found in _containers(model)}
    try:
        yield
    finally:
        changed = [
            place
            for place, found, content in before.values()
            if not _same(_content(found), content) and _put_back(found, content)
        ]
    if changed:
        raise CaptureError(
            f"forward changes {changed[0]}, which a graph would not do on every call. Return the value instead; a "
            "cache that one call of the model fills is fine once it is filled"
        )


def _containers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Find the containers in a model's attributes, nested ones too."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in MODULE_OWN:
                yield from _nested(value, f"{key} of module {name!r}" if name else f"self.{key}", 3)


def _nested(value: Any, place: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, CONTAINERS) and not isinstance(value, nn.Module):
        yield place, value
    if depth and isinstance(value, (tuple, *CONTAINERS)) and not isinstance(value, nn.Module):
        for item in value.values() if isinstance(value, MutableMapping) else value:
            yield from _nested(item, place, depth - 1)


def _content(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, MutableMapping) else list(container)


def _same(now: list[Any], then: list[Any]) -> bool:
    """Compare by identity, plain values by value: tensors do not compare."""
    return len(now) == len(then) and all(_equal(one, other) for one, other in zip(now, then, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _same(list(one), list(other))
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)


def _put_back(container: Any, content: list[Any]) -> bool:
    container.clear()
    if isinstance(container, (MutableMapping, MutableSet)):
        for item in content:
            container.__setitem__(*item) if isinstance(container, MutableMapping) else container.add(item)
    else:
        container.extend(content)
    return True
