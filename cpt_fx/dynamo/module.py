"""The result of a transform whose graphs are found while the model runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code

from cpt_fx.dynamo.engine import Engine, outer_compiler
from cpt_fx.dynamo.lift import Compiler
from cpt_fx.graph_module import ENGINE, take_tensors
from cpt_fx.meta import STATE

_OWN = frozenset({*vars(nn.Module()), "forward", "_compiled_call_impl"})
"""Attributes that a result has itself: what nn.Module works with. All others are the model's."""


class _Children(dict[str, "nn.Module | None"]):
    """The modules of a result: those of the model's copy, and the state. What is put in is put into the copy."""

    def __init__(self, root: nn.Module, state: nn.Module) -> None:
        super().__init__({**root._modules, STATE: state})
        self._root = root

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        super().__setitem__(name, module)
        self._root._modules[name] = module

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self._root._modules[name]


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
        for containers in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[containers] = getattr(root, containers)
        self.__dict__[ENGINE] = engine
        self._connect()

    @property
    def _modules(self) -> dict[str, nn.Module | None]:
        """The model's own modules as they are now, and the state."""
        engine: Engine | None = self.__dict__.get(ENGINE)
        return {} if engine is None else _Children(engine.root, engine.state)

    @_modules.setter
    def _modules(self, value: object) -> None:
        """Keep nothing: nn.Module makes an empty dict when it is built."""

    def _connect(self) -> None:
        """Lead every call of the model through the engine, also those that the model's own methods make."""
        engine: Engine = self.__dict__[ENGINE]
        engine.root.__dict__["forward"] = _Entrance(engine)

        @functools.wraps(engine.forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Through its call, which runs the hooks on the model as a whole.
            return engine.root(*args, **kwargs)

        self.__dict__["forward"] = _uncompiled(call)

    @property
    def training(self) -> bool:
        """The mode of the model, which its own code may switch."""
        engine: Engine | None = self.__dict__.get(ENGINE)
        return True if engine is None else engine.root.training

    @training.setter
    def training(self, mode: bool) -> None:
        engine: Engine | None = self.__dict__.get(ENGINE)
        if engine is not None:
            engine.root.training = mode

    def train(self, mode: bool = True) -> DynamoModule:
        """Switch the mode of the model and of its graphs."""
        engine: Engine = self.__dict__[ENGINE]
        # The model may have its own idea of a mode: layers that stay frozen.
        engine.root.train(mode)
        engine.follow_mode()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # The model's own way of doing it, extra state included.
        self.__dict__[ENGINE].root._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        ours = f"{prefix}{STATE}."
        theirs = {key: value for key, value in state_dict.items() if not key.startswith(ours)}
        root = self.__dict__[ENGINE].root
        root._load_from_state_dict(theirs, prefix, local_metadata, strict, missing, unexpected, errors)

    def __getattr__(self, name: str) -> Any:
        """Look in the model's copy for what is not here."""
        engine: Engine | None = self.__dict__.get(ENGINE)
        if engine is None:
            return super().__getattr__(name)
        if name == STATE:
            return engine.state
        value = getattr(engine.root, name)
        own = isinstance(value, MethodType) and value.__self__ is engine.root
        return _in_the_net(engine, value) if own and not value.__func__.__module__.startswith("torch.") else value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the model's code reads where it reads it: in the copy."""
        engine: Engine | None = self.__dict__.get(ENGINE)
        if engine is None or name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(engine.root, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete likewise."""
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.__dict__[ENGINE].root, name)

    def __dir__(self) -> list[str]:
        """List what the copy has, too."""
        return sorted({*object.__dir__(self), *dir(self.__dict__[ENGINE].root)})

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


def _in_the_net(engine: Engine, method: MethodType) -> Callable[..., Any]:
    """Let what a method multiplies by itself, and in modules that it calls, go through quantizers too."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with engine.net:
            return method(*args, **kwargs)

    return call


class _Entrance:
    """The forward of the model's copy: into the engine, or, in a model that calls itself, on within the graph."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Code asks a model for its arguments: attention_mask, labels, ...
        self.__signature__ = inspect.signature(engine.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        # A compiler that comes by cannot ask for threads; it runs in the one that holds the engine, if any does.
        inside = engine.running if torch.compiler.is_dynamo_compiling() else engine.runs_here()
        return engine.forward(*args, **kwargs) if inside else _enter(engine, args, kwargs)

    __code__ = __call__.__code__  # Dynamo asks a forward for it


# A compiler around the model has nothing to find in this frame; one that traces through it still may.
skip_code(_Entrance.__call__.__code__)
