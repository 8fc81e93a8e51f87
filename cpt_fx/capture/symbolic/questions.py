"""Refuse questions that a model's code asks in a trace: type, identity or attributes of a value, or process state.

Functions such as `isinstance` are replaced by ours. Questions that Python answers without calling anything (`a is b`,
`x is None`, patterns) are found in the bytecode of each function that runs, and checked when their line runs. So are
writes to variables and attributes.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import operator
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cpt_fx.capture.base import ABSENT, CaptureError
from cpt_fx.capture.symbolic.refusals import (
    is_inside,
    is_machine,
    is_made_inside,
    is_quiet,
    is_the_models,
    is_traced_code,
    note,
    place_of,
    refuse,
    refuse_question,
)
from cpt_fx.capture.symbolic.traced import is_there, is_traced, traced_in
from cpt_fx.capture.torch_private import STATES

if TYPE_CHECKING:
    from cpt_fx.capture.symbolic.guards import Kept


class StackItem(NamedTuple):
    """Facts from the bytecode about one operand of an instruction."""

    paths: tuple[tuple[str, ...], ...] = ()
    """The variables, with attributes, that it is computed from."""
    is_variable: bool = False
    """Whether it is exactly that variable or attribute."""
    is_called: bool = False
    """Whether a function other than `type` computes it."""
    is_none: bool = False


class Question(NamedTuple):
    """An instruction that asks about its operands, or writes to a variable or attribute."""

    kind: str
    """`is`, `match`, `store` (to an attribute), or `outer` (a store to a variable of an outer scope)."""
    operands: tuple[StackItem, ...]


class CodeFacts(NamedTuple):
    """The questions in a function's code, by line, and where it may catch exceptions."""

    questions: Mapping[int, list[Question]]
    caught: tuple[tuple[int, int], ...]
    """Ranges of instructions inside of a `try` or a `with`."""


def facts_of(code: CodeType) -> CodeFacts:
    """Return the facts about a code object, from a cache."""
    known = _known.get(id(code))
    if known is None:
        facts = CodeFacts(_questions(code), _caught(code)) if is_traced_code(code.co_filename) else CodeFacts({}, ())
        known = _known[id(code)] = code, facts
    return known[1]


_known: dict[int, tuple[CodeType, CodeFacts]] = {}
"""By id, since hashing code is slow; the code object is kept, so that its id stays valid."""


def _caught(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Return where an `except`, or the exit of a `with`, may catch; one that only re-raises does not count."""
    steps = [step.opname for step in dis.get_instructions(code)]
    if not any(one == "POP_EXCEPT" and other != "RERAISE" for one, other in pairwise(steps)):
        return ()
    # Python 3.10 has no exception table: take the whole function.
    entries = getattr(dis.Bytecode(code), "exception_entries", None)
    return ((0, sys.maxsize),) if entries is None else tuple((entry.start, entry.end) for entry in entries)


def is_caught(frame: FrameType) -> bool:
    """Return whether an exception that is raised in a function now may be caught there."""
    return any(start <= frame.f_lasti < end for start, end in facts_of(frame.f_code).caught)


class _Step(NamedTuple):
    """An instruction; one that loads or stores two variables is split in two."""

    name: str
    value: Any
    line: int
    is_target: bool
    """Whether it is the target of a jump."""


def _questions(code: CodeType) -> dict[int, list[Question]]:
    """Return the instructions of a function that ask or write, by line."""
    steps: list[_Step] = []
    line = code.co_firstlineno
    lines = dict(dis.findlinestarts(code))
    for each in dis.get_instructions(code):
        line = lines.get(each.offset) or line
        names, values = [each.opname], [each.argval]
        if isinstance(each.argval, tuple) and "_FAST" in each.opname:
            names, values = [f"{kind}_FAST" for kind in re.findall("LOAD|STORE", each.opname)], list(each.argval)
        steps += [_Step(name, value, line, each.is_jump_target) for name, value in zip(names, values, strict=True)]
    questions: dict[int, list[Question]] = {}
    for place, (name, value, line, _) in enumerate(steps):
        is_jump = name.startswith("POP_JUMP") and name.endswith("NONE")
        kind, count = ("is", 1) if is_jump else _ASKS.get(name, ("", 0))
        if kind:
            questions.setdefault(line, []).append(Question(kind, _operands(steps[: place + 1], count)))
        elif name == "STORE_GLOBAL" or (name == "STORE_DEREF" and value in code.co_freevars):
            questions.setdefault(line, []).append(Question("outer", (StackItem(((value,),)),)))
    return questions


def _operands(whole: list[_Step], count: int) -> tuple[StackItem, ...]:
    """Return the operands of the last of some instructions.

    An operand that is not a plain variable may be computed from all that is read since the last instruction of an
    earlier line; in patterns, from all that is read in the function so far.
    """
    line = whole[-1].line
    first = next((place for place in range(len(whole) - 1, 0, -1) if whole[place - 1].line < line), 0)
    is_pattern = whole[-1].name in _PATTERNS
    steps = whole if is_pattern or not any(_VARIABLE.match(step.name) for step in whole[first:]) else whole[first:]
    changed = {step.value for step in steps if _STORE.match(step.name)}  # not assigned yet when the line begins
    paths: list[tuple[str, ...]] = []
    for before, step in pairwise((_Step("", None, 0, False), *steps)):
        if _VARIABLE.match(step.name):
            paths.append((step.value,))
        elif step.name in _ATTRIBUTE and (_VARIABLE.match(before.name) or before.name in _ATTRIBUTE):
            paths[-1] = (*paths[-1], step.value)
    is_called = any("CALL" in step.name for step in steps) and ("type",) not in paths
    end = len(steps) - 1
    if steps[end].name == "STORE_ATTR" and steps[end - 1].name in ("SWAP", "ROT_TWO"):  # `a.b += 1`: `a` is below
        end = max((place for place, step in enumerate(steps) if step.name in ("COPY", "DUP_TOP")), default=end)
    found: list[StackItem] = []
    for _ in range(count):
        start = end - 1
        while start > 0 and steps[start].name in _ATTRIBUTE:
            start -= 1
        name, value, *_ = steps[max(start, 0)]
        is_one_way = start >= 0 and not is_pattern and not any(step.is_target for step in steps[start + 1 : end + 1])
        if is_one_way and _VARIABLE.match(name) and value not in changed:
            found.append(StackItem(((value, *(step.value for step in steps[start + 1 : end])),), is_variable=True))
        elif is_one_way and name == "LOAD_CONST":
            found.append(StackItem(is_none=value is None))
        else:
            return tuple(found + [StackItem(tuple(dict.fromkeys(paths)), is_called=is_called)] * count)[:count]
        end = start
    return tuple(found)


_PATTERNS = ("MATCH_CLASS", "MATCH_MAPPING", "MATCH_SEQUENCE")
_ASKS = {"IS_OP": ("is", 2), "STORE_ATTR": ("store", 1), **dict.fromkeys(_PATTERNS, ("match", 1))}
"""Instructions that ask or write: the kind of question, and how many operands it has."""
_VARIABLE = re.compile("LOAD_(FAST|NAME|GLOBAL|DEREF|CLASSDEREF)")
_STORE = re.compile("STORE_(FAST|NAME|DEREF)")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


def look(question: Question, frame: FrameType) -> None:
    """Abort the trace if an answer may be wrong for the value at run time, or if a write would be lost."""
    asked = [operand for operand in question.operands if not operand.is_none]
    found = [[_reach(path, frame) for path in operand.paths] for operand in asked]
    involved = any(is_traced(value) or inside for reached in found for value, inside in reached)
    values = [reached[0][0] if operand.is_variable else None for operand, reached in zip(asked, found, strict=True)]
    if question.kind == "outer":
        if not is_made_inside(asked[0].paths[0][0], frame):
            refuse(f"the code sets {asked[0].paths[0][0]} outside of itself, which a graph would not do on every call,")
    elif question.kind == "store":
        _check_store(asked[0], values[0], frame)
    elif question.kind == "match":
        _refuse_if(involved, "of what kind a value is")
    elif len(asked) == 1:
        is_known = asked[0].is_variable and not found[0][0][1]
        items = () if is_known else [item for value, _ in found[0] for item in traced_in(value)]
        is_unknown = involved and not (is_known and is_there(values[0]))
        _refuse_if(is_unknown or not all(map(is_there, items)), "whether a value is None")
    elif len(asked) == 2 and not (is_traced(values[0]) and values[0] is values[1]):
        # An operand such as `xs[0]` may be an item of a container, `type(xs)` may not.
        holders = [value for each, reached in zip(asked, found, strict=True) for value, _ in reached
                   if not each.is_variable and ("type",) not in each.paths]  # fmt: skip
        involved |= any(map(traced_in, holders))
        _refuse_if(involved or all(each.is_called for each in asked), "whether two values are one")


def _refuse_if(wrong: bool, what: str) -> None:
    if wrong:
        refuse(f"the code asks {what}, which torch.fx cannot answer for a value that is only traced,")


def _check_store(operand: StackItem, value: Any, frame: FrameType) -> None:
    """Refuse writes to objects that existed before: classes, parameters, and objects from outer scopes."""
    path = operand.paths[0] if operand.is_variable else ()
    name = path[0] if path else ""
    is_outer = name and (name not in frame.f_locals or name in frame.f_code.co_freevars)
    is_older = bool(is_outer and not is_made_inside(name, frame)) or (len(path) > 1 and not hasattr(value, "__dict__"))
    is_class = isinstance(value, type) or ("type",) in operand.paths
    is_older |= isinstance(value, nn.Parameter)
    if is_class or (is_older and not isinstance(value, nn.Module) and not is_traced(value)):
        what = ".".join(path) or "a class"
        refuse(f"the code sets an attribute of {what}, which a graph would not do on every call,")


def _reach(path: tuple[str, ...], frame: FrameType) -> tuple[Any, bool]:
    """Follow a path without running any user code; return the value, and whether the path leads into a tensor."""
    value: Any = ChainMap(frame.f_locals, frame.f_globals, vars(builtins)).get(path[0])
    for name in path[1:]:
        if is_traced(value) or type(value) is nn.Parameter or type(value) is Tensor:
            return value, True
        value = _attribute(value, name)
    return value, False


def _attribute(value: Any, name: str) -> Any:
    if name == "__class__":
        return type(value)
    if issubclass(type(value), nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            if name in value.__dict__[group]:
                return value.__dict__[group][name]
    return inspect.getattr_static(value, name, None)


def _about_values(original: Callable[..., Any], asked: int = 1) -> Callable[..., Any]:
    """Wrap a builtin so that it refuses to answer about a traced value."""

    def ask(*args: Any) -> Any:
        if len(args) >= asked and (is_traced(args[0]) or is_traced(args[-1])):
            refuse_question(f"by {original.__name__}()", sys._getframe(1))
        return original(*args)

    return ask


def _about_classes(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; refuse to set one of a class, of a Python module or of a traced value."""
    if (isinstance(owner, (type, ModuleType)) or is_traced(owner)) and is_inside(sys._getframe(1)):
        kind = "a tensor" if is_traced(owner) else "a class" if isinstance(owner, type) else "a module of Python"
        refuse(f"the code sets {name} of {kind}, which a graph would not do,")
    setattr(owner, name, value)


def _about_the_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch so that it refuses calls of the model's code: process state may differ at each call."""

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
    torch.overrides: ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
    **STATES,
}  # fmt: skip
"""Functions that read or set the state of the process, or tell whether values are traced."""

OTHERS = {id(vars(owner)[name]): _about_the_state(vars(owner)[name]) for owner in _STATES for name in _STATES[owner]}
OTHERS |= {id(each): _about_values(each) for each in (operator.is_, operator.is_not, isinstance, issubclass, callable)}
"""By the id of the replaced function, since modules may import it under another name."""


class _Watcher:
    """The trace function of `sys.settrace`: sees each function that is called while a model is traced."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.known: dict[int, Any] = {}
        self.globals: set[int] = set()
        self.replaced: list[tuple[dict[str, Any], str, Any]] = []

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Return the trace function for the lines of a function; None if there is nothing to inspect."""
        known = self.known.get(id(frame.f_code), ABSENT)
        return self._meet(frame) if known is ABSENT else known

    def _meet(self, frame: FrameType) -> Any:
        """Replace builtins in the module of a new function, if it is traced code or gets a traced value."""
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
        if not is_asked:  # checked again at the next call
            return None
        self._remember(frame)
        if id(frame.f_globals) not in self.globals:
            self.globals.add(id(frame.f_globals))
            self.replace(frame.f_globals, BUILTINS)
        self.known[id(code)] = _run if any(facts_of(code)) else None
        return self.known[id(code)]

    def replace(self, names: dict[str, Any], more: dict[str, Any]) -> None:
        """Put our functions into a module; not into `builtins`, which other threads and the recording code use, too."""
        new = {name: ask for name, ask in more.items() if name not in names}
        new |= {name: OTHERS[id(value)] for name, value in names.items() if id(value) in OTHERS}
        self.replaced += [(names, name, names.get(name, ABSENT)) for name in new]
        names.update(new)

    def _remember(self, frame: FrameType) -> None:
        """Take snapshots of the containers that a function reaches through outer scopes."""
        code = frame.f_code
        for name in code.co_names if is_traced_code(code.co_filename) else ():
            if name in frame.f_globals:
                self.kept.add(frame.f_globals[name], f"{name} of {frame.f_globals.get('__name__')}", 2)
        for name in code.co_freevars:
            if name in frame.f_locals and not is_made_inside(name, frame.f_back):
                self.kept.add(frame.f_locals[name], name, 2)


@contextmanager
def refusing_questions(kept: Kept) -> Iterator[Callable[..., Any]]:
    """Yield the trace function that inspects the model's code, and refuses its questions and caught exceptions."""
    watcher = _Watcher(kept)
    for owner in (*_STATES, operator):
        watcher.replace(vars(owner), {})
    try:
        yield watcher.enter
    finally:
        for names, name, value in reversed(watcher.replaced):
            if value is ABSENT:
                del names[name]
            else:
                names[name] = value


def _run(frame: FrameType, event: str, arg: Any) -> Any:
    if event == "line":
        for question in facts_of(frame.f_code).questions.get(frame.f_lineno, ()):
            look(question, frame)
    elif event == "exception" and is_caught(frame) and not issubclass(arg[0], _USUAL):
        values = frame.f_locals.values()
        if any(is_traced(value) or traced_in(value) for value in values):
            note(CaptureError(f"the code may catch a {arg[0].__name__} that only tracing raises{place_of(frame)}"))
    return _run


_USUAL = (StopIteration, GeneratorExit, ImportError)
"""Exceptions of ordinary control flow and of optional imports, which code may catch."""
