"""Runs a model through Dynamo: in one graph if that can be done, else in several with a net between them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import skip_code

from cpt_fx.bodies import graphs_of
from cpt_fx.dynamo.backend import Backend, why_broken
from cpt_fx.dynamo.callers import caller_of
from cpt_fx.dynamo.checkpoint import quantized_again
from cpt_fx.dynamo.lift import Compiler
from cpt_fx.dynamo.net import Net
from cpt_fx.dynamo.scripts import noticed_scripts
from cpt_fx.dynamo.tree import Places, own_tree
from cpt_fx.errors import TransformError
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.history import LOGGER, History, check_coverage
from cpt_fx.meta import Uncovered
from cpt_fx.names import Names
from cpt_fx.overrides import SELECTED, Patterns, Selected, check_before_capture
from cpt_fx.pass_base import Report, unique
from cpt_fx.pipeline import Pipeline
from cpt_fx.runtime import Precision

WHOLE_GRAPHS = 64
"""Captures of a model as one graph, for modes, shapes and branches. One that needs more is captured in parts."""
PARTS = 64
"""Captures of one piece of code in parts, more where many modules run it. Beyond, it runs in the net.

Past such a limit, torch's own is 8, Dynamo lets code run as it is, which alone would be without quantizers.
"""
RENEWALS = 8
"""How often all graphs may be thrown away because tensors were replaced."""

ATTEMPTS = 2
"""How often a model may fail to be one graph: some set themselves up in their first call, and are one from then on."""

CAPTURE = {
    "allow_rnn": True,
    "allow_unspec_int_on_nn_module": True,  # else a module that counts is captured anew at each call
    "accumulated_recompile_limit": 1_000_000,
    "use_numpy_random_stream": True,
    "skip_nnmodule_hook_guards": False,  # else a hook that comes later would never run
    "optimize_ddp": False,  # it would cut the graph between Dynamo and us
}
ONE_GRAPH = {**CAPTURE, "capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True,
             "fail_on_recompile_limit_hit": True}  # fmt: skip
SEVERAL = {**CAPTURE, "suppress_errors": True}


class _QuietCompilation:
    """Keeps warnings that Dynamo raises about its own tracing to itself, and only those: from start to end of it.

    Where warnings are errors, it would take them for a reason not to capture.
    """

    def __init__(self) -> None:
        self.engines = 0
        self._filters: Any = None

    def __enter__(self) -> None:
        self.engines += 1
        # Each time anew: torch._dynamo.reset() forgets who listens.
        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def __exit__(self, *_: object) -> None:
        self.engines -= 1

    def _start(self, _: object) -> None:
        if self.engines:
            self._filters = warnings.catch_warnings()
            self._filters.__enter__()
            warnings.simplefilter("ignore")

    def _end(self, _: object) -> None:
        if self._filters is not None:
            self._filters.__exit__(None, None, None)
            self._filters = None


_QUIET = _QuietCompilation()
_ONE_AT_A_TIME = threading.RLock()
"""Threads take turns: while a model runs, Dynamo's configuration is ours."""
_RUNNING: list[Engine] = []
"""The models that run in this turn, the innermost last."""


class NotCapturedError(TransformError):
    """Dynamo did not look at the model's code at all: it is switched off."""


@dataclass(frozen=True)
class Capture:
    """One graph that Dynamo found: rewritten, and why it ends where it ends."""

    view: QuantizedGraphModule
    reports: tuple[Report, ...]
    broken_by: str = ""
    """Why the code could not go on in this graph, with file and line; empty where it returned."""


class Engine:
    """One model's graphs: how they are found, rewritten and run. Copies and pickles keep them, not what is compiled."""

    def __init__(self, source: nn.Module, pipeline: Pipeline, notes: tuple[str, ...], *, strict: bool) -> None:
        self.source = source
        self.root = own_tree(source)
        self._forward = self.root.__dict__.get("forward")
        self.pipeline = pipeline
        self.notes = notes
        self.strict = strict
        self.state = Precision()
        self.state.grows = True
        self.state.train(source.training)
        self.names = Names()
        self.captures: list[Capture] = []
        self.left: list[Uncovered] = []
        self.breaks_because = ""
        """Why the model cannot be one graph; empty as long as it is."""
        self.selected = Selected()
        self._ineffective: tuple[str, ...] = ()
        self._check_patterns()
        self._settled = -1
        self._learned = 0
        self.examples = False
        """Whether this call is that of the examples given to transform."""
        self.attempts = ATTEMPTS
        """How often the model may still fail to be one graph."""
        self._reset()

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own forward: that of its class, unless it was given one of its own."""
        own: Callable[..., Any] = self._forward or MethodType(type(self.root).forward, self.root)
        return own

    def _reset(self) -> None:
        self.runs = 0
        self.running = False
        self._thread = 0
        self.failure: BaseException | None = None
        self.net = Net(self)
        self.outdated = False
        """Whether a graph was called with tensors that are no longer where it looks for them: all is captured anew."""
        self._renewals = 0
        self._calls: dict[tuple[int, bool], tuple[Compiler | None, Callable[..., Any]]] = {}
        self._copied = len(self.captures)
        """How many captures are those of the model this one was copied from: shown until there are own ones."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process, and the way in, which leads to the original."""
        derived = ("runs", "running", "_thread", "failure", "net", "outdated", "_renewals", "_calls", "_copied")
        return {key: value for key, value in self.__dict__.items() if key not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start anew: graphs are found again at the first call."""
        self.__dict__.update(state)
        self._reset()

    def _modules(self) -> dict[str, type[nn.Module]]:
        return {path: type(module) for path, module in self.root.named_modules(remove_duplicate=False)}

    def _check_patterns(self) -> None:
        """Refuse names and types that select nothing, as far as that is known before there is a graph."""
        for step in self.pipeline:
            for argument in ("exclude", "overrides"):
                check_before_capture(Patterns(getattr(step, argument, ()), argument), self._modules())

    def rewrite(self, view: QuantizedGraphModule, broken_by: str) -> None:
        """Run the passes on a graph and take note of it."""
        view.meta[SELECTED] = self.selected
        with self.net.asleep():
            reports = self.pipeline.run(view)
        self.state.pin()
        del self.captures[: self._copied]
        self._copied = 0
        self.captures.append(Capture(view, reports, broken_by))

    @property
    def places(self) -> Places:
        """Where the tensors and modules are: read anew for each graph, since tensors may be replaced."""
        return Places(self.root)

    def leave_here(self, op: str, reason: str) -> None:
        """Take note of an operator that the code between the graphs is about to call, and that stays as it is."""
        self.leave(caller_of(self.places).path, op, reason)

    def leave(self, path: str, op: str, reason: str) -> None:
        """Take note of an operator between the graphs that stays as it is."""
        item = Uncovered(path, op, reason)
        if item not in self.left:
            self.left.append(item)

    def runs_here(self) -> bool:
        """Whether the model is running in this very thread."""
        return self.running and self._thread == threading.get_ident()

    def renew(self) -> None:
        """Capture anew at the next call, unless that has not helped several times."""
        self._renewals += 1
        self.outdated = self._renewals <= RENEWALS

    def forget_last(self) -> None:
        """Take back the last capture: it never ran."""
        self.captures.pop()

    def follow_mode(self) -> None:
        """Let the graphs have the mode of the model: operators of the root ask them for it."""
        mode = self.root.training
        if self.state.training != mode:
            # The model's own code has switched itself: fit() calls self.train(), predict() calls self.eval().
            self.state.train(mode)
        for capture in self.captures:
            if capture.view.training != mode:
                for module in graphs_of(capture.view):
                    module.training = mode

    def graphs(self) -> list[fx.GraphModule]:
        """Return every rewritten graph, those inside others too."""
        return [module for capture in self.captures for module in graphs_of(capture.view)]

    def history(self) -> History:
        """Return what is known of the graphs found so far."""
        several = (f"the code cannot be one graph: {self.breaks_because}",) if self.breaks_because else ()
        reports = tuple(report for capture in self.captures for report in capture.reports)
        breaks = unique(capture.broken_by for capture in self.captures if capture.broken_by)
        if self.left:
            reports = (*reports, Report("net", 0, uncovered=tuple(self.left)))
        return History(
            "dynamo", (*self.notes, *several, *self._ineffective), reports, repr(self.pipeline), self.source, breaks
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the model run in this thread: its own calls of itself go on, Dynamo is quiet about its tracing."""
        with _ONE_AT_A_TIME, _QUIET, ExitStack() as stack:
            # A transformed model inside another one has its own quantizers, and is none of the other one's business.
            for other in _RUNNING:
                stack.enter_context(other.net.asleep())
            was_running, self.running, self._thread = self.running, True, threading.get_ident()
            _RUNNING.append(self)
            try:
                yield
            finally:
                _RUNNING.pop()
                self.running = was_running

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Compiler | None = None, whole: bool = False
    ) -> Any:
        """Run the model, and say what was covered where something new was captured.

        `compiler` compiles the rewritten graphs; `whole` demands that there is one.
        """
        with self.entered():
            self.follow_mode()
            if self.outdated:
                self._calls.clear()
                self.outdated = False
            result = self._call(args, kwargs, compiler, whole)
        found = len(self.captures) + len(self.left)
        if found > self._settled:
            if self._settled < 0:
                self._ineffective = self.selected.check(self._modules().items())
            self._warn_of_late_parameters()
            # A call may take an early way out; examples are chosen to show what there is.
            check_coverage(self.history(), self.graphs(), strict=self.strict, complete=self.examples)
            self._settled = found
        return result

    def _warn_of_late_parameters(self) -> None:
        """Tell of learned ranges that are new: an optimizer that exists already does not know them."""
        learned = sum(1 for _ in self.state.parameters())
        if learned > self._learned and not self.examples:
            LOGGER.warning(
                "%d learned ranges came up in this call of %s: an optimizer made before does not train them. Make it "
                "now, or pass example_inputs to cpt_fx.transform",
                learned - self._learned, type(self.source).__name__,
            )  # fmt: skip
        self._learned = learned

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Compiler | None, whole: bool) -> Any:
        with default_stance():
            if self.attempts > 0 or whole:
                before, self.failure = self.runs, None
                try:
                    with dynamo_config.patch(ONE_GRAPH):
                        result = self._compiled(compiler, True)(*args, **kwargs)
                    self.breaks_because = ""
                    return result
                except Exception as error:
                    if self.failure is not None:
                        raise self.failure from None
                    # Once a graph has run, the error is the model's own.
                    if self.runs != before or whole:
                        raise
                    reason = why_broken(error)
                    self.attempts -= 1
            else:
                reason = self.breaks_because
            self.failure = None
            with self.net, quantized_again(self), noticed_scripts(self), dynamo_config.patch(SEVERAL):
                result = self._compiled(compiler, False)(*args, **kwargs)
            if self.failure is not None:
                raise self.failure
            self.breaks_because = reason
            return result

    def _compiled(self, compiler: Compiler | None, whole: bool) -> Callable[..., Any]:
        key = (id(compiler), whole)
        if key not in self._calls:
            forward = self.forward

            def run(*args: Any, **kwargs: Any) -> Any:
                # Dynamo looks into functions, not into torch's own modules: this one is the way in.
                if whole and not torch.compiler.is_dynamo_compiling():
                    raise NotCapturedError("Dynamo is switched off")
                return forward(*args, **kwargs)

            limit = WHOLE_GRAPHS if whole else PARTS + 8 * sum(1 for _ in self.root.modules())
            compiled = torch.compile(  # type: ignore[call-overload]
                run, backend=Backend(self, compiler), fullgraph=whole, recompile_limit=limit, isolate_recompiles=True
            )
            self._calls[key] = compiler, compiled
        return self._calls[key][1]


def outer_compiler() -> tuple[Compiler | None, bool]:
    """Return the compiler of a `torch.compile` around the model, if there is one, and whether it demands one graph."""
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    if not callable(callback):
        return None, False
    compiler = eval_frame.innermost_backend(callback)
    if isinstance(getattr(compiler, "compiler_fn", compiler), Backend):
        return None, False  # another transformed model's, which this one is inside of
    assert_one = type(getattr(callback, "_torchdynamo_orig_backend", None)).__name__ == "ConvertFrameAssert"
    return compiler, assert_one


# Not disabled, which would hide the compiler it looks for; only not captured itself.
skip_code(outer_compiler.__code__)


@contextmanager
def default_stance() -> Iterator[None]:
    """Capture whatever the stance is: `force_eager` would skip the rewritten graphs, and with them the quantizers."""
    stance: Any = nullcontext()
    if eval_frame._stance.stance != "default":
        stance = torch.compiler.set_stance("default")
    with stance:
        yield
