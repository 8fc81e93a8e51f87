"""The compiler that Dynamo is given: it rewrites each graph, and runs it as it is or hands it on to another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from traceback import FrameSummary
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Source, TracingContext

from cpt_fx.bodies import add_body, free_name
from cpt_fx.capture.base import copy_graph, over
from cpt_fx.capture.tree import Places
from cpt_fx.dynamo.callers import caller_of, lines_to_forward
from cpt_fx.dynamo.checkpoint import checkpointed
from cpt_fx.dynamo.control import RUN_AS, controls
from cpt_fx.dynamo.lift import Compiler, lifted
from cpt_fx.graph_module import ROOT, QuantizedGraphModule, blank
from cpt_fx.meta import WEIGHT, read_before
from cpt_fx.names import Names
from cpt_fx.result import plain_class
from cpt_fx.runtime import Precision

if TYPE_CHECKING:
    from cpt_fx.dynamo.engine import Engine


class Backend:
    """Rewrites the graphs of one model. `inner` compiles the result; None runs it eagerly."""

    def __init__(self, owner: Engine, inner: Compiler | None = None) -> None:
        self.owner = owner
        self.inner = inner

    def __call__(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Rewrite one graph."""
        try:
            return self._rewrite(graph_module, inputs)
        except Exception as error:
            # Dynamo would wrap it: the user gets what was raised.
            self.owner.failure = error
            raise

    def _rewrite(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        frame = _frame(self.owner.root)
        view = view_of(graph_module, inputs, frame, self.owner.root, self.owner.state, self.owner.names)
        self.owner.rewrite(view, broken_by(graph_module))
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        expected = [(place, name) for place, value in enumerate(inputs) if (name := frame.places.tensor(value))]

        def run(*args: Any) -> Any:
            return view.forward(*args)  # as it is by then: graphs may be edited

        if self.inner is not None and not controls(view):
            run = lifted(view, placeholders, inputs, self.inner)
        return self._guarded(run, expected, graph_module.forward)

    def _guarded(
        self, run: Callable[..., Any], expected: Sequence[tuple[int, str]], plain: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Note that a graph runs, and make sure that it runs on the tensors whose names it holds.

        Where a module was replaced, or a graph reached in a way that no guard knows, the plain graph runs in the net:
        operator by operator, each with the quantizers of the tensors that are there.
        """
        owner = self.owner
        readers = [(place, *_reader(owner.root, name)) for place, name in expected]

        def guarded(*args: Any) -> Any:
            for place, holder, key in readers:
                if args[place] is not holder.get(key):
                    owner.renew()
                    with owner.net:
                        return plain(*args)
            owner.runs += 1
            with owner.net.asleep():
                return run(*args)

        return guarded


def _reader(root: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    """Return the container that holds a tensor, and its key there."""
    path, _, key = name.rpartition(".")
    module = root.get_submodule(path)
    return (module._parameters if key in module._parameters else module._buffers), key  # type: ignore[return-value]


def _frame(root: nn.Module) -> Frame:
    """Return whose code Dynamo is looking at, and let the graph serve the modules that it met there alone.

    Dynamo shares a graph between modules of one class. Ranges belong to one module: a guard on identity keeps the
    others out. Modules that are reached from one of the frame's own variables are the same if that one is.
    """
    places = Places(root)
    translator, scope = outermost_frame()
    owner, path = None, ""
    guards = TracingContext.get().guards_context.dynamo_guards
    own = []
    for name, value in translator.f_locals.items():
        source: Source = LocalSource(name)
        if isinstance(value, MethodType):  # the way into a whole model is its forward
            source, value = AttrSource(source, "__self__"), value.__self__
        elif isinstance(value, nn.Module) and id(value) in places.modules and (owner is None or name == "self"):
            owner, path = value, places.modules[id(value)]
        if isinstance(value, nn.Module) and id(value) in places.modules:
            guards.add(source.make_guard(GuardBuilder.ID_MATCH))
            own.append(source.name)
    for source in {guard.originating_source for guard in guards}:
        if not source.name.startswith(tuple(own)) and id(_value_of(source.name, scope)) in places.modules:
            guards.add(source.make_guard(GuardBuilder.ID_MATCH))
    caller = caller_of(places)
    return Frame(places, path if owner is not None else caller.path, lines_to_forward(translator.f_code.co_name))


def outermost_frame() -> tuple[Any, dict[str, Any]]:
    """Return what Dynamo knows of the function that it started with, and the variables that sources there refer to."""
    translator: Any = InstructionTranslator.current_tx()
    while translator.parent is not None:
        translator = translator.parent
    return translator, {"L": translator.f_locals, "G": translator.f_globals}


def _value_of(source: str, scope: dict[str, Any]) -> Any:
    """Return what a source names, where it is a plain expression over the frame's variables."""
    try:
        return eval(source, {"__builtins__": {}}, scope)
    except Exception:  # an expression in helpers of Dynamo's: iterators, weak references, never a module of its own
        return None


def broken_by(graph_module: fx.GraphModule) -> str:
    """Return why a graph ends before the code does, in one line."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    return f"{_place(reason.user_stack[-1]) if reason.user_stack else 'an unknown place'}: {_in_short(reason.reason)}"


def why_broken(error: Exception) -> str:
    """Say why a model cannot be one graph: the reason, and the line of the model's code."""
    frame = getattr(error, "innermost_user_frame_summary", None)
    return f"{_place(frame) if frame is not None else type(error).__name__}: {_in_short(error)}"


def _place(frame: FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}{f' ({frame.line})' if frame.line else ''}"


def _in_short(text: object) -> str:
    """Return the first sentence of Dynamo's explanation."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    explained = next((line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")), "")
    return explained or (lines[0] if lines else "no reason given")


# Run as it is, the mark of a checkpoint would not restore the random state for the second forward pass.
_RUN_AS: dict[Any, Callable[..., Any]] = {**RUN_AS, torch.ops.higher_order.tag_activation_checkpoint: checkpointed}


class Frame:
    """Whose code a graph comes from: a module's path, and the lines that lead from its forward to the code."""

    def __init__(self, places: Places, path: str, lines: str) -> None:
        self.places = places
        self.path = path
        self.lines = lines
        self._stacks: dict[tuple[Any, ...], dict[str, tuple[str, Any]]] = {}

    def stack(self, node: fx.Node) -> dict[str, tuple[str, Any]]:
        """Turn Dynamo's module stack into ours: `{call: (path, class)}`, outermost first, without the root."""
        theirs: dict[Any, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        calls = tuple(theirs)
        if calls not in self._stacks:
            self._stacks[calls] = self._converted(theirs)
        return dict(self._stacks[calls])

    def convert(self, node: fx.Node) -> None:
        """Say of a node where it comes from in our terms."""
        node.meta["nn_module_stack"] = self.stack(node)
        if self.lines and "stack_trace" in node.meta:
            node.meta["stack_trace"] = self.lines + node.meta["stack_trace"]

    def _converted(self, theirs: dict[Any, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        stack: dict[str, tuple[str, Any]] = {path: (path, kind) for path, kind in self.places.ancestors(self.path)}
        for key, (_, kind) in theirs.items():
            identity, _, call = str(key).partition("@")
            path = self.places.modules.get(int(identity), "") if identity.isdigit() else ""
            if not path:
                continue
            for above, its_kind in self.places.ancestors(path)[:-1]:
                stack.setdefault(above, (above, its_kind))
            name = f"{path}@{call}" if call else path
            # Innermost last, also where the path stands in the stack already.
            stack.pop(name, None)
            stack[name] = (path, plain_class(kind) if isinstance(kind, type) else kind)
        return stack


def view_of(
    graph_module: fx.GraphModule, inputs: Sequence[Any], frame: Frame, root: nn.Module, state: Precision, names: Names
) -> QuantizedGraphModule:
    """Return the graph as a module whose parameters and buffers are read from the model by name.

    It has the model's own containers of tensors, so that whatever is put in there (a cast, a checkpoint) is seen.
    """
    view = over(root, state, names)
    graph = copy_graph(graph_module.graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node, value in zip(placeholders, inputs, strict=True):
        frame.convert(node)
        _name_tensor(node, value, first, frame)
    _adopt(view, graph, graph_module, frame)
    return view


def _adopt(view: QuantizedGraphModule, graph: fx.Graph, source: fx.GraphModule, frame: Frame) -> None:
    """Put a graph into a module: module stacks by path, constants and graphs inside the graph taken along."""
    for node in list(graph.nodes):
        frame.convert(node)
        if node.op == "call_function" and node.target in _RUN_AS:
            node.target = _RUN_AS[node.target]
        if node.op != "get_attr":
            continue
        value = getattr(source, str(node.target), None)
        if isinstance(value, fx.GraphModule):
            body = blank()
            body.__dict__[ROOT], body.meta = view.__dict__[ROOT], dict(view.meta)
            _adopt(body, copy_graph(value.graph), value, frame)
            node.target = add_body(view, str(node.target), body)
        elif value is not None:
            # A constant: in nobody's state_dict, and not in the model's own containers.
            node.target = free_name(str(node.target), view)
            object.__setattr__(view, node.target, value)
    # Not by its setter, which compiles: the passes change the graph first.
    view._graph = graph
    graph.owning_module = view


def _name_tensor(node: fx.Node, value: Any, first: fx.Node, frame: Frame) -> None:
    """Read a parameter or buffer by its name, instead of taking it as an input."""
    name = frame.places.tensor(value)
    if name is None:
        if isinstance(value, nn.Parameter):
            node.meta[WEIGHT] = True
        return
    read = read_before(first, name)
    read.meta = {**node.meta}
    node.replace_all_uses_with(read)
