"""The compiler that Dynamo is given: it rewrites each graph, and runs it as it is or hands it on to another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Source, TracingContext

from cpt_fx.capture.tree import Places
from cpt_fx.dynamo.callers import caller_of, lines_to_forward
from cpt_fx.dynamo.control import controls
from cpt_fx.dynamo.lift import Compiler, lifted
from cpt_fx.dynamo.views import Frame, view_of

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
    translator: Any = InstructionTranslator.current_tx()
    while translator.parent is not None:
        translator = translator.parent
    owner, path = None, ""
    scope = {"L": translator.f_locals, "G": translator.f_globals}
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
    where = reason.user_stack[-1] if reason.user_stack else None
    place = f"{where.filename}:{where.lineno}" if where else "an unknown place"
    code = f" ({where.line})" if where and where.line else ""
    return f"{place}{code}: {_in_short(str(reason.reason))}"


def _in_short(text: str) -> str:
    """Return the first sentence of Dynamo's explanation."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    explained = next((line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")), "")
    return explained or (lines[0] if lines else "no reason given")


def why_broken(error: Exception) -> str:
    """Say why a model cannot be one graph: the reason, and the line of the model's code."""
    lines = str(error).splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    code = ""
    if places:
        after = next(place for place, line in enumerate(lines) if line.strip() == places[-1])
        code = f" ({lines[after + 1].strip()})" if after + 1 < len(lines) else ""
        parts = places[-1].split('"')
        number = parts[2].replace(", line ", "").partition(",")[0]
        return f"{parts[1]}:{number}{code}: {_in_short(str(error))}"
    return f"{type(error).__name__}: {_in_short(str(error))}"
