"""The torch.fx frontend: fast, needs no example inputs, and refuses what it would get silently wrong."""

from __future__ import annotations

import inspect
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from cpt_fx.aliasing import writes_in_place
from cpt_fx.capture.base import Captured, CaptureError, assemble, clone_tree
from cpt_fx.capture.containers import unchanged_containers
from cpt_fx.capture.in_place import recording_updates
from cpt_fx.capture.modes import merge_modes
from cpt_fx.meta import OPENED, get_attribute, module_path

FACTORIES = ("zeros", "ones", "full", "empty", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye")
"""Functions of torch that make a tensor from nothing: they run in the graph, not once while tracing."""

_TRACING = threading.RLock()
"""One trace at a time: tracing replaces functions of torch for its thread."""

PLAIN = (bool, int, float, str, type(None))
"""Argument values that Python code branches on: they become constants of the graph."""


class Tracer(fx.Tracer):
    """Traces through the layers that normalize would open, so that their weights are graph values from the start."""

    def __init__(self, fixed: Mapping[str, object], originals: Mapping[int, str]) -> None:
        super().__init__(param_shapes_constant=False)
        self.fixed = dict(fixed)
        self.originals = originals
        self._tensor_paths: dict[int, str] | None = None
        self._context = _context()
        self.dropped_checkpoints = False

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuse operators inside a context that changes them: a graph does not record `with` statements."""
        node = super().create_node(kind, *args, **kwargs)
        changed = [name for name, state in _context().items() if state != self._context[name]]
        # Saved-tensor hooks change what is kept for the backward pass, not what is computed.
        self.dropped_checkpoints |= torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if changed and kind.startswith("call_"):
            path, _ = module_path(node)
            place = f"module {path!r}" if path else "the model's forward"
            raise CaptureError(f"{place} runs {node.format_node()} inside {changed[0]}, which torch.fx would lose")
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Keep torch.nn layers as calls, except those with products and those with computed parameters."""
        if isinstance(m, OPENED) or parametrize.is_parametrized(m) or isinstance(m, parametrize.ParametrizationList):
            return False
        if m._forward_hooks or m._forward_pre_hooks:
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def path_of_module(self, mod: nn.Module) -> str:
        """Find a module also when the code reaches the original through a bound method or a closure."""
        if id(mod) in self.originals:
            return self.originals[id(mod)]
        return super().path_of_module(mod)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Turn parameters and buffers into graph values, by identity (fx searches the whole model for each one).

        Buffers too: code that updates one in place must do so when the graph runs, not while it is traced.
        """
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        if self._tensor_paths is None:
            named = (*self.root.named_parameters(), *self.root.named_buffers())
            self._tensor_paths = {id(value): name for name, value in named}
        name = self._tensor_paths.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    @contextmanager
    def recording_factories(self) -> Iterator[None]:
        """Record `torch.zeros(...)` and its like as nodes while tracing.

        Run once at trace time, their result would be a constant: shared between calls where the code fills it in
        place, and the same at every call where it is random.
        """

        def recorded(function: Callable[..., Any]) -> Callable[..., fx.Proxy]:
            def record(*args: Any, **kwargs: Any) -> fx.Proxy:
                if kwargs.get("generator") is not None:
                    raise CaptureError(
                        "forward draws from a torch.Generator: its state would not start anew at each call"
                    )
                return self.create_proxy("call_function", function, args, kwargs)

            return record

        with replaced({(torch, name): recorded(getattr(torch, name)) for name in FACTORIES}):
            yield

    @contextmanager
    def recording_output_sizes(self) -> Iterator[None]:
        """Let `conv_transpose(x, output_size=...)` work out its padding in the graph, from the input's size there."""
        original = _ConvTransposeNd._output_padding

        def recorded(layer: nn.Module, x: Any, output_size: Any, *args: Any) -> Any:
            if output_size is None:
                return original(layer, x, output_size, *args)  # type: ignore[arg-type]
            return self.create_proxy("call_function", output_padding, (x, output_size, *args), {})

        with replaced({(_ConvTransposeNd, "_output_padding"): recorded}):
            yield

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


_ABSENT = object()


def _holds_proxy(value: Any) -> bool:
    return any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(value))


def output_padding(x: torch.Tensor, output_size: Any, *args: Any) -> list[int]:
    """Return the padding that gives a transposed convolution its output size."""
    return _ConvTransposeNd._output_padding(None, x, output_size, *args)  # type: ignore[arg-type]


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


def _context() -> dict[str, object]:
    """Return what `with` statements change about the operators inside them."""
    return {
        "torch.no_grad": torch.is_grad_enabled(),
        "torch.autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ],
    }


def expect(given: object, value: object, name: str) -> None:
    """Refuse a value that the graph was not captured for."""
    if given is not value and (isinstance(given, torch.Tensor) or given != value):
        raise ValueError(
            f"this model was captured for {name}={value!r}, which its code branches on; got "
            f"{type(given).__name__ if isinstance(given, torch.Tensor) else repr(given)}. To use another value, pass "
            "example_inputs / example_kwargs with it to cpt_fx.transform"
        )


def capture_symbolic(
    model: nn.Module, example_inputs: tuple[Any, ...] | None = None, example_kwargs: dict[str, Any] | None = None
) -> Captured:
    """Capture with torch.fx, or raise `CaptureError` where the graph would not do what the model does."""
    optional = _optional_arguments(model)
    if example_inputs is not None or example_kwargs is not None:
        fixed = _constants_of(model, example_inputs or (), example_kwargs or {})
        traced = _both_modes(model, fixed)
    else:
        # Code may test an optional argument. Where leaving it open and leaving it out give the same graph, it is
        # open; otherwise the graph is the one for its default, and says so when it is given.
        fixed = dict(optional)
        traced = _both_modes(model, fixed)
        for name in optional:
            without = {key: value for key, value in fixed.items() if key != name}
            try:
                opened = _both_modes(model, without)
            except CaptureError:
                continue
            if _same_but_for(opened.graph, traced.graph, name, optional[name]):
                fixed, traced = without, opened
    _drop_dead_constants(traced.graph)
    _restore_modes(traced.root, model)
    notes = [f"captured for {name}={value!r}: the code branches on it" for name, value in fixed.items()]
    if traced.dropped_checkpoints:
        notes.append("torch.utils.checkpoint inside forward is not kept: activations stay in memory for backward")
    return Captured(assemble(traced.root, traced.graph), "symbolic", tuple(notes))


class Traced(NamedTuple):
    """A trace: the copy of the model it was made on, the graph, and whether checkpoints inside it were lost."""

    root: nn.Module
    graph: fx.Graph
    dropped_checkpoints: bool


def _both_modes(model: nn.Module, fixed: Mapping[str, object]) -> Traced:
    """Trace in training and in evaluation mode and merge: flags that code passes on become run-time values."""
    state = torch.random.get_rng_state()
    try:
        training = _trace(model, fixed, mode=True)
        evaluation = _trace(model, fixed, mode=False)
    finally:
        torch.random.set_rng_state(state)
    merge_modes(training.graph, evaluation.graph)
    for node in training.graph.nodes:
        if node.op == "get_attr" and "_tensor_constant" in str(node.target):
            first, second = (get_attribute(trace.root, str(node.target)) for trace in (training, evaluation))
            if not torch.equal(first, second):
                raise CaptureError(f"{node.name} differs from trace to trace: it is random or depends on outer state")
    return training


def _trace(model: nn.Module, fixed: Mapping[str, object], *, mode: bool) -> Traced:
    clones: dict[int, nn.Module] = {}
    root = clone_tree(model, clones)
    root.train(mode)
    names = {id(module): name for name, module in model.named_modules()}
    tracer = Tracer(fixed, names)
    for name, module in root.named_modules():
        hooked = module._backward_hooks or module._backward_pre_hooks
        if name and hooked and not tracer.is_leaf_module(module, name):
            raise CaptureError(
                f"module {name!r} ({type(module).__name__}) has a backward hook: its operators become part of the "
                "graph, where the hook would never be called"
            )
    try:
        with _TRACING, unchanged_containers(model), ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            for context in (tracer.recording_factories, tracer.recording_output_sizes, recording_updates,
                            refusing_what_is_lost, watching_attributes):  # fmt: skip
                stack.enter_context(context())
            warnings.simplefilter("ignore")
            graph = tracer.trace(root)
    except CaptureError:
        raise
    except Exception as error:
        control_flow = isinstance(error, fx.proxy.TraceError) or "Proxy" in str(error)
        advice = (
            ". Code that depends on a tensor's values or size cannot be one graph: compute both sides and choose with "
            "torch.where, or keep the function as one call with torch.fx.wrap"
        )
        raise CaptureError(
            f"torch.fx cannot trace {type(model).__name__}{_line_of(error)}: {type(error).__name__}: "
            f"{str(error).rstrip('.')}{advice if control_flow else ''}"
        ) from error
    _check_constants(graph)
    return Traced(root, graph, tracer.dropped_checkpoints)


def _line_of(error: Exception) -> str:
    """Say which line of the model's own code raised: the innermost one outside of torch and this library."""
    inner = (Path(__file__).parents[1], Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in inner)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _check_constants(graph: fx.Graph) -> None:
    """Refuse in-place updates of a tensor that exists only in the trace: they would add up from call to call."""
    for node in graph.nodes:
        if writes_in_place(node, {}):
            first = node.args[0] if node.args else None
            if isinstance(first, fx.Node) and first.op == "get_attr" and "_tensor_constant" in str(first.target):
                raise CaptureError(
                    f"{node.format_node()} updates a tensor that the code makes on every call, but that the trace "
                    "holds as a constant. Make it with torch.zeros / x.new_zeros inside forward"
                )


def _restore_modes(root: nn.Module, model: nn.Module) -> None:
    """Give every module of the copy the mode its original is in."""
    for copied, original in zip(root.modules(), model.modules(), strict=True):
        copied.training = original.training


def _optional_arguments(model: nn.Module) -> dict[str, object]:
    """Return the arguments of forward that may be left out and that Python code may branch on."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty and isinstance(parameter.default, PLAIN)
    }


def _constants_of(
    model: nn.Module, example_inputs: tuple[Any, ...], example_kwargs: dict[str, Any]
) -> dict[str, object]:
    """Return the arguments that the examples fix: plain values given, and defaults of those left out."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*example_inputs, **example_kwargs)
    except TypeError as error:
        raise TypeError(f"the example inputs do not fit {type(model).__name__}.forward{signature}: {error}") from None
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if isinstance(value, PLAIN)}


def _same_but_for(opened: fx.Graph, fixed: fx.Graph, name: str, value: object) -> bool:
    """Whether leaving an argument open changed nothing but that the argument itself is passed on."""
    ignore = (expect,)
    left = [node for node in opened.nodes if node.target not in ignore]
    right = [node for node in fixed.nodes if node.target not in ignore]
    if len(left) != len(right):
        return False
    matching: dict[fx.Node, object] = {}

    def translate(node: fx.Node) -> Any:
        return matching[node]

    for ours, theirs in zip(left, right, strict=True):
        if ours.op != theirs.op or (ours.target != theirs.target):
            return False
        matching[ours] = value if ours.op == "placeholder" and ours.target == name else theirs
        if ours.op == "placeholder":
            continue
        if fx.map_arg((ours.args, ours.kwargs), translate) != (theirs.args, theirs.kwargs):
            return False
    return True


def _drop_dead_constants(graph: fx.Graph) -> None:
    """Remove parameters that were looked at but not used (a shape test, an `is None`)."""
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
