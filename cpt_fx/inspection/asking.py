"""Whether code that runs asks in which mode it runs: then it may do something else in another one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import cpt_fx.passes

TRAINING, GRADIENTS = "training", "gradients"
_WORDS = {
    TRAINING: frozenset({"training"}),
    GRADIENTS: frozenset({"requires_grad", "grad_fn", "is_leaf", "is_grad_enabled", "is_inference_mode_enabled"}),
}
"""What code names that asks."""
_FUNCTIONS = frozenset({torch.is_grad_enabled, torch.is_inference_mode_enabled})
_LAYERS = ("batchnorm", "dropout", "instancenorm", "module")
_PASSED_ON = (*(f"torch/nn/modules/{name}.py" for name in _LAYERS), "torch/_tensor.py", "torch/autograd/grad_mode.py")
"""Code that gives a mode to an operator or to hooks, or puts it back, and does nothing else with it."""
_OURS = tuple(str(Path(path).resolve().parent) for path in (__file__ + "/..", str(cpt_fx.passes.__file__)))


@contextmanager
def asked() -> Iterator[set[str]]:
    """Note what the Python code that runs inside asks: by the names that it uses, and the functions of C it calls."""
    if sys.getprofile() is not None:
        yield {TRAINING, GRADIENTS}  # a profiler of the user's stays; all modes are run
        return
    found: set[str] = set()

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            found.update(_asks(frame.f_code))
        elif event == "c_call" and called in _FUNCTIONS and not _is_ours(frame.f_code.co_filename):
            found.add(GRADIENTS)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _is_ours(file: str) -> bool:
    # The code of a graph reads modes for operators; functions that somebody put into it are code of their own.
    return file.startswith(("<eval_with_key>", *_OURS)) or file.endswith(_PASSED_ON)


@functools.cache
def _asks(code: CodeType) -> frozenset[str]:
    if _is_ours(code.co_filename):
        return frozenset()
    used = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    return frozenset(what for what, words in _WORDS.items() if used & words)
