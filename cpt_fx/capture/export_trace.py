"""One run of torch.export over a copy of a model: what it would lose without a word is refused."""

from __future__ import annotations

import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from cpt_fx.capture.base import CaptureError, clone_tree
from cpt_fx.capture.containers import unchanged_containers
from cpt_fx.capture.export_inline import inline_regions
from cpt_fx.capture.guards import PLAIN, _refusing_functions, replaced
from cpt_fx.capture.symbolic import _TRACING
from cpt_fx.graph_module import CALL_HOOKS

_PLACEHOLDER_MOMENTUM = 0.1
"""Stands for the momentum of a batch norm that averages over all it has seen, which is a value, not a constant."""


@dataclass(frozen=True)
class Exported:
    """What an export holds: the program, its graph with every region inlined, and constants by their path."""

    program: torch.export.ExportedProgram
    module: fx.GraphModule
    dropped_checkpoints: bool = False

    @property
    def graph(self) -> fx.Graph:
        """The graph of ATen calls: flat inputs, a flat tuple of outputs."""
        return self.module.graph


def opened(program: torch.export.ExportedProgram) -> Exported:
    """Return the module of a program: buffers updated in place again, no checks, regions inlined."""
    module: Any = program.module(check_guards=False)
    inline_regions(module)
    return Exported(program, module)


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Exported:
    """Export a copy of a model in one mode, with every size of its inputs left open where its code allows that."""
    root = clone_tree(model)
    root.train(training)
    for hooks in CALL_HOOKS:
        # Those of the whole model go to the result, which calls them; traced as well, they would run twice.
        getattr(root, hooks).clear()
    for module in root.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            module.momentum = _PLACEHOLDER_MOMENTUM
    # Each input on its own: a tensor that is passed twice would be one input of the graph.
    args, kwargs = pytree.tree_map(_copy, (args, kwargs))
    try:
        with _TRACING, _unchanged_attributes(root), _refusing_what_is_lost(), unchanged_containers(model), _quiet():
            shapes = _every_size_open(root, args, kwargs)
            with _noticing_checkpoints() as checkpoints:
                program = torch.export.export(root, args, kwargs, dynamic_shapes=shapes, strict=False)
            return replace(opened(program), dropped_checkpoints=bool(checkpoints))
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_said(model, error)) from error


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def check_backward_hooks(model: nn.Module) -> None:
    """Refuse backward hooks inside a model: its modules' operators become part of the graph, calls are gone."""
    for name, module in model.named_modules():
        if name and (module._backward_hooks or module._backward_pre_hooks):
            raise CaptureError(
                f"module {name!r} ({type(module).__name__}) has a backward hook: its operators become part of the "
                "graph, where the hook would never be called"
            )


def _every_size_open(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes = torch.export.ShapesCollection()
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and value.ndim:
            shapes[value] = (torch.export.Dim.AUTO,) * value.ndim
    return shapes.dynamic_shapes(model, args, kwargs)


@contextmanager
def _unchanged_attributes(root: nn.Module) -> Iterator[None]:
    """Refuse code that stores something in a module: the export does it once, a graph would not do it at all."""
    before = {id(module): _attributes(module) for module in root.modules()}
    original = nn.Module.__setattr__

    def checked(module: nn.Module, name: str, value: Any) -> None:
        # What torch.export puts back after the trace is as it was; what the code sets is not, at this very moment.
        old = before.get(id(module), {}).get(name, _ABSENT)
        if id(module) in before and isinstance(value, PLAIN) and not _same(value, old):
            raise _stores(module, name, value)
        original(module, name, value)

    with replaced({(nn.Module, "__setattr__"): checked}):
        yield
    for module in root.modules():
        for name, value in _attributes(module).items():
            if not _same(value, before[id(module)].get(name, _ABSENT)):
                raise _stores(module, name, value)


def _stores(module: nn.Module, name: str, value: Any) -> CaptureError:
    what = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
    return CaptureError(
        f"the forward of {type(module).__name__} stores {what} in self.{name}, which a graph would not do on every "
        "call. Return it, or keep it in a buffer that is updated in place"
    )


_ABSENT = object()


def _same(value: Any, old: Any) -> bool:
    """Compare tensors and objects by identity, plain values by value; torch.export puts copies of containers back."""
    if value is old or type(value) is not type(old):
        return value is old
    if isinstance(value, (tuple, list)):
        return len(value) == len(old) and all(map(_same, value, old))
    if isinstance(value, dict):
        return list(value) == list(old) and all(map(_same, value.values(), old.values()))
    return isinstance(value, PLAIN) and bool(value == old)


def _attributes(module: nn.Module) -> dict[str, Any]:
    tensors = {**module._parameters, **module._buffers}
    plain = {key: value for key, value in vars(module).items() if not key.startswith("_") and key != "training"}
    return {**tensors, **plain}


@contextmanager
def _refusing_what_is_lost() -> Iterator[None]:
    """Refuse calls that leave nothing behind in the graph; whether gradients are on outside does not matter."""

    def manual_seed(seed: Any) -> Any:
        raise CaptureError(f"forward calls torch.manual_seed({seed}), which a graph would not do on every call")

    state = torch.random.get_rng_state()
    try:
        with replaced({(torch, "manual_seed"): manual_seed}), _refusing_functions(), torch.enable_grad():
            yield
    finally:
        torch.random.set_rng_state(state)


@contextmanager
def _noticing_checkpoints() -> Iterator[list[Any]]:
    """Notice hooks on what is saved for the backward pass: they change what is kept, not what is computed."""
    seen: list[Any] = []
    enter = saved_tensors_hooks.__enter__

    def noticed(hooks: Any) -> None:
        seen.append(hooks)
        enter(hooks)

    with replaced({(saved_tensors_hooks, "__enter__"): noticed}):
        yield seen


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing whole graphs before an error that becomes one sentence here."""
    torch_names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]
    loggers = {name: logging.getLogger(name) for name in torch_names}
    levels = {name: logger.level for name, logger in loggers.items()}
    try:
        for logger in loggers.values():
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            loggers[name].setLevel(level)


def _said(model: nn.Module, error: Exception) -> str:
    """Put an error of torch.export into a sentence, with the way out where there is one."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    said = f"torch.export cannot trace {type(model).__name__}{_line_of(error)}: {type(error).__name__}: {text}"
    if "Cache" in text and "known type" in text:
        return f"{said}. The model returns a cache, which a graph cannot hold: pass use_cache=False in example_kwargs"
    if "known type" in text:
        return f"{said}. If it is a dataclass, call torch.export.register_dataclass on it first"
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        return (
            f"{said}. Code that depends on a tensor's values cannot be one graph: compute both sides and choose with "
            "torch.where"
        )
    return said


def _line_of(error: Exception) -> str:
    """Say which line of the model's own code raised: the innermost one below this library and outside of torch."""
    frames = list(traceback.extract_tb(error.__traceback__))
    start = max((place for place, frame in enumerate(frames) if frame.filename == __file__), default=0)
    own = [frame for frame in frames[start + 1 :]
           if frame.line and not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)]  # fmt: skip
    return f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""
