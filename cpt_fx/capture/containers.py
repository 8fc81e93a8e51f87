"""Lists, dicts and tensors that a model's code changes while it is traced: put back as they were, and noticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cpt_fx.capture.base import MODULE_OWN
from cpt_fx.capture.memory import keep_container, keep_tensor
from cpt_fx.capture.refusals import file_of_class, is_the_models, place_of_forward, refuse
from cpt_fx.capture.tree import is_plain_object

CONTAINERS = (dict, list, set, deque)

_BY_ANY_NAME = {
    "getattr",
    "hasattr",
    "vars",
    "dir",
    "__dict__",
    "__getattribute__",
    "attrgetter",
    "getmembers",
    "eval",
    "exec",
}
"""What reads attributes whose names need not stand in the code."""


class Kept:
    """Containers as they were before the code ran: those of the model, and whatever else the code comes by."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[str, Any, Callable[[], bool]]] = {}
        self.names: set[str] = set()
        """The names in all code that ran."""

    def add(self, value: Any, place: str, depth: int = 3) -> None:
        """Remember a container, or an object of somebody's class, and those in it."""
        if value is None or isinstance(value, (bool, Tensor, nn.Module)) or id(value) in self._before:
            return
        if isinstance(value, type):
            # Its own attributes are watched where code sets them; containers in it belong to all of its objects.
            for key, item in vars(value).items() if is_the_models(file_of_class(value)) else ():
                if isinstance(item, CONTAINERS):
                    self.add(item, f"{key} of {value.__name__}", depth - 1)
            return
        inside = list(value) if isinstance(value, tuple) else []
        for held in (value, vars(value) if is_plain_object(value) else None):
            if isinstance(held, CONTAINERS) and id(held) not in self._before:
                self._before[id(held)] = (place, held, keep_container(held))
                inside += held.values() if isinstance(held, dict) else held
        for item in inside if depth else ():
            self.add(item, place, depth - 1)

    def note_names(self, code: CodeType) -> None:
        """Remember what may be the names of attributes: texts too, for `getattr(x, "name")` and patterns."""
        texts = pytree.tree_leaves(list(code.co_consts))
        self.names.update(code.co_names, (text for text in texts if isinstance(text, str)))

    def names_read(self) -> frozenset[str] | None:
        """Return the names of all attributes that the code may have read; None where it may be any."""
        return None if self.names & _BY_ANY_NAME else frozenset(self.names)

    def changed(self) -> str:
        """Put everything back as it was; return the place of what had changed, if anything had."""
        places = [place for place, _, put_back in self._before.values() if put_back()]
        return places[0] if places else ""


@contextmanager
def unchanged_state(model: nn.Module) -> Iterator[Kept]:
    """Refuse code that changes a container of a module, or puts something else into a parameter or buffer.

    A graph would not do it on every call. Whatever happens, all is put back: no tracing value stays in it.
    """
    kept = Kept()
    tensors = [(name, keep_tensor(tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            kept.add(value, f"{name} of module {path!r}" if path else f"self.{name}", 0 if name in MODULE_OWN else 3)
        kept.add(vars(module), f"the attributes of module {path!r}" if path else "the attributes of self", 0)
    for kind in {kind: None for module in model.modules() for kind in type(module).__mro__}:
        kept.add(kind, "", 2)
    try:
        yield kept
    finally:
        others = [said.format(name) for name, put_back in tensors if (said := put_back())]
        changed = kept.changed()
    place = place_of_forward(model)
    if others:
        refuse(f"forward changes {others[0]}, which a graph would not do on every call,", place)
    if changed:
        refuse(
            f"forward changes {changed}, which a graph would not do on every call. Return the value instead; a cache "
            "that one call of the model fills is fine once it is filled: the forward",
            place,
        )
