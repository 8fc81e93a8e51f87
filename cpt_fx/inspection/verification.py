"""Proof that quantization happened: every quantizer ran, at the width it should, with at most 2^b levels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.api import graphs, history_of
from cpt_fx.capture.captured import WHOLE
from cpt_fx.capture.dry_run import dry_run, eager_model, is_sharded
from cpt_fx.capture.proof import Proof, resting
from cpt_fx.capture.session import Session
from cpt_fx.capture.standalone import Standalone, transformed_in
from cpt_fx.errors import TransformError
from cpt_fx.formats import FULL_PRECISION, minimum_bits, most_levels
from cpt_fx.inspection.census import Seen, census, list_what_runs
from cpt_fx.inspection.places import ProductPlaces
from cpt_fx.inspection.sameness import MODES, TOLD, Inputs, Mode, Sameness, compare, run_in
from cpt_fx.inspection.views import QuantizerView, fields, quantizer_nodes, views_in
from cpt_fx.ir.meta import get_attribute
from cpt_fx.ir.pass_base import STAGES, stage_of
from cpt_fx.ir.subgraphs import outermost, state_of
from cpt_fx.ir.verifier import SpecError, check
from cpt_fx.quantizers.counters import SAMPLE

Views = tuple[QuantizerView, ...]

PROBE = 2
"""The width of a dry run: four levels are so few that hardly any tensor passes for quantized by accident."""
PROVABLE = int(math.log2(SAMPLE)) - 1
"""The largest width that can be proven: above it a sample has too few elements to exceed the allowed levels."""


class VerificationError(TransformError):
    """A transformed model does not quantize as it should, or differs from the plain model at 32 bits."""


@dataclass(frozen=True)
class Verification:
    """The outcome of a verification."""

    quantizers: int
    runs: int
    """Runs of all quantizers in total."""
    widths: tuple[int, ...]
    """Widths at which levels were counted."""
    largest_ratio: float
    """The largest number of levels seen, as a share of the 2^b allowed."""
    uncounted: tuple[str, ...] = ()
    """Quantizers that ran, but whose levels were not counted."""
    idle: tuple[str, ...] = ()
    """Quantizers that were not expected to run: those that the inputs do not reach, and gradient quantizers where
    nothing before them is trained, no loss depends on them, or gradients were not requested."""
    products: int = 0
    """Products of the dry run at 2 bits: each had quantized operands, or is listed as uncovered."""
    outside: tuple[str, ...] = ()
    """Modules that multiply outside of the transformed parts, with the operators."""
    notes: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    """The modes in which the result at 32 bits was found to equal the plain model."""
    views: tuple[QuantizerView, ...] = field(default=(), repr=False)
    """Every quantizer with the counters that the proof rests on: those of the dry run, if there was one."""

    @property
    def proven(self) -> bool:
        """Whether at least one quantizer had work to do, and levels were counted for every one that had."""
        return not self.unproven

    @property
    def unproven(self) -> str:
        """Why this is no proof; an empty string if it is one."""
        if not self.quantizers:
            return "there is no quantizer: nothing is quantized"
        inputs = [view.node for view in self.views if view.role == "activation"]
        if self.quantizers == len(self.idle) or (inputs and not set(inputs) - set(self.idle)):
            return "no quantizer of an input had anything to do"
        if self.uncounted:
            return f"the levels were not counted of {len(self.uncounted)} quantizers"
        return "" if self.widths else "no quantizer has rounded anything yet"

    def __str__(self) -> str:
        """Return a summary in a few lines."""
        levels = "no levels counted"
        if self.widths:
            levels = f"levels counted at widths {', '.join(map(str, self.widths))}: never more than 2^b levels"
            percent = math.ceil(100 * self.largest_ratio)
            levels += f", at most {percent} % of them" if percent < 100 else ""
        first = f"{self.quantizers - len(self.idle)} quantizers ran, {self.runs} times in total; {levels}"
        same = [f"at 32 bits the same as the plain model: {', '.join(self.compared)}"] if self.compared else []
        return "\n".join((first, *same, *self.notes, *([f"not proven: {self.unproven}"] if self.unproven else [])))

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as plain data."""
        return fields(self, "proven", "quantizers", "runs", "widths", "largest_ratio", "uncounted", "idle",
                      "products", "outside", "compared", "unproven", "notes")  # fmt: skip


def verify(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool, source: nn.Module | None = None
) -> Verification:
    """Check the counters of a model, with inputs those of a dry run; raise an error that lists every problem.

    `source` is the plain model to compare with; by default what `revert` would return.
    """
    modules, views = graphs(model), views_in(model)
    problems = [*_broken_promises(modules), *_faults(modules, views)]
    same, seen, rested = Sameness(), Seen(ProductPlaces(model)), set[int]()
    tried = source is not None or bool(args or kwargs)
    backward, unreached = any(view.role == "gradient" and view.times_run for view in views), Views()
    if tried:
        with resting([module for module in modules if outermost(module) is module]) as rested:
            why = _incomparable(model)
            same = Sameness(notes=(why,) if why else ())
            if not why:
                same = compare(model, args, kwargs, gradients, partial(history_of, model), source, rested)
            gradients = gradients and not same.stuck
            backward, views, unreached, seen = _try(model, args, kwargs, gradients, same)
        list_what_runs(model, seen)
        modules = graphs(model)
        wrong = (*same.problems, *_faults(modules, views, PROBE), *seen.problems, *map(str, seen.unknown))
        problems += [problem for problem in wrong if problem not in problems]
        rested |= {id(modules[view.graph]) for view in unreached if not view.times_run}
    # No gradient is expected if the plain model has nothing to differentiate either.
    expected = gradients and (backward or not same.modes)
    working, idle = _parted(modules, [view for view in views if view not in unreached], expected, backward)
    problems += [*_undriven(model), *_never_ran(working, expected and not backward)]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise VerificationError(f"{len(problems)} problem{'s' * (len(problems) > 1)} with quantization:{listed}")
    known = history_of(model).outside
    more = [name for name in seen.outside if name.partition(" (")[0] not in {item.layer for item in known}]
    outside = [f"outside of what was transformed: {item}" for item in (*known, *more)]
    blind = tuple(view.node for view in working if not view.levels and (tried or 0 < view.bits < FULL_PRECISION))
    ratios = [count / most_levels(view.format.scheme, bits) for view in working for bits, count in view.levels.items()]
    proof = Verification(
        quantizers=len(views),
        runs=sum(view.times_run for view in views),
        widths=tuple(sorted({bits for view in working for bits in view.levels})),
        largest_ratio=max(ratios, default=0.0),
        uncounted=blind,
        idle=tuple(sorted(view.node for view in (*idle, *unreached))),
        products=seen.products,
        outside=seen.outside,
        notes=(*_notes(working, idle, unreached, blind, gradients), *_held(model), *same.notes, *seen.notes, *outside),
        compared=same.modes,
        views=views,
    )
    if proof.proven and proof.compared:
        modes = f"at 32 bits the same as the plain model {', '.join(proof.compared)}"
        covers = f"{proof.quantizers - len(proof.idle)} quantizers keep to their levels; {modes}"
        for _, part in transformed_in(model):
            part.proof = Proof(part, covers, rested)
    return proof


def prove(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], source: nn.Module) -> None:
    """Verify a result of `transform` with its example inputs."""
    try:
        verify(model, args, kwargs, gradients=True, source=source)
    except VerificationError as error:
        raise VerificationError(f"{error}\ntransform has proven its examples: prove=False leaves it out") from None


def _incomparable(model: nn.Module) -> str:
    """Return why a model cannot be compared with the plain one; an empty string if it can."""
    if any(isinstance(part, Standalone) for _, part in transformed_in(model)):
        return "a graph that stands alone is not compared with the plain model: verify the result"
    if any(is_sharded(type(one)) for one in model.modules()):
        return "a sharded model is not compared with the plain model: verify it before it is sharded"
    return ""


def _try(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool, same: Sameness
) -> tuple[bool, Views, Views, Seen]:
    """Run at `PROBE` bits under a census: forward and backward, then forward in the other mode if its code may differ.

    Return whether there were gradients, the quantizers with their counters, those not reached, and the census. Code
    may branch on values, which differ from those at 32 bits, and a graph may belong to another call: the census sees
    the products that run instead.
    """
    inner, modules = eager_model(model), graphs(model)
    with dry_run(model), resting(modules) as rested:
        for module in modules:
            for _, quantizer in quantizer_nodes(module.graph):
                get_attribute(module, quantizer.counters).zero_()
        with ExitStack() as stack:
            for _, part in transformed_in(model):
                stack.enter_context(part.state.at(PROBE))
            seen = stack.enter_context(census(model))
            modes = [Mode(inner.training, gradients)]
            if not _is_one_graph(inner):
                # Without gradients if possible: code that registers hooks on its results only runs with them.
                others = [mode for mode in MODES if mode.training != inner.training and str(mode) in same.modes]
                modes += sorted(others)[:1]
            backward = run_in(inner, Inputs(args, kwargs, dict.fromkeys(modes[1:])), modes)
        views, modules = views_in(model, rested), graphs(model)
        empty = {(index, node) for index, module in enumerate(modules) for node in _without_values(module, seen)}
        unreached = tuple(
            view
            for view in views
            if (view.graph, view.node) in empty or (not view.times_run and id(modules[view.graph]) in rested)
        )
    return backward, views, unreached, seen


def _without_values(module: fx.GraphModule, seen: Seen) -> Iterator[str]:
    """Yield the quantizers that ran on empty tensors only, such as those of an expert that no token is routed to."""
    for node, quantizer in quantizer_nodes(module.graph):
        if seen.values.get(id(get_attribute(module, quantizer.counters))) == 0:
            yield node.name


def _is_one_graph(model: nn.Module) -> bool:
    """Whether a call runs a single graph of torch.fx, which is the same in training and in evaluation."""
    parts = transformed_in(model)
    return len(parts) == 1 and not parts[0][0] and isinstance(parts[0][1], Session) and [*parts[0][1].traced] == [WHOLE]


def _broken_promises(modules: list[fx.GraphModule]) -> Iterator[str]:
    """Check the graphs as they are now: counters do not show whether the result of a quantizer is used."""
    for module in modules:
        stage = stage_of(module)
        # A graph with quantizers must be bound, even if another pass than `bind` did it.
        is_bound = STAGES.index(stage) < STAGES.index("bound") and quantizer_nodes(module.graph)
        try:
            check(module, "bound" if is_bound else stage)
        except SpecError as error:
            yield str(error).replace("\n", "\n  ")


def _undriven(model: nn.Module) -> Iterator[str]:
    """Yield the parts whose widths `schedule.step()` does not change."""
    for path, part in transformed_in(model):
        state, where = part.state, f"{part.kind} at {path}" if path else part.kind
        if not state.width_sources or state.forced is not None:  # forced by `at_bits`, which a note reports
            continue
        if state.schedule is None:
            yield f"no schedule drives {where}: no pass binds one, and its widths stay at 32; schedule.bind(model) does"
        elif state not in state.schedule._controllers:
            yield f"no schedule drives {where}: it was unbound, and its widths stay as they are"


def _held(model: nn.Module) -> Iterator[str]:
    for _, part in transformed_in(model):
        if part.state.forced is not None:
            yield f"`at_bits` holds the widths of {part.kind} at {part.state.forced}: no schedule drives them meanwhile"


def _faults(modules: list[fx.GraphModule], views: Views, asked: int | None = None) -> Iterator[str]:
    """Yield what is wrong with widths, running ranges and levels; `asked` is the width of a dry run."""
    for view in views:
        state, allowed = state_of(modules[view.graph]), partial(most_levels, view.format.scheme)
        span = f"{view.layer}: the running range of {view.operand} is"
        others = [bits for bits in view.levels if bits != asked]
        if asked is None and state.schedule is not None and state.forced is None:
            # Compare the width that each reads with its bit-width source at the schedule's position.
            expected = state.width(view.width_source, training=state.root.training)
            mode = f"{'training' if state.root.training else 'evaluation'} at step {state.schedule.position}"
            if expected != view.bits:
                yield f"{view} is at {view.bits} bits; for {mode} it should be at {expected}"
        elif asked is not None and others:
            found = ", ".join(map(str, others))
            yield f"{view} ran at {found} bits when {asked} were asked for: no schedule drives it"
        if view.range is not None and not all(map(math.isfinite, view.range)):
            yield f"{span} {view.range}: a NaN or an infinity went through it"
        if asked is not None and view.skipped:
            yield f"{span} as it was: a NaN or an infinity came to it"
        for bits, count in view.levels.items():
            if count > allowed(bits):
                many = f"{count} distinct levels at {bits} bits, {allowed(bits)} are allowed"
                yield f"{view} showed {many}: it does not quantize"


def _parted(
    modules: list[fx.GraphModule], views: Iterable[QuantizerView], gradients: bool, backward: bool
) -> tuple[Views, Views]:
    """Separate the quantizers that have work to do from gradient quantizers that are not expected to run.

    These are not expected to run if gradients were not requested, if nothing before the quantizer is trained, or if the
    loss does not depend on it: a forward pass went through it, and gradients reached others, but not this one.
    """
    trained = {
        (index, node.name) for index, module in enumerate(modules) for node in ([] if backward else _trained(module))
    }
    working: list[QuantizerView] = []
    idle: list[QuantizerView] = []
    for view in views:
        expected = gradients and (not view.waited if backward else (view.graph, view.node) in trained)
        (working if expected or view.times_run or view.role != "gradient" else idle).append(view)
    return tuple(working), tuple(idle)


def _never_ran(working: Views, waiting: bool) -> list[str]:
    silent = [view for view in working if not view.times_run]
    problems = [f"{view} never ran" for view in silent]
    if waiting and any(view.role == "gradient" for view in silent):
        problems.append("no gradient quantizer ran at all: without a backward pass, ask for verify(gradients=False)")
    return problems


def _trained(module: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose value depends on something that requires a gradient, as far as the graph shows."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        own: Any = get_attribute(module, str(node.target)) if node.op in ("get_attr", "call_module") else None
        tensors = own.parameters() if isinstance(own, nn.Module) else [own] if isinstance(own, torch.Tensor) else []
        if any(used in found for used in node.all_input_nodes) or any(tensor.requires_grad for tensor in tensors):
            found.add(node)
    return found


def _notes(working: Views, idle: Views, unreached: Views, blind: tuple[str, ...], gradients: bool) -> Iterator[str]:
    """Yield what a proof leaves out, and what it cannot check."""
    widths = {bits for view in working for bits in view.levels}
    if blind:
        named = ", ".join(blind[:3]) + ", ..." * (len(blind) > 3)
        yield (
            f"levels were not counted for {len(blind)} quantizers ({named}): "
            "they ran, but compiled, on another device than the CPU, or on values that are not finite"
        )
    if not widths and not blind:
        yield "every width stands at full precision: nothing was rounded"
    if any(bits > PROVABLE for bits in widths):
        yield f"levels are counted in {SAMPLE} elements: that proves widths up to {PROVABLE} bits, not above"
    narrow = [view.layer for view in working if any(bits < minimum_bits(view.format.scheme) for bits in view.levels)]
    if narrow:
        yield f"at 1 bit a float is what it is at 2, with three levels: {', '.join(dict.fromkeys(narrow))}"
    skipped = [f"{view.layer} ({view.operand}, {view.skipped})" for view in working if view.skipped]
    if skipped:
        yield f"batches that were not finite, from which no running range learned, came to {', '.join(skipped)}"
    if unreached:
        named = ", ".join(list(dict.fromkeys(view.layer for view in unreached))[:TOLD])
        yield f"{len(unreached)} quantizers left out, since these inputs do not reach them: of {named}"
    if idle:
        why = "nothing before them is trained, or no loss depends on them" if gradients else "not asked for"
        yield f"{len(idle)} gradient quantizers left out: {why}"
