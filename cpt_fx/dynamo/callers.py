"""Who calls an operator in eager code: the module, and the lines that lead from its forward to the call."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from cpt_fx.capture.tree import Places
from cpt_fx.names import RESUMED

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_BETWEEN = (_OURS, *(f"{_TORCH}/{part}" for part in ("_dynamo", "_compile.py", "utils/checkpoint.py")))
"""Whose frames say nothing about a place in the model's code, and may differ from call to call."""


@dataclass(frozen=True)
class Caller:
    """The module an operator belongs to, and where in its code the call stands."""

    path: str
    trace: str
    steps: tuple[int, ...]
    """The instructions that make the calls: two operators on one line differ in them."""
    function: str | None = None
    """The autograd function whose forward this is, if it is one's."""


def caller_of(places: Places) -> Caller:
    """Walk up from the call to the first method of one of the model's modules."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[str] = []
    steps: list[int] = []
    function = None
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_BETWEEN):
            first: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
            steps.append(frame.f_lasti)
            if isinstance(first, FunctionCtx):
                function = code.co_qualname.rpartition(".")[0] if hasattr(code, "co_qualname") else code.co_name
            if isinstance(first, nn.Module) and id(first) in places.modules:
                return Caller(places.modules[id(first)], "".join(reversed(lines)), tuple(steps), function)
        elif isinstance(outside := frame.f_locals.get("called_by"), Caller):
            # A checkpoint's code, in the forward pass or once more in the backward pass: called from the same place.
            return Caller(
                outside.path, outside.trace + "".join(reversed(lines)), (*steps, *outside.steps),
                function or outside.function,
            )  # fmt: skip
        frame = frame.f_back
    return Caller("", "".join(reversed(lines[:1])), tuple(steps[:1]), function)


def lines_to_forward(name: str) -> str:
    """Return the lines that lead from a forward to a function that Dynamo captures by itself, as a stack trace.

    Captured together with its caller, an operator in there knows them; it must have the same place in both cases.
    """
    function = _resumed(name)
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "forward" not in function:
        code = frame.f_code
        if not code.co_filename.startswith((_OURS, _TORCH)):
            # The function itself is on the stack where it goes on after a break.
            if lines or _resumed(code.co_name) != function:
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
            if "forward" in code.co_name:
                return "".join(reversed(lines))
        frame = frame.f_back
    return ""


def _resumed(name: str) -> str:
    """Return the name of the function that a piece of it goes on with."""
    match = RESUMED.match(name)
    return match[1] if match else name
