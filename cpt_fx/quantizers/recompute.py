"""Recomputation of quantized tensors: for the backward pass a product keeps their source, not the quantized copy.

A product saves its operands. Without quantizers these are tensors that the layer before keeps anyway; quantized copies
would need extra memory, half as much again. So the source is kept, and the backward pass quantizes it once more, to
the same bits: same bit-width, same range, same noise. If checkpointing reruns a forward pass, it uses the bit-widths of
the original one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import traceback
from torch.utils import checkpoint as home

from cpt_fx.common.compilers import skip_frame
from cpt_fx.common.torch_private import top_saved_tensors_hooks
from cpt_fx.quantizers import kernels as simulate
from cpt_fx.quantizers.counters import LOOKING, show
from cpt_fx.quantizers.numerics import Grid
from cpt_fx.quantizers.torch_private import graph_task_id, pop_saved_tensors_hooks, push_saved_tensors_hooks

if TYPE_CHECKING:
    from cpt_fx.ir.state import Precision, Widths

_SOURCE = "_cpt_fx_source"
_WORTH_IT = 1 << 16
"""Number of elements from which the memory is worth the microseconds of a hook."""
_VIEWS_BETWEEN = 3
"""Maximum number of nodes from a result over views to its product: a linear layer over sequences has one view."""


class Source(NamedTuple):
    """The source of a quantized tensor, and how it was quantized."""

    x: Tensor
    width: int
    grid: Grid
    value_ranges: Tensor
    seed: Tensor | None


@contextmanager
def computed_again() -> Iterator[None]:
    """Tell a compiler to recompute what is traced inside a `with` block for the backward pass, instead of saving it.

    By its own rules it would save the quantized operand of a product, since the backward pass needs it whole, and also
    what the layer before needs of the source.
    """
    meta = traceback.get_current_meta()
    before = meta.get("recompute")
    if not traceback.has_preserved_node_meta() or before is not None:
        yield
        return
    meta["recompute"] = home.CheckpointPolicy.PREFER_RECOMPUTE
    try:
        yield
    finally:
        del meta["recompute"]


def mark(quantized: Tensor, source: Source) -> None:
    """Attach the source to a quantized tensor, if the tensor is large."""
    if quantized.numel() >= _WORTH_IT:
        setattr(quantized, _SOURCE, source)
        _wrap_hooks()


def keep_sources(product: Tensor) -> None:
    """Make the operator that computed a tensor save the sources of its quantized operands instead of the operands."""
    if _hooks() is not None:
        # Saved tensors have gone through these hooks; reading them would call the hooks, and recompute a checkpoint.
        return
    for node in _makers(product):
        for name in _saved_names(node.__class__):
            saved = getattr(node, f"_saved_{name}")
            source = _source_of(saved) if isinstance(saved, Tensor) else None
            if source is not None:
                getattr(node, f"_raw_saved_{name}").register_hooks(partial(_Kept.of, source), _Kept.again)


def check_unchanged(x: Tensor, version: int) -> None:
    """Refuse to quantize a tensor again that has changed since, with autograd's message."""
    if x._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(x.shape)} that was quantized for a product is at version {x._version}; expected version "
            f"{version} instead"
        )


def _source_of(saved: Tensor) -> Source | None:
    """Return the source of a tensor, or of the tensor that it is a view of."""
    return getattr(saved if saved._base is None else saved._base, _SOURCE, None)


def _makers(product: Tensor) -> Iterator[Any]:
    """Yield the autograd nodes from a tensor over views to the operator that computed it."""
    node: Any = product.grad_fn
    for _ in range(_VIEWS_BETWEEN):
        if node is None:
            return
        yield node
        if _saved_names(node.__class__) or not node.next_functions:
            return
        node = node.next_functions[0][0]


@cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the tensors that a kind of autograd node saves; none for custom functions."""
    names = (name.removeprefix("_raw_saved_") for name in dir(kind) if name.startswith("_raw_saved_"))
    return tuple(name for name in names if hasattr(kind, f"_saved_{name}"))


class _Kept(NamedTuple):
    """A source that is saved in place of a quantized tensor, or of a view of one."""

    source: Source
    x: Tensor
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, source: Source, saved: Tensor) -> _Kept:
        """Return what is saved in place of a tensor."""
        x = source.x.detach()
        return cls(source, x, x._version, saved.size(), saved.stride(), int(saved.storage_offset()))

    def again(self) -> Tensor:
        """Quantize the source again."""
        check_unchanged(self.x, self.version)
        return self._requantized(self.x)

    def _requantized(self, x: Tensor) -> Tensor:
        source, grid = self.source, self.source.grid
        made = simulate.quantize(x, source.width, grid, source.value_ranges, source.seed)
        if LOOKING:
            show(made.values, source.width, grid)
        return made.values.as_strided(self.size, self.stride, self.offset)


class _SourceHooks(NamedTuple):
    """Saved-tensor hooks around the user's own, which get sources instead of quantized tensors."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    def packed(self, saved: Tensor) -> tuple[_Kept | None, Any]:
        """Pass the source of a tensor to the user's hook, or the tensor itself if it has none."""
        source = _source_of(saved)
        if source is None:
            return None, self.pack(saved)
        kept = _Kept.of(source, saved)
        return kept, self.pack(kept.x)

    def unpacked(self, packed: tuple[_Kept | None, Any]) -> Tensor:
        """Undo `packed`."""
        kept, what = packed
        tensor = self.unpack(what)
        return tensor if kept is None else kept._requantized(tensor.contiguous())


def _hooks() -> tuple[Any, Any] | None:
    """Return the saved-tensor hooks that are active."""
    hooks: tuple[Any, Any] | None = top_saved_tensors_hooks(False)
    return hooks


def _wrap_hooks() -> None:
    """Wrap the user's active hooks in ours; removing the user's removes ours.

    Those of checkpointing, which save nothing, are not wrapped.
    """
    hooks = _hooks()
    if hooks is None or isinstance(getattr(hooks[0], "__self__", None), _SourceHooks):
        return
    if getattr(hooks[0], "__module__", "") == home.__name__:
        return
    before = _SourceHooks(*hooks)
    pop_saved_tensors_hooks()
    push_saved_tensors_hooks(before.packed, before.unpacked)


skip_frame(_Kept.again.__code__, inside=True)  # runs in the backward pass, which forward itself may call

_MARK = "_cpt_fx_widths"


def widths_of_pass(state: Precision, now: Widths) -> Widths:
    """Return the bit-widths in force, or, in a recomputation, those of the original forward pass."""
    again = graph_task_id() != -1
    owner = _checkpoint(again)
    if owner is None:
        return now
    kept: dict[int, Widths] = owner.__dict__.setdefault(_MARK, {})
    held = kept.get(id(state), now) if again else kept.setdefault(id(state), now)
    if len(held.values) < len(now.values):  # a graph was captured in between
        held = kept[id(state)] = type(now)(now.values | held.values, state.device)
    return held


def is_recomputing() -> bool:
    """Return whether this forward runs inside a backward pass: checkpointing, which must not update a range twice."""
    return not torch.compiler.is_compiling() and graph_task_id() != -1


def _checkpoint(again: bool) -> Any:
    """Return the object that the surrounding checkpoint keeps from its forward pass to its recomputation, or None."""
    if not again:
        hooks: Any = top_saved_tensors_hooks(True)
        if hooks is not None and hooks[0].__module__ == home.__name__:
            cells = dict(zip(hooks[0].__code__.co_freevars, hooks[0].__closure__ or (), strict=True))
            return cells["frame"].cell_contents if "frame" in cells else None
        if torch.is_grad_enabled():
            return None
    # A recomputation, or the reentrant kind, whose forward pass runs without gradients: search the stack.
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == home.__file__:
            owner = frame.f_locals.get("ctx" if frame.f_code in _REENTRANT else "frame")
            if owner is not None:
                return owner
        frame = frame.f_back
    return None


_REENTRANT = frozenset({home.CheckpointFunction.forward.__code__, home.CheckpointFunction.backward.__code__})
