"""What a trace would lose or freeze without a word, noticed while the model's code runs."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_fx.aliasing import overwritten
from cpt_fx.capture.base import CaptureError

PLAIN = (bool, int, float, str, type(None))
"""Argument values that Python code branches on: they become constants of the graph."""

INNER = (Path(__file__).parents[1], Path(torch.__file__).parent, Path(dis.__file__).parent)
"""Where code lies that is not the model's own: this library, torch, Python."""

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

    def enable(*_: Any) -> Any:
        raise CaptureError("forward switches gradients on: where the model is called without them, a graph would not")

    refused = {
        (torch, "manual_seed"): manual_seed,
        (torch.autocast, "__enter__"): enter,
        (torch.enable_grad, "__enter__"): enable,
    }
    with replaced(refused), _refusing_functions():
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
            written = overwritten(value.node, {}) if name in module._buffers else []
            if any(str(source.target).rpartition(".")[2] == name for source in written):
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


def refuse_handlers() -> None:
    """Refuse an operator that is recorded where exceptions are caught: values that are only traced raise none.

    Called while tracing: whoever called the operator is on the stack, up to the tracer itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != TRACE:
        code = frame.f_code
        if _is_the_models(code) and _catches(code):
            raise CaptureError(
                f"{code.co_name} ({code.co_filename}:{frame.f_lineno}) catches exceptions, and values that are only "
                "traced raise none: a graph might take the way that the model does not"
            )
        frame = frame.f_back


TRACE = "_trace_with_guards"
"""Name of the function that starts a trace: below it on the stack is the user's program, which may catch anything."""


@cache
def _is_the_models(code: CodeType) -> bool:
    name = code.co_filename
    return not name.startswith("<") and not any(map(Path(name).is_relative_to, INNER))


@cache
def _catches(code: CodeType) -> bool:
    """Whether a function has an `except` of its own: `with` statements have none."""
    return any(step.opname in ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH") for step in dis.get_instructions(code))


class RefusingWrites(TorchDispatchMode):
    """Refuse code that writes to a parameter or buffer it got hold of behind the tracer's back.

    Whoever walks over `self.parameters()` sees the real tensors: an update would happen once, while tracing, to the
    model's own values, and never when the graph runs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what an operator is about to write."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                written = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in pytree.tree_leaves(value) if written else ():
                    name = (
                        self._names.get(tensor.untyped_storage()._cdata) if isinstance(tensor, torch.Tensor) else None
                    )
                    if name is not None:
                        raise CaptureError(
                            f"forward updates {name} in place, but not as an attribute of its module: torch.fx would "
                            "run the update once, while tracing"
                        )
        return func(*args, **kwargs)


def context() -> dict[str, object]:
    """Return what `with` statements change about the operators inside them."""
    return {
        "torch.no_grad": torch.is_grad_enabled(),
        "torch.autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ],
    }
