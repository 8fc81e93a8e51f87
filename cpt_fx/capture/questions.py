"""Questions that code asks by calling a function: what a value is, what it has, how the process stands."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.fx._symbolic_trace

from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.guards import Kept
from cpt_fx.capture.identity import facts_of, is_caught, is_made_inside, look, traced_in
from cpt_fx.capture.refusals import (
    is_inside,
    is_machine,
    is_quiet,
    is_the_models,
    is_traced_code,
    note,
    place_of,
    refuse,
    refuse_question,
)
from cpt_fx.capture.traced import is_traced


def _about_values(original: Callable[..., Any], asked: int = 1) -> Callable[..., Any]:
    """Let a function of Python refuse to answer for a traced value as for any object."""

    def ask(*args: Any) -> Any:
        if len(args) >= asked and (is_traced(args[0]) or is_traced(args[-1])):
            refuse_question(f"by {original.__name__}()", sys._getframe(1))
        return original(*args)

    return ask


def _about_classes(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, unless it is one of a class, of a module of Python or of a traced value."""
    if (isinstance(owner, (type, ModuleType)) or is_traced(owner)) and is_inside(sys._getframe(1)):
        kind = "a tensor" if is_traced(owner) else "a class" if isinstance(owner, type) else "a module of Python"
        refuse(f"the code sets {name} of {kind}, which a graph would not do,")
    setattr(owner, name, value)


def _about_the_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of torch refuse to tell the model's code what may be otherwise at each call, or to change it."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        if is_the_models(sys._getframe(1).f_code.co_filename) and is_inside(sys._getframe(1)):
            refuse(f"forward calls {original.__name__}(), which a graph would not do on every call,")
        return original(*args, **kwargs)

    return ask


BUILTINS = {each.__name__: _about_values(each) for each in (isinstance, issubclass, hasattr, id, callable)}
BUILTINS |= {"getattr": _about_values(getattr, 3), "setattr": _about_classes}

_STATES = {
    torch: ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled",
            "get_autocast_dtype", "get_autocast_cpu_dtype", "get_autocast_gpu_dtype", "is_autocast_cache_enabled",
            "get_default_dtype", "get_default_device", "are_deterministic_algorithms_enabled"),
    torch.random: ("initial_seed", "manual_seed", "seed", "get_rng_state", "set_rng_state", "fork_rng"),
    torch._C: ("is_grad_enabled", "_is_any_autocast_enabled"),
    torch.overrides: ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
    torch.fx._symbolic_trace: ("is_fx_tracing", "is_fx_symbolic_tracing"),
}  # fmt: skip
"""What tells or sets the state of the process, or tells whether values are traced."""

OTHERS = {id(vars(owner)[name]): _about_the_state(vars(owner)[name]) for owner in _STATES for name in _STATES[owner]}
OTHERS |= {id(each): _about_values(each) for each in (operator.is_, operator.is_not, isinstance, issubclass, callable)}
"""By the function that is replaced, since modules import it under names of their own."""


class _Watcher:
    """Sees each function that is called while a model is traced."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.known: dict[int, Any] = {}
        self.globals: set[int] = set()
        self.replaced: list[tuple[dict[str, Any], str, Any]] = []

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Return what looks at the lines of a function, None where there is nothing to look at."""
        known = self.known.get(id(frame.f_code), _NEW)
        return self._meet(frame) if known is _NEW else known

    def _meet(self, frame: FrameType) -> Any:
        """Let the functions of the model's code, and those of others that get a traced value, ask ours."""
        code = frame.f_code
        if is_machine(code.co_filename) or is_quiet(code.co_filename) or not code.co_flags & inspect.CO_OPTIMIZED:
            self.known[id(code)] = None
            return None
        if is_the_models(code.co_filename):
            self.kept.note_names(code)
        if is_traced_code(code.co_filename):
            is_asked = is_inside(frame)
        else:
            back = frame.f_back
            called = back is not None and id(back.f_globals) in self.globals
            is_asked = called and any(map(is_traced, frame.f_locals.values()))
        if not is_asked:  # this time
            return None
        self._remember(frame)
        if id(frame.f_globals) not in self.globals:
            self.globals.add(id(frame.f_globals))
            self.replace(frame.f_globals, BUILTINS)
        self.known[id(code)] = _run if facts_of(code) else None
        return self.known[id(code)]

    def replace(self, names: dict[str, Any], more: dict[str, Any]) -> None:
        """Put ours into a module: not into `builtins`, which are those of all threads and of the machine itself."""
        new = {name: ask for name, ask in more.items() if name not in names}
        new |= {name: OTHERS[id(value)] for name, value in names.items() if id(value) in OTHERS}
        self.replaced += [(names, name, names.get(name, _NEW)) for name in new]
        names.update(new)

    def _remember(self, frame: FrameType) -> None:
        """Remember the containers that a function knows from outside."""
        code = frame.f_code
        for name in code.co_names if is_traced_code(code.co_filename) else ():
            if name in frame.f_globals:
                self.kept.add(frame.f_globals[name], f"{name} of {frame.f_globals.get('__name__')}", 2)
        for name in code.co_freevars:
            if name in frame.f_locals and not is_made_inside(name, frame.f_back):
                self.kept.add(frame.f_locals[name], name, 2)


_NEW = object()


@contextmanager
def refusing_questions(kept: Kept) -> Iterator[Callable[..., Any]]:
    """Give what looks at the model's code, line by line, and refuses what it asks and what it catches."""
    watcher = _Watcher(kept)
    for owner in (*_STATES, operator):
        watcher.replace(vars(owner), {})
    try:
        yield watcher.enter
    finally:
        for names, name, value in reversed(watcher.replaced):
            if value is _NEW:
                del names[name]
            else:
                names[name] = value


def _run(frame: FrameType, event: str, arg: Any) -> Any:
    facts = facts_of(frame.f_code)
    assert facts is not None
    if event == "line":
        for question in facts.questions.get(frame.f_lineno, ()):
            look(question, frame)
    elif event == "exception" and is_caught(frame) and not issubclass(arg[0], _USUAL):
        values = frame.f_locals.values()
        if any(is_traced(value) or traced_in(value) for value in values):
            note(CaptureError(f"the code may catch a {arg[0].__name__} that only tracing raises{place_of(frame)}"))
    return _run


_USUAL = (StopIteration, GeneratorExit, ImportError)
"""What is raised, and caught, for reasons of its own."""
