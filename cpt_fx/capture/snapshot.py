"""Detect, at the next call, changes of what a traced graph depends on besides tensors."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from cpt_fx.capture.base import ABSENT
from cpt_fx.capture.tree import is_plain_object
from cpt_fx.common.torch_private import has_any_global_hook
from cpt_fx.ir.result import CONTAINERS, derived, plain_class

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_OWN = frozenset({*vars(nn.Module()), "_cpt_fx_part", "_compiled_call_impl", "_is_torch_compile", "_training"})
_NEEDED = ("module", "outside", "looks_at_hooks", "names")


class Snapshot:
    """Snapshot of the modules whose code was traced: classes, children, hooks, attributes."""

    def __init__(self, entry: nn.Module, called: set[int], names: frozenset[str] | None = None) -> None:
        """Take the snapshot of everything below `entry`, except inside modules that the graph calls.

        `names` are the names that occur in the traced code: it cannot have read attributes of other names, such as a
        counter of the training loop. None means any name.
        """
        self.names = names
        self.seen: list[_Seen] = []
        self._walk(entry, called, set(), is_entry=True)
        self.hooked = has_global_hooks()

    def _walk(self, module: nn.Module, called: set[int], known: set[int], *, is_entry: bool = False) -> None:
        if id(module) in known:
            return
        known.add(id(module))
        outside = id(module) in called and not is_entry
        self.seen.append(_Seen(module, self.names, is_entry=is_entry, outside=outside))
        for child in () if outside else module._modules.values():
            if child is not None:
                self._walk(child, called, known)

    def changed(self) -> str:
        """Return what differs, as text; empty if nothing does."""
        if self.hooked is not has_global_hooks():
            return "hooks for all modules"
        for seen in self.seen:
            why = seen.changed()
            if why:
                return f"{why} of {type(seen.module).__name__}"
        return ""


def has_global_hooks() -> bool:
    """Return whether global module hooks are set."""
    return bool(has_any_global_hook())


class _Seen:
    """Snapshot of one module."""

    def __init__(self, module: nn.Module, names: frozenset[str] | None, *, is_entry: bool, outside: bool) -> None:
        self.module, self.outside, self.looks_at_hooks = module, outside, not is_entry
        # The code of torch's layers is not inspected: it may have read any attribute.
        self.names = names if _is_of_the_model(plain_class(type(module))) else None
        self._look()

    def _look(self) -> None:
        module, outside = self.module, self.outside
        self.kind = type(module)
        self.plain_kind = plain_class(self.kind)
        self.is_derived = self.plain_kind is not self.kind
        self.forward = self.plain_kind.forward
        self.hooked = is_hooked(module)
        self.children = None if outside else tuple(module._modules.items())
        self.tensors = None if outside else _presence(module)
        keys = () if outside else tuple(filter(self._may_be_read, vars(module)))
        self.count = len(vars(module))
        contents = [(key, vars(module)[key], content_of(vars(module)[key])) for key in keys]
        # Mutable values are compared by their content.
        self.plain = tuple((key, value) for key, value, content in contents if content is value)
        self.deep = tuple((key, content) for key, value, content in contents if content is not value)

    def _may_be_read(self, key: str) -> bool:
        return key not in _OWN and (self.names is None or key in self.names or key == "forward")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the derived class and its forward, which `__setstate__` finds again from the user's class."""
        # The copy of a GraphModule has a class and a graph of its own: its snapshot is taken later.
        known = _NEEDED if isinstance(self.module, fx.GraphModule) else self.__dict__.keys() - {"kind", "forward"}
        return {key: self.__dict__[key] for key in known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the snapshot, for the copy of the module."""
        self.__dict__.update(state)
        if "plain_kind" in state:
            self.kind = derived(self.plain_kind) if self.is_derived else self.plain_kind
            self.forward = self.plain_kind.forward

    def changed(self) -> str:
        """Return what differs, as text; empty if nothing does."""
        module = self.module
        if "kind" not in self.__dict__:
            self._look()
        if type(module) is not self.kind:
            return "the class"
        if self.plain_kind.forward is not self.forward:
            return "the forward"
        if self.looks_at_hooks and is_hooked(module) is not self.hooked:
            return "the hooks"
        if self.outside:
            return ""
        now = module.__dict__
        children = now["_modules"]
        if len(children) != len(self.children or ()):
            return "the modules"
        for name, child in self.children or ():
            if children.get(name, ABSENT) is not child:
                return "the modules"
        if _presence(module) != self.tensors:
            return "the parameters"
        for key, value in self.plain:
            other = now.get(key, ABSENT)
            if other is not value and not _is_same(other, value):
                return f"the attribute {key}"
        for key, content in self.deep:
            if not _is_same(content_of(now.get(key, ABSENT)), content):
                return f"the attribute {key}"
        if len(now) != self.count:
            if sum(map(self._may_be_read, now)) != len(self.plain) + len(self.deep):
                return "the attributes"
            self.count = len(now)
        return ""


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has forward or backward hooks of its own."""
    held = module.__dict__
    return any(held[hooks] for hooks in _HOOKS)


def _presence(module: nn.Module) -> tuple[Any, ...]:
    """Return which parameters and buffers are None: code branches on `self.bias is None`."""
    held = module.__dict__
    tensors = (*held["_parameters"].items(), *held["_buffers"].items())
    return tuple((name, value is None) for name, value in tensors if not name.startswith("cpt_fx_"))


def _is_of_the_model(kind: type[nn.Module]) -> bool:
    """Return whether a class inherits no code from torch, except from nn.Module and containers."""
    return all(
        base in (object, nn.Module, *CONTAINERS) or not base.__module__.startswith("torch.") for base in kind.__mro__
    )


def _held(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an instance of a user's class, slots included; None for functions and plain values."""
    held = getattr(value, "__dict__", None) if not callable(value) or is_plain_object(value) else None
    names = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    if held is None and (not names or callable(value)):
        return None
    return {**{name: getattr(value, name) for name in names if hasattr(value, name)}, **(held or {})}


def content_of(value: Any, depth: int = 4) -> Any:
    """Return the content of a container, or of an instance of a user's class, in a form to compare later."""
    if depth == 0 or isinstance(value, (*_PLAIN, Tensor, nn.Module, type)):
        return value
    if isinstance(value, dict):
        return {key: content_of(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [content_of(item, depth - 1) for item in value]
    if isinstance(value, set):
        return sorted(map(repr, value))
    if isinstance(value, partial):
        return [content_of(item, depth) for item in (value.func, value.args, value.keywords)]
    held = _held(value)
    return value if held is None else (type(value), {key: content_of(item, depth - 1) for key, item in held.items()})


def _is_same(one: Any, other: Any) -> bool:
    """Compare plain values by value, containers item by item, everything else by identity."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, _PLAIN) and bool(one == other)
