"""What a trace would lose or freeze without a word, noticed while the model's code runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree

from cpt_fx.aliasing import writes_in_place
from cpt_fx.capture.base import CaptureError

PLAIN = (bool, int, float, str, type(None))
"""Argument values that Python code branches on: they become constants of the graph."""

_ABSENT = object()


def _holds_proxy(value: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(value))


@contextmanager
def replaced(functions: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Put other functions in the place of some of torch's, for as long as the block runs."""
    thread = threading.get_ident()

    def here_only(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        """Other threads go on with the original."""
        return lambda *args, **kwargs: (function if threading.get_ident() == thread else original)(*args, **kwargs)

    originals = {place: vars(place[0])[place[1]] for place in functions}
    try:
        for (owner, name), function in functions.items():
            setattr(owner, name, here_only(function, originals[owner, name]))
        yield
    finally:
        for (owner, name), function in originals.items():
            setattr(owner, name, function)


@contextmanager
def refusing_what_is_lost() -> Iterator[None]:
    """Refuse calls that leave nothing behind in a graph: a backward of one's own, seeds, autocast regions."""

    def manual_seed(seed: Any) -> Any:
        raise CaptureError(f"forward calls torch.manual_seed({seed}), which a graph would not do on every call")

    def enter(_: Any) -> Any:
        raise CaptureError("forward enters torch.autocast: torch.fx would lose the region, also a disabled one")

    with replaced({(torch, "manual_seed"): manual_seed, (torch.autocast, "__enter__"): enter}), _refusing_functions():
        yield


@contextmanager
def _refusing_functions() -> Iterator[None]:
    """Refuse custom autograd functions, also where the code holds on to a bound `apply`: below all of them."""
    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        raise CaptureError(
            f"forward calls the autograd.Function {cls.__name__}: torch.fx would trace its forward, its backward "
            "would be lost"
        )

    try:
        setattr(_SingleLevelFunction, "apply", classmethod(apply))  # noqa: B010  (torch does not declare it)
        yield
    finally:
        delattr(_SingleLevelFunction, "apply")


@contextmanager
def watching_attributes() -> Iterator[None]:
    """Refuse code that stores something in a module on every call: a graph would do it once, or not at all.

    `self.buffer += 1` is fine: the update in place is in the graph, and storing the same tensor again changes nothing.
    """
    original = nn.Module.__setattr__

    def checked(module: nn.Module, name: str, value: Any) -> None:
        before = module.__dict__.get(name, _ABSENT)
        if isinstance(value, fx.Proxy):
            source = value.node.args[0] if value.node.args else None
            in_place = name in module._buffers and writes_in_place(value.node, {})
            if in_place and isinstance(source, fx.Node) and str(source.target).rpartition(".")[2] == name:
                return
        elif _holds_proxy(value):
            pass
        elif not isinstance(value, PLAIN) or (type(value) is type(before) and value == before):
            return original(module, name, value)  # type: ignore[arg-type]
        what = "a tensor" if _holds_proxy(value) else repr(value)
        raise CaptureError(
            f"the forward of {type(module).__name__} stores {what} in self.{name}, which a graph would not do on every "
            "call. Return it, or keep it in a buffer that is updated in place"
        )

    with replaced({(nn.Module, "__setattr__"): checked}):
        yield


def context() -> dict[str, object]:
    """Return what `with` statements change about the operators inside them."""
    return {
        "torch.no_grad": torch.is_grad_enabled(),
        "torch.autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ],
    }
