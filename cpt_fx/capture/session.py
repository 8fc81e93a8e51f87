"""One transformed model: its tree, its graphs, and how a call of any of its modules finds the graph to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from cpt_fx.capture import Examples, trace_module
from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.captured import WHOLE, AsItIs, Capture, Entry, traced_view
from cpt_fx.capture.proof import Proof
from cpt_fx.capture.reminders import Reminder
from cpt_fx.capture.running_statistics import create_ranges, warn_of_norms, warn_of_ranges
from cpt_fx.capture.side_effects import run_aside, unchanged
from cpt_fx.common.compilers import has_proxies, imported_aside, is_compiler_around, refuse_tools, skip_frame
from cpt_fx.errors import TransformError
from cpt_fx.ir.contexts import ModesOf
from cpt_fx.ir.history import LOGGER, History, check_coverage
from cpt_fx.ir.layer_names import Names
from cpt_fx.ir.layer_state import forget, place_for_widths
from cpt_fx.ir.meta import CALLED, ENTRY, Uncovered, around
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.ir.pass_base import Report, unique
from cpt_fx.ir.result import PART, adopt, part_of, plain_class
from cpt_fx.ir.state import Precision, Widths
from cpt_fx.ir.subgraphs import graphs_of
from cpt_fx.overrides import SELECTED, Patterns, Selected, check_before_capture
from cpt_fx.pipeline import Pipeline, no_collection

if TYPE_CHECKING:
    from cpt_fx.capture.dynamo.engine import DynamoEngine


ACTIVE: list[Session] = []
"""Sessions whose model's own code is running, in any thread: their nets quantize what it multiplies."""


def nets_asleep(but: Session | None = None) -> ExitStack:
    """Suspend the nets of all other active sessions, for code that is not theirs: rewritten graphs and traces."""
    stack = ExitStack()
    for session in ACTIVE:
        if session is not but:
            stack.enter_context(session.engine.net.asleep())
    return stack


class Session:
    """One transformed model: `root` is its own module tree, whose modules call `enter`."""

    def __init__(
        self, root: nn.Module, pipeline: Pipeline, capture: str, notes: tuple[str, ...] = (), *, strict: bool
    ) -> None:
        self.root = root
        self.kind = type(root).__name__
        self.pipeline = pipeline
        self.auto = capture == "auto"
        traced = "given" if isinstance(root, fx.GraphModule) else "symbolic"
        self.frontend = {"dynamo": "dynamo", "export": "dynamo", "program": "export"}.get(capture, traced)
        """How graphs are found: with `"dynamo"` while the code runs, otherwise the graph exists from the start."""
        self.notes = notes
        self.strict = strict
        self.examples = False
        """Whether the current call is the one on the examples given to `transform`."""
        self.fixed: dict[str, object] | None = None
        """The plain values among the arguments of those examples; later traces use the same."""
        self.looking = False
        """Whether the current call belongs to a dry run, such as a proof."""
        self.state = Precision(root)
        self.state.move_to(place_for_widths(root, self.state.device))
        if strict and self._without_kernels:
            raise TransformError(f"strict=True, but {self._without_kernels[0]}")
        self.names = Names()
        self.selected = Selected()
        self.left: list[Uncovered] = []
        self.breaks_because = ""
        """Why Dynamo cannot capture the model in one graph; empty as long as it can."""
        self.ineffective: tuple[str, ...] = ()
        self.found: list[Capture] = []
        """Graphs that Dynamo found."""
        self.traced: dict[Entry, Capture] = {}
        """Graphs that torch.fx traced."""
        self._start()

    def _start(self) -> None:
        self.watching = 0
        """How many methods of the model are running under the net."""
        self.moving = 0
        self.views: dict[tuple[int, bool], QuantizedGraphModule | AsItIs] = {}
        """Traced graphs by module id and `Entry.every_module`; a compiler around the model reads them, too."""
        self._engine: DynamoEngine | None = None
        self._evaluates = False
        self.has_lost_ranges = False
        """Whether parameters were loaded without their ranges."""
        self.trained_at: Widths | None = None
        """The bit-widths of the latest training step; None if batch norm's statistics were recalibrated since."""
        self.told_norms = False
        self.proof: Proof | None = None
        """The proof of this object; a copy has to be proven itself."""
        self.reminder = Reminder()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is valid in this process only."""
        new = object.__new__(Session)
        new._start()
        state = {key: value for key, value in self.__dict__.items() if key not in new.__dict__}
        # The copy traces outdated graphs again, unless the user has edited them.
        state["traced"] = {at: one for at, one in self.traced.items() if one.view.is_edited() or not one.changed()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the session; what Dynamo compiled is captured again at the first call."""
        self.__dict__.update(state)
        self._start()

    # Graphs and history.

    @property
    def captures(self) -> list[Capture]:
        """The captures of all rewritten graphs."""
        return [*self.traced.values(), *self.found]

    def graphs(self) -> list[fx.GraphModule]:
        """Return every rewritten graph, subgraphs included."""
        return [module for capture in self.captures for module in graphs_of(capture.view)]

    def graph_of(self, module: nn.Module) -> fx.Graph:
        """Return the graph of the whole model; raise AttributeError if there is none."""
        # Dynamo's latest, if it captured the whole model in one graph.
        found = (one for one in reversed(self.found) if one.is_whole and not self.breaks_because)
        whole = self.traced.get(WHOLE) or next(found, None)
        if module is not self.root or whole is None:
            raise AttributeError(
                f"{self.kind} is not one graph: cpt_fx.graphs(result) lists those that there are, "
                "cpt_fx.single_graph(result, example_inputs) makes one where that can be"
            )
        return whole.view.graph

    def history(self) -> History:
        """Return the history of the transform, for the graphs found so far."""
        several = (f"the code cannot be one graph: {self.breaks_because}",) if self.breaks_because else ()
        reports = tuple(report for capture in self.captures for report in capture.reports)
        breaks = unique(capture.broken_by for capture in self.found if capture.broken_by)
        if self.left:
            reports = (*reports, Report("net", 0, uncovered=tuple(self.left)))
        notes = (*self.notes, *several, *self.ineffective, *self._without_kernels)
        return History(self.frontend, notes, reports, repr(self.pipeline), self.kind, breaks)

    def module_types(self) -> dict[str, type[nn.Module]]:
        """Return the class of every module, by all of its paths."""
        # In a model given as a graph, modules may only hold parameters; the nodes record their layer classes.
        given: fx.Graph | None = self.root.__dict__.get("_graph")
        nodes = () if given is None else given.nodes
        made_of = {path: kind for node in nodes for path, kind in around(node) if kind is not None}
        modules = self.root.named_modules(remove_duplicate=False)
        return {path: plain_class(type(module)) for path, module in modules} | made_of

    def check_patterns(self) -> None:
        """Raise for names and types that select nothing, as far as that is known before capture."""
        types = self.module_types()
        for step in self.pipeline:
            for argument in ("exclude", "overrides"):
                check_before_capture(Patterns(getattr(step, argument, None) or (), argument), types)

    def judge_patterns(self) -> None:
        """Raise for patterns that select nothing, note those that have no effect, now that the graphs are known."""
        self.ineffective = self.selected.check(self.module_types().items())
        if self.frontend == "dynamo":  # its other notes are logged as information only
            for note in self.ineffective:
                LOGGER.warning("%s", note)

    # Calls.

    def runs_here(self) -> bool:
        """Return whether the engine runs the model's own code in this thread, where modules run their plain forward."""
        return self._engine is not None and self._engine.runs_here()

    @property
    def engine(self) -> DynamoEngine:
        """The engine that runs the model's code through Dynamo."""
        if self._engine is None:
            from cpt_fx.capture.dynamo.engine import DynamoEngine  # torch's compiler is slow to import

            self._engine = DynamoEngine(self)
        return self._engine

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the rewritten graph of a module, capturing it first if needed."""
        if has_proxies((args, kwargs)) or has_proxies(args) or has_proxies(kwargs.values()):
            raise TransformError(
                "torch.fx cannot trace a transformed model: its graphs are there already, in cpt_fx.graphs(result)"
            )
        if torch.compiler.is_dynamo_compiling():
            from cpt_fx.capture.dynamo.engine import enter

            return enter(self, module, args, kwargs)
        if is_compiler_around():
            return imported_aside("cpt_fx.capture.dynamo.engine").enter(self, module, args, kwargs)
        view = self.view_for(module)
        return self.engine.run(module, args, kwargs) if view is None else self.run(view, args, kwargs)

    def run(self, view: QuantizedGraphModule | AsItIs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a traced graph; nets of methods that call it are suspended: its products have quantizers already."""
        with ModesOf():
            if not ACTIVE:
                return view.forward(*args, **kwargs)
            with nets_asleep():
                return view.forward(*args, **kwargs)

    def view_for(self, module: nn.Module) -> QuantizedGraphModule | AsItIs | None:
        """Prepare a call; return the traced graph to run, None if Dynamo is to run the code."""
        if module.__dict__.get("_is_replica"):
            raise TransformError("torch.nn.DataParallel copies modules: use DistributedDataParallel")
        if self.frontend == "dynamo":
            refuse_tools(self.root)
        if not self.reminder.awake:
            self.reminder.call(self)
        self.state.ready()
        view = None if self.frontend == "dynamo" else traced_view(self, module)
        if self.looking:
            return view
        if self.root.training:
            self._evaluates = False
        elif not self._evaluates:
            self._evaluates = True
            with nets_asleep():
                warn_of_ranges(self)
            warn_of_norms(self)
        return view

    def refuse_to_drop(self, view: QuantizedGraphModule) -> None:
        """Raise if a new capture would discard the user's edits of a graph."""
        if view.is_edited():
            raise TransformError(
                f"{self.kind} was changed, which needs a new graph, but its graph was edited, and the edits would be "
                "lost: undo the change, or transform the changed model anew"
            )

    def adopt_new(self) -> None:
        """Adopt modules that were put into the tree, so that they run rewritten graphs, too."""
        if adopt(self.root, self):
            self.look_again()

    def begin(self, examples: Examples | None) -> None:
        """Capture the whole model, as far as that is possible without running it."""
        if self.frontend != "dynamo":
            try:
                self.trace(WHOLE, examples)
            except CaptureError as error:
                if not self.auto:
                    raise
                self.fall_back(f"not captured by torch.fx: {error}")
        if self.frontend == "dynamo":
            self.check_patterns()
            create_ranges(self)
            return
        self.judge_patterns()
        check_coverage(self.history(), self.graphs(), strict=self.strict)

    def fall_back(self, why: str) -> None:
        """Drop what torch.fx traced, and have Dynamo capture the model from now on."""
        self.traced.clear()
        self.views.clear()
        self.frontend = "dynamo"
        self.notes = (*self.notes, why)

    @no_collection()
    def trace(self, entry: Entry, examples: Examples | None = None) -> None:
        """Trace a module with torch.fx and rewrite the graph; do the same for modules that it calls as modules."""
        with nets_asleep(), unchanged(self.root):
            found = run_aside(trace_module, (self, entry, examples), {})
        if found.loses and self.auto:
            raise CaptureError(found.loses)
        found.view.meta[ENTRY] = entry
        reports = self.rewrite(found.view)
        self.traced[entry] = Capture(found.view, reports, snapshot=found.snapshot)
        module = self.root.get_submodule(entry.path)
        self.views[id(module), entry.every_module] = found.view
        found.view.note_edits()
        self.notes = unique((*self.notes, *found.notes))
        for node in found.view.graph.find_nodes(op="call_module"):
            called = self.root.get_submodule(str(node.target))
            inner = Entry(str(node.target), entry.every_module)
            ours = PART in called.__dict__ and part_of(called).session is self
            if CALLED in node.meta and ours and inner not in self.traced:
                self.trace(inner)

    def rewrite(self, view: QuantizedGraphModule) -> tuple[Report, ...]:
        """Run the passes on a graph."""
        view.meta[SELECTED] = self.selected
        before = self.state.schedule
        with nets_asleep():
            reports = self.pipeline.run(view)
        found = self.state.schedule
        if found is not before and before is not None:
            before.bind(self.state)
        elif found not in (before, self.pipeline.settings.schedule) and not self.pipeline.binds:
            raise TransformError(f"a pass binds {found}, and no schedule that was given to transform drives anything")
        self.state.pin()
        return reports

    def watch(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a method of the model under the net, which quantizes the products in the method's own code."""
        from cpt_fx.capture.dynamo.engine import watch  # torch's compiler is slow to import

        return watch(self, function, args, kwargs)

    # State.

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Move bit-widths and counters to the devices of the model, once the outermost block has moved its modules."""
        before = self._without_kernels
        self.moving += 1
        try:
            yield
        finally:
            self.moving -= 1
        if self.moving:
            return
        self.state.move_to(place_for_widths(self.root, self.state.device))
        if self._without_kernels != before:
            for note in self._without_kernels:
                LOGGER.warning("%s: %s", self.kind, note)

    @property
    def _without_kernels(self) -> tuple[str, ...]:
        """Return a note for each device type that lacks kernels for the integer products that the pipeline asks for."""
        if not any(step.reaches == "lowered" for step in self.pipeline):
            return ()
        names = unique(tensor.device.type for tensor in self.root.parameters() if tensor.device.type != "cpu")
        return tuple(f"execution='integer' has no kernels for {name}: products are simulated there" for name in names)

    def look_again(self) -> None:
        """Check the ranges again at the next evaluation: there are layers with untrained ranges."""
        self._evaluates = False

    def capture_anew(self) -> None:
        """Make Dynamo capture the model's code again: a layer of it belongs to another transformed model now."""
        if self._engine is not None:
            self._engine.forget_calls()

    def note_lost_ranges(self) -> None:
        """Note that parameters were loaded without their ranges; the next evaluation warns of it."""
        self.has_lost_ranges, self._evaluates = True, False

    def forget_ranges(self) -> None:
        """Reset all running ranges, since a whole checkpoint without any was loaded."""
        self.note_lost_ranges()
        for module in self.root.modules():
            forget(module)


# A compiler around the model skips these frames, and compiles the graphs that they lead to.
for _function in (Session.enter, Session.run, Session.runs_here):
    skip_frame(_function.__code__)
