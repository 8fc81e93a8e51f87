"""The widths of a forward pass, found again where checkpointing runs it once more in the backward pass."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint as home

if TYPE_CHECKING:
    from cpt_fx.runtime import Precision, Widths

_MARK = "_cpt_fx_widths"


def widths_of_pass(state: Precision, now: Widths) -> Widths:
    """Return the widths in force now, or, in a recomputation, those of the pass that is computed again."""
    again = torch._C._current_graph_task_id() != -1
    owner = _checkpoint(again)
    if owner is None:
        return now
    kept: dict[int, Widths] = owner.__dict__.setdefault(_MARK, {})
    return kept.get(id(state), now) if again else kept.setdefault(id(state), now)


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass: checkpointing, which must not teach a range twice."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _checkpoint(again: bool) -> Any:
    """Return the object that a checkpoint keeps from its forward pass to its recomputation, inside of one."""
    if not again:
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0].__module__ == home.__name__:
            cells = dict(zip(hooks[0].__code__.co_freevars, hooks[0].__closure__ or (), strict=True))
            return cells["frame"].cell_contents if "frame" in cells else None
        if torch.is_grad_enabled():
            return None
    # A recomputation, or the reentrant kind, whose forward pass runs without gradients: the owner is on the stack.
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == home.__file__:
            owner = frame.f_locals.get("ctx" if frame.f_code in _REENTRANT else "frame")
            if owner is not None:
                return owner
        frame = frame.f_back
    return None


_REENTRANT = frozenset({home.CheckpointFunction.forward.__code__, home.CheckpointFunction.backward.__code__})
