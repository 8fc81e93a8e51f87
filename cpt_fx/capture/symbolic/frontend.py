"""The torch.fx frontend: fast, needs no example inputs, and refuses code that it would silently get wrong."""

from __future__ import annotations

import inspect
import operator
import pickle
import random
import threading
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from torch import fx, nn

from cpt_fx.capture.base import CaptureError, drop_unread
from cpt_fx.capture.captured import Entry
from cpt_fx.capture.symbolic.guards import PLAIN, DynamoNeededError, guarding
from cpt_fx.capture.symbolic.questions import refusing_questions
from cpt_fx.capture.symbolic.refusals import noting, place_of_error, place_of_forward
from cpt_fx.capture.symbolic.tracer import Tracer, expect, expect_given
from cpt_fx.capture.torch_private import import_dynamo
from cpt_fx.capture.tree import own_tree
from cpt_fx.ir.aliasing import overwritten
from cpt_fx.ir.meta import get_attribute, module_path, module_stack, read_before
from cpt_fx.ir.result import PART, part_of
from cpt_fx.pipeline import no_collection

if TYPE_CHECKING:
    from cpt_fx.capture.session import Session

_TRACING = threading.RLock()
"""One trace at a time: tracing replaces functions of torch for its thread."""


class Examples(NamedTuple):
    """Example arguments of a model; plain values among them may become constants of the graph."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class TraceResult(NamedTuple):
    """A trace: the copied module that was traced, the graph, and what to tell the user."""

    root: nn.Module
    graph: fx.Graph
    dropped_checkpoints: bool = False
    notes: tuple[str, ...] = ()
    loses: str = ""
    """What the graph drops or refuses at run time although another frontend may keep it; empty if nothing."""
    asked: Mapping[str, str] = {}
    """Arguments that the code compares with None, with the place in the code."""
    names: frozenset[str] | None = None
    """Names in the code that ran that may be attributes; None if it may have read any attribute."""


def trace_symbolic(session: Session, entry: Entry, examples: Examples | None = None) -> TraceResult:
    """Trace with torch.fx; raise `CaptureError` if the graph would behave differently from the code."""
    module = session.root.get_submodule(entry.path)
    if PART in module.__dict__ and part_of(module).forward is not None:
        raise CaptureError(
            f"this {type(module).__name__} was given a forward of its own, and torch.fx traces that of the class: set "
            "it after the transform, or write it into the class"
        )
    optional = _optional_arguments(module)
    if examples is not None:
        session.fixed = _constants_of(module, examples)
    fixed = optional if entry.path or session.fixed is None else session.fixed
    # Code may branch on a plain argument. If a trace with it as a placeholder gives the same graph, it stays one;
    # otherwise the graph is specialized to its value, and raises when it is given another.
    traced = _both_modes(session, entry, fixed)
    for name, value in list(fixed.items()):
        without = {key: other for key, other in fixed.items() if key != name}
        try:
            without_it = _both_modes(session, entry, without)
        except CaptureError:
            continue
        if name not in without_it.asked and _same_but_for(without_it.graph, traced.graph, name, value):
            fixed, traced = without, without_it
    drop_unread(traced.graph)
    notes = [f"captured for {name}={value!r}: the code branches on it" for name, value in fixed.items()]
    loses = f"the code branches on {', '.join(fixed)}{place_of_forward(module)}" if fixed else ""
    for name, place in traced.asked.items():
        _check_given(traced.graph, name)
        notes.append(f"captured with {name} given: the code asks whether it is None")
        if name in optional:
            loses = f"the code asks whether {name} is None{place}"
    if traced.dropped_checkpoints:
        loses = "forward uses torch.utils.checkpoint"
        notes.append("torch.utils.checkpoint inside forward is not kept: activations stay in memory for backward")
    return traced._replace(notes=tuple(notes), loses=loses)


def _check_given(graph: fx.Graph, name: str) -> None:
    """Add a check that raises at run time if an argument that the trace took for a tensor is None."""
    for node in graph.find_nodes(op="placeholder", target=name):
        with graph.inserting_after(node):
            graph.call_function(expect_given, (node, name))


def _both_modes(session: Session, entry: Entry, fixed: Mapping[str, object]) -> TraceResult:
    """Trace in training and in evaluation mode and merge: flags that the code passes on become run-time values."""
    before = _other_random_numbers()
    training = _trace(session, entry, fixed, mode=True)
    evaluation = _trace(session, entry, fixed, mode=False)
    if _other_random_numbers() != before:
        raise CaptureError("forward draws random numbers of Python or numpy: a graph would hold what one trace drew")
    _merge_modes(training.graph, evaluation.graph)
    if training.names is not None and evaluation.names is not None:
        training = training._replace(names=training.names | evaluation.names)
    for node in filter(is_constant, training.graph.nodes):
        first, second = (get_attribute(trace.root, str(node.target)) for trace in (training, evaluation))
        if not torch.equal(first, second):
            raise CaptureError(f"{node.name} differs from trace to trace: it is random or depends on outer state")
    return training


def is_constant(node: fx.Node) -> bool:
    """Return whether a node reads a tensor that was created during the trace."""
    return node.op == "get_attr" and "_tensor_constant" in str(node.target)


def _other_random_numbers() -> bytes:
    return pickle.dumps((random.getstate(), numpy.random.get_state()))


def _trace(session: Session, entry: Entry, fixed: Mapping[str, object], *, mode: bool) -> TraceResult:
    root = own_tree(session.root, session)
    _set_mode(root, mode)
    names = {id(module): name for tree in (session.root, root) for name, module in tree.named_modules()}
    tracer = Tracer(fixed, names, every_module=entry.every_module)
    module = root.get_submodule(entry.path)
    graph: fx.Graph | None = None
    failed: Exception | None = None
    with _TRACING, noting() as noted:
        try:
            with (
                guarding(root, tracer.replacements()) as kept,
                warnings.catch_warnings(),
                no_collection(),  # callbacks of the collector would be taken for the model's code
                refusing_questions(kept) as tracer.look,
            ):
                warnings.simplefilter("ignore")
                graph = _trace_with_guards(tracer, root, module)
            tracer.refuse_survivors()
        except Exception as error:  # whatever the model's code raises
            failed = error
    # An error that the model's code caught comes first: what it did afterwards may follow from it.
    first = noted[0] if noted else failed
    if isinstance(first, DynamoNeededError):
        import_dynamo()
        return _trace(session, entry, fixed, mode=mode)
    if isinstance(first, CaptureError):
        raise first
    if first is not None:
        raise _untraceable(first, module) from first
    assert graph is not None
    _check_constants(graph, module)
    return TraceResult(module, graph, tracer.dropped_checkpoints, asked=tracer.asked, names=kept.names_read())


def _untraceable(error: Exception, entry: nn.Module) -> CaptureError:
    """Return the error to raise where torch.fx itself failed."""
    control_flow = isinstance(error, fx.proxy.TraceError) or "Proxy" in str(error) or "Traced" in str(error)
    advice = (
        ". Code that depends on a tensor's values or size cannot be one graph: compute both sides and choose with "
        "torch.where, or keep the function as one call with torch.fx.wrap"
    )
    return CaptureError(
        f"torch.fx cannot trace {type(entry).__name__}{place_of_error(error)}: {type(error).__name__}: "
        f"{str(error).rstrip('.')}{advice if control_flow else ''}"
    )


def _set_mode(module: nn.Module, mode: bool) -> None:
    """Set `training` directly, since `train()` may be overridden; skip modules of other sessions, which are shared."""
    if PART in module.__dict__:
        return
    module.training = mode
    for child in module._modules.values():
        if child is not None:
            _set_mode(child, mode)


def _trace_with_guards(tracer: Tracer, root: nn.Module, entry: nn.Module) -> fx.Graph:
    # Guards walk up the stack to this function, which they recognize by its name (refusals.TRACE).
    tracer.remember(root)
    return tracer.trace(entry)


def _check_constants(graph: fx.Graph, root: nn.Module) -> None:
    """Refuse constants made from parameters, and in-place updates of constants, which would add up over calls."""
    for node in graph.nodes:
        if is_constant(node) and get_attribute(root, str(node.target)).requires_grad:
            raise CaptureError(
                "forward computes with parameters that it did not take from an attribute of their module: torch.fx "
                "would hold the result as a constant"
            )
        for value in overwritten(node, {}):
            if is_constant(value):
                raise CaptureError(
                    f"{node.format_node()} updates a tensor that the code makes on every call, but that the trace "
                    "holds as a constant. Make it with torch.zeros / x.new_zeros inside forward"
                )


def _optional_arguments(model: nn.Module) -> dict[str, object]:
    """Return the optional arguments of forward that code may branch on, with their defaults."""
    arguments = inspect.signature(model.forward).parameters.values()
    return {each.name: each.default for each in arguments if isinstance(each.default, PLAIN)}


def _constants_of(model: nn.Module, examples: Examples) -> dict[str, object]:
    """Return the arguments that the examples fix: plain values given, and plain defaults of those left out."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*examples.args, **examples.kwargs)
    except TypeError as error:
        raise TypeError(f"the example inputs do not fit {type(model).__name__}.forward{signature}: {error}") from None
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if isinstance(value, PLAIN)}


def _same_but_for(without_it: fx.Graph, fixed: fx.Graph, name: str, value: object) -> bool:
    """Return whether a graph with an argument as a placeholder equals the specialized one, after constant folding."""
    right = iter([node for node in fixed.nodes if node.target is not expect])
    matching: dict[fx.Node, object] = {}

    def translate(node: fx.Node) -> Any:
        return matching[node]

    for ours in without_it.nodes:
        if ours.target is expect:
            continue
        args, kwargs = fx.map_arg((ours.args, ours.kwargs), translate)
        inputs = [matching[node] for node in ours.all_input_nodes]
        if inputs and ours.op != "output" and not any(isinstance(value, fx.Node) for value in inputs):
            try:
                matching[ours] = _computed(ours, args, kwargs)
            except Exception:  # the value does not support what the code does with it
                return False
            continue
        theirs = next(right, None)
        if theirs is None or (ours.op, ours.target) != (theirs.op, theirs.target):
            return False
        matching[ours] = value if ours.op == "placeholder" and ours.target == name else theirs
        if ours.op != "placeholder" and (args, kwargs) != (theirs.args, theirs.kwargs):
            return False
    return next(right, None) is None


def _computed(node: fx.Node, args: Any, kwargs: Any) -> object:
    """Evaluate a node on plain values, as Python would."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op != "call_function" or getattr(node.target, "__module__", None) not in ("_operator", "math", "builtins"):
        raise ValueError(f"{node.target} is not a function of numbers")
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _merge_modes(training: fx.Graph, evaluation: fx.Graph) -> None:
    """Make the training trace follow the mode at run time; raise if the two traces differ by more than flags.

    `F.dropout(x, p, self.training)` leaves a True in one trace and a False in the other. Such a constant becomes
    `self.<module>.training`, read at run time. Any other difference means that the code took another path.
    """
    ours, theirs = list(training.nodes), list(evaluation.nodes)
    matching: dict[fx.Node, fx.Node] = {}
    for node, other in zip(ours, theirs, strict=False):
        if node.op != other.op or node.target != other.target or node.name != other.name:
            raise _differs(node, other)
        matching[other] = node
        if node.op != "placeholder":
            _merge_arguments(training, node, other, matching)
    if len(ours) != len(theirs):
        longer = max(ours, theirs, key=len)
        raise _differs(longer[min(len(ours), len(theirs))], None)


def _merge_arguments(graph: fx.Graph, node: fx.Node, other: fx.Node, matching: dict[fx.Node, fx.Node]) -> None:
    flags: dict[bool, fx.Node] = {}

    def flag(value: bool) -> fx.Node:
        if value not in flags:
            path, _ = module_path(node)
            mode = read_before(node, f"{path}.training" if path else "training")
            with graph.inserting_before(node):
                flags[value] = mode if value else graph.call_function(operator.not_, (mode,))
        return flags[value]

    def merge(mine: Any, its: Any) -> Any:
        if isinstance(mine, fx.Node) and isinstance(its, fx.Node):
            if matching.get(its) is mine:
                return mine
        elif isinstance(mine, bool) and isinstance(its, bool):
            return mine if mine is its else flag(mine)
        elif isinstance(mine, (tuple, list)) and type(mine) is type(its) and len(mine) == len(its):
            items = [merge(*pair) for pair in zip(mine, its, strict=True)]
            return type(mine)(*items) if hasattr(mine, "_fields") else type(mine)(items)
        elif isinstance(mine, dict) and isinstance(its, dict) and mine.keys() == its.keys():
            return {key: merge(mine[key], its[key]) for key in mine}
        elif isinstance(mine, slice) and isinstance(its, slice):
            return slice(merge(mine.start, its.start), merge(mine.stop, its.stop), merge(mine.step, its.step))
        elif type(mine) is type(its) and (mine is its or mine == its):
            return mine
        raise _differs(node, other)

    args, kwargs = merge(node.args, other.args), merge(node.kwargs, other.kwargs)
    if flags:
        node.args, node.kwargs = args, kwargs


def _differs(node: fx.Node, other: fx.Node | None) -> CaptureError:
    """Return the error for two traces that differ, naming the innermost module that both operators came from."""
    both = [one for one in (node, other) if one is not None and one.op != "output"]
    stacks = [[path for path, _ in module_stack(one)] for one in both]
    common = [path for path in stacks[0] if all(path in stack for stack in stacks)] if stacks else []
    place = f"module {common[-1]!r}" if common and common[-1] else "the model's forward"
    instead = _operator(node) if other is None else f"{_operator(node)} in training, {_operator(other)} in evaluation"
    return CaptureError(
        f"{place} does something else in training than in evaluation ({instead}): a graph traced once would be "
        "silently wrong in one of them"
    )


def _operator(node: fx.Node) -> str:
    """Return a call of an operator as readable text."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name}({', '.join(map(str, (*node.args, *node.kwargs.values())))})"
