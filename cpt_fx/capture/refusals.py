"""How a trace is given up: the place in the model's code is named, and no `except` of that code can hide it."""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn

from cpt_fx.capture.base import CaptureError
from cpt_fx.result import plain_class

_TORCH = os.path.join(Path(torch.__file__).parent, "")
_MACHINE = (
    os.path.join(Path(__file__).parents[1], ""),
    os.path.join(_TORCH, "fx", ""),
    os.path.join(_TORCH, "functional.py"),
    os.path.join(_TORCH, "nn", "functional.py"),
    os.path.join(_TORCH, "utils", "checkpoint.py"),
    "<eval_with_key>",
)
"""What records operators, or hands itself over to be recorded: it may ask what it likes about a traced value."""

_QUIET = (os.path.join(_TORCH, "_library", ""), os.path.join(_TORCH, "utils", "_pytree.py"))
"""What the machine calls all the time: it is not looked at, but its questions are those of whoever calls it."""

_PYTHON = os.path.join(sysconfig.get_paths()["stdlib"], "")
_LAYERS = os.path.join(_TORCH, "nn", "modules", "")

TRACE = "_trace_with_guards"
"""Name of the function that starts a trace: below it on the stack is the user's program, which may catch anything."""

_noted: list[list[Exception]] = []


def looked_at(function: Callable[..., Any], look: Any = None) -> Callable[..., Any]:
    """Let a function be looked at line by line, as the model's code is, or not at all: what records operators."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(look)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(before)

    return run


@contextmanager
def noting() -> Iterator[list[Exception]]:
    """Keep what is refused while the block runs: the model's code may catch it, and go on without the answer."""
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def note(error: Exception) -> Exception:
    """Keep an error that the model's code may catch."""
    if _noted:
        _noted[-1].append(error)
    return error


def refuse(what: str, place: str | None = None) -> NoReturn:
    """Give the trace up, naming the place in the model's code: the line that runs, unless another one is given."""
    raise note(CaptureError(f"{what}{place_of(sys._getframe(1)) if place is None else place}"))


def refuse_question(what: str, frame: FrameType | None) -> None:
    """Give the trace up if it is the model's code that asks, not what records it."""
    if _noted and asks(frame):
        refuse(f"the code asks {what}, which torch.fx cannot answer for a value that is only traced,")


def asks(frame: FrameType | None) -> bool:
    """Whether it is the traced code that runs, be it in a function of torch or Python that it calls."""
    while frame is not None and not is_traced_code(frame.f_code.co_filename):
        if is_machine(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return frame is not None


def is_inside(frame: FrameType | None) -> bool:
    """Whether a function runs inside of the trace: not in another thread, and not since a module is imported."""
    while frame is not None and frame.f_code.co_name != TRACE:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return frame is not None


@cache
def is_machine(name: str) -> bool:
    """Whether a file's code records operators."""
    return name.startswith(_MACHINE)


@cache
def is_quiet(name: str) -> bool:
    """Whether a file's code serves the machine, and is not looked at."""
    return name.startswith(_QUIET)


@cache
def is_the_models(name: str) -> bool:
    """Whether a file's code may be the model's own."""
    installed = "-packages" in name.removeprefix(_PYTHON)  # somebody's package, inside of Python's own folder
    return not name.startswith(("<frozen", *_MACHINE, _TORCH)) and (installed or not name.startswith(_PYTHON))


@cache
def is_traced_code(name: str) -> bool:
    """Whether a file's code is what the graph is of: the model's own, and that of torch's layers."""
    return is_the_models(name) or (name.startswith(_LAYERS) and not name.endswith("module.py"))


def file_of_class(kind: type) -> str:
    """Return the file that a class is written in."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<frozen>"


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Walk up from a function to the one that starts the trace."""
    while frame is not None and frame.f_code.co_name != TRACE:
        yield frame
        frame = frame.f_back


def is_made_inside(name: str, frame: FrameType | None) -> bool:
    """Whether a variable from outside of a function belongs to another function that is being traced."""
    return any(name in each.f_code.co_cellvars for each in callers(frame))


def place_of(frame: FrameType | None) -> str:
    """Say which line of the model's own code runs; nothing where none does."""
    own = next((each for each in callers(frame) if is_the_models(each.f_code.co_filename)), None)
    return "" if own is None else _line(own.f_code.co_filename, own.f_lineno)


def place_of_error(error: BaseException) -> str:
    """Say which line of the model's own code raised: the innermost one."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in lines if is_the_models(place[0])]
    return _line(*own[-1]) if own else ""


def place_of_forward(module: nn.Module) -> str:
    """Say where the forward of a module is written."""
    code = getattr(inspect.unwrap(plain_class(type(module)).forward), "__code__", None)
    return f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _line(name: str, number: int) -> str:
    text = linecache.getline(name, number).strip()
    return f" at {name}:{number}" + (f" ({text})" if text else "")
