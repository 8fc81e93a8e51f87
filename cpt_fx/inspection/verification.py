"""Proof that quantization happened: every quantizer ran, at the width it should, on at most 2^b levels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.api import graphs
from cpt_fx.bodies import state_of
from cpt_fx.errors import TransformError
from cpt_fx.evidence import SAMPLE
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.inspection.census import Seen, Unknown, census, list_what_runs
from cpt_fx.inspection.views import QuantizerView, fields, quantizer_nodes, views_in
from cpt_fx.meta import get_attribute
from cpt_fx.passes.verify import Verify
from cpt_fx.spec import SpecError
from cpt_fx.trial import eager_model, forward_and_backward, trial

Views = tuple[QuantizerView, ...]

PROBE = 2
"""A second width for a trial run: four levels are so few that hardly a tensor passes for quantized by accident."""
PROVABLE = int(math.log2(SAMPLE)) - 1
"""Above this width a sample has too few elements to show more levels than are allowed."""


class VerificationError(TransformError):
    """A transformed model did not quantize as it should have."""


@dataclass(frozen=True)
class Verification:
    """What was proven."""

    quantizers: int
    runs: int
    """Runs of all quantizers together."""
    widths: tuple[int, ...]
    """Widths at which levels were counted."""
    largest_ratio: float
    """The largest number of levels seen, as a part of the 2^b allowed."""
    unwitnessed: tuple[str, ...] = ()
    """Quantizers that ran, but whose levels nobody counted."""
    idle: tuple[str, ...] = ()
    """Gradient quantizers that had nothing to do: nothing before them is trained, no loss depends on them, or gradients
    were not asked for."""
    products: int = 0
    """Products that a trial run made at 2 bits: each had operands on a grid, or is listed as uncovered."""
    unknown: tuple[Unknown, ...] = ()
    """Products with operands that come from no quantizer, and that nothing lists."""
    outside: tuple[str, ...] = ()
    """Modules outside of what was transformed that multiply, with the operators."""
    notes: tuple[str, ...] = ()
    views: tuple[QuantizerView, ...] = field(default=(), repr=False)
    """What the proof rests on: every quantizer with its record, that of the trial run where there was one."""

    @property
    def proven(self) -> bool:
        """Whether the levels of every quantizer that had work to do were counted."""
        return not (self.unwitnessed or self.unknown)

    def __str__(self) -> str:
        """Say it in a few lines."""
        levels = "no levels counted"
        if self.widths:
            levels = f"levels counted at widths {', '.join(map(str, self.widths))}: never more than 2^b levels"
            percent = math.ceil(100 * self.largest_ratio)
            levels += f", at most {percent} % of them" if percent < 100 else ""
        first = f"{self.quantizers - len(self.idle)} quantizers ran, {self.runs} times in total; {levels}"
        return "\n".join((first, *self.notes))

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as plain data."""
        names = (
            "proven",
            "quantizers",
            "runs",
            "widths",
            "largest_ratio",
            "unwitnessed",
            "idle",
            "products",
            "outside",
        )
        return fields(self, *names, "notes")


def verify(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool) -> Verification:
    """Check the records of a model, those of a trial run where inputs are given; raise with every problem found."""
    modules, views = graphs(model), views_in(model)
    problems = [
        *_broken_promises(modules),
        *_wrong_widths(modules, views),
        *_bad_ranges(views),
        *_too_many_levels(views),
    ]
    seen = Seen()
    if args or kwargs:
        views, more, seen = _try(model, args, kwargs, gradients)
        list_what_runs(model, seen)
        problems += [problem for problem in more if problem not in problems]
    working, idle = _parted(graphs(model), views, gradients)
    problems += _never_ran(working, gradients)
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise VerificationError(f"{len(problems)} problem{'s' * (len(problems) > 1)} with quantization:{listed}")
    proof = _summary(views, working, idle, gradients, tried=bool(args or kwargs))
    notes = [*proof.notes, *seen.notes, *(f"outside of what was transformed: {name}" for name in seen.outside)]
    return replace(proof, products=seen.products, unknown=seen.unknown, outside=seen.outside, notes=tuple(notes))


def _try(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool
) -> tuple[Views, list[str], Seen]:
    """Run at the current widths, then at `PROBE` bits under a census; return what was recorded and what is wrong."""
    inner = eager_model(model)
    with trial(model):
        for module in graphs(model):
            for _, quantizer in quantizer_nodes(module.graph):
                get_attribute(module, quantizer.record).zero_()
        forward_and_backward(inner, args, kwargs, gradients=gradients)
        before = views_in(model)
        problems = [*_bad_ranges(before), *_not_finite(before)]
        with ExitStack() as stack:
            for state in {id(found): found for found in map(state_of, graphs(model))}.values():
                stack.enter_context(state.at(PROBE))
            seen = stack.enter_context(census(model))
            forward_and_backward(inner, args, kwargs, gradients=gradients)
        views = views_in(model)
    return views, [*problems, *_too_many_levels(views), *seen.problems, *map(str, seen.unknown)], seen


def _broken_promises(modules: list[fx.GraphModule]) -> Iterator[str]:
    """Check the graph as it is now: a quantizer that runs, but that nothing reads, has a record as any other."""
    for module in modules:
        try:
            Verify()(module)
        except SpecError as error:
            yield str(error).replace("\n", "\n  ")


def _wrong_widths(modules: list[fx.GraphModule], views: Views) -> Iterator[str]:
    """Compare the width each quantizer reads with what its dial says for the schedule's position."""
    for view in views:
        state = state_of(modules[view.graph])
        if state.schedule is None or state.forced is not None:
            continue
        expected = state.width(view.dial, training=state.root.training)
        if expected != view.bits:
            mode = f"{'training' if state.root.training else 'evaluation'} at step {state.schedule.position}"
            yield f"{view} is at {view.bits} bits; for {mode} it should be at {expected}"


def _bad_ranges(views: Views) -> list[str]:
    return [
        f"{view.layer}: the running range of {view.operand} is {view.range}: a NaN or an infinity went through it"
        for view in views
        if view.range is not None and not all(map(math.isfinite, view.range))
    ]


def _not_finite(views: Views) -> list[str]:
    return [
        f"{view.layer}: the running range of {view.operand} is as it was: a NaN or an infinity came to it"
        for view in views
        if view.skipped
    ]


def _too_many_levels(views: Views) -> list[str]:
    return [
        f"{view} showed {count} distinct levels at {bits} bits, {2**bits} are allowed: it does not quantize"
        for view in views
        for bits, count in view.levels.items()
        if count > 2**bits
    ]


def _parted(modules: list[fx.GraphModule], views: Views, gradients: bool) -> tuple[Views, Views]:
    """Tell quantizers that have work to do from gradient quantizers of which no run is expected.

    Gradients were not asked for, or nothing before the quantizer is trained, or the loss does not depend on it: a
    forward pass went through it, gradients reached others, and none came here.
    """
    backward = _went_backward(views)
    trained = {
        (index, node.name) for index, module in enumerate(modules) for node in ([] if backward else _trained(module))
    }
    working: list[QuantizerView] = []
    idle: list[QuantizerView] = []
    for view in views:
        expected = gradients and (not view.waited if backward else (view.graph, view.node) in trained)
        (working if expected or view.times_run or view.role != "gradient" else idle).append(view)
    return tuple(working), tuple(idle)


def _went_backward(views: Views) -> bool:
    return any(view.role == "gradient" and view.times_run for view in views)


def _never_ran(working: Views, gradients: bool) -> list[str]:
    silent = [view for view in working if not view.times_run]
    problems = [f"{view} never ran" for view in silent]
    if gradients and not _went_backward(working) and any(view.role == "gradient" for view in silent):
        problems.append("no gradient quantizer ran at all: without a backward pass, ask for verify(gradients=False)")
    return problems


def _trained(module: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose value depends on something that requires a gradient, as far as the graph shows it."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        own: Any = get_attribute(module, str(node.target)) if node.op in ("get_attr", "call_module") else None
        tensors = own.parameters() if isinstance(own, nn.Module) else [own] if isinstance(own, torch.Tensor) else []
        if any(used in found for used in node.all_input_nodes) or any(tensor.requires_grad for tensor in tensors):
            found.add(node)
    return found


def _summary(views: Views, working: Views, idle: Views, gradients: bool, *, tried: bool) -> Verification:
    ratios = [count / 2**bits for view in working for bits, count in view.levels.items()]
    widths = sorted({bits for view in working for bits in view.levels})
    blind = tuple(view.node for view in working if not view.levels and (tried or 0 < view.bits < FULL_PRECISION))
    notes = []
    if blind:
        named = ", ".join(blind[:3]) + ", ..." * (len(blind) > 3)
        notes.append(
            f"levels were not witnessed for {len(blind)} quantizers ({named}): "
            "they ran, but compiled, on another device than the CPU, or on values that are not finite"
        )
    if not widths and not blind:
        notes.append("every width stands at full precision: nothing was rounded")
    if any(bits > PROVABLE for bits in widths):
        notes.append(f"levels are counted in {SAMPLE} elements: that proves widths up to {PROVABLE} bits, not above")
    skipped = [f"{view.layer} ({view.operand}, {view.skipped})" for view in working if view.skipped]
    if skipped:
        notes.append(f"batches that were not finite, from which no running range learned, came to {', '.join(skipped)}")
    if idle:
        why = "nothing before them is trained, or no loss depends on them" if gradients else "not asked for"
        notes.append(f"{len(idle)} gradient quantizers left out: {why}")
    return Verification(
        quantizers=len(views),
        runs=sum(view.times_run for view in views),
        widths=tuple(widths),
        largest_ratio=max(ratios, default=0.0),
        unwitnessed=blind,
        idle=tuple(sorted(view.node for view in idle)),
        notes=tuple(notes),
        views=views,
    )
