"""The Dynamo backend: it rewrites each graph, and runs it eagerly or passes it on to another compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from traceback import FrameSummary
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from cpt_fx.capture.base import copy_graph, over, put_graph
from cpt_fx.capture.dynamo.callers import caller_of, lines_to_forward
from cpt_fx.capture.dynamo.checkpoint import checkpointed
from cpt_fx.capture.dynamo.control import RUN_AS, controls
from cpt_fx.capture.dynamo.torch_private import AttrSource, GuardBuilder, LocalSource, RestartAnalysis, Source
from cpt_fx.capture.tree import TreePlaces
from cpt_fx.common.torch_private import TracingContext, translator
from cpt_fx.ir.meta import STATE, WEIGHT, attribute_or_none, get_attribute, read_before
from cpt_fx.ir.module import ROOT, QuantizedGraphModule, blank
from cpt_fx.ir.result import plain_class
from cpt_fx.ir.subgraphs import OUTER, add_subgraph, free_name

if TYPE_CHECKING:
    from cpt_fx.capture.dynamo.engine import DynamoEngine

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
TAG_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


class Backend:
    """Rewrites the graphs of one model; `inner` compiles the result, None runs it eagerly."""

    def __init__(self, owner: DynamoEngine, inner: Compiler | None = None) -> None:
        self.owner = owner
        self.inner = inner

    def __call__(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Rewrite one graph."""
        try:
            return self._rewrite(graph_module, inputs)
        except RestartAnalysis:
            raise  # not a failure: Dynamo captures the code again with other inputs
        except Exception as error:
            # Dynamo wraps the error; the engine raises the original one.
            self.owner.failure = error
            raise

    def _rewrite(self, graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        frame = _frame(self.owner.root)
        view = view_of(graph_module, inputs, frame, self.owner)
        self.owner.rewrite(view, broken_by(graph_module))
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        expected = [(place, name) for place, value in enumerate(inputs) if (name := frame.places.tensor(value))]

        def run(*args: Any) -> Any:
            return view.forward(*args)  # looked up in each call: graphs may be edited

        if self.inner is not None and not controls(view):
            try:
                run = lifted(view, placeholders, inputs, self.inner)
            except RestartAnalysis:
                self.owner.forget_last()
                raise
        return self._guarded(run, expected, graph_module.forward)

    def _guarded(
        self, run: Callable[..., Any], expected: Sequence[tuple[int, str]], plain: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Wrap a graph to count its runs, and to check that inputs it reads by name are still the model's tensors.

        If they are not (a module was replaced, or no guard covers the path to the graph), the plain graph runs under
        the net, operator by operator, each with the quantizers of its actual tensors.
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
    """Return the `Frame` that Dynamo is capturing, and guard the graph on the identity of the modules in it.

    Dynamo shares a graph between modules of one class, but ranges belong to one module. Modules that are reached from
    one of the frame's own variables need no guard of their own: that variable has one.
    """
    places = TreePlaces(root)
    translator, scope = outermost_frame()
    owner, path = None, ""
    guards = TracingContext.get().guards_context.dynamo_guards
    own = []
    for name, value in translator.f_locals.items():
        source: Source = LocalSource(name)
        if isinstance(value, MethodType):  # a whole model is entered through its forward
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
    """Return Dynamo's translator of the function that it started with, and the scope to evaluate sources in."""
    outermost = translator()
    while outermost.parent is not None:
        outermost = outermost.parent
    return outermost, {"L": outermost.f_locals, "G": outermost.f_globals}


def _value_of(source: str, scope: dict[str, Any]) -> Any:
    """Return the value of a source; None if it is not a plain expression over the frame's variables."""
    try:
        return eval(source, {"__builtins__": {}}, scope)
    except Exception:  # it uses Dynamo's helpers (iterators, weak references) and is never a module
        return None


def broken_by(graph_module: fx.GraphModule) -> str:
    """Return the reason for a graph break, in one line; empty if there is none."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    return f"{_place(reason.user_stack[-1]) if reason.user_stack else 'an unknown place'}: {_in_short(reason.reason)}"


def why_broken(error: Exception) -> str:
    """Return why a model cannot be captured as one graph, with the line of its code."""
    frame = getattr(error, "innermost_user_frame_summary", None)
    return f"{_place(frame) if frame is not None else type(error).__name__}: {_in_short(error)}"


def _place(frame: FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}{f' ({frame.line})' if frame.line else ''}"


def _in_short(text: object) -> str:
    """Return the explanation in a Dynamo error message, or else its first line."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    explained = next((line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")), "")
    return explained or (lines[0] if lines else "no reason given")


# Run eagerly, Dynamo's operator for checkpoints would not restore the random state for the recomputation.
_RUN_AS: dict[Any, Callable[..., Any]] = {**RUN_AS, TAG_CHECKPOINT: checkpointed}


class Frame:
    """Where the code of a graph comes from: a module's path, and the stack lines from its forward to the code."""

    def __init__(self, places: TreePlaces, path: str, lines: str) -> None:
        self.places = places
        self.path = path
        self.lines = lines
        self._stacks: dict[tuple[Any, ...], dict[str, tuple[str, Any]]] = {}

    def convert(self, node: fx.Node) -> None:
        """Convert a node's module stack to our form: `{call: (path, class)}`, outermost first, without the root."""
        theirs: dict[Any, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
        calls = tuple(theirs)
        if calls not in self._stacks:
            self._stacks[calls] = self._converted(theirs)
        node.meta["nn_module_stack"] = dict(self._stacks[calls])
        if self.lines and "stack_trace" in node.meta:
            node.meta["stack_trace"] = self.lines + node.meta["stack_trace"]

    def _converted(self, theirs: dict[Any, tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
        stack: dict[str, tuple[str, Any]] = {**self.places.stack(self.path)}
        for key, (_, kind) in theirs.items():
            identity, _, call = str(key).partition("@")
            path = self.places.modules.get(int(identity), "") if identity.isdigit() else ""
            if not path:
                continue
            for above, place in self.places.stack(path.rpartition(".")[0]).items():
                stack.setdefault(above, place)
            name = f"{path}@{call}" if call else path
            # Innermost last, even if the path is in the stack already.
            stack.pop(name, None)
            stack[name] = (path, plain_class(kind) if isinstance(kind, type) else kind)
        return stack


def view_of(
    graph_module: fx.GraphModule, inputs: Sequence[Any], frame: Frame, owner: DynamoEngine
) -> QuantizedGraphModule:
    """Return the graph as a module whose parameters and buffers are read from the model by name."""
    view = over(owner.root, owner.state, owner.names, copy_graph(graph_module.graph))
    first = next(node for node in view.graph.nodes if node.op != "placeholder")
    for node, value in zip(view.graph.find_nodes(op="placeholder"), inputs, strict=True):
        frame.convert(node)
        _name_tensor(node, value, first, frame)
    _adopt(view, graph_module, frame)
    return view


def _adopt(view: QuantizedGraphModule, source: fx.GraphModule, frame: Frame) -> None:
    """Take over the constants and subgraphs of a graph; convert its module stacks, replace its control flow."""
    for node in list(view.graph.nodes):
        frame.convert(node)
        if node.op == "call_function" and node.target in _RUN_AS:
            node.target = _RUN_AS[node.target]
        if node.op != "get_attr":
            continue
        value = getattr(source, str(node.target), None)
        if isinstance(value, fx.GraphModule):
            subgraph = blank()
            subgraph.__dict__[ROOT], subgraph.meta = view.__dict__[ROOT], dict(view.meta)
            put_graph(subgraph, copy_graph(value.graph))
            _adopt(subgraph, value, frame)
            node.target = add_subgraph(view, str(node.target), subgraph)
        elif value is not None:
            # A constant: in no state_dict, and not in the containers that are shared with the model.
            node.target = free_name(str(node.target), view)
            object.__setattr__(view, node.target, value)
    for node in view.graph.find_nodes(op="call_function", target=checkpointed):
        _read_inside(node, get_attribute(view, str(node.args[0].target)))


def _read_inside(node: fx.Node, subgraph: fx.GraphModule) -> None:
    """Move reads of attributes of a checkpoint's arguments, such as `x.mT`, into its body.

    Dynamo reads them in front of the checkpoint, where gradients would be summed in another order.
    """
    read_from, *given = node.args
    places = list(zip(given, subgraph.graph.find_nodes(op="placeholder"), strict=True))
    for place in tuple(places):
        read, inside = place
        if not isinstance(read, fx.Node) or read.target is not getattr or len(read.users) > 1 or not inside.users:
            continue
        source, name = read.args
        known = next((input for value, input in places if value is source), None)
        with subgraph.graph.inserting_before(next(user for user in subgraph.graph.nodes if user in inside.users)):
            made = subgraph.graph.call_function(getattr, (known or inside, name))
        made.meta = {**read.meta}
        inside.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
        if known is None:
            places[places.index(place)] = (source, inside)
        else:
            places.remove(place)
            subgraph.graph.erase_node(inside)
        node.args = (read_from, *(value for value, _ in places))
        node.graph.erase_node(read)


def _name_tensor(node: fx.Node, value: Any, first: fx.Node, frame: Frame) -> None:
    """Make the graph read a parameter or buffer by its name, instead of taking it as an input."""
    name = frame.places.tensor(value)
    if name is None:
        if isinstance(value, nn.Parameter):
            node.meta[WEIGHT] = True
        return
    read = read_before(first, name)
    read.meta = {**node.meta}
    node.replace_all_uses_with(read)


def lifted(
    view: QuantizedGraphModule, placeholders: Sequence[fx.Node], inputs: Sequence[Any], compiler: Compiler
) -> Callable[..., Any]:
    """Compile a view with its state as inputs, so that a cast, a checkpoint or another mode needs no recompilation.

    `placeholders` are Dynamo's own, which hold the source of each input, and `inputs` their example values.
    """
    given = {id(value): node.name for node, value in zip(placeholders, inputs, strict=True)}
    lift = _Lift(view, given)
    for node, original in zip(lift.graph.find_nodes(op="placeholder"), placeholders, strict=False):
        node._dynamo_source = original._dynamo_source  # type: ignore[attr-defined]
    values = [_read(view, path) for path in lift.reads]
    module = fx.GraphModule(lift.root, lift.graph)
    compiled = compiler(module, [*inputs, *values])

    def run(*args: Any) -> Any:
        return compiled(*args, *(_read(view, path) for path in lift.reads))

    return run


_COUNTERS = f".{STATE}.counters."
_MODES = (torch.tensor(False), torch.tensor(True))


def _read(view: nn.Module, path: str) -> Tensor:
    value = get_attribute(view, path)
    if isinstance(value, bool):
        return _MODES[value]
    assert isinstance(value, Tensor)
    # Counters are written by the backward pass of one call and by the next forward pass: each call has its own alias.
    return value.data if _COUNTERS in f".{path}" else value


class _Lift:
    """A copy of a graph in which every tensor that it or a subgraph reads becomes a placeholder."""

    def __init__(self, view: QuantizedGraphModule, given: dict[int, str]) -> None:
        self.view = view
        self.root = nn.Module()
        self.graph = copy_graph(view.graph)
        self.reads: list[str] = []
        self._inputs: dict[str, fx.Node] = {node.name: node for node in self.graph.find_nodes(op="placeholder")}
        self._given = given
        self._made: dict[str, fx.Node] = {}
        subgraphs: dict[fx.Node, list[str]] = {}
        for node in list(self.graph.nodes):
            if node.op == "get_attr":
                value = get_attribute(view, str(node.target))
                if isinstance(value, QuantizedGraphModule):
                    subgraphs[node] = self._body(node, value)
                elif isinstance(value, bool):
                    self._read_mode(node)
                elif isinstance(value, Tensor):
                    node.replace_all_uses_with(self.input_for(str(node.target), value))
                    self.graph.erase_node(node)
            elif any(used in subgraphs for used in node.all_input_nodes):
                self._pass_on(node, subgraphs)

    def input_for(self, path: str, value: object) -> fx.Node:
        """Return the placeholder for a value: Dynamo's own, else a new one."""
        name = self._given.get(id(value), "")
        if name in self._inputs:
            return self._inputs[name]
        if path not in self._made:
            first: fx.Node = next(node for node in self.graph.nodes if node.op != "placeholder")
            with self.graph.inserting_before(first):
                made = self.graph.placeholder(f"read_{path}".replace(".", "_"))
            made._dynamo_source = None
            self._made[path] = made
            self.reads.append(path)
        return self._made[path]

    def _read_mode(self, node: fx.Node) -> None:
        """Pass observers their mode as a tensor: a Python bool would be a constant of the compiled code."""
        mode = self.input_for(str(node.target), None)
        for user in list(node.users):
            user.args = tuple(True if arg is node else arg for arg in user.args)
            user.kwargs = {**user.kwargs, "trains": mode}
        self.graph.erase_node(node)

    def _body(self, node: fx.Node, subgraph: QuantizedGraphModule) -> list[str]:
        inner = _Lift(subgraph, {})
        name = str(node.target).replace(".", "_")
        self.root.add_module(name, fx.GraphModule(inner.root, inner.graph))
        node.target = name
        # What a subgraph reads through the outer graph, the outer graph reads itself.
        return [path.removeprefix(f"{OUTER}.") for path in inner.reads]

    def _pass_on(self, node: fx.Node, subgraphs: dict[fx.Node, list[str]]) -> None:
        """Pass the state that a subgraph reads to the operator that runs it."""
        for used in [used for used in node.all_input_nodes if used in subgraphs]:
            state = tuple(self.input_for(path, attribute_or_none(self.view, path)) for path in subgraphs[used])
            if node.target is checkpointed:
                node.target = TAG_CHECKPOINT
                node.args = (*node.args, *state)
            elif state:
                with self.graph.inserting_before(node):
                    bound = self.graph.call_function(with_state, (used, state))
                node.replace_input_with(used, bound)


def with_state(subgraph: Callable[..., Any], state: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a subgraph with its state bound, which takes only its own arguments."""
    return partial(_called_with, subgraph, state)


def _called_with(subgraph: Callable[..., Any], state: tuple[Any, ...], *args: Any) -> Any:
    return subgraph(*args, *state)
