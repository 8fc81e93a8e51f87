"""Detect whether running code queries its mode (training, gradients): such code may differ between modes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch

from cpt_fx.common.resources import OWN

TRAINING, GRADIENTS = "training", "gradients"
_WORDS = {
    TRAINING: frozenset({"training"}),
    GRADIENTS: frozenset({"requires_grad", "grad_fn", "is_leaf", "is_grad_enabled", "is_inference_mode_enabled"}),
}
"""Names by which code queries each mode."""
_FUNCTIONS = frozenset({torch.is_grad_enabled, torch.is_inference_mode_enabled})
_LAYERS = ("batchnorm", "dropout", "instancenorm", "module")
_PASSED_ON = (*(f"torch/nn/modules/{name}.py" for name in _LAYERS), "torch/_tensor.py", "torch/autograd/grad_mode.py")
"""Code that only passes a mode on to an operator or to hooks, or restores it."""


@contextmanager
def asked() -> Iterator[set[str]]:
    """Collect the modes that Python code in the block queries, by the names it uses and the C functions it calls."""
    if sys.getprofile() is not None:
        yield {TRAINING, GRADIENTS}  # keep the user's profiler, and run all modes
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
    # Generated code reads modes only for operators; the functions that it calls are checked separately.
    return file.startswith(("<eval_with_key>", *OWN)) or file.endswith(_PASSED_ON)


@functools.cache
def _asks(code: CodeType) -> frozenset[str]:
    if _is_ours(code.co_filename):
        return frozenset()
    used = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    return frozenset(what for what, words in _WORDS.items() if used & words)
