"""Track which nodes run under another gradient mode, autocast or torch.func transform, and restore such modes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from cpt_fx.common.compilers import skip_frame
from cpt_fx.common.torch_private import enter_autocast, exit_autocast, set_grad_enabled
from cpt_fx.ir.torch_private import enter_inference_mode, exit_inference_mode

_DEVICES = ("cpu", "cuda", "mps", "xpu", "mtia", "hpu", "xla", "privateuseone")
_GUARDS: list[Any] = []
_SET_GRAD: frozenset[Any] = frozenset({set_grad_enabled, torch.set_grad_enabled})
_ENTER: frozenset[Any] = frozenset({enter_autocast, enter_inference_mode})
_EXIT: frozenset[Any] = frozenset({exit_autocast, exit_inference_mode})


TRANSFORMED = "under torch.vmap or another transform of torch.func: running ranges and hooks have no place there"
"""Why products inside a transformed function stay in full precision."""


class ModesOf:
    """Restores torch's global modes when an exception leaves the block: gradients, autocast and the other `_SWITCHES`.

    Graphs set modes by calls instead of `with` blocks; after an exception, the calls that reset them never run. With
    `always`, the modes are restored in any case.
    """

    def __init__(self, *, always: bool = False) -> None:
        self.always = always

    def __enter__(self) -> None:
        self.before, self.inference = _modes(), torch.is_inference_mode_enabled()

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None and not self.always:
            return
        if torch.is_inference_mode_enabled() is not self.inference:
            # The region's own guard may be freed later and restores the same mode. This one is never freed.
            _GUARDS.append(torch.inference_mode(self.inference))
            _GUARDS[-1].__enter__()
        if _modes() != self.before:
            switches, devices, nesting = self.before
            for (_, put), value in zip(_SWITCHES, switches, strict=True):
                put(value)
            for device, enabled, dtype in devices:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            for _ in range(torch.autocast_increment_nesting() - nesting + 1):
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()


_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.is_grad_enabled, set_grad_enabled),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
"""Modes that have a getter and a setter."""


def _modes() -> tuple[list[Any], list[tuple[str, bool, torch.dtype]], int]:
    devices = [(name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in _DEVICES]
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return [read() for read, _ in _SWITCHES], devices, nesting


for _function in (ModesOf.__enter__, ModesOf.__exit__, _modes):
    # A compiler around the model should not trace these.
    skip_frame(_function.__code__)


class Regions:
    """Walks a graph in order and tracks the contexts that each node runs in.

    Two calls of one operator on one value are the same only if their contexts are: without gradients a result has no
    autograd history, and under autocast it may have another dtype.
    """

    def __init__(self) -> None:
        self._gradients: Any = None
        self._entered: tuple[fx.Node, ...] = ()
        self._levels = 0

    @property
    def transformed(self) -> bool:
        """Whether the current node runs under `torch.vmap` or another transform of `torch.func`."""
        return self._levels > 0

    @property
    def infers(self) -> bool:
        """Whether the current node runs in inference mode, in which nothing has a gradient."""
        modes = [node.args for node in self._entered if node.target is enter_inference_mode]
        return bool(modes) and modes[-1] == (True,)

    @property
    def current(self) -> Hashable:
        """The contexts of the current node, as a key to compare."""
        return self._gradients, self._entered, self._levels

    def visit(self, node: fx.Node) -> None:
        """Process the next node of the graph."""
        if node.op != "call_function":
            return
        if node.target in _SET_GRAD:
            self._gradients = node.args[0] if node.args else node.kwargs.get("mode")
        elif node.target in _ENTER:
            self._entered = (*self._entered, node)
        elif node.target in _EXIT:
            self._entered = tuple(entered for entered in self._entered if entered is not node.args[0])
        else:
            name = getattr(node.target, "__name__", "")
            self._levels += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
