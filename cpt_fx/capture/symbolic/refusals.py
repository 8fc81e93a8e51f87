"""Abort a trace: name the place in the model's code, and let no `except` in that code hide the refusal."""

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
from cpt_fx.common.resources import OWN
from cpt_fx.ir.result import plain_class

_TORCH = os.path.join(Path(torch.__file__).parent, "")
_MACHINE = (
    *OWN,
    os.path.join(_TORCH, "fx", ""),
    os.path.join(_TORCH, "functional.py"),
    os.path.join(_TORCH, "nn", "functional.py"),
    os.path.join(_TORCH, "utils", "checkpoint.py"),
    "<eval_with_key>",
)
"""Files whose code records operators, or is recorded as a call: it may ask anything about a traced value."""

_QUIET = (os.path.join(_TORCH, "_library", ""), os.path.join(_TORCH, "utils", "_pytree.py"))
"""Files that recording code calls all the time: not inspected, but their questions count as those of their caller."""

_PYTHON = os.path.join(sysconfig.get_paths()["stdlib"], "")
_LAYERS = os.path.join(_TORCH, "nn", "modules", "")

TRACE = "_trace_with_guards"
"""Name of the function that starts a trace; what calls it is the user's program, which may catch anything."""

_noted: list[list[Exception]] = []


def looked_at(function: Callable[..., Any], look: Any = None) -> Callable[..., Any]:
    """Wrap a function to run under the trace function `look`; by default under none: it is not inspected."""

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
    """Collect what is refused in the block: the model's code may catch the error and go on."""
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def note(error: Exception) -> Exception:
    """Record an error, which the model's code may catch, and return it."""
    if _noted:
        _noted[-1].append(error)
    return error


def refuse(what: str, place: str | None = None) -> NoReturn:
    """Abort the trace, naming the place in the model's code: the running line, unless another one is given."""
    raise note(CaptureError(f"{what}{place_of(sys._getframe(1)) if place is None else place}"))


def refuse_question(what: str, frame: FrameType | None) -> None:
    """Abort the trace if the model's code asks, not the code that records it."""
    if _noted and asks(frame):
        refuse(f"the code asks {what}, which torch.fx cannot answer for a value that is only traced,")


def asks(frame: FrameType | None) -> bool:
    """Return whether a frame is of the traced code or a library function that it calls, not of the recording code."""
    while frame is not None and not is_traced_code(frame.f_code.co_filename):
        if is_machine(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return frame is not None


def is_inside(frame: FrameType | None) -> bool:
    """Return whether a frame runs inside the trace: not in another thread, and not during an import."""
    while frame is not None and frame.f_code.co_name != TRACE:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return frame is not None


@cache
def is_machine(name: str) -> bool:
    """Return whether a file's code records operators."""
    return name.startswith(_MACHINE)


@cache
def is_quiet(name: str) -> bool:
    """Return whether a file's code serves the recording code, and is not inspected."""
    return name.startswith(_QUIET)


@cache
def is_the_models(name: str) -> bool:
    """Return whether a file's code may be the model's own."""
    installed = "-packages" in name.removeprefix(_PYTHON)  # a package installed inside of the standard library's folder
    return not name.startswith(("<frozen", *_MACHINE, _TORCH)) and (installed or not name.startswith(_PYTHON))


@cache
def is_traced_code(name: str) -> bool:
    """Return whether a file's code is traced: the model's own, and that of torch's layers."""
    return is_the_models(name) or (name.startswith(_LAYERS) and not name.endswith("module.py"))


def file_of_class(kind: type) -> str:
    """Return the file that defines a class."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<frozen>"


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Iterate over the frames from one up to the function that starts the trace."""
    while frame is not None and frame.f_code.co_name != TRACE:
        yield frame
        frame = frame.f_back


def is_made_inside(name: str, frame: FrameType | None) -> bool:
    """Return whether a variable of an outer scope belongs to another function that is being traced."""
    return any(name in each.f_code.co_cellvars for each in callers(frame))


def place_of(frame: FrameType | None) -> str:
    """Return the running line of the model's own code, as text; empty if there is none."""
    own = next((each for each in callers(frame) if is_the_models(each.f_code.co_filename)), None)
    return "" if own is None else _line(own.f_code.co_filename, own.f_lineno)


def place_of_error(error: BaseException) -> str:
    """Return the innermost line of the model's own code that raised, as text; empty if there is none."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in lines if is_the_models(place[0])]
    return _line(*own[-1]) if own else ""


def place_of_forward(module: nn.Module) -> str:
    """Return where the forward of a module is defined, as text."""
    code = getattr(inspect.unwrap(plain_class(type(module)).forward), "__code__", None)
    return f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _line(name: str, number: int) -> str:
    text = linecache.getline(name, number).strip()
    return f" at {name}:{number}" + (f" ({text})" if text else "")
