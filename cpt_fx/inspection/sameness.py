"""Compare a result at 32 bits with the plain model: run both under the same conditions, compare everything bitwise."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from cpt_fx.capture.base import MODULE_OWN
from cpt_fx.capture.dry_run import called, dry_run, eager_model, tensors_in
from cpt_fx.capture.tree import plain_tree
from cpt_fx.common.torch_private import TorchDispatchMode, pytree
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.inspection.asking import GRADIENTS, TRAINING, asked
from cpt_fx.inspection.leaves import (
    ABSENT,
    GRADIENT,
    Found,
    close_in,
    difference,
    echoed_in,
    kept,
    leaves,
    scaled,
    unsteady_in,
)
from cpt_fx.ir.history import History
from cpt_fx.ir.layer_state import PREFIX
from cpt_fx.ir.result import PART, plain_class, sessions_in

TOLD = 10
"""How many differences are listed one by one."""
TURNS = 3
"""Number of perturbed, or repeated, runs of the plain model: in a single one a value may stay the same by chance."""
_CONTAINERS = (list, dict, set, deque)


class Mode(NamedTuple):
    """The mode of a run: training or evaluation, with or without gradients."""

    training: bool
    gradients: bool

    def __str__(self) -> str:
        """Return the mode in words."""
        return f"in {'training' if self.training else 'evaluation'}{'' if self.gradients else ' without gradients'}"


MODES = (Mode(True, True), Mode(False, False), Mode(True, False), Mode(False, True))


class Inputs(NamedTuple):
    """The arguments of both models, and the modes without a backward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stuck: Mapping[Mode, Exception | None] = MappingProxyType({})
    """Modes in which no backward pass is run, with the error that it raised in the plain model, if any."""


@dataclass(frozen=True)
class Sameness:
    """The outcome of comparing a result with the plain model."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    """The modes in which both ran and were compared."""
    stuck: bool = False
    """Whether the backward pass of the plain model itself raises."""


@dataclass
class RunResult:
    """What one run produced."""

    mode: Mode
    failed: Exception | None = None
    stuck: Exception | None = None
    """The error that the backward pass raised."""
    found: dict[str, Any] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    """Which modes its code queried: `TRAINING`, `GRADIENTS`."""


Needed = Callable[[Mode, list[RunResult]], bool]
"""Whether to run in a mode, given the results of the modes before."""


def compare(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: bool,
    history: Callable[[], History], source: nn.Module | None = None, rested: Set[int] = frozenset(),
) -> Sameness:  # fmt: skip
    """Run a transformed model at 32 bits and the plain one, in every mode, from the same state, and compare.

    Each runs in one mode after the other, so that changes that a run leaves in the model show in the next. `rested` are
    the graphs that have not run yet.
    """
    inner = eager_model(model)
    source = plain_tree(inner) if source is None else eager_model(source)
    modes = [mode for mode in MODES if gradients or not mode.gradients]
    is_dynamos = "dynamo" in history().frontend
    needed = partial(_needed, is_dynamos=is_dynamos) if gradients else None
    call, theirs = _runs_of_plain(source, Inputs(args, kwargs), modes, needed)
    ours = _runs_of_result(inner, call, [run.mode for run in theirs], is_dynamos)
    # Code in a graph may query modes that the plain model does not; a graph that has not run may be for another mode.
    if len(ours) < len(modes) and (rested or _questions(ours) - _questions(theirs)):
        call, theirs = _runs_of_plain(source, call, modes)
        ours = _runs_of_result(inner, call, modes, is_dynamos=True)
    as_it_is = [pair for pair in zip(ours, theirs, strict=True) if pair[0].mode.training == inner.training]
    if all(mine.failed is not None and other.failed is not None for mine, other in as_it_is):
        raise next(mine.failed for mine, _ in as_it_is if mine.failed is not None)
    return _judged(ours, theirs, source, call, history())


def _judged(
    ours: list[RunResult], theirs: list[RunResult], source: nn.Module, call: Inputs, known: History
) -> Sameness:
    """Report differences, except those that summation order explains or that occur between runs of the plain model."""
    notes: list[str] = []
    modes = [run.mode for run in theirs]
    found = _differences(ours, theirs)
    came = [run.found for run in ours], [run.found for run in theirs]
    close = close_in(found, *came)
    if found.keys() - close.keys():
        close |= echoed_in(found, *came, _moved(source, call, modes), source.parameters())
    decomposed = any(report.name == "decompose" and report.changed for report in known.reports)
    if decomposed and found.keys() - close.keys():
        close |= close_in(found, *came, _coarsest(source, call, modes))
    if close:
        if not decomposed:
            alone = _alone(source, call, modes) if "dynamo" in known.frontend else theirs
            close = _without(close, _differences(alone, ours))
        found = _without(found, close)
        _note(notes, "at 32 bits {} as in the plain model up to float rounding, not to the bit", close)
    if found:
        unstable = unsteady_in(found, *came, [_again(source, call, modes) for _ in range(TURNS)])
        found = _without(found, unstable)
        _note(notes, "two runs of the plain model itself differ: {} could not be compared", unstable)
    left = [f"at 32 bits, {modes[place]}: {how}" for (place, _), how in found.items()]
    for one in theirs:
        if one.stuck is not None:
            notes.append(f"{one.mode} gradients could not be compared: the plain model {_said(one.stuck)}")
        if one.failed is not None and not left:
            notes.append(f"{one.mode} neither the plain model nor the result runs on these inputs: {_said(one.failed)}")
    more = [f"at 32 bits it differs from the plain model in {len(left) - TOLD} more places"] if left[TOLD:] else []
    compared = tuple(str(one.mode) for one in theirs if one.failed is None)
    return Sameness((*left[:TOLD], *more), tuple(notes), compared, any(one.stuck is not None for one in theirs))


def _questions(runs: Iterable[RunResult]) -> set[str]:
    return {question for run in runs for question in run.asked}


def _needed(mode: Mode, known: list[RunResult], is_dynamos: bool) -> bool:
    """Whether a mode may differ from those that ran: code cannot depend on a mode that it does not query.

    Training with gradients and evaluation without are always run. Where code queries its mode, Dynamo captures a graph
    for each answer, which is proven once it exists.
    """
    questions = _questions(known)
    failed = any(run.failed is not None for run in known)
    asks = GRADIENTS in questions or (TRAINING in questions and mode.gradients and not is_dynamos)
    return mode.training == mode.gradients or asks or failed


def _runs_of_plain(
    source: nn.Module, call: Inputs, modes: list[Mode], needed: Needed | None = None
) -> tuple[Inputs, list[RunResult]]:
    """Run the plain model; if its backward pass raises in a mode, run all again without a backward pass in that mode.

    Until it raises, a backward pass recomputes checkpointed layers, which updates their buffers. How many it recomputes
    differs between the plain model and the result.
    """
    with dry_run(source):
        runs = _runs(source, call, modes, needed=needed)
    stuck = {run.mode: run.stuck for run in runs if run.stuck is not None}
    if stuck.keys() <= call.stuck.keys():
        return call, runs
    return _runs_of_plain(source, call._replace(stuck={**call.stuck, **stuck}), modes, needed)


def _runs_of_result(model: nn.Module, call: Inputs, modes: list[Mode], is_dynamos: bool) -> list[RunResult]:
    """Run a result at 32 bits.

    Queries are not recorded under Dynamo: its guards query whatever the plain code does, and its tracing everything.
    """
    with dry_run(model), ExitStack() as stack:
        for _, part in sessions_in(model):
            stack.enter_context(part.state.at(FULL_PRECISION))
        return _runs(model, call, modes, watched=not is_dynamos)


def _moved(source: nn.Module, call: Inputs, modes: list[Mode]) -> list[list[dict[str, Any]]]:
    """Return what the plain model produces in a few runs with perturbed trained tensors, or else perturbed inputs."""
    moved = []
    as_given = {id(one) for one in tensors_in(call[:2])}  # tensors that could not be copied must not be scaled
    for turn in range(TURNS):
        given = _copied(call)
        copied = [one for one in tensors_in(given[:2]) if id(one) not in as_given]
        trained = [*source.parameters(), *(one for one in copied if one.requires_grad)]
        with dry_run(source):
            scaled(trained or copied, turn)
            moved.append([run.found for run in _runs(source, given, modes)])
    return moved


def _coarsest(source: nn.Module, call: Inputs, modes: list[Mode]) -> float:
    """Return the eps of the coarsest half-precision type in which the plain model computes; 0 if there is none."""
    with dry_run(source), _Types() as types:
        _runs(source, call, modes)
    return max((torch.finfo(kind).eps for kind in types.halves), default=0.0)


class _Types(TorchDispatchMode):
    """Collects the half-precision types that operators return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.halves: set[torch.dtype] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have compilers ignore this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note the types of its results."""
        result = func(*args, **(kwargs or {}))
        self.halves |= {one.dtype for one in tensors_in(result) if one.dtype in (torch.float16, torch.bfloat16)}
        return result


def _again(source: nn.Module, call: Inputs, modes: list[Mode]) -> list[dict[str, Any]]:
    with dry_run(source):
        return [run.found for run in _runs(source, call, modes)]


def _alone(source: nn.Module, call: Inputs, modes: list[Mode]) -> list[RunResult]:
    """Run the plain model under Dynamo: some code computes in another order when it is compiled."""
    from cpt_fx.capture.dynamo.engine import default_stance  # torch's compiler is slow to import

    with dry_run(source), default_stance():
        source.compile(backend="eager")
        return _runs(source, call, modes)


def _without(found: Found, others: Found) -> Found:
    return {key: how for key, how in found.items() if key not in others}


def _note(notes: list[str], text: str, found: Found) -> None:
    names = list(dict.fromkeys(name for _, name in found))
    if names:
        notes.append(text.format(", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)))


def _runs(
    model: nn.Module, call: Inputs, modes: list[Mode], *, watched: bool = True, needed: Needed | None = None
) -> list[RunResult]:
    """Run a model in one mode after the other, skipping those that the results so far make unnecessary."""
    flags = [(module, module.training) for module in model.modules()]
    as_given = model.training
    runs: list[RunResult] = []
    for mode in modes:
        if needed is not None and not needed(mode, runs):
            continue
        model.train(mode.training)
        for module, flag in flags if mode.training == as_given else ():
            module.training = flag
        # Not the seed at capture: a random number that became a constant of a graph must not be drawn again here.
        _seed(model, 271_828 + MODES.index(mode))
        runs.append(_run(model, _copied(call), mode, watched))
    return runs


def run_in(model: nn.Module, call: Inputs, modes: list[Mode]) -> bool:
    """Run a model in some modes; raise what it raises, and return whether any run produced gradients."""
    runs = _runs(model, call, modes, watched=False)
    for error in (error for run in runs for error in (run.failed, run.stuck) if error is not None):
        raise error
    return any(name.startswith(GRADIENT) for run in runs for name in run.found)


def _seed(model: nn.Module, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    for device in {tensor.device for tensor in model.parameters() if tensor.is_cuda}:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _copied(call: Inputs) -> Inputs:
    """Copy the arguments, since code may write to them; modules, and what cannot be copied, are passed as they are."""
    memo: dict[int, Any] = {}
    for _, leaf in leaves(call[:2], ""):
        if isinstance(leaf, Tensor) and not leaf.is_leaf:
            memo[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
    memo |= {id(module): module for module in pytree.tree_leaves(call[:2]) if isinstance(module, nn.Module)}
    try:
        args, kwargs = copy.deepcopy(call[:2], memo)
    except Exception:
        return call
    return call._replace(args=args, kwargs=kwargs)


def _run(model: nn.Module, call: Inputs, mode: Mode, watched: bool) -> RunResult:
    """Run a model, with gradients also its backward pass; collect everything it returned, wrote, stored or drew."""
    args, kwargs, stuck = call
    held = _held(model)
    versions = {name: one._version for name, one in model.named_parameters()}
    run = RunResult(mode, stuck=stuck.get(mode))
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(mode.gradients):
            with asked() if watched else nullcontext(set[str]()) as run.asked:
                output = called(model, args, kwargs)
            stored = {name: value for name, value in _held(model).items() if _is_new(held.get(name, ABSENT), value)}
            for name, value in (("the output", output), *stored.items()):
                run.found |= {path: kept(leaf) for path, leaf in leaves(value, name)}
            if mode.gradients and mode not in stuck:
                try:
                    run.found |= _gradients(model, [output, *stored.values()], (args, kwargs))
                except Exception as error:
                    run.stuck = error
    except Exception as error:
        run.failed = error
        return run
    run.found |= dict(leaves((args, kwargs), "the input"))
    run.found["the state of torch's random numbers"] = torch.get_rng_state()
    run.found["the state of Python's random numbers"] = random.getstate()
    state: Any = numpy.random.get_state()
    run.found["the state of numpy's random numbers"] = (state[1].tobytes(), *state[2:])
    # All buffers, since batch norm updates its statistics without a version bump. A parameter written like that changes
    # what the next run returns.
    run.found |= {f"buffer {name}": kept(one) for name, one in model.named_buffers() if not _is_ours(name)}
    changed = ((name, one) for name, one in model.named_parameters() if versions.get(name) != one._version)
    run.found |= {f"parameter {name}": kept(one) for name, one in changed if not _is_ours(name)}
    return run


def _is_ours(name: str) -> bool:
    return name.rpartition(".")[2].startswith(PREFIX)


def _held(model: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a model's modules, except of torch's own layers."""
    return {
        f"attribute {path}.{name}".replace(" .", " "): value
        for path, module in model.named_modules()
        if not plain_class(type(module)).__module__.startswith("torch.nn.")
        for name, value in vars(module).items()
        if name not in MODULE_OWN and not name.startswith(("__", PREFIX, PART, "_compiled", "_is_full"))
    }


def _is_new(before: Any, now: Any) -> bool:
    """Whether an attribute was assigned, or is a container that may have been filled."""
    return now is not before or (isinstance(now, _CONTAINERS) and len(now) > 0)


def _gradients(model: nn.Module, outputs: list[Any], given: Any) -> dict[str, Any]:
    """Return the gradients of everything that was produced, with every element weighted by its own random number.

    `torch.autograd.grad` accumulates nothing: it neither writes `.grad` nor runs hooks that step an optimizer. A plain
    sum would send the same number back from every element, which hides differences.
    """
    inputs = [leaf for _, leaf in leaves(given, "") if isinstance(leaf, Tensor) and leaf.requires_grad]
    held = (*model.named_parameters(), *model.named_buffers(), *_held(model).items())
    named = [(name, one) for name, one in held if PREFIX not in name]
    named += [(f"input {place}", one) for place, one in enumerate(inputs)]
    wanted = {f"{GRADIENT}{name}": one for name, one in named if isinstance(one, Tensor) and one.requires_grad}
    ends = list({id(out): out for out in _ends(outputs)}.values())
    if not ends or not wanted:
        return {}
    chance = torch.Generator().manual_seed(len(ends))
    weights = [torch.randn(out.shape, generator=chance, dtype=_drawn(out)).to(out) for out in ends]
    found = torch.autograd.grad(ends, list(wanted.values()), weights, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _ends(outputs: list[Any]) -> Iterator[Tensor]:
    for _, leaf in leaves(outputs, ""):
        if isinstance(leaf, Tensor) and leaf.requires_grad and (leaf.is_nested or leaf.layout is torch.strided):
            yield from leaf.unbind() if leaf.is_nested else (leaf,)


def _drawn(tensor: Tensor) -> torch.dtype:
    return torch.complex64 if tensor.is_complex() else torch.float32


def _differences(ours: list[RunResult], theirs: list[RunResult]) -> Found:
    """Return everything that differs, and how."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return {(place, name): how for place, pair in pairs for name, how in _apart(*pair)}


def _apart(ours: RunResult, theirs: RunResult) -> Iterator[tuple[str, str]]:
    if ours.failed is not None or theirs.failed is not None:
        if ours.failed is None or theirs.failed is None:
            yield "", f"the result {_said(ours.failed)}, the plain model {_said(theirs.failed)}"
        return
    if ours.stuck is not None and theirs.stuck is None:
        yield "", f"the backward pass of the result {_said(ours.stuck)}, that of the plain model runs"
    for name in dict.fromkeys((*theirs.found, *ours.found)):
        if name.startswith(GRADIENT) and (ours.stuck is not None or theirs.stuck is not None):
            continue
        how = difference(ours.found.get(name, ABSENT), theirs.found.get(name, ABSENT))
        if how:
            yield name, f"{name} {how}"


def _said(error: Exception | None) -> str:
    return "runs" if error is None else f"raises: {(str(error).splitlines() or [''])[0]:.300}"
