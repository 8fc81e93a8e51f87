"""A faithful torch.fx tracer: weights and buffers as graph values, factory functions as nodes, arguments as given."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.snapshot import is_hooked
from cpt_fx.capture.symbolic.guards import Replacements, context, refuse_handlers
from cpt_fx.capture.symbolic.questions import is_caught
from cpt_fx.capture.symbolic.refusals import looked_at, note, place_of, place_of_forward, refuse
from cpt_fx.capture.symbolic.traced import Traced
from cpt_fx.capture.torch_private import ConvTransposeNd, conv_output_padding
from cpt_fx.capture.tree import TreePlaces
from cpt_fx.common.torch_private import top_saved_tensors_hooks
from cpt_fx.ir.aliasing import overwritten
from cpt_fx.ir.meta import CALLED, module_path
from cpt_fx.ir.result import PART
from cpt_fx.operators import INLINED
from cpt_fx.operators.around import FACTORIES


class Tracer(fx.Tracer):
    """Traces into the layers that normalize would replace by functions, so that their weights are graph values."""

    def __init__(
        self, fixed: Mapping[str, object], originals: Mapping[int, str], *, every_module: bool = False
    ) -> None:
        super().__init__(param_shapes_constant=False)
        self.fixed = dict(fixed)
        self.originals = originals
        self.every_module = every_module
        self._tensor_paths: dict[int, str] = {}
        self._wanted: set[int] = set()
        self._context = context()
        self.dropped_checkpoints = False
        self.asked: dict[str, str] = {}
        """Arguments that the code compares with None, with the place in the code."""
        self._read: dict[str, fx.Proxy] = {}
        self._made: list[weakref.ref[Traced]] = []
        self._thread = threading.get_ident()
        self._called: nn.Module | None = None
        """The module whose call is being traced."""
        self.look: Any = None
        """The trace function (`sys.settrace`) that inspects the model's code line by line."""

    def proxy(self, node: fx.Node) -> Traced:
        """Return a traced value for a node, and keep a weak reference to it."""
        made = Traced(node, self)
        self._made.append(weakref.ref(made))
        return made

    create_proxy = looked_at(fx.Tracer.create_proxy)

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> Any:
        """Inspect the code of the root's forward, but not the code that calls it."""
        function, inputs = super().create_args_for_root(*args, **kwargs)
        return looked_at(function, self.look), inputs

    def read(self, name: str, frame: FrameType) -> None:
        """Refuse to read an attribute of a traced value where the code may catch the error that it is missing."""
        if is_caught(frame):
            refuse(f"the code reads .{name} where it catches exceptions, which torch.fx cannot know of a traced value,")

    def refuse_survivors(self) -> None:
        """Refuse code that keeps a traced value anywhere: it is not a tensor, and a graph would not keep it."""
        self._read.clear()
        if any(made() is not None for made in self._made):
            gc.collect()
        kept = next((value for value in (made() for made in self._made) if value is not None), None)
        if kept is not None:
            what = f"forward keeps {kept.node.format_node()}, which a graph would not do on every call,"
            raise CaptureError(f"{what}{place_of_forward(self.root)}")

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Refuse a branch on a traced value, even if the code catches the error."""
        raise note(fx.proxy.TraceError("symbolically traced variables cannot be used as inputs to control flow"))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Refuse a loop over a traced value, even if the code catches the error."""
        raise note(fx.proxy.TraceError("a value that is only traced cannot be iterated over"))

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Create a node; refuse operators inside a context that changes them: graphs record no `with` statements."""
        node = super().create_node(kind, *args, **kwargs)
        if threading.get_ident() != self._thread:
            what = "forward runs operators in another thread, which torch.fx would take for its own,"
            note(CaptureError(f"{what}{place_of(sys._getframe(1))}"))
        changed = [name for name, state in context().items() if state != self._context[name]]
        # Saved-tensor hooks change what is kept for the backward pass, not what is computed.
        if top_saved_tensors_hooks(True) is not None:
            self.dropped_checkpoints = True
            if self._updates(node):
                refuse("forward updates a buffer inside torch.utils.checkpoint, which does so twice in each step,")
        if changed and kind.startswith("call_"):
            path, _ = module_path(node)
            place = f"module {path!r}" if path else "the model's forward"
            refuse(f"{place} runs {node.format_node()} inside {changed[0]}, which torch.fx would lose,")
        if kind.startswith("call_"):
            refuse_handlers()
        return node

    def _updates(self, node: fx.Node) -> bool:
        """Return whether a node writes to a buffer, as an in-place operator or as a norm that learns statistics."""
        if node.op == "call_module":
            module = self._called
            assert module is not None
            return module.training and any(buffer is not None for buffer in module._buffers.values())
        return any(value.op == "get_attr" for value in overwritten(node, {}))

    def create_arg(self, a: Any) -> Any:
        """Read tensors of the model by their path; refuse containers that a graph would rebuild as plain ones."""
        if type(a) is Traced:  # the most frequent case first
            return a.node
        if isinstance(a, torch.Tensor) and id(a) in self._tensor_paths:
            return self.create_node("get_attr", self._tensor_paths[id(a)], (), {})
        if isinstance(a, (dict, list)) and type(a) not in (dict, list) and "immutable_" not in type(a).__name__:
            plain = "dict" if isinstance(a, dict) else "list"
            refuse(f"forward makes a {type(a).__name__}, which torch.fx would turn into a plain {plain},")
        if isinstance(a, torch.ScriptObject):  # such as the packed weights of torch's integer layers
            refuse("forward passes on an object of TorchScript's, which torch.fx cannot name,")
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Keep torch.nn layers as calls, except those with products and those with computed parameters."""
        if self.is_called(m):
            return True
        if isinstance(m, (*INLINED, parametrize.ParametrizationList)) or parametrize.is_parametrized(m):
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def is_called(self, module: nn.Module) -> bool:
        """Return whether a module must be called as a module: it has hooks, or a forward or transform of its own."""
        if isinstance(module, parametrize.ParametrizationList):
            return False
        return self.every_module or id(module) in self._wanted or PART in module.__dict__

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Mark the call of a module that must be called as a module when the graph runs."""
        called, self._called = self.is_called(m), m
        result = super().call_module(m, forward, args, kwargs)
        if called and isinstance(result, fx.Proxy):
            result.node.meta[CALLED] = True
        return result

    def path_of_module(self, mod: nn.Module) -> str:
        """Return a module's path, even if the code reaches the original through a bound method or a closure."""
        if id(mod) in self.originals:
            return self.originals[id(mod)]
        return super().path_of_module(mod)

    def remember(self, root: nn.Module) -> None:
        """Record the paths of tensors before the code runs, which may replace them for a while.

        Also record which modules have hooks or a forward of their own: what the code itself sets is part of the trace.
        """
        self._wanted = {id(module) for module in root.modules() if is_hooked(module) or "forward" in module.__dict__}
        self._tensor_paths = TreePlaces(root).tensors
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    self._tensor_paths.setdefault(id(value), f"{path}.{name}" if path else name)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Turn parameters and buffers into graph values, by identity (fx searches the whole model for each one).

        Buffers too: code that updates one in place must do so when the graph runs, not while it is traced.
        """
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        name = self._tensor_paths.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in self._read:  # not in the given cache, which outlives the trace
            self._read[name] = self.create_proxy("get_attr", name, (), {})
        return self._read[name]

    def replacements(self) -> Replacements:
        """Return functions that record `torch.zeros` and the like, and the padding of transposed convolutions.

        Run at trace time, their result would be a constant: shared between calls if the code fills it in place, the
        same at every call if it is random, and valid for one input size only.
        """

        def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
            def record(*args: Any, **kwargs: Any) -> Any:
                if kwargs.get("generator") is not None:
                    refuse("forward draws from a torch.Generator: its state would not start anew at each call,")
                return self.create_proxy("call_function", function, args, kwargs)

            return record

        def padded(layer: nn.Module, x: Any, output_size: Any, *args: Any) -> Any:
            if output_size is None:
                return conv_output_padding(layer, x, output_size, *args)
            return self.create_proxy("call_function", output_padding, (x, output_size, *args), {})

        factories: Replacements = {(torch, name): recorded(getattr(torch, name)) for name in FACTORIES}
        return {**factories, (ConvTransposeNd, "_output_padding"): padded}

    def _proxy_placeholder(
        self, name: str, concrete_args: Any, sig: inspect.Signature, fn_for_analysis: Callable[..., Any]
    ) -> Any:
        """Make an argument a graph input; a fixed one keeps its place in the signature and is checked at run time."""
        bare = name.lstrip("*")
        if bare not in self.fixed or name.startswith("*"):
            return super()._proxy_placeholder(name, concrete_args, sig, fn_for_analysis)
        value = self.fixed[bare]
        given = self.create_proxy("placeholder", name, (value,), {})
        self.create_proxy("call_function", expect, (given, value, bare), {})
        return value


def output_padding(x: torch.Tensor, output_size: Any, *args: Any) -> list[int]:
    """Return the padding that gives a transposed convolution its output size."""
    return conv_output_padding(None, x, output_size, *args)


def expect(given: object, value: object, name: str) -> None:
    """Raise if an argument has another value than the graph was captured for."""
    if given is not value and (isinstance(given, torch.Tensor) or given != value):
        raise ValueError(
            f"this model was captured for {name}={value!r}, which its code branches on; got "
            f"{type(given).__name__ if isinstance(given, torch.Tensor) else repr(given)}. To use another value, "
            "capture the model with it in example_inputs / example_kwargs"
        )


def expect_given(given: object, name: str) -> None:
    """Raise if an argument that was given at capture is None."""
    if given is None:
        raise ValueError(
            f"this model was captured with {name} given, which its code asks about; got None. Capture the model with "
            f"{name}=None in example_inputs / example_kwargs, or with capture='dynamo', which takes both"
        )
