"""Find the caller of an operator in eager code: the module, and the stack lines from its forward to the call."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from cpt_fx.capture.tree import TreePlaces
from cpt_fx.common.resources import OWN
from cpt_fx.ir.layer_names import RESUMED

_TORCH = str(Path(torch.__file__).parent)
_BETWEEN = (*OWN, *(f"{_TORCH}/{part}" for part in ("_dynamo", "_compile.py", "utils/checkpoint.py")))
"""Files whose frames are not the model's code, and may differ from call to call."""


@dataclass(frozen=True)
class Caller:
    """The module that an operator belongs to, and the place of the call in its code."""

    path: str
    trace: str
    steps: tuple[int, ...]
    """The offsets of the calling instructions, which distinguish two operators on one line."""
    function: str | None = None
    """Name of the custom autograd function whose forward makes the call, if one does."""


def caller_of(places: TreePlaces) -> Caller:
    """Return the caller of an operator: walk up the stack to the first method of one of the model's modules."""
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
            # Inside a checkpoint, perhaps in its recomputation: go on from the caller that `_remembering` stored.
            return Caller(
                outside.path, outside.trace + "".join(reversed(lines)), (*steps, *outside.steps),
                function or outside.function,
            )  # fmt: skip
        frame = frame.f_back
    return Caller("", "".join(reversed(lines[:1])), tuple(steps[:1]), function)


def lines_to_forward(name: str) -> str:
    """Return the stack lines from a forward to a function that Dynamo captures separately.

    An operator in a function that is captured together with its caller has these lines already; its place must be the
    same in both cases.
    """
    function = _resumed(name)
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "forward" not in function:
        code = frame.f_code
        if not code.co_filename.startswith((*OWN, _TORCH)):
            # After a graph break, the function itself is on the stack, too.
            if lines or _resumed(code.co_name) != function:
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
            if "forward" in code.co_name:
                return "".join(reversed(lines))
        frame = frame.f_back
    return ""


def _resumed(name: str) -> str:
    """Return the name of the function that another one resumes after a graph break; any other name unchanged."""
    match = RESUMED.match(name)
    return match[1] if match else name
