"""Runs a model through Dynamo: in one graph if possible, else in several with a net between them.

The functions at the end are the entry points of calls under an outer `torch.compile`, and of methods of the model.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from cpt_fx.capture.base import resolves
from cpt_fx.capture.captured import AsItIs, Capture
from cpt_fx.capture.dynamo.backend import Backend, Compiler, why_broken
from cpt_fx.capture.dynamo.checkpoint import quantized_again, reentrant_apart
from cpt_fx.capture.dynamo.net import Net, noticed_scripts
from cpt_fx.capture.dynamo.torch_private import callback_handler, config, eval_frame, stance
from cpt_fx.capture.running_statistics import warn_of_ranges
from cpt_fx.capture.session import ACTIVE, Session, nets_asleep
from cpt_fx.capture.tree import TreePlaces
from cpt_fx.common.torch_private import frames
from cpt_fx.errors import TransformError
from cpt_fx.ir.contexts import ModesOf
from cpt_fx.ir.history import LOGGER, check_coverage
from cpt_fx.ir.layer_state import ranges
from cpt_fx.ir.meta import Uncovered
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.ir.result import part_of, plain_class

WHOLE_GRAPHS = 64
"""Maximum number of captures of a model as one graph, for modes, shapes and branches; then it is captured in parts."""
PARTS = 64
"""Maximum number of captures of one piece of code in parts, plus 8 per module; then the code runs under the net.

Past such a limit (torch's own is 8), Dynamo runs code as it is, which without the net would have no quantizers.
"""
RENEWALS = 8
"""How often all graphs may be discarded because tensors were replaced."""

ATTEMPTS = 2
"""How often capture of a module as one graph may fail: it may succeed once the first call has initialized it."""

CAPTURE = {
    "allow_rnn": True,
    "allow_unspec_int_on_nn_module": True,  # else a module that counts calls is captured again at each call
    "accumulated_recompile_limit": 1_000_000,
    "use_numpy_random_stream": True,
    "skip_nnmodule_hook_guards": False,  # else a hook that is added later would never run
    "optimize_ddp": False,  # it would split graphs before our backend gets them
}
ONE_GRAPH = {**CAPTURE, "capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True,
             "fail_on_recompile_limit_hit": True}  # fmt: skip
SEVERAL = {**CAPTURE, "suppress_errors": True}


class _QuietCompilation:
    """Suppresses warnings that Dynamo's tracing raises, and only those, by callbacks at its start and end.

    Where warnings are errors, Dynamo would take them for a reason not to capture.
    """

    def __init__(self) -> None:
        self.engines = 0
        self._filters: Any = None

    def __enter__(self) -> None:
        self.engines += 1
        # Checked each time: torch._dynamo.reset() removes callbacks.
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
"""One thread at a time: while a model runs, Dynamo's configuration is changed."""


class NotCapturedError(TransformError):
    """Dynamo is switched off, and captured nothing."""


class DynamoEngine:
    """Runs the model's own code, and rewrites every graph that Dynamo captures on the way."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.root = session.root
        self.state = session.state
        self.names = session.names
        self.running = False
        self._thread = 0
        self.runs = 0
        self.failure: Exception | None = None
        self.net = Net(self)
        self.outdated = False
        """Whether a graph was called with tensors that are no longer the model's: the next call captures all again."""
        self._renewals = 0
        self.attempts: dict[int, int] = {}
        """How often capture of each module as one graph may still fail, by its id."""
        self._calls: dict[tuple[int, int, bool, Any], tuple[Any, Callable[..., Any]]] = {}
        self._entered: nn.Module | None = None
        self._wants_one = False
        self._rewritten = 0
        self._settled = -1
        """How many graphs and operators outside of them were known when the coverage was last checked."""
        self._learned = sum(1 for _ in ranges(self.root))
        self._copied = len(session.found)
        """How many captures come from the model that this one is a copy of: listed until it has its own."""

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return a module's plain forward: that of the user's class, or one that was set on the module."""
        own: Callable[..., Any] | None = part_of(module).forward
        return own or MethodType(plain_class(type(module)).forward, module)

    def rewrite(self, view: QuantizedGraphModule, broken_by: str) -> None:
        """Run the passes on a graph and record the capture."""
        for capture in self.session.found:
            self.session.refuse_to_drop(capture.view)
        # Graphs of removed layers will not run again.
        self.session.found[:] = [capture for capture in self.session.found if resolves(capture.view)]
        reports = self.session.rewrite(view)
        self._rewritten += 1
        view.note_edits()
        del self.session.found[: self._copied]
        self._copied = 0
        whole = self._entered is self.root and self._wants_one
        self.session.found.append(Capture(view, reports, broken_by, is_whole=whole))

    @property
    def places(self) -> TreePlaces:
        """The paths of tensors and modules, found anew at each access, since tensors may be replaced."""
        return TreePlaces(self.root)

    def leave(self, path: str, op: str, reason: str) -> None:
        """Record an operator between the graphs that stays in full precision."""
        item = Uncovered(path, op, reason)
        if item not in self.session.left:
            self.session.left.append(item)

    def runs_here(self) -> bool:
        """Return whether the model's own code is running in this thread."""
        return self.running and self._thread == threading.get_ident()

    def renew(self) -> None:
        """Have everything captured again at the next call, `RENEWALS` times at most."""
        self._renewals += 1
        self.outdated = self._renewals <= RENEWALS

    def forget_calls(self) -> None:
        """Drop everything that was compiled."""
        self._calls.clear()

    def forget_last(self) -> None:
        """Remove the last capture, whose graph is not kept."""
        self.session.found.pop()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let the model's own code run in this thread: modules run their plain forward, Dynamo's warnings are muted."""
        # A transformed model inside another one has its own quantizers: the nets of the others are suspended.
        with _ONE_AT_A_TIME, _QUIET, ModesOf(), reentrant_apart(), nets_asleep(but=self.session):
            before = self.running, self._thread
            self.running, self._thread = True, threading.get_ident()
            ACTIVE.append(self.session)
            try:
                yield
            finally:
                ACTIVE.remove(self.session)
                self.running, self._thread = before

    def run(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Compiler | None = None,
        whole: bool = False,
    ) -> Any:  # fmt: skip
        """Run a module with its graphs compiled by `compiler`, as one graph if `whole`; check what was added."""
        session = self.session
        with self.entered():
            if self.outdated:
                self.forget_calls()
                self.outdated = False
                session.adopt_new()
            result = self._call(module, args, kwargs, compiler, whole)
        found = self._rewritten + len(session.left)
        if found > self._settled:
            if self._settled < 0:
                session.judge_patterns()
            self._warn_of_late_state()
            if not self.root.training and not session.looking:
                with nets_asleep():
                    warn_of_ranges(session)
            # A call may return early; examples are expected to reach everything.
            complete = session.examples and module is self.root
            check_coverage(session.history(), session.graphs(), strict=session.strict, complete=complete)
            self._settled = found
        return result

    def _warn_of_late_state(self) -> None:
        """Warn of new ranges: an optimizer, DDP or EMA that was created before them does not include them."""
        session = self.session
        count = sum(1 for _ in ranges(self.root))
        if count > self._learned and not session.looking:
            LOGGER.warning(
                "%d running ranges came up in this call of %s: pass example_inputs to cpt_fx.transform before EMA, DDP "
                "or an optimizer is made", count - self._learned, session.kind,
            )  # fmt: skip
        self._learned = count

    def _call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Compiler | None, whole: bool
    ) -> Any:
        with default_stance():
            attempts = self.attempts.setdefault(id(module), ATTEMPTS)
            self._entered, self._wants_one = module, attempts > 0 or whole
            if self._wants_one:
                before, self.failure = self.runs, None
                try:
                    with config.patch(ONE_GRAPH):
                        result = self._compiled(module, compiler, True)(*args, **kwargs)
                    if module is self.root:
                        self.session.breaks_because = ""
                    return result
                except Exception as error:
                    if self.failure is not None:
                        raise self.failure from None
                    # Once a graph has run, the error is the model's own.
                    if self.runs != before or whole:
                        raise
                    reason = why_broken(error)
                    self.attempts[id(module)] -= 1
            else:
                reason = self.session.breaks_because
            self.failure, self._wants_one = None, False
            with self.net, quantized_again(self), noticed_scripts(self), config.patch(SEVERAL):
                result = self._compiled(module, compiler, False)(*args, **kwargs)
            if self.failure is not None:
                raise self.failure
            self.session.breaks_because = reason
            return result

    def demand_one_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if a model that ran in several graphs does so again, naming every graph break."""
        from cpt_fx.capture.dynamo.recording import not_one_graph

        if self.session.breaks_because:
            self.root(*args, **kwargs)
        if self.session.breaks_because:
            raise not_one_graph(self, args, kwargs)
        # The dry run undoes what a model initializes in its first call: the first real call initializes it again.
        self.attempts.clear()

    def _compiled(self, module: nn.Module, compiler: Compiler | None, whole: bool) -> Callable[..., Any]:
        forward = self.forward_of(module)
        # The forward is part of the key, since a class may be given another one.
        key = (id(module), id(compiler), whole, getattr(forward, "__func__", forward))
        if key not in self._calls:
            limit = WHOLE_GRAPHS if whole else PARTS + 8 * sum(1 for _ in self.root.modules())
            compiled = compiled_by(Backend(self, compiler), forward, limit, whole=whole)
            self._calls[key] = (module, compiler), compiled
        return self._calls[key][1]

    def compiled_for(self, backend: Callable[..., Any], *, dynamic: bool, whole: bool = True) -> Callable[..., Any]:
        """Return the model's forward with its graphs given to another backend."""
        return compiled_by(backend, self.forward_of(self.root), PARTS, whole=whole, dynamic=dynamic or None)


def compiled_by(
    backend: Callable[..., Any], forward: Callable[..., Any], limit: int, *, whole: bool, dynamic: bool | None = None
) -> Callable[..., Any]:
    """Return a forward that Dynamo captures whenever its guards fail, in one graph if `whole`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        # Dynamo captures functions, but no forward of torch's own modules: this function is its entry point.
        if whole and not torch.compiler.is_dynamo_compiling():
            raise NotCapturedError("Dynamo is switched off")
        return forward(*args, **kwargs)

    # Dynamo keeps compiled code with the code object: a copy of its own is freed with the function.
    run.__code__ = run.__code__.replace()
    compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
        run, backend=backend, fullgraph=whole, dynamic=dynamic, recompile_limit=limit, isolate_recompiles=True
    )
    return compiled


def outer_compiler() -> tuple[Compiler | None, bool]:
    """Return the compiler of a `torch.compile` around the model, if there is one, and whether it demands one graph."""
    callback = frames.get_eval_frame_callback()
    if not callable(callback):
        return None, False
    compiler = eval_frame.innermost_backend(callback)
    if isinstance(getattr(compiler, "compiler_fn", compiler), Backend):
        return None, False  # that of another transformed model around this one
    assert_one = type(getattr(callback, "_torchdynamo_orig_backend", None)).__name__ == "ConvertFrameAssert"
    return compiler, assert_one


# Skipped, not disabled: disabling it would hide the compiler that it looks for.
eval_frame.skip_code(outer_compiler.__code__)


def default_stance() -> AbstractContextManager[Any]:
    """Set the default stance of torch.compile: any other would skip the rewritten graphs and their quantizers."""
    now = stance()
    is_default = now.stance == "default" and now.backend is None
    return nullcontext() if is_default else torch.compiler.set_stance("default")


_ALONE = "the model inside is transformed by cpt_fx, which captures it itself: call it outside, or compile it alone"


@torch.compiler.disable(recursive=False, reason=_ALONE)  # type: ignore[untyped-decorator]
def enter(session: Session, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the rewritten graph of a module under an outer compiler, which does not see the code that selects it."""
    before = session.state.handed
    view = _ready(session, module)
    if view is None:
        return _run(session, module, outer_compiler(), args, kwargs)
    try:
        return session.run(view, args, kwargs)
    finally:
        session.state.handed = before


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ready(session: Session, module: nn.Module) -> QuantizedGraphModule | AsItIs | None:
    view = session.view_for(module)
    if view is not None:
        session.state.hand()
    return view


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(session: Session, module: nn.Module, outer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module through the engine, outside of the outer compiler, to which the engine passes each graph."""
    return session.engine.run(module, args, kwargs, *outer)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def watch(session: Session, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a method of the model under the net: products between the modules that it calls are quantized."""
    session.watching += 1
    ACTIVE.append(session)
    try:
        with session.engine.net:
            return function(*args, **kwargs)
    finally:
        session.watching -= 1
        ACTIVE.remove(session)
