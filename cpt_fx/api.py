"""`transform`: a model and a schedule in, the same model with cyclic precision out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from cpt_fx.bodies import graphs_of
from cpt_fx.capture import Examples, prepared
from cpt_fx.capture.captured import WHOLE, traced_view
from cpt_fx.capture.memory import run_aside
from cpt_fx.capture.tree import own_tree, plain_tree
from cpt_fx.errors import TransformError
from cpt_fx.history import History, joined
from cpt_fx.layer_state import PREFIX
from cpt_fx.meta import CALLED, STATE, Uncovered
from cpt_fx.operators import HIDING
from cpt_fx.overrides import Pattern
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import Recipe
from cpt_fx.result import PART, adopt
from cpt_fx.schedules.base import Schedule
from cpt_fx.session import Session
from cpt_fx.standalone import Standalone, standalone, the_one_in, transformed_in
from cpt_fx.trial import eager_model, trial

WRAPPERS = ("OptimizedModule", "DataParallel")
"""Modules that go around a transformed model, not into it: by name, since torch's compiler is slow to import."""


def transform(
    model: nn.Module | ExportedProgram,
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
    prove: bool = True,
) -> nn.Module:
    """Return `model` with quantizers on weights, activations and gradients whose widths follow `schedule`.

    The model is not modified. The result shares its parameters and buffers under the same names; call
    `schedule.step()` after each optimizer step, and `cpt_fx.revert(result)` to get the plain model back.

    Args:
        model: any module, a `torch.fx.GraphModule`, a `torch.export.ExportedProgram`, or a module inside
            `DistributedDataParallel`, which the result is then inside of, too.
        schedule: what the widths do over the run; one schedule may drive several models.
        recipe: what is quantized how: a `Recipe`, the name of a preset, or None for `recipes.default()`.
        example_inputs: positional arguments the model is called with. `"export"` needs them; with `"dynamo"` they
            capture the graph now instead of at the first call; with `"symbolic"` they fix arguments that the code
            branches on.
        example_kwargs: keyword arguments the model is called with.
        capture: `"symbolic"` (torch.fx), `"dynamo"` (whatever the code does), `"export"` (by Dynamo, and an error if
            the example inputs do not run in one graph), or `"auto"`: torch.fx where its graph provably does what the
            model does and hides nothing, else Dynamo.
        exclude: module names, globs or types left in full precision.
        overrides: name, glob or type -> fixed bits (`8`, `(8, 8, 8)`), an offset (`"+2"`), a schedule of its own, a
            `Rule`, a `Recipe`, or a mapping of `bits`, `offset`, `schedule`, `input` (or `activation`), `weight`,
            `bias`, `gradient`.
        execution: `"simulated"` in floating point, or `"integer"`: what the formats allow is multiplied on integers at
            widths up to 8, and `recipe=None` stands for `recipes.integer()`.
        strict: raise where an operator that multiplies stays in full precision without having been excluded; with
            `execution="integer"` also where a quantized product is not lowered.
        prove: where example inputs are given, prove with them that the result is the model at 32 bits and quantizes
            below, as `inspect(result).verify(*inputs)` does. `VerificationError` says what is wrong.
    """
    if not isinstance(overrides, (Mapping, type(None))):
        raise TypeError(
            f"overrides must map module names, globs or types to what is different there, got {overrides!r}"
        )
    pipeline = Pipeline.standard(recipe=recipe, exclude=exclude, overrides=overrides, execution=execution)
    examples = examples_of(example_inputs, example_kwargs)
    return transform_with(pipeline, model, schedule, examples, capture, strict, prove)


def transform_with(
    pipeline: Pipeline,
    model: nn.Module | ExportedProgram,
    schedule: Schedule,
    examples: Examples | None,
    frontend: str,
    strict: bool,
    prove: bool,
) -> nn.Module:
    """Transform a model with a given pipeline: what `transform` and `Pipeline.transform` come down to."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    _check(inner, schedule)
    frontend, plain, notes = prepared(frontend, inner, examples)
    root = own_tree(plain)
    session = Session(root, pipeline.following(schedule), frontend, notes, strict=strict)
    adopt(root, session)
    session.begin(examples)
    if PART not in root.__dict__:
        # Torch's own, with nothing in it that multiplies: no call of it would ever be looked at.
        raise TransformError(f"there is nothing to quantize in {session.kind}")
    if pipeline.binds:
        schedule.bind(root)
        assert session.state.schedule is schedule
    session.reminder.watch(session, plain, root)
    if session.frontend == "dynamo" and examples is not None:
        session.examples = True
        with trial(root):
            run_aside(root, *examples)
            if frontend == "export":
                session.engine.demand_one_graph(*examples)
        session.examples = False
    if prove and examples is not None and not any(tensor.is_meta for tensor in root.parameters()):
        from cpt_fx.inspection.verification import prove as prove_it  # which needs this module

        prove_it(root, *examples, source=plain)
    return _rewrapped(model, root) if isinstance(model, nn.parallel.DistributedDataParallel) else root


def examples_of(args: Any, kwargs: Any) -> Examples | None:
    """Return what a model is called with, if that is given; refuse what is not in the form of a call."""
    if args is not None and not isinstance(args, tuple):
        raise TypeError(f"example_inputs must be a tuple of the model's arguments, got {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"example_kwargs must be a dict of the model's arguments by name, got {type(kwargs).__name__}")
    return None if args is None and kwargs is None else Examples(args or (), kwargs or {})


def _rewrapped(wrapper: nn.parallel.DistributedDataParallel, inner: nn.Module) -> nn.Module:
    """Put a transformed model in the place of the plain one: the parameters, and what averages them, are the same."""
    new = object.__new__(type(wrapper))
    new.__dict__ = {**wrapper.__dict__, "_modules": {**wrapper._modules, "module": inner}}
    return new


def revert(model: nn.Module) -> nn.Module:
    """Return the plain model of a transformed one: a tree of the user's classes, with what the result holds now.

    The modules are new, parameters and buffers are shared. The result, and the model that was given to `transform`,
    stay as they are. Of a model that contains transformed parts, these are taken back.
    """
    for _, found in transformed_in(model):
        if isinstance(found, Standalone):
            raise TransformError(
                f"this graph of {found.kind} stands alone, without the model's own modules: take cpt_fx.revert(result) "
                "of what it was made of, which shares its tensors"
            )
        found.reminder.rest()
    return plain_tree(eager_model(model))


def graphs(model: nn.Module) -> list[fx.GraphModule]:
    """Return the rewritten graphs of a transformed model, those inside others after the one they are in.

    A model that was captured by Dynamo has those found so far: none before its first call.
    """
    return [graph for _, found in transformed_in(model) for graph in found.graphs()]


def single_graph(
    result: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: dict[str, Any] | None = None,
    *,
    dynamic: bool = True,
) -> fx.GraphModule:
    """Return a transformed model as one `torch.fx.GraphModule`, as export needs it.

    A model that was captured by torch.fx or torch.export is one already, and is returned. One that was captured by
    Dynamo is captured again from a run on examples, in one graph that has its signature and returns what it returns.
    Parameters, buffers and running ranges are shared with the result; the widths follow the same schedule. The run
    leaves no trace.

    The graph is the one for the mode that the result is in now: where its code asks for the mode, the graph checks it
    when it runs. Under `torch.no_grad()` it is the one for a run without gradients. Plain values among the arguments
    are part of the graph, and are checked, too; attributes and globals that the code reads are those of now.

    Args:
        result: what `transform` returned, or a module around it.
        example_inputs: positional arguments the model is called with; needed where Dynamo captured it.
        example_kwargs: keyword arguments the model is called with.
        dynamic: let the sizes of the examples vary, as far as the code does; otherwise the graph is for these alone.

    Raises:
        CaptureError: where the model is not one graph, with file, line and reason of every break.
    """
    found = the_one_in(result, "single_graph")
    if isinstance(found, Standalone):
        return found.module
    found.reminder.call(found)  # by whoever trains the graph
    examples = examples_of(example_inputs, example_kwargs)
    if found.frontend != "dynamo":
        traced_view(found, found.root)  # captured again, where the model has changed since its last call
    if WHOLE in found.traced:
        inside = graphs_of(found.traced[WHOLE].view)
        if not any(CALLED in node.meta for graph in inside for node in graph.graph.nodes):
            return standalone(found)
        # What hooks surround has a graph of its own, which Dynamo puts in its place.
    if examples is None:
        raise TypeError(
            "Dynamo captures a model from a run: pass single_graph(result, example_inputs) a tuple of the model's "
            "arguments, or example_kwargs"
        )
    from cpt_fx.dynamo.single import single_graph_of  # torch's compiler is slow to import

    return single_graph_of(found, *examples, dynamic=dynamic)


def history_of(model: nn.Module) -> History:
    """Return how a model was transformed; of one that contains transformed parts, what there is to say of all."""
    found = transformed_in(model)
    rest = tuple(
        Uncovered(name, type(module).__name__, "outside of what was transformed") for name, module in _rest(model)
    )
    if len(found) == 1 and not found[0][0] and not rest:
        return found[0][1].history()
    kind = type(eager_model(model)).__name__
    return joined([(path, result.history()) for path, result in found], rest, kind)


def _rest(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what stands outside of everything transformed and may multiply: whatever has parameters, norms aside."""
    inside: set[int] = set()
    rest: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if PART in module.__dict__:
            inside |= {id(part) for part in module.modules()}
        owns = not type(module).__module__.startswith("torch.") and any(
            p is not None for p in module._parameters.values()
        )
        if id(module) not in inside and (owns or isinstance(module, HIDING)):
            rest.append((name, module))
    return rest


def _check(model: object, schedule: object) -> None:
    """Refuse what cannot work before anything is done."""
    if not isinstance(model, (nn.Module, ExportedProgram)):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if type(model).__name__ in WRAPPERS:
        raise TypeError(f"transform the model first and wrap the result; got it inside {type(model).__name__}")
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule must be a schedule such as cpt_fx.schedules.named(...), got {type(schedule).__name__}"
        )
    if isinstance(model, nn.Module):
        _check_untouched(model)
    if torch.is_inference_mode_enabled():
        raise TransformError("transform was called under torch.inference_mode(): its tensors could never be trained")
    if not torch.is_grad_enabled():
        raise TransformError("transform was called under torch.no_grad(): leave it, the result is made for training")


def _check_untouched(model: nn.Module) -> None:
    """Refuse a model that has our state already."""
    part = next((module.__dict__[PART] for module in model.modules() if PART in module.__dict__), None)
    if part is not None:
        raise TransformError(
            f"this {part.session.kind} is transformed already. Take cpt_fx.revert(model) to transform it anew, or "
            "schedule.bind(model) to drive it by another schedule"
        )
    taken = next((name for name in model.state_dict() if PREFIX in name or f"{STATE}." in name), None)
    if taken is not None or hasattr(model, STATE):
        raise TransformError(
            f"{type(model).__name__} has a part called {taken or STATE!r}, a name under which cpt_fx keeps its state: "
            "rename it"
        )
