"""`transform`: a model and a schedule in, the same model with cyclic precision out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from cpt_fx.capture import Examples, prepared
from cpt_fx.capture.captured import WHOLE, traced_view
from cpt_fx.capture.dry_run import dry_run, eager_model
from cpt_fx.capture.session import Session
from cpt_fx.capture.side_effects import run_aside
from cpt_fx.capture.standalone import Standalone, standalone, the_one_in, transformed_in
from cpt_fx.capture.tree import own_tree, plain_tree
from cpt_fx.errors import TransformError
from cpt_fx.ir.history import History, joined
from cpt_fx.ir.layer_state import PREFIX
from cpt_fx.ir.meta import CALLED, STATE, Uncovered
from cpt_fx.ir.result import PART, adopt
from cpt_fx.ir.subgraphs import graphs_of
from cpt_fx.operators import HIDING
from cpt_fx.overrides import Pattern
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import Recipe
from cpt_fx.schedules.base import Schedule

WRAPPERS = ("OptimizedModule", "DataParallel")
"""Wrappers to apply after the transform. Compared by class name, since torch's compiler is slow to import."""


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
    """Return `model` with quantizers on weights, activations and gradients whose bit-widths follow `schedule`.

    The model is not modified. The result shares its parameters and buffers under the same names; call
    `schedule.step()` after each optimizer step, and `cpt_fx.revert(result)` to get the plain model back.

    Args:
        model: any module, a `torch.fx.GraphModule`, a `torch.export.ExportedProgram`, or a module wrapped in
            `DistributedDataParallel`; the result is then wrapped the same way.
        schedule: sets the bit-widths over the training run; one schedule may drive several models.
        recipe: what is quantized and how: a `Recipe`, the name of a preset, or None for `recipes.default()`.
        example_inputs: positional arguments to call the model with. `"export"` needs them; with `"dynamo"` the graph
            is captured now instead of at the first call; with `"symbolic"` they give the values of arguments that the
            code branches on.
        example_kwargs: keyword arguments to call the model with.
        capture: `"symbolic"` (torch.fx), `"dynamo"` (any code), `"export"` (Dynamo, with an error if the example inputs
            do not run in one graph), or `"auto"`: torch.fx where its graph provably does what the model does and hides
            no product, else Dynamo.
        exclude: names, globs or types of modules to leave in full precision.
        overrides: name, glob or type -> fixed bits (`8`, `(8, 8, 8)`), an offset (`"+2"`), a schedule of its own, a
            `Rule`, a `Recipe`, or a mapping of `bits`, `offset`, `schedule`, `input` (or `activation`), `weight`,
            `bias`, `gradient`.
        execution: `"simulated"` (floating point), or `"integer"`: products whose formats allow it run on integers at
            bit-widths up to 8, and `recipe=None` means `recipes.integer()`.
        strict: raise if an operator that multiplies stays in full precision without having been excluded; with
            `execution="integer"` also if a quantized product is not lowered.
        prove: if example inputs are given, use them to prove that the result equals the model at 32 bits and quantizes
            below that, as `inspect(result).verify(*inputs)` does; raise `VerificationError` if it does not.
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
    """Transform a model with a given pipeline; shared by `transform` and `Pipeline.transform`."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    _check(inner, schedule)
    frontend, plain, notes = prepared(frontend, inner, examples)
    root = own_tree(plain)
    session = Session(root, pipeline.following(schedule), frontend, notes, strict=strict)
    adopt(root, session)
    session.begin(examples)
    if PART not in root.__dict__:
        # A layer of torch that multiplies nothing: `adopt` left it plain, and its calls would never reach the session.
        raise TransformError(f"there is nothing to quantize in {session.kind}")
    if pipeline.binds:
        schedule.bind(root)
        assert session.state.schedule is schedule
    session.reminder.watch(session, plain, root)
    if session.frontend == "dynamo" and examples is not None:
        session.examples = True
        with dry_run(root):
            run_aside(root, *examples)
            if frontend == "export":
                session.engine.demand_one_graph(*examples)
        session.examples = False
    if prove and examples is not None and not any(tensor.is_meta for tensor in root.parameters()):
        from cpt_fx.inspection.verification import prove as prove_it  # deferred: it imports this module

        prove_it(root, *examples, source=plain)
    return _rewrapped(model, root) if isinstance(model, nn.parallel.DistributedDataParallel) else root


def examples_of(args: Any, kwargs: Any) -> Examples | None:
    """Return the example arguments, None if none are given; raise `TypeError` unless they are a tuple and a dict."""
    if args is not None and not isinstance(args, tuple):
        raise TypeError(f"example_inputs must be a tuple of the model's arguments, got {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"example_kwargs must be a dict of the model's arguments by name, got {type(kwargs).__name__}")
    return None if args is None and kwargs is None else Examples(args or (), kwargs or {})


def _rewrapped(wrapper: nn.parallel.DistributedDataParallel, inner: nn.Module) -> nn.Module:
    """Return a copy of a wrapper around the transformed model; parameters and gradient reduction are shared."""
    new = object.__new__(type(wrapper))
    new.__dict__ = {**wrapper.__dict__, "_modules": {**wrapper._modules, "module": inner}}
    return new


def revert(model: nn.Module) -> nn.Module:
    """Return the plain form of a transformed model: a tree of the user's classes with the tensors it holds now.

    The modules are new, parameters and buffers are shared. The transformed model and the one given to `transform` are
    not changed. In a model that contains transformed parts, these are reverted.
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
    """Return the rewritten graphs of a transformed model, each followed by its subgraphs.

    For a model captured by Dynamo these are the graphs found so far: none before its first call.
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

    A model captured by torch.fx, or given as an exported program, is one graph already, which is returned. A model
    captured by Dynamo is captured again from a run on the examples, as one graph with the model's signature and output.
    Parameters, buffers and running ranges are shared with `result`; bit-widths follow the same schedule. The run has no
    side effects.

    A graph captured from a run holds for the current mode: if the code reads the mode, the graph checks it at run time.
    Under `torch.no_grad()` it is a graph without gradients. Plain values among the arguments become constants of the
    graph, which checks them, too; attributes and globals that the code reads keep their current values.

    Args:
        result: what `transform` returned, or a module that contains it.
        example_inputs: positional arguments to call the model with; needed if Dynamo captured it, or if a module inside
            it has hooks.
        example_kwargs: keyword arguments to call the model with.
        dynamic: allow other sizes than those of the examples, as far as the code does; otherwise the graph is for these
            sizes only.

    Raises:
        CaptureError: if the model is not one graph, with file, line and reason of every graph break.
    """
    found = the_one_in(result, "single_graph")
    if isinstance(found, Standalone):
        return found.root
    found.reminder.call(found)  # counts as a call: the graph may be trained in its place
    examples = examples_of(example_inputs, example_kwargs)
    if found.frontend != "dynamo":
        traced_view(found, found.root)  # traces again if the model has changed
    if WHOLE in found.traced:
        inside = graphs_of(found.traced[WHOLE].view)
        if not any(CALLED in node.meta for graph in inside for node in graph.graph.nodes):
            return standalone(found)
        # A module with hooks has a graph of its own; only Dynamo can inline it.
    if examples is None:
        raise TypeError(
            "Dynamo captures a model from a run: pass single_graph(result, example_inputs) a tuple of the model's "
            "arguments, or example_kwargs"
        )
    from cpt_fx.capture.dynamo.single import single_graph_of  # torch's compiler is slow to import

    return single_graph_of(found, *examples, dynamic=dynamic)


def history_of(model: nn.Module) -> History:
    """Return how a model was transformed, joined over all transformed parts that it contains."""
    found = transformed_in(model)
    rest = tuple(
        Uncovered(name, type(module).__name__, "outside of what was transformed") for name, module in _rest(model)
    )
    if len(found) == 1 and not found[0][0] and not rest:
        return found[0][1].history()
    kind = type(eager_model(model)).__name__
    return joined([(path, result.history()) for path, result in found], rest, kind)


def _rest(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules outside all transformed parts that may multiply: with parameters, except torch's norms."""
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
    """Raise for arguments that cannot work, before anything is done."""
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
    """Raise if a model is transformed already, or has a part with a name reserved for our state."""
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
