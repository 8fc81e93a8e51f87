"""The result of a transform whose graphs are found while the model runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code

from cpt_fx.dynamo.engine import Engine, outer_compiler
from cpt_fx.dynamo.lift import Compiler
from cpt_fx.graph_module import ENGINE, take_tensors
from cpt_fx.meta import STATE


class DynamoModule(nn.Module):
    """A model whose code runs as it is, and whose graphs, wherever Dynamo finds them, are rewritten.

    Parameters, buffers and modules are those of a copy of the module tree, which shares every tensor with the
    original. Attributes and methods that are not its own are the copy's: `result.config`, `result.generate(...)`.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        root = engine.root
        take_tensors(self, root)
        # The same containers: a tensor that is replaced here is replaced there.
        self._parameters, self._buffers = root._parameters, root._buffers
        self._modules = {**root._modules, STATE: engine.state}
        self.__dict__[ENGINE] = engine
        self._connect()

    def _connect(self) -> None:
        """Lead every call of the model through the engine, also those that the model's own methods make."""
        engine: Engine = self.__dict__[ENGINE]
        engine.root.__dict__["forward"] = _Entrance(engine)

        @functools.wraps(engine.forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Through its call, which runs the hooks on the model as a whole.
            return engine.root(*args, **kwargs)

        self.__dict__["forward"] = _uncompiled(call)

    def train(self, mode: bool = True) -> DynamoModule:
        """Switch the mode of the model and of its graphs."""
        engine: Engine = self.__dict__[ENGINE]
        # The model may have its own idea of a mode: layers that stay frozen.
        engine.root.train(mode)
        engine.state.train(mode)
        self.training = engine.root.training
        engine.follow_mode()
        return self

    def __getattr__(self, name: str) -> Any:
        """Look in the model's copy for what is not here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if ENGINE not in self.__dict__:
                raise
        return getattr(self.__dict__[ENGINE].root, name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the way in, which is made anew."""
        return {key: value for key, value in self.__dict__.items() if key != "forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, and connect."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect()


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a `torch.compile` around the model from tracing its plain code: the engine compiles the rewritten graphs."""
    reason = "the model inside is transformed by cpt_fx, which captures it itself: call it outside, or compile it alone"
    return torch.compiler.disable(function, recursive=False, reason=reason)  # type: ignore[no-any-return]


@_uncompiled
def _enter(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _run(engine, outer_compiler(), args, kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(engine: Engine, outer: tuple[Compiler | None, bool], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Leave the compiler around the model for good: what is compiled from here on, the engine hands to it."""
    return engine.run(args, kwargs, *outer)


class _Entrance:
    """The forward of the model's copy: into the engine, or, in a model that calls itself, on within the graph."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine.running:
            return self.engine.forward(*args, **kwargs)
        return _enter(self.engine, args, kwargs)

    __code__ = __call__.__code__  # Dynamo asks a forward for it


# A compiler around the model has nothing to find in this frame; one that traces through it still may.
skip_code(_Entrance.__call__.__code__)
