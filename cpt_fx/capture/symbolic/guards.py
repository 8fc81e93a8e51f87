"""Guards against what a trace would silently lose or freeze, active while the model's code runs."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from cpt_fx.capture.base import ABSENT, MODULE_OWN, patched
from cpt_fx.capture.side_effects import keep_container, keep_tensor
from cpt_fx.capture.symbolic.questions import is_caught
from cpt_fx.capture.symbolic.refusals import callers, file_of_class, is_the_models, note, place_of_forward, refuse
from cpt_fx.capture.torch_private import SingleLevelFunction
from cpt_fx.capture.tree import is_plain_object
from cpt_fx.common.torch_private import TorchDispatchMode, pytree
from cpt_fx.ir.aliasing import overwritten

PLAIN = (bool, int, float, str, type(None))
"""Types of argument values that Python code branches on: these become constants of the graph."""


class DynamoNeededError(Exception):
    """The code is about to import Dynamo, which would take our replacements of functions for the originals."""


@contextmanager
def _without_dynamo() -> Iterator[None]:
    """Refuse to import Dynamo inside the block, as `torch.utils.checkpoint` does if it is not imported yet."""
    thread = threading.get_ident()

    def find_spec(name: str, *_: object) -> None:
        if name == "torch._dynamo" and threading.get_ident() == thread:
            raise note(DynamoNeededError())

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


Replacements = dict[tuple[Any, str], Callable[..., Any]]
"""Functions that replace attributes, by owner and name."""


@contextmanager
def _replaced(functions: Replacements) -> Iterator[None]:
    """Replace functions of torch inside the block, for this thread only."""
    thread = threading.get_ident()

    def here_only(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """Call the replacement in this thread, and the original in others."""
        return lambda *args, **kwargs: (function if threading.get_ident() == thread else original)(*args, **kwargs)

    had_table = _dynamo_table().cache_info().currsize
    try:
        with patched({place: here_only(function, getattr(*place)) for place, function in functions.items()}):
            yield
    finally:
        if not had_table:
            # A table made inside the block, as when Dynamo is imported, holds the replacements of torch's functions.
            _dynamo_table().cache_clear()


def _dynamo_table() -> Any:
    """Return the cached function that makes Dynamo's table of functions; an empty stand-in if it is not imported."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    return getattr(rules, "get_torch_obj_rule_map", None) or cache(lambda: None)


def _refusing_modes() -> Replacements:
    """Return functions that refuse calls which a graph would not record."""

    def refusing(what: str) -> Callable[..., None]:
        return lambda *_: refuse(f"forward {what}")

    original = torch.set_grad_enabled.__init__

    def setting(switch: torch.set_grad_enabled, mode: bool) -> None:
        # Not if torch itself calls it: `no_grad` is checked when operators are recorded inside.
        if is_the_models(sys._getframe(2).f_code.co_filename):
            refuse("forward calls set_grad_enabled, which a graph would not,")
        original(switch, mode)

    gradients = "switches gradients on: where the model is called without them, a graph would not,"
    return {
        (torch.autocast, "__enter__"): refusing("enters torch.autocast: torch.fx would lose it, also a disabled one,"),
        (torch.enable_grad, "__enter__"): refusing(gradients),
        (torch.set_grad_enabled, "__init__"): setting,
    }


@contextmanager
def _refusing_functions() -> Iterator[None]:
    """Refuse custom autograd functions, in their base class: the code may hold a bound `apply`."""
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return super(SingleLevelFunction, cls).apply(*args, **kwargs)
        refuse(
            f"forward calls the autograd.Function {cls.__name__}: torch.fx would trace its forward, its backward "
            "would be lost"
        )

    with patched({(SingleLevelFunction, "apply"): classmethod(apply)}):
        yield


def _refusing_stores() -> Replacements:
    """Return a function that refuses to store values in a module: a graph would do so once, or not at all.

    `self.buffer += 1` is fine: the update in place is in the graph, and storing the same tensor again changes nothing.
    """
    original = nn.Module.__setattr__

    def checked(module: nn.Module, name: str, value: Any) -> None:
        before = module.__dict__.get(name, ABSENT)
        is_traced = any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(value))
        if not is_traced and (not isinstance(value, PLAIN) or (type(value) is type(before) and value == before)):
            return original(module, name, value)  # type: ignore[arg-type]
        written = overwritten(value.node, {}) if isinstance(value, fx.Proxy) and name in module._buffers else []
        if any(str(source.target).rpartition(".")[2] == name for source in written):
            return
        what = "a tensor" if is_traced else repr(value)
        refuse(
            f"the forward of {type(module).__name__} stores {what} in self.{name}, which a graph would not do on every "
            "call. Return it, or keep it in a buffer that is updated in place"
        )

    return {(nn.Module, "__setattr__"): checked}


def refuse_handlers() -> None:
    """Refuse an operator that is recorded where exceptions are caught, or inside of a `with` statement.

    Traced values raise nothing, and what a `with` does around operators is not in the graph. Called when an operator is
    recorded: its callers are on the stack, up to the tracer itself.
    """
    for frame in callers(sys._getframe(1)):
        if is_caught(frame):
            code = frame.f_code
            refuse(
                f"{code.co_name} ({code.co_filename}:{frame.f_lineno}) catches exceptions or enters a context: a graph "
                "would not enter it, and might take the way that the model does not,"
            )


class _RefusingTensors(TorchDispatchMode):
    """Refuse code that computes with, or writes to, a parameter or buffer without going through the tracer.

    Code that iterates over `self.parameters()` sees the real tensors: what it does with them happens once, while
    tracing, and never when the graph runs. The same holds for writes to any tensor that existed before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._names = {_memory(tensor): name for name, tensor in tensors}
        self._made: dict[Any, torch.Tensor] = {}
        """Results of operators during the trace, by their memory: code may write to these."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check what an operator is about to read and write."""
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._look(tensor, written=written)
        result = func(*args, **kwargs)
        self._made.update(
            {_memory(each): each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)}
        )
        return result

    def _look(self, tensor: torch.Tensor, *, written: bool) -> None:
        name = self._names.get(_memory(tensor))
        if written and (name is not None or _memory(tensor) not in self._made):
            refuse(
                f"forward updates {name or 'a tensor from outside of it'} in place, but not as an attribute of its "
                "module: torch.fx would run the update once, while tracing,"
            )
        if name is not None:
            refuse(
                f"forward computes with {name}, parameters that it did not take from an attribute of their module: "
                "torch.fx would hold the result as a constant,"
            )


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def context() -> dict[str, object]:
    """Return the modes that `with` statements set for the operators inside them."""
    return {
        "torch.no_grad": torch.is_grad_enabled(),
        "torch.autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ],
    }


CONTAINERS = (dict, list, set, deque)

_BY_ANY_NAME = {"getattr", "hasattr", "vars", "dir", "__dict__", "__getattribute__", "attrgetter", "getmembers", "eval",
                "exec"}  # fmt: skip
"""Functions that read attributes whose names need not occur in the code."""


class Kept:
    """Snapshots of containers before the code ran: those of the model, and others that the code reaches."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[str, Any, Callable[[], bool]]] = {}
        self.names: set[str] = set()
        """The names in all code that ran."""

    def add(self, value: Any, place: str, depth: int = 3) -> None:
        """Take a snapshot of a container or an instance of a user's class, and of those in it."""
        if value is None or isinstance(value, (bool, Tensor, nn.Module)) or id(value) in self._before:
            return
        if isinstance(value, type):
            # Writes to its attributes are refused elsewhere; containers in a class are shared by all its instances.
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
        """Record what may be names of attributes: strings, too, for `getattr(x, "name")` and patterns."""
        texts = pytree.tree_leaves(list(code.co_consts))
        self.names.update(code.co_names, (text for text in texts if isinstance(text, str)))

    def names_read(self) -> frozenset[str] | None:
        """Return the names of all attributes that the code may have read; None if it may have read any."""
        return None if self.names & _BY_ANY_NAME else frozenset(self.names)

    def changed(self) -> str:
        """Restore all containers; return the place of one that had changed, or an empty string."""
        places = [place for place, _, put_back in self._before.values() if put_back()]
        return places[0] if places else ""


@contextmanager
def _unchanged_state(model: nn.Module) -> Iterator[Kept]:
    """Refuse code that changes a container of a module, or the data, gradient or hooks of a parameter or buffer.

    A graph would not do so on every call. All is restored in any case, so that no traced value stays behind.
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


@contextmanager
def guarding(model: nn.Module, replacements: Replacements) -> Iterator[Kept]:
    """Put all guards around the trace of a model, and replace more functions of torch."""
    functions = _replaced({**replacements, **_refusing_modes(), **_refusing_stores()})
    with _unchanged_state(model) as kept, _RefusingTensors(model), _without_dynamo(), functions, _refusing_functions():
        yield kept
