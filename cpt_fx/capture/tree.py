"""Copies of a model's module tree that run on their own, and the paths of modules and tensors in a tree."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import accumulate
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from cpt_fx.capture.base import EVERY, MODULE_OWN, clone_tree, refuse_taken_names
from cpt_fx.ir.result import plain_class
from cpt_fx.ir.watched import is_own_method, plain_function


class Inlined(nn.Module):
    """Replaces the wrapper of `torch.compile`: the same names, without a compiler of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, which is captured together with its caller."""
        return self.get_submodule("_orig_mod")(*args, **kwargs)


def own_tree(model: nn.Module, session: object = None) -> nn.Module:
    """Copy a model so that running the copy changes nothing in the original; parameters and buffers are shared.

    Python attributes that lead back into the model (lists of modules, bound methods, closures) lead into the copy.
    Modules transformed by `session` are copied as the plain modules they were.
    """
    clones: dict[int, nn.Module] = {}
    root = clone_tree(model, clones, session)
    refuse_taken_names(model)
    rebound = _Rebinding(clones)
    for original in list(clones):
        module = clones[original]
        if id(module) == original:
            continue
        module.__dict__.pop("_compiled_call_impl", None)
        for key, value in list(module.__dict__.items()):
            if key == "_modules":
                continue
            if key in MODULE_OWN:
                # Hooks may be bound methods of a module.
                for name, hook in list(value.items()) if isinstance(value, dict) else ():
                    value[name] = rebound(hook)
            else:
                module.__dict__[key] = rebound(value)
    _inline_compiled(root)
    return root


def plain_tree(model: nn.Module) -> nn.Module:
    """Copy a model with all transformed modules in it as the plain modules they were, without our state."""
    return own_tree(model, EVERY)


def _inline_compiled(root: nn.Module) -> None:
    """Replace modules wrapped by `torch.compile`: nested in a captured model they would be compiled a second time."""
    for module in root.modules():
        for name, child in module._modules.items():
            if type(child).__name__ == "OptimizedModule" and child is not None and "_orig_mod" in child._modules:
                plain = Inlined()
                plain._modules["_orig_mod"] = child._modules["_orig_mod"]
                plain.training = child.training
                module._modules[name] = plain


class _Rebinding:
    """Rewrites attribute values: references to modules of the original become references to their copies.

    Containers that a module holds are copied, since running the copy may fill them. What closures, partials and other
    objects hold may be shared, and is copied only if it leads to a module of the model.
    """

    def __init__(self, clones: dict[int, nn.Module]) -> None:
        self.clones = clones
        self.own = True
        self.done: dict[tuple[int, bool], Any] = {}
        self.kept: list[Any] = []  # ids stay valid only as long as their objects live

    def __call__(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self.clones.get(id(value), value)
        change = _REBUILD.get(type(value)) or (_Rebinding.object if is_plain_object(value) else None)
        if change is None:
            return value
        key = (id(value), self.own)
        if key not in self.done:
            self.kept.append(value)
            self.done[key] = value  # for values that refer to themselves
            self.done[key] = change(self, value)
        return self.done[key]

    def items(self, value: Any) -> Any:
        """Rewrite a list, deque, set or tuple."""
        new = [self(item) for item in value]
        owned = self.own and not isinstance(value, tuple)
        if not owned and not _changed(new, value):
            return value
        return deque(new, value.maxlen) if isinstance(value, deque) else type(value)(new)

    def mapping(self, value: Any) -> Any:
        """Rewrite a dict: its values, and keys that are modules."""
        new = value.copy()
        new.clear()
        new.update({self(key) if isinstance(key, nn.Module) else key: self(item) for key, item in value.items()})
        return new if self.own or _changed(new.values(), value.values()) or _changed(new, value) else value

    def method(self, value: MethodType) -> Any:
        """Rebind a bound method to the copy of its owner."""
        owner = self(value.__self__)
        if owner is value.__self__:
            return value
        # The method of a derived class becomes that of the user's class.
        return MethodType(getattr(type(owner), value.__name__) if is_own_method(value) else value.__func__, owner)

    def partial(self, value: functools.partial[Any]) -> Any:
        """Rewrite the function and the arguments of a `functools.partial`."""
        if plain_function(value) is not value:
            return self(plain_function(value))
        parts = (value.func, value.args, value.keywords)
        function, args, keywords = rebound = self.foreign(parts)
        return functools.partial(function, *args, **keywords) if _changed(rebound, parts) else value

    def function(self, value: FunctionType) -> Any:
        """Copy a function whose closure or defaults lead to a module, so that they lead to its copy."""
        try:
            contents = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # an empty cell
            return value
        defaults = (value.__defaults__, value.__kwdefaults__)
        rebound, others = self.foreign(contents), self.foreign(defaults)
        if not _changed(rebound, contents) and not _changed(others, defaults):
            return value
        cells = tuple(CellType(content) for content in rebound) if value.__closure__ else None
        new = FunctionType(value.__code__, value.__globals__, value.__name__, others[0], cells)
        new.__dict__.update(value.__dict__)
        new.__kwdefaults__ = others[1]
        return new

    def object(self, value: Any) -> Any:
        """Copy a helper object that leads to a module; return others unchanged."""
        held = vars(value).copy()
        new = self.foreign(held.values())
        if not _changed(new, held.values()):
            return value
        made = copy.copy(value)
        made.__dict__.update(zip(held, new, strict=True))
        return made

    def foreign(self, values: Iterable[Any]) -> list[Any]:
        """Rewrite values that no module holds directly, and that may be shared."""
        own, self.own = self.own, False
        try:
            return [self(value) for value in values]
        finally:
            self.own = own


def is_plain_object(value: Any) -> bool:
    """Return whether a value is an instance of a class outside of `_SHARED`, with attributes that may hold modules."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not isinstance(value, (type, Tensor, ModuleType)) and package not in _SHARED


_SHARED = frozenset({"torch", "numpy", "builtins", "functools", "logging", "threading"})
"""Packages whose objects hold no modules of a model."""


def _changed(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return any(one is not other for one, other in zip(new, old, strict=True))


_REBUILD: dict[type, Callable[[_Rebinding, Any], Any]] = {
    **dict.fromkeys((list, deque, set, tuple), _Rebinding.items),
    **dict.fromkeys((dict, OrderedDict, defaultdict), _Rebinding.mapping),
    MethodType: _Rebinding.method,
    functools.partial: _Rebinding.partial,
    FunctionType: _Rebinding.function,
}


class TreePlaces:
    """The paths of the tensors and modules of a tree at the time of construction."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.tensors: dict[int, str] = {}
        self.modules: dict[int, str] = {}
        for path, module in root.named_modules():
            self.modules[id(module)] = path
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                self.tensors.setdefault(id(tensor), f"{path}.{name}" if path else name)

    def tensor(self, value: object) -> str | None:
        """Return the path of a parameter or buffer; None for any other value."""
        return self.tensors.get(id(value)) if isinstance(value, torch.Tensor) else None

    def stack(self, path: str) -> dict[str, tuple[str, type[nn.Module]]]:
        """Return the module stack of a node of the module at `path`: {path: (path, class)}, without the root."""
        names = accumulate(path.split(".") if path else (), "{}.{}".format)
        return {name: (name, plain_class(type(self.root.get_submodule(name)))) for name in names}
