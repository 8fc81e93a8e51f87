"""The result of a transform: the model's own module tree, whose modules have classes derived from the user's.

A derived class runs rewritten graphs instead of the user's forward, whether the whole model, a layer or a method is
called. In all else it is like the user's class: name, signature, methods, isinstance.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from cpt_fx.common.compilers import is_one_graph_demanded, skip_frame
from cpt_fx.errors import TransformError
from cpt_fx.ir.layer_state import PREFIX, forget, is_range, moved, own
from cpt_fx.ir.watched import OF, look_of, own_function, runs_here, runs_plain, watched_method
from cpt_fx.ir.watched import PART as PART
from cpt_fx.operators import HIDING

if TYPE_CHECKING:
    from cpt_fx.capture.session import Session

CALL_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
POSITION = f"{PREFIX}position"
"""Key of the schedule's position in the state_dict of the root."""
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BY_TYPE = ("__dict__", "__weakref__")
"""Attributes that `type` adds to every class."""


class Part:
    """Links a module to its transform: the session, and a forward that the user set on the instance."""

    def __init__(self, session: Session, forward: Callable[..., Any] | None = None) -> None:
        self.session = session
        self.forward = forward


class Transformed(nn.Module):
    """Base that every derived class has in front of the user's class."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing: the user's own `__init_subclass__` must not run for a derived class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # `type(module)(...)` and `sequence[:2]` create plain modules.
        object.__setattr__(self, "__class__", plain_class(type(self)))
        type(self).__init__(self, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        held = PART in self.__dict__
        super().__setattr__(name, own_function(self, name, value) if held else value)
        if held and isinstance(value, nn.Module):
            _take_in(self, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a module, which from now on runs rewritten graphs, too."""
        super().add_module(name, module)
        if module is not None:
            _take_in(self, module)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformed:
        """Move our tensors with the module but keep their dtype: half precision is too coarse for a running average."""
        ours = {id(tensor) for tensor in own(self).values()}

        def applied(tensor: Tensor) -> Tensor:
            return moved(tensor, fn(tensor).device) if id(tensor) in ours else fn(tensor)

        with part_of(self).session.settled():
            super()._apply(applied, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(self, POSITION):
            destination[prefix + POSITION] = self.cpt_fx_position

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        session = part_of(self).session
        given = [key for key in state_dict if key.startswith(prefix + PREFIX) and is_range(key.removeprefix(prefix))]
        if session.frontend == "dynamo":  # which may not have found all ranges of the checkpoint yet
            for key in given:
                name = key.removeprefix(prefix)
                if name not in own(self):
                    self.register_buffer(name, torch.zeros_like(state_dict[key]))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        position = state_dict.pop(prefix + POSITION, None) if session.root is self else None
        unexpected_keys[:] = [key for key in unexpected_keys if position is None or key != prefix + POSITION]
        lost = [name for name in own(self) if prefix + name not in state_dict]
        theirs = [name for name in (*self._parameters, *self._buffers) if not name.startswith(PREFIX)]
        is_there = any(prefix + name in state_dict for name in theirs)
        if lost and (is_there or not theirs):
            missing_keys[:] = [key for key in missing_keys if key.removeprefix(prefix) not in lost]
            if not given and is_there:
                forget(self)
                session.note_lost_ranges()
        if session.root is self and _is_plain(state_dict, prefix, self):
            session.forget_ranges()
        if position is None:
            return
        if position.numel() != 2 or position.is_meta:
            error_msgs.append(f"{prefix}{POSITION} holds no position and schedule, but shape {tuple(position.shape)}")
        elif not position[0] >= 0:
            error_msgs.append(f"{prefix}{POSITION} holds {position[0].item()}, which is no step of a schedule")
        else:
            session.state.resume(position, session.kind)

    @property
    def cpt_fx_position(self) -> Tensor:
        """The value that the state_dict has under this name: tools look up its keys as attributes of the model."""
        session = part_of(self).session
        mark = session.state.mark() if session.root is self else None
        if mark is None:
            raise AttributeError(POSITION)
        return mark

    @cpt_fx_position.setter
    def cpt_fx_position(self, value: object) -> None:
        """Ignore the value: `functional_call` sets what a state_dict has, then restores what it found."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the user's class does, plus the `Part`, which its own pickling may leave out."""
        made = super().__reduce_ex__(protocol)
        assert isinstance(made, tuple)
        function, args, *rest = made
        state, *items = rest or [None]
        return _rebuilt, (_plain(function), tuple(map(_plain, args))), (state, self.__dict__[PART]), *items

    def __setstate__(self, state: Any) -> None:
        """Restore the state as the user's class does, then the `Part` and the derived class, which that may reset."""
        theirs, part = state
        if theirs is not None:
            super().__setstate__(theirs)  # type: ignore[no-untyped-call]
        self.__dict__[PART] = part
        object.__setattr__(self, "__class__", derived(type(self)))


def _is_plain(state_dict: Any, prefix: str, root: nn.Module) -> bool:
    """Return whether a checkpoint has all of a model's parameters, and none of our tensors."""
    if any(key.startswith(prefix) and PREFIX in key for key in state_dict):
        return False
    names = [name for name, _ in root.named_parameters() if PREFIX not in name]
    return bool(names) and all(prefix + name in state_dict for name in names)


def _plain(value: Any) -> Any:
    return plain_class(value) if isinstance(value, type) and issubclass(value, nn.Module) else value


def _rebuilt(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Create a module of the user's class, and give it the derived one."""
    module = function(*args)
    if isinstance(module, nn.Module) and not isinstance(module, Transformed):
        object.__setattr__(module, "__class__", derived(type(module)))
    return module


def part_of(module: nn.Module) -> Part:
    """Return the `Part` of a module of a result."""
    part: Part = module.__dict__[PART]
    return part


_DERIVED: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()


def derived(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a user's class that runs rewritten graphs."""
    if issubclass(cls, Transformed):
        return cls
    if "parametrizations" in cls.__dict__ or cls.__name__.startswith("Parametrized"):
        # Torch gives each parametrized module its own class, and finds the original as its base.
        base = derived(cls.__bases__[0])
        return type(cls.__name__, (base,), {key: value for key, value in cls.__dict__.items() if key not in _BY_TYPE})
    made = _DERIVED.get(cls)
    if made is None:
        kind: Any = type(cls)
        look: Any = look_of(kind)
        made = _DERIVED[cls] = look(cls.__name__, (Transformed, cls), _body(cls))
    assert made is not None
    return made


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the user's class that a class was derived from, or the class itself."""
    if not issubclass(cls, Transformed):
        return cls
    if cls.__name__.startswith("Parametrized") and cls.__bases__[0] is not Transformed:
        body = {key: value for key, value in cls.__dict__.items() if key not in _BY_TYPE}
        return type(cls.__name__, (plain_class(cls.__bases__[0]),), body)
    # Not always the class itself: fully_shard derives another one from it.
    made = next(base for base in cls.__mro__ if base.__bases__[0] is Transformed)
    plain: type[nn.Module] = made.__bases__[1]
    return plain


def plain_layer(layer: nn.Module) -> nn.Module:
    """Return a layer of the user's class that shares all attributes with one of a result, for tracing."""
    if PART not in layer.__dict__:
        return layer
    made: nn.Module = object.__new__(plain_class(type(layer)))
    # Without hooks: a layer that has some stays a call.
    made.__dict__ = {
        key: type(value)() if key in CALL_HOOKS else value for key, value in layer.__dict__.items() if key != PART
    }
    return made


def _body(cls: type[nn.Module]) -> dict[str, Any]:
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body |= {OF: cls, "forward": _forward_of(cls)}
    if issubclass(cls, fx.GraphModule):
        body.update(_of_graph_modules(cls))
    elif not hasattr(cls, "graph"):
        body["graph"] = _Graph()
    body |= {name: watched_method(cls, name) for name in _methods(cls)}
    if issubclass(cls, (nn.ModuleList, nn.Sequential)):
        body["insert"] = _insert_of(cls)
        if cls.__getitem__ in (nn.ModuleList.__getitem__, nn.Sequential.__getitem__):
            body["__getitem__"] = _getitem_of(cls)
    if "__deepcopy__" in dir(cls):
        body["__deepcopy__"] = _deepcopy_of(cls)
    return body


def signature_of(forward: Any) -> inspect.Signature:
    """Return the signature of a forward, which may be any callable."""
    try:
        return inspect.signature(forward)
    except ValueError as error:
        raise TransformError(
            f"forward is {forward!r}, which does not say what it takes: call it in a method"
        ) from error


def _forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if runs_plain(self):
            return cls.forward(self, *args, **kwargs)
        part: Part = self.__dict__[PART]
        if part.forward is not None and runs_here(self):
            return part.forward(*args, **kwargs)
        session = part.session
        if torch.compiler.is_dynamo_compiling() and is_one_graph_demanded():
            view = session.views.get((id(self), False))
            if view is not None:
                return view.forward(*args, **kwargs)
        return session.enter(self, args, kwargs)

    # All classes share this code: Dynamo would compile it for each of them, up to a limit.
    skip_frame(forward.__code__)
    functools.update_wrapper(forward, cls.forward)
    forward.__signature__ = signature_of(cls.forward)  # type: ignore[attr-defined]
    # torch.jit would follow `__wrapped__` to the user's code.
    del forward.__wrapped__  # type: ignore[attr-defined]
    return forward


def _methods(cls: type[nn.Module]) -> Iterable[str]:
    """Return the names of the user's own methods except forward: what they multiply is quantized, too."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] in ("torch", "builtins", "abc", "cpt_fx"):
            continue
        found |= {
            name: value
            for name, value in vars(base).items()
            if isinstance(value, types.FunctionType) and (not name.startswith("__") or name == "__call__")
        }
    return [name for name in found if name != "forward" and getattr(cls, name, None) is found[name]]


def _insert_of(cls: Any) -> Callable[..., Any]:
    def insert(self: nn.Module, index: int, module: nn.Module) -> Any:
        # It writes to the dict of modules, bypassing `add_module`.
        inserted = cls.insert(self, index, module)
        _take_in(self, self)
        return inserted

    return insert


def _getitem_of(cls: Any) -> Callable[..., Any]:
    def __getitem__(self: nn.Module, index: Any) -> Any:  # noqa: N807
        if not isinstance(index, slice):
            return cls.__getitem__(self, index)
        # A slice is a plain container, as from `__init__` above, where Dynamo cannot trace the change of class.
        items = list(self._modules.items())[index]
        return cls(OrderedDict(items) if issubclass(cls, nn.Sequential) else [module for _, module in items])

    return __getitem__


def _deepcopy_of(cls: type[nn.Module]) -> Callable[..., Any]:
    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:  # noqa: N807
        # The user's `__deepcopy__` copies a plain module; modules inside are copied by their own.
        object.__setattr__(self, "__class__", cls)
        part = self.__dict__.pop(PART)
        try:
            new: nn.Module = copy.deepcopy(self, memo)
        finally:
            object.__setattr__(self, "__class__", derived(cls))
            self.__dict__[PART] = part
        memo[id(self)] = new
        new.__dict__[PART] = copy.deepcopy(part, memo)
        object.__setattr__(new, "__class__", derived(type(new)))
        return new

    return __deepcopy__


def _of_graph_modules(cls: type[nn.Module]) -> dict[str, Any]:
    """Return what a GraphModule needs: `graph` is the rewritten graph, `recompile` that of the user's class."""
    plain: Any = cls

    def recompile(self: nn.Module) -> Any:
        # It writes to the module's class.
        object.__setattr__(self, "__class__", cls)
        try:
            return plain.recompile(self)
        finally:
            object.__setattr__(self, "__class__", derived(cls))

    def graph(self: nn.Module) -> fx.Graph:
        session = part_of(self).session
        found: fx.Graph = session.graph_of(self) if self is session.root else plain.graph.fget(self)
        return found

    return {"recompile": recompile, "graph": property(graph, plain.graph.fset)}


class _Graph:
    """`result.graph`: the graph of the whole model, unless the model has an attribute of that name."""

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        for held in (module._parameters, module._buffers, module._modules):
            if "graph" in held:
                return held["graph"]
        if PART not in module.__dict__:
            raise AttributeError("graph")
        return part_of(module).session.graph_of(module)


def adopt(tree: nn.Module, session: Session) -> bool:
    """Switch all modules of a tree that may multiply to their derived classes; return whether any is new to it."""
    part: Part | None = tree.__dict__.get(PART)
    is_another = part is not None and tree is part.session.root is not session.root
    if is_another or isinstance(tree, parametrize.ParametrizationList):
        return False
    found = may_multiply(tree) if part is None else part.session is not session
    for child in tree._modules.values():
        if child is not None:
            found |= adopt(child, session)
    if part is not None:
        # A layer from another result, or a copy of one, becomes ours.
        if part.session is not session:
            part.session.capture_anew()
        part.session = session
    elif may_multiply(tree):
        tree.__dict__[PART] = Part(session, tree.__dict__.pop("forward", None))
        object.__setattr__(tree, "__class__", derived(type(tree)))
    return found


def _take_in(holder: nn.Module, module: nn.Module) -> None:
    """Adopt a module that was added to a module of a result; check the ranges again: its own are untrained."""
    if PART in holder.__dict__:
        session = part_of(holder).session
        adopt(module, session)
        session.look_again()


def may_multiply(module: nn.Module) -> bool:
    """Return whether a module may multiply, or hold modules that do; torch's own layers are known."""
    if isinstance(module, (*HIDING, *CONTAINERS)):
        return True
    return bool(module._modules) or not type(module).__module__.startswith("torch.nn.modules")


def sessions_in(model: nn.Module) -> list[tuple[str, Session]]:
    """Return the session of every transform in a model, each with the path of its result in the model.

    The path is empty if the model has only some layers of a result: layer names are then those of the result.
    """
    found: dict[int, tuple[str, Session]] = {}
    for name, module in model.named_modules():
        part = module.__dict__.get(PART)
        if part is not None and (id(part.session) not in found or part.session.root is module):
            found[id(part.session)] = (name if part.session.root is module else "", part.session)
    return list(found.values())
