"""`export.ort_training`: a transformed model as a directory that ONNX Runtime trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from cpt_fx.errors import ExportError
from cpt_fx.export import losses, refusals
from cpt_fx.export import manifest as files
from cpt_fx.export.artifacts import (
    drop_unused_inputs,
    inputs_for_initializers,
    keep_state,
    training_model,
    with_functions,
)
from cpt_fx.export.capture_modes import call_of, in_mode
from cpt_fx.export.directory import digest, new_directory
from cpt_fx.export.environment import require_training, version_of
from cpt_fx.export.losses import LossLike, resolve
from cpt_fx.export.manifest import Manifest, Parameter, State
from cpt_fx.export.optimizers import Optimizer, optimizer_model, resolve_optimizer
from cpt_fx.export.program import BITS, SEEDS, Call, Graph, states_of, trace
from cpt_fx.export.verify import verify
from cpt_fx.standalone import precision_of
from cpt_fx.trial import eager_model, trial

_PACKAGES = ("cpt_fx", "torch", "onnx", "onnxscript", "onnxruntime-training-cpu", "onnxruntime-training")


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
    """Write a transformed model as ONNX Runtime trains it: `cpt_fx.ort.Trainer` takes it from there.

    Widths are inputs of the graphs, so that one directory serves every schedule. What the model has learned so far,
    its running ranges included, goes along.

    Args:
        result: what `transform` returned.
        example_inputs: a tuple of the model's arguments, or a dict of them by name. Sizes other than the batch are
            fixed to theirs.
        directory: where to write. A directory that is not empty is refused.
        loss: `"cross_entropy"`, `"mse"`, `"bce_with_logits"`, `"l1"`; a function of the output and the targets; or None
            where the model returns its loss.
        optimizer: `"sgd"`, `"adam"`, `"adamw"`, or a fresh one of these of `torch.optim` over the model's parameters,
            whose groups and settings are taken over.
        dynamic_batch: let the first dim of every input vary from call to call.
        overwrite: replace what the directory holds, as soon as the new export is complete.
        example_targets: a tensor, or a tuple of them, for a loss that is a function of the user's own.

    Raises:
        ExportError: what ONNX Runtime cannot train, and why, by layer.
    """
    require_training()
    result = eager_model(result)
    function, loss_name = resolve(loss)
    call = _with_targets(result, call_of(example_inputs), loss, function, example_targets)
    with in_mode(result, True, call) as graph:
        training = trace(graph, call, dynamic_batch=dynamic_batch)
        states = {name: buffer.detach().cpu().numpy() for name, buffer in states_of(graph).items()}
    refusals.check_schedules(training.dials.values())
    with in_mode(result, False, call) as graph:
        evaluation = trace(graph, call, dynamic_batch=dynamic_batch)
    with new_directory(Path(directory), overwrite=overwrite) as folder:
        manifest = _write(result, training, evaluation, states, optimizer, folder, loss_name, dynamic_batch)
        with in_mode(result, True, call) as graph:
            verify(folder, manifest, graph, training, call)
    return manifest


def _with_targets(result: nn.Module, call: Call, loss: LossLike, function: Callable[..., Tensor], given: Any) -> Call:
    """Add targets to a call: those given, or what the loss takes for what the model returns."""
    if given is not None:
        targets = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    elif loss is None:
        targets = ()
    else:
        with in_mode(result, False, call) as graph, trial(graph), torch.no_grad():
            targets = losses.example_targets(loss, graph(*call.args, **call.kwargs))
    if not all(isinstance(target, Tensor) for target in targets):
        raise ExportError("example_targets must be a tensor or a tuple of tensors")
    return replace(call, targets=targets, loss=function)


def _write(
    result: nn.Module, training: Graph, evaluation: Graph, values: dict[str, Any],
    optimizer: str | torch.optim.Optimizer, folder: Path, loss: str, dynamic_batch: bool,
) -> Manifest:  # fmt: skip
    """Write all files of a directory."""
    changed = tuple(name for name, after in training.states.items() if after)
    constants = {name: value for name, value in values.items() if name not in changed}
    kept = {name: values[name] for name in changed if values[name].dtype.kind == "f"}
    counters = {name: values[name] for name in changed if name not in kept}
    _check_counters(counters)
    first, second = with_functions(training), with_functions(evaluation)
    for proto in (first, second):
        keep_state(proto, constants)
        drop_unused_inputs(proto, (*(BITS + name for name in training.dials), SEEDS, *changed))
    keep_state(first, kept)
    spec = resolve_optimizer(optimizer, dict(result.named_parameters(remove_duplicate=False)))
    parameters = _parameters(result, first, spec, training)
    trainable = tuple(parameter.tensor.name for parameter in parameters if parameter.trainable)
    frozen = tuple(parameter.tensor.name for parameter in parameters if not parameter.trainable)
    if not trainable:
        raise ExportError("no parameter that requires a gradient is used by the model: there is nothing to train")
    outputs = {value.name: value for value in second.graph.output}
    inputs = {value.name: value for value in first.graph.input}
    made = training_model(first, training, trainable, (*frozen, *kept), counters, folder)
    inputs_for_initializers(second, (*trainable, *frozen))
    onnx.save(second, str(folder / files.EVALUATION))
    onnx.save(optimizer_model(spec, parameters), str(folder / files.OPTIMIZER))
    manifest = Manifest(
        inputs=tuple(_tensor(inputs[name]) for name in training.inputs),
        targets=tuple(_tensor(inputs[name]) for name in training.targets),
        outputs=tuple(_tensor(outputs[name]) for name in evaluation.outputs),
        dials={BITS + name: dial for name, dial in training.dials.items()},
        seeds=training.draws if any(value.name == SEEDS for value in made.graph.input) else 0,
        parameters=parameters,
        states=tuple(_state(name, values[name], training.states[name]) for name in changed),
        optimizer=spec.to_dict(),
        loss=loss,
        schedule=repr(precision_of(result).schedule),
        dynamic_batch=dynamic_batch,
        versions={name: found for name in _PACKAGES if (found := version_of(name))},
        digests={name: digest(folder / name) for name in files.FILES},
    )
    manifest.write(folder)
    return manifest


def _check_counters(counters: dict[str, Any]) -> None:
    """Refuse state that ONNX Runtime's checkpoint cannot hold."""
    for name, value in counters.items():
        if value.dtype.kind != "i" or value.ndim:
            raise ExportError(
                f"the model changes its buffer {name!r} ({value.dtype}, shape {value.shape}) while it trains: state "
                "that changes must be floating point, or a single integer"
            )


def _parameters(result: nn.Module, proto: onnx.ModelProto, spec: Optimizer, training: Graph) -> tuple[Parameter, ...]:
    """List the parameters that the training graph reads, with all the names that each of them has in the model."""
    held = {tensor.name: tensor for tensor in proto.graph.initializer}
    # The loss may send no gradient to some: PyTorch's optimizers leave these as they are.
    reached = refusals.trainable(training.model, held)
    names: dict[Tensor, list[str]] = {}
    for name, parameter in result.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    found = []
    for tensor, known in names.items():
        used = next((name for name in known if name in held), None)
        if used is None:
            continue
        found.append(
            Parameter(
                tensor=files.Tensor(name=used, dtype=_dtype(held[used].data_type), shape=tuple(held[used].dims)),
                trainable=tensor.requires_grad and used in reached,
                also=tuple(name for name in known if name != used),
                group=spec.group_of(known),
            )
        )
    return tuple(found)


def _dtype(kind: int) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(kind))


def _tensor(value: onnx.ValueInfoProto) -> files.Tensor:
    kind = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim)
    return files.Tensor(name=value.name, dtype=_dtype(kind.elem_type), shape=shape)


def _state(name: str, value: Any, after: str) -> State:
    return State(tensor=files.Tensor(name=name, dtype=str(value.dtype), shape=tuple(value.shape)), next=after)
