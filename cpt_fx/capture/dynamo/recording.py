"""Record one run of a model through Dynamo in one graph: inputs, outputs, and what the graph assumes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.dynamo import torch_private as private
from cpt_fx.capture.dynamo.backend import Backend, Frame, broken_by, outermost_frame, view_of, why_broken
from cpt_fx.capture.dynamo.engine import ONE_GRAPH, SEVERAL, DynamoEngine, NotCapturedError, default_stance
from cpt_fx.capture.tree import TreePlaces
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.ir.result import plain_class

EXACT = {"specialize_int": True, "specialize_float": True, "allow_unspec_int_on_nn_module": False}
"""Numbers among the arguments become constants of the graph, which checks them."""

_LOGGING = ("debug", "info", "warning", "warn", "error", "critical", "exception", "log")


def _log_functions() -> set[Any]:
    """Return the functions that log, including those that libraries add to every logger: Dynamo ignores them."""
    return {value for name, value in vars(logging.Logger).items() if name in _LOGGING or name.endswith("_once")}


ANY_SIZE = {"backed_size_oblivious": True, "use_duck_shape": False}
"""A size of 1 may vary like any other, and two equal sizes independently, unless the code says otherwise."""

ANY_BUT_ONE = {"backed_size_oblivious": False, "use_duck_shape": False}
"""Sizes of 0 and 1 in the examples are fixed; the others may vary."""


class WholeInt(int):
    """An integer that a graph returned, distinguished by identity from others of the same value."""


class WholeFloat(float):
    """A float that a graph returned, distinguished by identity from others of the same value."""


@dataclass
class Recording:
    """The graph of one run of a model, with its inputs and outputs."""

    places: TreePlaces
    view: QuantizedGraphModule
    environment: Any
    """Dynamo's shape environment: conditions on sizes, bounds, and where each size comes from."""
    inputs: list[Input]
    tensors: list[tuple[Tensor, Tensor]]
    """Every tensor that the code reads, and its fake tensor with symbolic sizes."""
    sizes: dict[Any, tuple[Tensor, int]]
    """Symbol -> the tensor and the dim that it is the size of."""
    modes: dict[str, bool]
    """The modules whose mode the code reads, by path, with that mode."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    given: tuple[Any, ...] = ()
    returned: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Input:
    """One input of Dynamo's graph: where its value comes from; for a number, which property of which tensor it is."""

    node: fx.Node
    name: str
    argument: bool
    """Whether it comes from the arguments of the call."""
    random: bool
    of: tuple[Tensor, str, int] | None


def record(engine: DynamoEngine, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool) -> Recording:
    """Run a model's forward on examples in one graph, with the hooks on the whole model around it."""
    recorder, engine.failure = _Recorder(engine), None

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            output = engine.compiled_for(recorder, dynamic=dynamic)(*args, **kwargs)
        except Exception as error:
            if recorder.ran or isinstance(error, NotCapturedError):
                raise  # the model's own error
            output = _retry(recorder, args, kwargs, dynamic, error)
        if recorder.recording is not None:
            recorder.recording.args, recorder.recording.kwargs, recorder.recording.output = args, kwargs, output
        return output

    root = engine.root
    # A copy of the root with this forward, so that the hooks of the whole model run around it.
    around: nn.Module = object.__new__(plain_class(type(root)))
    around.__dict__ = {**root.__dict__, "forward": forward}
    with _one_graph(engine):
        around(*args, **kwargs)
    if recorder.recording is None:
        raise CaptureError(f"{engine.session.kind} computes nothing with tensors: there is no graph")
    return recorder.recording


@contextmanager
def _one_graph(engine: DynamoEngine) -> Iterator[None]:
    """Configure Dynamo to capture the model in one graph, for as many sizes as possible."""
    # Without NNPACK, whose test for a batch below 16 would become a condition of the graph.
    with (
        _silence(), engine.entered(), default_stance(), torch.backends.nnpack.flags(enabled=False),
        private.shapes_config.patch(**ANY_SIZE),
        private.config.patch({**ONE_GRAPH, **EXACT, "ignore_logging_functions": _log_functions()}),
    ):  # fmt: skip
        yield


def _retry(recorder: _Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, error: Exception) -> Any:
    """Capture once more: some models initialize themselves in their first call, and are one graph from then on.

    Then try with sizes of 1 fixed: code that broadcasts a dim of size 1 in the examples needs that.
    """
    engine = recorder.owner
    error = engine.failure or error
    breaks = _breaks(engine, args, kwargs, "" if isinstance(error, CaptureError) else why_broken(error))
    for sizes in (ANY_SIZE, ANY_BUT_ONE):
        engine.failure = None
        try:
            with private.shapes_config.patch(**sizes):
                return engine.compiled_for(recorder, dynamic=dynamic)(*args, **kwargs)
        except Exception:
            if recorder.ran:
                raise
    raise engine.failure or _several(engine, breaks) from None


def not_one_graph(engine: DynamoEngine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError:
    """Return the error for a model that ran in several graphs."""
    with _one_graph(engine):
        return _several(engine, _breaks(engine, args, kwargs, engine.session.breaks_because))


def _breaks(engine: DynamoEngine, args: tuple[Any, ...], kwargs: dict[str, Any], first: str) -> list[str]:
    """Run the code in parts, and return every graph break, not only the first one."""
    breaks = [first]

    def collect(module: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        breaks.append(broken_by(module))
        return module.forward

    try:
        with private.config.patch({**SEVERAL, "fail_on_recompile_limit_hit": False}):
            engine.compiled_for(collect, dynamic=False, whole=False)(*args, **kwargs)
    except Exception as own:
        raise CaptureError(
            f"{engine.session.kind} does not run on these examples: {type(own).__name__}: {own}"
        ) from own
    return breaks


@contextmanager
def _silence() -> Iterator[None]:
    """Keep torch from logging every graph break with a stack trace."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._subclasses")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _several(engine: DynamoEngine, breaks: list[str]) -> CaptureError:
    found: dict[str, str] = {}
    for place in filter(None, breaks):
        found.setdefault(place.partition(" (")[0], place)  # one reason per line of code: the first is the most specific
    listed = "".join(f"\n  {place}" for place in found.values())
    return CaptureError(
        f"{engine.session.kind} is not one graph. Its code breaks at:{listed}\nChange these lines, or capture with "
        "'dynamo': it runs in several graphs"
    )


class _Recorder(Backend):
    """Records the graph, and runs it as it is."""

    recording: Recording | None = None
    ran = False

    def _rewrite(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        recording = self.recording = self._record(graph_module, inputs)

        def run(*given: Any) -> Any:
            self.ran = True
            recording.given = given
            recording.returned = tuple(_marked(value) for value in graph_module.forward(*given))
            return recording.returned

        return run

    def _record(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Recording:
        engine = self.owner
        translator, scope = outermost_frame()
        output = translator.output
        _refuse_effects(output.side_effects)

        def value_of(source: private.Source) -> Any:
            return eval(source.name, scope)

        places = engine.places
        view = view_of(graph_module, inputs, Frame(places, "", ""), engine)
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        ours = view.graph.find_nodes(op="placeholder")
        environment = output.shape_env
        tensors = [
            (value_of(source), variable.proxy.node.meta["example_value"])
            for source, variable in output.input_source_to_var.items()
            if isinstance(getattr(variable, "proxy", None), fx.Proxy)
            and isinstance(variable.proxy.node.meta.get("example_value"), Tensor)
        ]
        sizes = {
            symbol: (value_of(source.base), source.idx)
            for symbol, sources in environment.var_to_sources.items()
            for source in reversed(sources)
            if _property(source) == "size"
        }
        return Recording(
            places, view, environment,
            [_input(node, made._dynamo_source, value_of) for node, made in zip(ours, placeholders, strict=True)],
            tensors, sizes, _modes(output.guards, places, value_of),
        )  # fmt: skip


def _marked(value: Any) -> Any:
    if type(value) is int:
        return WholeInt(value)
    return WholeFloat(value) if type(value) is float else value


def _property(source: private.Source | None) -> str:
    """Return the method that reads a number from a tensor: `size`, `stride` or `storage_offset`; empty if none does."""
    kind = getattr(source, "prop", None)
    return kind.name.lower() if kind is not None else ""


def _input(node: fx.Node, source: Any, value_of: Callable[[private.Source], Any]) -> Input:
    of = (value_of(source.base), _property(source), source.idx) if _property(source) else None
    chain = [source]
    while isinstance(chain[-1], private.ChainedSource):
        chain.append(chain[-1].base)
    start = chain[-1]
    argument = isinstance(start, private.LocalSource) and start.local_name in ("args", "kwargs")
    return Input(node, getattr(source, "name", node.name), argument, "Random" in type(start).__name__, of)


def _modes(guards: Any, places: TreePlaces, value_of: Callable[[private.Source], Any]) -> dict[str, bool]:
    """Return the modules whose `training` the code read, with its value, for which the graph holds."""
    sources = (guard.originating_source for guard in guards)
    read = [value_of(one.base) for one in sources if isinstance(one, private.AttrSource) and one.member == "training"]
    modules = [one for one in read if isinstance(one, nn.Module) and id(one) in places.modules]
    return dict(sorted((places.modules[id(module)], module.training) for module in modules))


def _refuse_effects(effects: private.SideEffects) -> None:
    """Refuse code with side effects on Python objects: Dynamo applies them outside of the graph."""
    if effects.tensor_hooks:
        raise CaptureError("forward registers a hook on a tensor, which is no part of a graph")
    for variable in effects.id_to_variable.values():
        if not effects.is_modified(variable) or isinstance(
            variable.mutation_type, (private.AttributeMutationNew, private.ValueMutationNew)
        ):
            continue
        stored = effects.store_attr_mutations.get(variable, {})
        owner = variable.value if stored and hasattr(variable, "value") else None
        names = [name for name, value in stored.items() if not _unchanged(owner, name, value)]
        if names:
            what = f"the forward of {type(owner).__name__} stores something in {', '.join(f'self.{n}' for n in names)}"
        elif stored:
            continue
        else:
            what = f"forward changes {_changed(variable)}"
        raise CaptureError(
            f"{what}, which one graph would not do on every call. Return it, or keep it in a buffer that is updated "
            "in place"
        )


def _unchanged(owner: Any, name: str, value: Any) -> bool:
    """Return whether a stored value equals the previous one."""
    try:
        new, old = value.as_python_constant(), getattr(owner, name)
    except Exception:  # not a constant, or nothing there
        return False
    return type(new) is type(old) and bool(new == old)


def _changed(variable: Any) -> str:
    source = getattr(variable, "source", None)
    text = getattr(source, "name", "") or "of its own"
    for ours, theirs in (("L['forward'].__self__", "self"), ("._modules['", "."), ("L['kwargs']", "kwargs"),
                         ("L['args']", "args")):  # fmt: skip
        text = text.replace(ours, theirs)
    return text.replace("']", "")
