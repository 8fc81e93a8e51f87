"""`export.ort_training`: a transformed model as a directory that ONNX Runtime trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx.capture.dry_run import eager_model, tensors_in
from cpt_fx.capture.standalone import precision_of
from cpt_fx.common.arrays import array_of
from cpt_fx.common.files import digest, new_directory
from cpt_fx.errors import ExportError, nearest
from cpt_fx.export.examples import call_of, in_mode, run, settle_sizes, with_several
from cpt_fx.export.functions import add_functions
from cpt_fx.export.program import Call, Graph, states_of, trace
from cpt_fx.export.recording import strip
from cpt_fx.export.refusals import check_schedules
from cpt_fx.export.updates import clipping_graph, model_of, resolve_optimizer, trace_updates
from cpt_fx.export.verify import verify
from cpt_fx.ir.layer_state import is_range
from cpt_fx.ort import manifest as files
from cpt_fx.ort.environment import EXTRAS, require_training, version_of
from cpt_fx.ort.manifest import Manifest, Optimizer, Parameter, State

if TYPE_CHECKING:
    from cpt_fx.export.reporting import Attempts

_PACKAGES = ("cpt_fx", "torch", "onnx", "onnxscript", "onnxruntime", *EXTRAS)
LossLike = str | Callable[..., Tensor] | None
_LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "l1": F.l1_loss,
}
_LABELLED = (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)
_ALIKE = (
    F.mse_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    nn.MSELoss, nn.BCEWithLogitsLoss, nn.BCELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss,
)  # fmt: skip
"""Losses whose targets are class labels, and losses whose targets have the shape of the outputs."""


def ort_training(
    result: nn.Module,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    directory: str | Path,
    *,
    loss: LossLike,
    optimizer: str | torch.optim.Optimizer,
    dynamic_batch: bool = True,
    overwrite: bool = False,
    example_targets: Any = None,
) -> Manifest:
    """Write a transformed model as a directory that `cpt_fx.ort.Trainer` trains in ONNX Runtime.

    Bit-widths are inputs of the graphs, so that one directory serves every schedule. The training starts from the
    model's present parameters, buffers and running ranges.

    Args:
        result: a model that `transform` returned.
        example_inputs: a tuple of the model's arguments, or a dict of them by name.
        directory: where to write. A directory that is not empty is refused.
        loss: `"cross_entropy"`, `"mse"`, `"bce_with_logits"`, `"l1"`; a function of the output and the targets; or None
            if the model returns its loss.
        optimizer: `"sgd"`, `"adam"`, `"adamw"`, or a fresh torch optimizer over the model's parameters: its own update
            is traced, with its groups and settings. Those that run the model again (LBFGS) are refused.
        dynamic_batch: keep sizes dynamic, as far as the model allows; otherwise fix them to those of the examples.
        overwrite: replace the contents of the directory, once the new export is complete.
        example_targets: a tensor, or a tuple of tensors, for a loss function whose targets are not known.

    Raises:
        ExportError: ONNX Runtime cannot train the model; the message names the layer and the reason.
    """
    require_training()
    result = eager_model(result)
    function, loss_name = _resolved(loss)
    made, groups = resolve_optimizer(optimizer, dict(result.named_parameters(remove_duplicate=False)))
    call = _with_targets(result, call_of(example_inputs), function, loss_name, example_targets)
    with in_mode(result, True, call) as graph:
        run(graph, call)
        call = with_several(call, graph) if dynamic_batch else call
        training = trace(graph, call, gradients=True, trained=groups, dynamic_batch=dynamic_batch)
        values = {name: array_of(buffer) for name, buffer in states_of(graph).items()}
        check_schedules(training.width_sources.values())
        with in_mode(result, False, call) as evaluated:
            evaluation = trace(evaluated, call, dynamic_batch=dynamic_batch)
        others, least = settle_sizes((training, evaluation), call, graph)
        with new_directory(Path(directory), overwrite=overwrite) as folder:
            manifest = _write(result, training, evaluation, values, made, groups, folder, loss_name, least)
            # At least three steps, so that the optimizer's state is used.
            verify(folder, manifest, graph, made, (call, *others, *[call] * (2 - len(others))))
        return manifest


def _with_targets(result: nn.Module, call: Call, loss: Callable[..., Tensor], name: str, given: Any) -> Call:
    """Add the loss and its targets to a call: those given, or examples that fit what the model returns."""
    if given is not None:
        targets = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    elif loss is _own_loss:
        targets = ()
    else:
        with in_mode(result, False, call) as graph:
            targets = (_example_target(loss, name, run(graph, call)),)
    if not all(isinstance(target, Tensor) for target in targets):
        raise ExportError("example_targets must be a tensor or a tuple of tensors")
    return replace(call, targets=targets, loss=loss)


def _write(
    result: nn.Module, training: Graph, evaluation: Graph, values: dict[str, Any],
    optimizer: torch.optim.Optimizer, groups: dict[str, int], folder: Path, loss: str, least: dict[str, int],
) -> Manifest:  # fmt: skip
    """Write all files of a directory."""
    named = dict(result.named_parameters(remove_duplicate=False))
    known = {**evaluation.parameters, **training.parameters}
    group_of = {name: next((groups[one] for one in names if one in groups), -1) for name, names in known.items()}
    updates = trace_updates(optimizer, {name: named[name] for name in training.gradients}, group_of)
    values = values | {name: array_of(named[name]) for name in known}
    for graph, name in ((training, files.GRADIENTS), (evaluation, files.EVALUATION)):
        add_functions(graph)
        _save(graph.model, folder / name)
    _save(clipping_graph({name: named[name].shape for name in training.gradients}), folder / files.CLIPPING)
    _save(updates.first, folder / files.FIRST_UPDATE)
    _save(updates.later, folder / files.UPDATE)
    states = {**evaluation.states, **training.states}
    values = {name: values[name] for name in (*known, *states)}
    _save_values(values | updates.initial, folder)
    held = {name: {"name": name, "dtype": str(value.dtype), "shape": value.shape} for name, value in values.items()}
    ends = {str(value.name): value for value in (*training.model.graph.inputs, *evaluation.model.graph.outputs)}
    manifest = Manifest(
        inputs=tuple(_tensor(ends[name]) for name in training.inputs),
        targets=tuple(_tensor(ends[name]) for name in training.targets),
        outputs=tuple(_tensor(ends[name]) for name in evaluation.outputs),
        width_sources=training.width_sources,
        seeds=training.draws,
        parameters=tuple(
            Parameter(**held[name], trainable=name in training.gradients, names=names, group=group_of[name])
            for name, names in known.items()
        ),
        states=tuple(State(**held[name], swaps=bool(training.states.get(name))) for name in states),
        optimizer=described(optimizer, updates.remembered),
        loss=loss,
        schedule=repr(precision_of(result).schedule),
        evaluation_seeds=evaluation.draws,
        least=least,
        choices=evaluation.choices,
        versions={name: found for name in _PACKAGES if (found := version_of(name))},
        digests={name: digest(folder / name) for name in files.FILES},
    )
    manifest.write(folder)
    return manifest


def described(optimizer: torch.optim.Optimizer, remembered: tuple[State, ...] = ()) -> Optimizer:
    """Return a manifest's entry on an optimizer; the options of its groups are stored as their `repr`."""
    groups = optimizer.param_groups
    own = ("params", "lr")
    return Optimizer(
        name=type(optimizer).__name__.lower(),
        learning_rates=tuple(float(group["lr"]) for group in groups),
        settings=tuple({key: repr(value) for key, value in group.items() if key not in own} for group in groups),
        remembered=remembered,
    )


def _save(model: ir.Model, path: Path) -> None:
    strip(model)
    ir.save(model, path)
    onnx.checker.check_model(str(path), full_check=True)


def _save_values(values: Mapping[str, Any], folder: Path) -> None:
    """Write the initial values as an ONNX model of initializers with external data: any size, for any language."""
    held = [
        ir.Value(name=name, const_value=ir.tensor(np.asarray(array, order="C"), name=name))
        for name, array in values.items()
    ]
    ir.save(model_of("values", [], [], [], held=held), folder / files.VALUES, external_data=files.DATA)
    (folder / files.DATA).touch()


def _tensor(value: ir.Value) -> files.Tensor:
    assert value.dtype is not None and value.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return files.Tensor(name=str(value.name), dtype=str(value.dtype.numpy()), shape=shape)


def _resolved(loss: LossLike) -> tuple[Callable[..., Tensor], str]:
    """Return the function that computes the loss from the model's outputs and the targets, and its name."""
    if loss is None:
        return _own_loss, "the model's own"
    if isinstance(loss, str):
        if loss not in _LOSSES:
            listed = ", ".join(f'"{name}"' for name in _LOSSES)
            raise ExportError(
                f"loss must be one of {listed}, None for the model's own, or a function of output and targets, got "
                f"{loss!r}.{nearest(loss, _LOSSES)}"
            )
        return _LOSSES[loss], loss
    if not callable(loss):
        raise ExportError(f"loss must be a name, None, or a function of output and targets, got {loss!r}")
    return loss, str(getattr(loss, "__name__", type(loss).__name__))


def _example_target(loss: Callable[..., Tensor], name: str, outputs: Any) -> Tensor:
    """Return a target that a known loss accepts for a model's outputs."""
    if not isinstance(outputs, Tensor):
        raise ExportError(
            f"the model returns {type(outputs).__name__}, and loss={name!r} takes a tensor: pass a function of the "
            "output and the targets, and example_targets"
        )
    plain = loss.func if isinstance(loss, functools.partial) else loss
    kinds = type(plain).__mro__ if isinstance(plain, nn.Module) else (plain,)
    if any(kind in _LABELLED for kind in kinds):
        if outputs.ndim < 2:
            raise ExportError(
                f"{name} needs scores of shape (batch, classes, ...), the model returns {tuple(outputs.shape)}"
            )
        return torch.zeros(outputs.shape[0], *outputs.shape[2:], dtype=torch.int64, device=outputs.device)
    if any(kind in _ALIKE for kind in kinds):
        return torch.zeros_like(outputs)
    raise ExportError(f"what targets {name} takes is not known: pass example_targets, a tensor or a tuple of tensors")


def _own_loss(outputs: Any) -> Tensor:
    """Return the loss that a model computed itself: its only output, its output `loss`, or its first output."""
    found = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", outputs)
    if isinstance(found, (tuple, list)):
        found = found[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ExportError(
            f"loss=None says that the model returns its loss (alone, first, or as `loss`), but it returns {what}: pass "
            f"loss={next(iter(_LOSSES))!r} or another one"
        )
    return found.reshape(())


def attempt(attempts: Attempts, folder: Path) -> tuple[str, ...]:
    """Export for `export.report`, with a loss that depends on every output; return notes."""
    made = ort_training(
        attempts.result, attempts.example_inputs, folder / "made",
        loss=_every_output, optimizer="sgd", example_targets=(),
    )  # fmt: skip
    notes = attempts.look("ort_training", folder / "made" / files.GRADIENTS)
    states = [state.name for state in made.states if state.swaps and not is_range(state.name)]
    kept = (f"exact: {', '.join(states)}: running state, written by each step",) if states else ()
    return (*notes, *kept, "tried: three steps were compared with PyTorch's")


def _every_output(outputs: Any) -> Tensor:
    """Return a scalar that depends on every output, in place of a loss."""
    return sum((leaf.square().mean() for leaf in tensors_in(outputs) if leaf.is_floating_point()), torch.zeros(()))
