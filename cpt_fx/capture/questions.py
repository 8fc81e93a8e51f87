"""Questions that a model's code asks while it is traced: what a value is, what it has, how the process stands.

Those that call a function find ours in its place. Those that Python answers without asking the value, `a is b`,
`x is None`, patterns of mappings and sequences, are read from the code of each function that runs, and looked at when
their line runs.
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
import torch.fx._symbolic_trace
from torch import Tensor, nn

from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.refusals import (
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
from cpt_fx.capture.traced import is_there, is_traced, traced_in

if TYPE_CHECKING:
    from cpt_fx.capture.guards import Kept


class Operand(NamedTuple):
    """What an instruction finds on the stack, as far as the code says."""

    paths: tuple[tuple[str, ...], ...] = ()
    """The variables, with attributes, that it is made of."""
    is_variable: bool = False
    """Whether it is just that variable or attribute."""
    is_called: bool = False
    """Whether some function made it, other than `type`."""
    is_none: bool = False


class Question(NamedTuple):
    """An instruction that asks about its operands, or writes to where they lead."""

    kind: str
    """`is`, `match`, `store`: an attribute of an object, `outer`: a variable from outside of the function."""
    operands: tuple[Operand, ...]


class Facts(NamedTuple):
    """What a function's code asks, by line, and where it may catch what is raised in it."""

    questions: Mapping[int, list[Question]]
    caught: tuple[tuple[int, int], ...]
    """Instructions, from one to another, inside of a `try` or a `with`."""


def facts_of(code: CodeType) -> Facts:
    """Read the code of a function, once."""
    known = _known.get(id(code))
    if known is None:
        facts = Facts(_questions(code), _caught(code)) if is_traced_code(code.co_filename) else Facts({}, ())
        known = _known[id(code)] = code, facts
    return known[1]


_known: dict[int, tuple[CodeType, Facts]] = {}
"""By identity, since the hash of code is slow; it is kept, so that its id stays its own."""


def _caught(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Return where an `except`, or the exit of a `with`, may catch: not one that only raises again."""
    steps = [step.opname for step in dis.get_instructions(code)]
    if not any(one == "POP_EXCEPT" and other != "RERAISE" for one, other in pairwise(steps)):
        return ()
    # Python 3.10 has no such table: there it is the whole function.
    entries = getattr(dis.Bytecode(code), "exception_entries", None)
    return ((0, sys.maxsize),) if entries is None else tuple((entry.start, entry.end) for entry in entries)


def is_caught(frame: FrameType) -> bool:
    """Whether what is raised in a function now may be caught there."""
    return any(start <= frame.f_lasti < end for start, end in facts_of(frame.f_code).caught)


class _Step(NamedTuple):
    """An instruction; of one that is about two variables, each half."""

    name: str
    value: Any
    line: int
    is_target: bool
    """Whether some jump leads there."""


def _questions(code: CodeType) -> dict[int, list[Question]]:
    """Find the instructions of a function that ask or write, by line."""
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
            questions.setdefault(line, []).append(Question("outer", (Operand(((value,),)),)))
    return questions


def _operands(whole: list[_Step], count: int) -> tuple[Operand, ...]:
    """Return the operands of the last of some instructions.

    One that is no plain variable may be made of all that is read since the last instruction of an earlier line, or, as
    in patterns, of all that is read at all.
    """
    line = whole[-1].line
    first = next((place for place in range(len(whole) - 1, 0, -1) if whole[place - 1].line < line), 0)
    is_pattern = whole[-1].name in _PATTERNS
    steps = whole if is_pattern or not any(_VARIABLE.match(step.name) for step in whole[first:]) else whole[first:]
    changed = {step.value for step in steps if _STORE.match(step.name)}  # does not hold it yet when the line begins
    paths: list[tuple[str, ...]] = []
    for before, step in pairwise((_Step("", None, 0, False), *steps)):
        if _VARIABLE.match(step.name):
            paths.append((step.value,))
        elif step.name in _ATTRIBUTE and (_VARIABLE.match(before.name) or before.name in _ATTRIBUTE):
            paths[-1] = (*paths[-1], step.value)
    is_called = any("CALL" in step.name for step in steps) and ("type",) not in paths
    end = len(steps) - 1
    if steps[end].name == "STORE_ATTR" and steps[end - 1].name in ("SWAP", "ROT_TWO"):  # `a.b += 1` keeps `a` below
        end = max((place for place, step in enumerate(steps) if step.name in ("COPY", "DUP_TOP")), default=end)
    found: list[Operand] = []
    for _ in range(count):
        start = end - 1
        while start > 0 and steps[start].name in _ATTRIBUTE:
            start -= 1
        name, value, *_ = steps[max(start, 0)]
        is_one_way = start >= 0 and not is_pattern and not any(step.is_target for step in steps[start + 1 : end + 1])
        if is_one_way and _VARIABLE.match(name) and value not in changed:
            found.append(Operand(((value, *(step.value for step in steps[start + 1 : end])),), is_variable=True))
        elif is_one_way and name == "LOAD_CONST":
            found.append(Operand(is_none=value is None))
        else:
            return tuple(found + [Operand(tuple(dict.fromkeys(paths)), is_called=is_called)] * count)[:count]
        end = start
    return tuple(found)


_PATTERNS = ("MATCH_CLASS", "MATCH_MAPPING", "MATCH_SEQUENCE")
_ASKS = {"IS_OP": ("is", 2), "STORE_ATTR": ("store", 1), **dict.fromkeys(_PATTERNS, ("match", 1))}
"""Instructions that ask or write: the kind of question, and how many operands it has."""
_VARIABLE = re.compile("LOAD_(FAST|NAME|GLOBAL|DEREF|CLASSDEREF)")
_STORE = re.compile("STORE_(FAST|NAME|DEREF)")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


def look(question: Question, frame: FrameType) -> None:
    """Give the trace up where an answer would not be true of the value that the graph has, or a write would be lost."""
    asked = [operand for operand in question.operands if not operand.is_none]
    found = [[_reach(path, frame) for path in operand.paths] for operand in asked]
    involved = any(is_traced(value) or inside for reached in found for value, inside in reached)
    values = [reached[0][0] if operand.is_variable else None for operand, reached in zip(asked, found, strict=True)]
    if question.kind == "outer":
        if not is_made_inside(asked[0].paths[0][0], frame):
            refuse(f"the code sets {asked[0].paths[0][0]} outside of itself, which a graph would not do on every call,")
    elif question.kind == "store":
        _look_at_store(asked[0], values[0], frame)
    elif question.kind == "match":
        _refuse_if(involved, "of what kind a value is")
    elif len(asked) == 1:
        is_known = asked[0].is_variable and not found[0][0][1]
        items = () if is_known else [item for value, _ in found[0] for item in traced_in(value)]
        is_unknown = involved and not (is_known and is_there(values[0]))
        _refuse_if(is_unknown or not all(map(is_there, items)), "whether a value is None")
    elif len(asked) == 2 and not (is_traced(values[0]) and values[0] is values[1]):
        # An item of a container, but not the type of one.
        holders = [value for each, reached in zip(asked, found, strict=True) for value, _ in reached
                   if not each.is_variable and ("type",) not in each.paths]  # fmt: skip
        involved |= any(map(traced_in, holders))
        _refuse_if(involved or all(each.is_called for each in asked), "whether two values are one")


def _refuse_if(wrong: bool, what: str) -> None:
    if wrong:
        refuse(f"the code asks {what}, which torch.fx cannot answer for a value that is only traced,")


def _look_at_store(operand: Operand, value: Any, frame: FrameType) -> None:
    """Refuse writes to what was there before: classes, and objects that the code comes by as variables from outside."""
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
    """Follow a path without running anybody's code: the value, and whether what is sought lies inside of a tensor."""
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
        self.known[id(code)] = _run if any(facts_of(code)) else None
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
    if event == "line":
        for question in facts_of(frame.f_code).questions.get(frame.f_lineno, ()):
            look(question, frame)
    elif event == "exception" and is_caught(frame) and not issubclass(arg[0], _USUAL):
        values = frame.f_locals.values()
        if any(is_traced(value) or traced_in(value) for value in values):
            note(CaptureError(f"the code may catch a {arg[0].__name__} that only tracing raises{place_of(frame)}"))
    return _run


_USUAL = (StopIteration, GeneratorExit, ImportError)
"""What is raised, and caught, for reasons of its own."""
