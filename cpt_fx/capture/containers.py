"""Lists and dicts that a model's code fills while it is traced: put back as they were, and noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from typing import Any

from torch import nn

from cpt_fx.capture.base import MODULE_OWN
from cpt_fx.capture.refusals import file_of_class, is_the_models, place_of_forward, refuse
from cpt_fx.capture.tree import is_plain_object

CONTAINERS = (MutableMapping, MutableSequence, MutableSet, deque)


class Kept:
    """Containers as they were before the code ran: those of the model, and whatever else the code comes by."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[str, Any, list[Any]]] = {}

    def add(self, value: Any, place: str, depth: int = 3) -> None:
        """Remember a container, or an object of somebody's class, and those in it."""
        if isinstance(value, nn.Module) or id(value) in self._before:
            return
        if isinstance(value, type):
            # Its own attributes are watched where code sets them; containers in it belong to all of its objects.
            for key, item in vars(value).items() if is_the_models(file_of_class(value)) else ():
                if isinstance(item, CONTAINERS):
                    self.add(item, f"{key} of {value.__name__}", depth - 1)
            return
        held = vars(value) if is_plain_object(value) and type(value) not in CONTAINERS else None
        if isinstance(value, CONTAINERS) or held is not None:
            kept = value if held is None else held
            self._before[id(value)] = (place, kept, _content(kept))
        if depth and isinstance(value if held is None else held, (tuple, *CONTAINERS)):
            inside = value if held is None else held
            for item in list(inside.values() if isinstance(inside, MutableMapping) else inside):
                self.add(item, place, depth - 1)

    def changed(self) -> str:
        """Put everything back as it was; return the place of what had changed, if anything had."""
        places = [place for place, found, content in self._before.values()
                  if not _same(_content(found), content) and _put_back(found, content)]  # fmt: skip
        return places[0] if places else ""


@contextmanager
def unchanged_containers(model: nn.Module) -> Iterator[Kept]:
    """Refuse code that changes a container of a module on every call: a graph would not do it.

    Whatever happens, the containers hold afterwards what they held before: no tracing value stays in them.
    """
    kept = Kept()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            kept.add(value, f"{name} of module {path!r}" if path else f"self.{name}", 0 if name in MODULE_OWN else 3)
        for kind in type(module).__mro__:
            kept.add(kind, "", 2)
        kept.add(vars(module), f"the attributes of module {path!r}" if path else "the attributes of self", 0)
    try:
        yield kept
    finally:
        changed = kept.changed()
    if changed:
        refuse(
            f"forward changes {changed}, which a graph would not do on every call. Return the value instead; a cache "
            "that one call of the model fills is fine once it is filled: the forward",
            place_of_forward(model),
        )


def _content(container: Any) -> list[Any]:
    if not isinstance(container, MutableMapping):
        return list(container)
    return [item for item in container.items() if not str(item[0]).startswith("_tensor_constant")]  # torch.fx's own


def _same(now: list[Any], then: list[Any]) -> bool:
    """Compare by identity, plain values by value: tensors do not compare."""
    return len(now) == len(then) and all(_equal(one, other) for one, other in zip(now, then, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _same(list(one), list(other))
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)


def _put_back(container: Any, content: list[Any]) -> bool:
    if isinstance(container, MutableMapping):
        before = dict(content)
        for key in [key for key, _ in _content(container) if key not in before]:
            del container[key]
        container.update(before)
    elif isinstance(container, MutableSet):
        container.clear()
        for item in content:
            container.add(item)
    else:
        container.clear()
        container.extend(content)
    return True
