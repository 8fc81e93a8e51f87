"""Functions that no compiler is to capture by themselves; said without importing torch's compiler, which is slow."""

from __future__ import annotations

from importlib import import_module
from types import CodeType
from typing import Any

import torch

_frames: Any = torch._C._dynamo.eval_frame


def skip_frame(code: CodeType) -> None:
    """Let a function run as Python where a compiler comes by; what it calls may still be captured."""
    action = _frames._FrameAction
    _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT))


def is_compiler_around() -> bool:
    """Whether a `torch.compile` around this call looks at every frame."""
    return _frames.get_eval_frame_callback() is not None


def imported_aside(name: str) -> Any:
    """Import a module while a compiler is around, which is not to look at the code of modules."""
    before = _frames.set_eval_frame(None)
    try:
        return import_module(name)
    finally:
        _frames.set_eval_frame(before)


def is_one_graph_demanded() -> bool:
    """Whether the compiler that looks at this code must make one graph of it: `fullgraph=True`, export."""
    translator: Any = import_module("torch._dynamo.symbolic_convert").InstructionTranslator.current_tx()
    return bool(translator.one_graph or translator.error_on_graph_break)


# A compiler asks it while it traces, and takes the answer for a constant.
is_one_graph_demanded._dynamo_marked_constant = True  # type: ignore[attr-defined]

for _function in (is_compiler_around, imported_aside):
    skip_frame(_function.__code__)
