"""`transform`: a model and a schedule in, the same model with cyclic precision out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.capture import capture as capture_model
from cpt_fx.errors import TransformError, check_choice
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.meta import QUANTIZER, SITE, STATE, Uncovered
from cpt_fx.overrides import Pattern
from cpt_fx.pass_base import Report
from cpt_fx.passes.bind import Bind
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import Recipe
from cpt_fx.runtime import Precision
from cpt_fx.schedules.base import Schedule

LOGGER = logging.getLogger("cpt_fx")

HISTORY = "_cpt_fx_history"
"""Attribute of a transformed module that says how it came about."""


@dataclass(frozen=True)
class History:
    """How a model was transformed. `source` is the plain model: not a submodule, its tensors are shared."""

    frontend: str
    notes: tuple[str, ...]
    reports: tuple[Report, ...]
    pipeline: str
    source: nn.Module

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """Everything that multiplies and stays in full precision."""
        return tuple(item for report in self.reports for item in report.uncovered)


WRAPPERS = ("OptimizedModule", "DataParallel", "DistributedDataParallel")
"""Modules that go around a transformed model, not into it: by name, since torch's compiler is slow to import."""

EXECUTIONS = ("simulated",)
"""How quantized products may run."""


def transform(
    model: nn.Module,
    schedule: Schedule,
    *,
    recipe: Recipe | str | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    capture: str = "auto",
    exclude: Pattern | Iterable[Pattern] = (),
    overrides: Mapping[Pattern, Any] | None = None,
    execution: str = "simulated",
    strict: bool = False,
) -> nn.Module:
    """Return `model` with quantizers on weights, activations and gradients whose widths follow `schedule`.

    The model is not modified. The result shares its parameters and buffers under the same names; call
    `schedule.step()` after each optimizer step, and `cpt_fx.revert(result)` to get the plain model back.

    Args:
        model: any module, or a `torch.fx.GraphModule`.
        schedule: what the widths do over the run; one schedule may drive several models.
        recipe: what is quantized how: a `Recipe`, the name of a preset, or None for `recipes.default()`.
        example_inputs: positional arguments the model is called with. Needed only where its code branches on an
            argument whose default is not the value it will get.
        example_kwargs: keyword arguments the model is called with.
        capture: `"symbolic"`, or `"auto"` for the first frontend that is faithful.
        exclude: module names, globs or types left in full precision.
        overrides: name, glob or type -> fixed bits (`8`, `(8, 8, 8)`), an offset (`"+2"`), a `Rule`, a `Recipe`, or a
            mapping of `bits`, `offset`, `input`, `weight`, `bias`, `gradient`.
        execution: `"simulated"`.
        strict: raise where an operator that multiplies stays in full precision without having been excluded.
    """
    if not isinstance(overrides, (Mapping, type(None))):
        raise TypeError(
            f"overrides must map module names, globs or types to what is different there, got {overrides!r}"
        )
    pipeline = Pipeline.standard(recipe=recipe, exclude=exclude, overrides=overrides)
    return transform_with(
        pipeline, model, schedule, example_inputs=example_inputs, example_kwargs=example_kwargs, frontend=capture,
        execution=execution, strict=strict,
    )  # fmt: skip


def transform_with(
    pipeline: Pipeline,
    model: nn.Module,
    schedule: Schedule,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    frontend: str = "auto",
    execution: str = "simulated",
    strict: bool = False,
) -> nn.Module:
    """Transform a model with a given pipeline: what `transform` and `Pipeline.transform` come down to."""
    _check(model, schedule, execution)
    if example_inputs is not None and not isinstance(example_inputs, tuple):
        raise TypeError(f"example_inputs must be a tuple of the model's arguments, got {type(example_inputs).__name__}")
    captured = capture_model(model, frontend, example_inputs, example_kwargs)
    module = captured.module
    bound = Pipeline(tuple(Bind(schedule) if isinstance(step, Bind) else step for step in pipeline))
    reports = bound.run(module)
    history = History(captured.frontend, captured.notes, reports, repr(bound), model)
    module.__dict__[HISTORY] = history
    _check_coverage(module, history, strict)
    return module


def revert(model: nn.Module) -> nn.Module:
    """Return the plain model of a transformed one, with the parameters and buffers it has now.

    It is the module that was given to `transform` (or its copy, where the result was copied or loaded).
    """
    history = history_of(model)
    plain = history.source
    source = _transformed(model)
    for path, ours in plain.named_modules():
        try:
            theirs = source.get_submodule(path)
        except AttributeError:
            continue
        for name in ours._parameters:
            if name in theirs._parameters:
                ours._parameters[name] = theirs._parameters[name]
        for name in ours._buffers:
            if name in theirs._buffers:
                ours._buffers[name] = theirs._buffers[name]
        ours.training = theirs.training
    return plain


def graphs(model: nn.Module) -> list[fx.GraphModule]:
    """Return the rewritten graphs of a transformed model."""
    return [_transformed(model)]


def history_of(model: nn.Module) -> History:
    """Return how a model was transformed."""
    history = _transformed(model).__dict__[HISTORY]
    assert isinstance(history, History)
    return history


def _transformed(model: nn.Module) -> QuantizedGraphModule:
    for module in model.modules():
        if isinstance(module, QuantizedGraphModule) and HISTORY in module.__dict__:
            return module
    raise TransformError(f"{type(model).__name__} is not transformed: call cpt_fx.transform(model, schedule) first")


def _check(model: object, schedule: object, execution: str) -> None:
    """Refuse what cannot work before anything is done."""
    check_choice("execution", execution, EXECUTIONS)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}"
            + (": transform the module it was exported from" if type(model).__name__ == "ExportedProgram" else "")
        )
    if type(model).__name__ in WRAPPERS:
        raise TypeError(f"transform the model first and wrap the result; got it inside {type(model).__name__}")
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule must be a schedule such as cpt_fx.schedules.named(...), got {type(schedule).__name__}"
        )
    if any(isinstance(module, Precision) for module in model.modules()):
        raise TransformError(
            f"this {_kind(model)} is transformed already. Take cpt_fx.revert(model) to transform it anew, or "
            "schedule.bind(model) to drive it by another schedule"
        )
    if hasattr(model, STATE):
        raise TransformError(
            f"{type(model).__name__} has a part called {STATE!r}, which is where cpt_fx keeps its state: rename it"
        )
    if torch.is_inference_mode_enabled():
        raise TransformError("transform was called under torch.inference_mode(): its tensors could never be trained")
    if not torch.is_grad_enabled():
        raise TransformError("transform was called under torch.no_grad(): leave it, the result is made for training")


def _kind(model: nn.Module) -> str:
    """Return the class of a model, of the plain one where it is transformed."""
    history = model.__dict__.get(HISTORY)
    return type(history.source if isinstance(history, History) else model).__name__


def _check_coverage(module: QuantizedGraphModule, history: History, strict: bool) -> None:
    """Refuse a result that quantizes nothing, or, if strict, not everything; log what is covered."""
    sites = {node.meta[SITE].layer for node in module.graph.nodes if SITE in node.meta}
    quantizers = sum(QUANTIZER in node.meta for node in module.graph.nodes)
    left = [item for item in history.uncovered if not item.by_choice]
    if not quantizers:
        shown = "".join(f"\n  {item}" for item in history.uncovered[:10])
        name = type(history.source).__name__ + (":" if shown else "")
        raise TransformError(f"there is nothing to quantize in {name}{shown}")
    if strict and left:
        shown = "".join(f"\n  {item}" for item in left)
        raise TransformError(f"strict=True, but {len(left)} operators or operands stay in full precision:{shown}")
    LOGGER.info(
        "%s: %d layers quantized by %d quantizers, %d excluded, %d uncovered, 1 graph (%s)",
        type(history.source).__name__, len(sites), quantizers, len(history.uncovered) - len(left), len(left),
        history.frontend,
    )  # fmt: skip
    ineffective = [note for report in history.reports if report.name == "annotate" for note in report.notes]
    for note in (*history.notes, *ineffective):
        LOGGER.warning("%s", note)
    for item in left:
        LOGGER.warning("in full precision: %s", item)
