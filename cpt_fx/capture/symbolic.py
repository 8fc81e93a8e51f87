"""The torch.fx frontend: fast, needs no example inputs, and refuses what it would get silently wrong."""

from __future__ import annotations

import inspect
import random
import threading
import traceback
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import fx, nn

from cpt_fx.aliasing import writes_in_place
from cpt_fx.capture.base import Captured, CaptureError, assemble, clone_tree
from cpt_fx.capture.containers import unchanged_containers
from cpt_fx.capture.guards import (
    PLAIN,
    RefusingWrites,
    refuse_modes_of_their_own,
    refusing_what_is_lost,
    watching_attributes,
)
from cpt_fx.capture.in_place import recording_updates
from cpt_fx.capture.modes import merge_modes
from cpt_fx.capture.tracer import Tracer, expect
from cpt_fx.meta import get_attribute

_TRACING = threading.RLock()
"""One trace at a time: tracing replaces functions of torch for its thread."""


def capture_symbolic(
    model: nn.Module, example_inputs: tuple[Any, ...] | None = None, example_kwargs: dict[str, Any] | None = None
) -> Captured:
    """Capture with torch.fx, or raise `CaptureError` where the graph would not do what the model does."""
    refuse_modes_of_their_own(model)
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
    loses = f"the code branches on {', '.join(fixed)}" if fixed else ""
    if traced.dropped_checkpoints:
        loses = "forward uses torch.utils.checkpoint"
        notes.append("torch.utils.checkpoint inside forward is not kept: activations stay in memory for backward")
    return Captured(assemble(traced.root, traced.graph), "symbolic", tuple(notes), loses)


class Traced(NamedTuple):
    """A trace: the copy of the model it was made on, the graph, and whether checkpoints inside it were lost."""

    root: nn.Module
    graph: fx.Graph
    dropped_checkpoints: bool


def _both_modes(model: nn.Module, fixed: Mapping[str, object]) -> Traced:
    """Trace in training and in evaluation mode and merge: flags that code passes on become run-time values."""
    state, others = torch.random.get_rng_state(), (random.getstate(), numpy.random.get_state())
    try:
        training = _trace(model, fixed, mode=True)
        evaluation = _trace(model, fixed, mode=False)
        drawn = random.getstate() != others[0] or _differ(numpy.random.get_state(), others[1])
    finally:
        torch.random.set_rng_state(state)
        random.setstate(others[0])
        numpy.random.set_state(others[1])
    if drawn:
        raise CaptureError("forward draws random numbers of Python or numpy: a graph would hold what one trace drew")
    merge_modes(training.graph, evaluation.graph)
    for node in training.graph.nodes:
        if node.op == "get_attr" and "_tensor_constant" in str(node.target):
            first, second = (get_attribute(trace.root, str(node.target)) for trace in (training, evaluation))
            if not torch.equal(first, second):
                raise CaptureError(f"{node.name} differs from trace to trace: it is random or depends on outer state")
    return training


def _differ(state: Any, other: Any) -> bool:
    """Compare two states of numpy's generator."""
    return any(not numpy.array_equal(one, two) for one, two in zip(state, other, strict=True))


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
        with _TRACING, unchanged_containers(model), RefusingWrites(model), ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            for context in (tracer.recording_factories, tracer.recording_output_sizes, recording_updates,
                            refusing_what_is_lost, watching_attributes):  # fmt: skip
                stack.enter_context(context())
            warnings.simplefilter("ignore")
            graph = _trace_with_guards(tracer, root)
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
    _check_constants(graph, root)
    return Traced(root, graph, tracer.dropped_checkpoints)


def _trace_with_guards(tracer: Tracer, root: nn.Module) -> fx.Graph:
    # By name the end of the stack that guards look at (guards.TRACE).
    tracer.remember(root)
    return tracer.trace(root)


def _line_of(error: Exception) -> str:
    """Say which line of the model's own code raised: the innermost one outside of torch and this library."""
    inner = (Path(__file__).parents[1], Path(torch.__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in inner)
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def _check_constants(graph: fx.Graph, root: nn.Module) -> None:
    """Refuse in-place updates of a tensor that exists only in the trace: they would add up from call to call."""
    for node in graph.nodes:
        constant = node.op == "get_attr" and "_tensor_constant" in str(node.target)
        if constant and get_attribute(root, str(node.target)).requires_grad:
            raise CaptureError(
                "forward computes with parameters that it did not take from an attribute of their module: torch.fx "
                "would hold the result as a constant"
            )
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
