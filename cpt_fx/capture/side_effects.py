"""Snapshot and restore of what a model's code may change as a side effect: attributes, hooks, classes, globals."""

from __future__ import annotations

import copyreg
import functools
import operator
import random
import sys
import threading
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

from cpt_fx.capture.base import ABSENT
from cpt_fx.common.torch_private import FakeTensor, is_traceable_wrapper_subclass
from cpt_fx.ir.contexts import ModesOf
from cpt_fx.ir.layer_state import PREFIX
from cpt_fx.ir.result import PART

_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "cpt_fx"})
"""Packages whose classes and objects are not searched, except instances of `_HOLDERS`."""
_MOST_ITEMS, _DEPTH, _LARGEST_ARRAY = 1000, 8, 1 << 24
"""Limits: items of a container to search, depth of the search, bytes of an array to restore.

Larger containers are restored but not searched: a module that refers to its trainer leads to whole datasets.
"""
_HOLDERS = (nn.Module, SimpleNamespace, Namespace, UserDict, UserList, ChainMap, threading.local, Optimizer)
"""Library classes whose instances hold objects of the user."""
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_Undo = Callable[[], object]


@contextmanager
def unchanged(model: nn.Module, *, values: bool = False) -> Iterator[None]:
    """Undo the side effects of a model's code in the block; with `values`, also in-place changes of tensor values.

    It covers modules, plain objects and containers that they lead to, closures, the classes of the modules, the globals
    that their methods name, with the functions among these, random state, and modes of the process. State of cpt_fx is
    kept.
    """
    memory = _Memory(values)
    memory.keep(model)
    try:
        with ModesOf(always=True):
            yield
    finally:
        with torch.no_grad():
            for undo in reversed(memory.undo):
                undo()


def run_aside(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function in a copy of the context, so that changes of context variables end with the call."""
    return copy_context().run(function, *args, **kwargs)


class _Memory:
    """All objects found, and the functions that restore them."""

    def __init__(self, values: bool) -> None:
        self.values = values
        self.undo: list[_Undo] = []
        self.known: dict[int, Any] = {}

    def keep(self, model: nn.Module) -> None:
        """Take a snapshot of all that a model leads to, and of the global random number generators."""
        self.undo += [
            functools.partial(random.setstate, random.getstate()),
            functools.partial(numpy.random.set_state, numpy.random.get_state()),
            functools.partial(torch.random.set_rng_state, torch.random.get_rng_state()),
        ]
        rows = deque((value, 0) for key, value in vars(torch_module).items() if key.startswith("_global_"))
        rows.extend((module, 0) for module in model.modules())
        while rows:
            value, depth = rows.popleft()  # breadth first: each object is reached on a shortest path
            if id(value) in self.known or depth > _DEPTH:
                continue
            self.known[id(value)] = value
            rows.extend((inner, depth + 1) for inner in self._one(value))

    def _one(self, value: Any) -> Iterable[Any]:
        """Take a snapshot of one object, and return what it leads to."""
        if isinstance(value, (str, bytes, int, float, complex, ModuleType, CodeType)) or value is None:
            return ()
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) is numpy.ndarray:
            return self._array(value)
        if isinstance(value, (list, deque, set, dict)):
            return self._container(value)
        if isinstance(value, (tuple, frozenset)):
            return value if len(value) <= _MOST_ITEMS else ()
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, (MethodType, staticmethod, classmethod)):
            return (value.__func__, getattr(value, "__self__", None))
        if isinstance(value, property):
            return (value.fget, value.fset)
        if isinstance(value, functools.partial):
            return (value.func, value.args, value.keywords)
        if isinstance(value, functools._lru_cache_wrapper):
            return self._cached(value)
        put_back = keep_generator(value)
        if put_back is not None:
            self.undo.append(put_back)
        return self._object(value)

    def _container(self, value: Any) -> Iterable[Any]:
        self.undo.append(keep_container(value))
        if len(value) > _MOST_ITEMS:
            return ()
        return list(value.values() if isinstance(value, dict) else value)

    def _object(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        if _is_foreign(kind) and not isinstance(value, _HOLDERS):
            return ()
        held = getattr(value, "__dict__", None)
        found = self._container(held) if type(held) is dict else ()
        slots = {name: getattr(value, name, ABSENT) for name in copyreg._slotnames(kind)}  # type: ignore[attr-defined]

        def undo() -> None:
            for name, item in slots.items():
                now = getattr(value, name, ABSENT)
                if now is not item:
                    object.__delattr__(value, name) if item is ABSENT else object.__setattr__(value, name, item)

        if slots:
            self.undo.append(undo)
        return [*found, *slots.values(), kind]

    def _class(self, value: type) -> Iterable[Any]:
        bases = [base for base in value.__mro__[1:] if base is not object]
        if _is_foreign(value):
            return bases
        before = dict(vars(value))

        def undo() -> None:
            for name in [name for name in vars(value) if name not in before]:
                type.__delattr__(value, name)
            for name, item in before.items():
                if vars(value).get(name) is not item:
                    type.__setattr__(value, name, item)

        self.undo.append(undo)
        return [*before.values(), *bases]

    def _function(self, value: FunctionType) -> Iterable[Any]:
        if value.__module__ is None or value.__module__.partition(".")[0] in _FOREIGN:
            return ()
        cells = [(cell, _content(cell)) for cell in value.__closure__ or ()]
        names = _names(value.__code__)
        held, named = value.__globals__, list[tuple[dict[str, Any], str, Any]]()
        for space in (held, *(vars(item) for item in map(held.get, names) if _is_users(item))):
            # The names of code include attributes: a name that is not a global now must not become one.
            named += [(space, name, space.get(name, ABSENT)) for name in names]
        named = [each for each in named if not isinstance(each[2], (ModuleType, type))]

        def undo() -> None:
            for cell, item in cells:
                if item is not ABSENT and _content(cell) is not item:
                    cell.cell_contents = item
            for space, name, item in named:
                # What was imported or defined meanwhile stays: Python also keeps track of it elsewhere.
                now = space.get(name, ABSENT)
                if now is not item and not isinstance(now, (ModuleType, type, FunctionType)):
                    space.pop(name) if item is ABSENT else space.__setitem__(name, item)

        self.undo.append(undo)
        own = (value.__dict__, value.__defaults__, value.__kwdefaults__)
        return [*(item for _, item in cells), *(item for *_, item in named), *own]

    def _cached(self, value: Any) -> Iterable[Any]:
        before = value.cache_info().currsize

        def undo() -> None:
            # Entries of a dry run may be copies that it made; the next call computes them again.
            if value.cache_info().currsize != before:
                value.cache_clear()

        self.undo.append(undo)
        return (getattr(value, "__wrapped__", None),)

    def _array(self, value: numpy.ndarray[Any, Any]) -> Iterable[Any]:
        if value.flags.writeable and value.nbytes <= _LARGEST_ARRAY:
            self.undo.append(functools.partial(numpy.copyto, value, value.copy()))
        return ()

    def _tensor(self, value: Tensor) -> Iterable[Any]:
        self.undo.append(keep_tensor(value, values=self.values))
        return (value.grad if value.is_leaf else None,)


def keep_container(value: Any) -> Callable[[], bool]:
    """Return a function that restores the content of a container, and returns whether it had changed."""
    before = _copied(value)

    def put_back() -> bool:
        now, wanted = _copied(value), before
        if not now and not wanted:  # the most frequent case
            return False
        if isinstance(now, dict):
            wanted = before | {key: item for key, item in now.items() if _is_ours(key) and key not in before}
        if _same(now, wanted, operator.is_):
            return False
        # Call the methods of the base class: those of a subclass may do more.
        kind: Any = next(base for base in (OrderedDict, dict, list, deque, set) if isinstance(value, base))
        kind.clear(value)
        (kind.extend if isinstance(value, (list, deque)) else kind.update)(value, wanted)
        return not _same(now, wanted, _equal)

    return put_back


def keep_tensor(value: Tensor, *, values: bool = False) -> Callable[[], str]:
    """Return a function that restores a tensor (values only if `values`) and names what changed: "the data of {}"."""
    is_wrapper = is_traceable_wrapper_subclass(value)
    if value.layout is not torch.strided or isinstance(value, FakeTensor) or is_wrapper:
        return lambda: ""
    # The same memory with another version counter: a pending backward pass may rely on the tensor's own.
    memory = value.detach() if value.is_inference() else value.data
    wanted, is_leaf = value.requires_grad, value.is_leaf
    copy = memory.clone() if values and not value.is_meta else None
    gradient = value.grad if is_leaf else None
    hooks = {name: dict(getattr(value, name) or {}) for name in _TENSOR_HOOKS}

    def put_back() -> str:
        changed = ""
        if memory_of(value) != memory_of(memory):
            value.data, changed = memory, "the data of {}"
        if copy is not None:
            with torch.inference_mode(value.is_inference()):
                memory.copy_(copy)
        if is_leaf and value.requires_grad is not wanted:
            value.requires_grad, changed = wanted, "whether {} asks for a gradient"
        if is_leaf and value.grad is not gradient:
            value.grad, changed = gradient, "the gradient of {}"
        for name, before in hooks.items():
            now = getattr(value, name)
            if now is not None and dict(now) != before:
                now.clear()
                now.update(before)
                changed = "the hooks of {}"
        return changed

    return put_back


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what identifies a tensor's memory and layout, without `data_ptr()`, which not every tensor has."""
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith((PREFIX, PART, "_tensor_constant"))  # the last is torch.fx's


def _is_users(value: object) -> bool:
    """Return whether a value is a Python module outside of the packages in `_FOREIGN`."""
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _FOREIGN


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


def _copied(value: Any) -> Any:
    return dict(value.items()) if isinstance(value, dict) else list(value)


def _same(now: Any, before: Any, test: Callable[[Any, Any], bool]) -> bool:
    if isinstance(now, dict):
        now, before = [*now, *now.values()], [*before, *before.values()]
    return len(now) == len(before) and all(map(test, now, before))


def _equal(one: Any, other: Any) -> bool:
    """Compare plain values by value, everything else by identity: tensors do not compare to a bool."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return _same(one, other, _equal)
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return ABSENT


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that a code object, and the functions it defines, look up."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))


def keep_generator(value: Any) -> _Undo | None:
    """Return a function that restores a random number generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None
