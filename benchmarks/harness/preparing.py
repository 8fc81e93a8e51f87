"""Turn a contender's name into a contender that is ready to be timed, with all its facts but the step time."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from harness import executed, memory
from harness.catalog import CONTENDERS, Settings
from harness.contenders import Trainee, cycle, make
from harness.models import Workload
from harness.results import Facts, Row

FAILURES = (ArithmeticError, AttributeError, ImportError, LookupError, NotImplementedError, OSError, RuntimeError,
            SyntaxError, TypeError, ValueError, AssertionError)  # fmt: skip
"""Errors that other packages may raise for a model that they cannot handle."""


@contextmanager
def bench(settings: Settings) -> Iterator[None]:
    """Pin the threads, start with an empty compiler, and suppress output; everything is restored on exit."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(quiet())
        if any(CONTENDERS[name].compiled for name in settings.contenders):
            stack.enter_context(_fresh_compiler())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(settings.threads)
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the output of compilers and peers; the table has what matters."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Use no cached compilations, so that compile times are those of a first compilation."""
    from torch._inductor.utils import fresh_cache

    torch.compiler.reset()
    with fresh_cache():
        yield
    torch.compiler.reset()


def prepare(name: str, workload: Workload, settings: Settings) -> tuple[Trainee | None, Row]:
    """Build, compile and examine one contender; one that cannot run becomes a row with the reason."""
    contender = CONTENDERS[name]
    torch.manual_seed(0)
    try:
        before = memory.storages()
        began = time.perf_counter()
        trainee = make(contender, workload, settings)
        build_seconds = time.perf_counter() - began
        facts = _examined(trainee, settings, before, build_seconds)
    except FAILURES as error:
        return None, Row(contender=contender, reason=reason(error))
    return trainee, Row(contender=contender, facts=facts)


def reason(error: BaseException) -> str:
    """Return in one line why a contender is missing."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    short = said if len(said) <= 160 else f"{said[:157]}..."
    return short if isinstance(error, ImportError) else f"{type(error).__name__}: {short}"


def _examined(trainee: Trainee, settings: Settings, before: dict[int, int], build_seconds: float) -> Facts:
    """Take the steps that must not be timed: the first ones, the widths of a whole cycle, and the profiled one."""
    compiler = None
    if trainee.contender.compiled:
        compiler = CountingCompiler(settings.backend)
        trainee.model = torch.compile(trainee.model, backend=compiler)  # type: ignore[assignment]
    first = _timed(trainee)
    graphs_of_first = 0 if compiler is None else compiler.calls
    later = _timed(trainee)
    widths = _sweep(trainee, cycle(settings))
    recompilations = 0 if compiler is None else compiler.calls - graphs_of_first
    saved = None if compiler else memory.kept_for_backward(trainee.output, trainee.inputs)
    # Between two steps: exactly the memory that a contender holds from one step to the next.
    held = sum(size for address, size in memory.storages().items() if address not in before)
    counts = executed.counts(trainee)
    trace = memory.traced(trainee.step)
    return Facts(
        peak_bytes=held + trace.peak_bytes,
        saved_bytes=saved,
        build_seconds=build_seconds,
        compile_seconds=max(first - later, 0.0) if compiler else None,
        graphs=graphs_of_first if compiler else None,
        recompilations=recompilations if compiler else None,
        widths=widths,
        executed=executed.since(counts, trainee, trace),
    )


class CountingCompiler:
    """A compiler for `torch.compile` that counts the graphs handed to it."""

    def __init__(self, backend: str) -> None:
        self.calls = 0
        self._compile: Any = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile a graph."""
        self.calls += 1
        return self._compile(graph, inputs)


def _timed(trainee: Trainee) -> float:
    began = time.perf_counter()
    trainee.step()
    return time.perf_counter() - began


def _sweep(trainee: Trainee, steps: int) -> tuple[int, ...]:
    """Step through a whole cycle, and return the forward widths that occurred."""
    seen = set()
    for _ in range(steps):
        if trainee.schedule is not None:
            seen.add(trainee.schedule.bits(trainee.schedule.position).weight)
        trainee.step()
    return tuple(sorted(seen))
