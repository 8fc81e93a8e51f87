"""`export.ort_artifacts`: an exported directory in the files of ONNX Runtime's own training API.

The API's `Module` holds the parameters and their accumulated gradients, and one node type of the graph adds to an
accumulator or resets it. The same node type writes running state, which is stored as non-trainable parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx_ir.passes import common

from cpt_fx.common.files import new_directory
from cpt_fx.errors import ExportError
from cpt_fx.export.updates import value_of
from cpt_fx.ort import manifest as files
from cpt_fx.ort.engine import initial_values
from cpt_fx.ort.environment import check_training, require
from cpt_fx.ort.manifest import GRADIENT, NEXT, SEEDS, Manifest, Optimizer

TRAINING, EVALUATION, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT = "checkpoint"
_DOMAIN = "com.microsoft"
_SUM, _DONE, _FRESH = "_grad.accumulation.buffer", "_grad.accumulation.out", "lazy_reset_grad"
"""Names that the API uses internally: the suffixes of gradient accumulators and of the flags that an accumulator is up
to date, and the input that resets them."""
_UPDATE = """<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
update (float[1] learning_rate, int64[1] step, seq(float[]) params, seq(float[]) gradients,
        seq(float[]) first_order_moments{more}) => (bool[1] updated) {{
    updated = com.microsoft.{call}
}}"""


def ort_artifacts(directory: str | PathLike[str], target: str | PathLike[str], *, overwrite: bool = False) -> None:
    """Convert a directory of `ort_training` for `onnxruntime.training.api`, in Python, C++, C# and Java.

    The API's `Optimizer` supports AdamW and plain SGD; use `cpt_fx.ort.Trainer` for all others. The files are
    `training_model.onnx`, `eval_model.onnx`, `optimizer_model.onnx` and `checkpoint`. A step takes the model's inputs,
    the targets, a bit-width for each `bits...` input, and `seeds` if the model draws random numbers;
    `Module.input_names()` gives the order. Gradients of several steps are summed, not averaged.

    Args:
        directory: a directory that `ort_training` wrote.
        target: the directory to write. One that is not empty is refused.
        overwrite: replace the contents of `target`, once everything is written.

    Raises:
        ExportError: the optimizer is not supported, or the build of ONNX Runtime with this API is not installed.
    """
    source = Path(directory)
    manifest = files.read(source)
    files.check_files(source, manifest)
    update = update_graph(manifest.optimizer)
    require(check_training())
    with new_directory(Path(target), overwrite=overwrite) as folder:
        training, evaluation = ir.load(source / files.GRADIENTS), ir.load(source / files.EVALUATION)
        _settle(training, manifest, _accumulated(training.graph, manifest))
        _settle(evaluation, manifest, _held(evaluation.graph, manifest).values())
        ir.save(training, folder / TRAINING)
        ir.save(evaluation, folder / EVALUATION)
        onnx.save(update, str(folder / OPTIMIZER))
        _write_checkpoint(manifest, initial_values(manifest, source / files.VALUES), folder / CHECKPOINT)


def _accumulated(graph: ir.Graph, manifest: Manifest) -> list[ir.Value]:
    """Make the training graph accumulate gradients and write running state in place; return the inputs for that."""
    graph.opset_imports[_DOMAIN] = 1
    held = _held(graph, manifest)
    outputs = {str(value.name): value for value in graph.outputs}
    loss, *_ = graph.outputs
    graph.outputs[:] = [loss]
    fresh = value_of(_FRESH, "bool", (1,))
    sums = []
    for item in manifest.parameters:
        if item.trainable:
            # The export returns Where(accumulate, sum + gradient, gradient): take the gradient alone.
            choice = outputs[item.name + GRADIENT + NEXT].producer()
            assert choice is not None and choice.op_type == "Where" and choice.inputs[2] is not None
            sums.append(value_of(item.name + _SUM, "float32", item.shape))
            _accumulate(graph, item.name, sums[-1], choice.inputs[2], fresh)
    state = {}
    for name in (item.name for item in manifest.states if item.name + NEXT in outputs):
        graph.append(ir.node("Cast", [outputs[name + NEXT]], {"to": ir.DataType.FLOAT}))
        state[name] = graph[-1].outputs[0]
    if state:
        # At the very end: other nodes may still read the old state.
        after = ir.node("Group", [*graph.outputs, *state.values()], domain=_DOMAIN)
        graph.append(after)
        for name, value in state.items():
            _accumulate(graph, name, held[name], value, after.outputs[0])
    return [*held.values(), *sums, fresh]


def _held(graph: ir.Graph, manifest: Manifest) -> dict[str, ir.Value]:
    """Return a float32 input for every tensor of the checkpoint: parameters, then state."""
    known = {str(value.name): value for value in graph.inputs}
    made = {}
    for tensor in manifest.held:
        old = known.get(tensor.name)
        made[tensor.name] = place = value_of(tensor.name, "float32", tensor.shape)
        if old is not None and old.dtype is not None:
            read = ir.node("Cast", [place], {"to": old.dtype})
            graph.insert_before(graph[0], read)
            old.replace_all_uses_with(read.outputs[0])
    return made


def _accumulate(graph: ir.Graph, name: str, place: ir.Value, value: ir.Value, fresh: ir.Value) -> None:
    """Append a node that adds `value` to `place`, or overwrites `place` if `fresh` is true."""
    done, inputs = value_of(name + _DONE, "bool", (1,)), [place, value, fresh]
    graph.append(ir.node("InPlaceAccumulatorV2", inputs, outputs=[done], domain=_DOMAIN, name=f"accumulate {name}"))
    graph.outputs.append(done)


def _settle(model: ir.Model, manifest: Manifest, held: Iterable[ir.Value]) -> None:
    """Remove unused nodes, and order the inputs: what the user passes, then what the API holds."""
    common.RemoveUnusedNodesPass()(model)
    passed = {*(tensor.name for tensor in manifest.taken), *manifest.width_sources, SEEDS}
    model.graph.inputs[:] = [*(value for value in model.graph.inputs if value.name in passed), *held]


def update_graph(optimizer: Optimizer) -> onnx.ModelProto:
    """Return the graph of an update; raise an error if the API does not support the optimizer."""
    first, *others = ({name: ast.literal_eval(text) for name, text in group.items()} for group in optimizer.settings)
    adam = optimizer.name in ("adam", "adamw") and not first["amsgrad"]
    decoupled = adam and (first["decoupled_weight_decay"] or not first["weight_decay"])
    plain = optimizer.name == "sgd" and not first["momentum"] and not first["weight_decay"]
    if others or not (decoupled or plain) or first["maximize"]:
        raise ExportError(
            f"ONNX Runtime's training API knows AdamW (without amsgrad), and SGD that has nothing but a learning rate, "
            f"with one parameter group each; this directory was exported with {optimizer}: cpt_fx.ort.Trainer trains it"
        )
    call, more = "SGDOptimizerV2 (learning_rate, params, gradients)", ""
    if decoupled:
        alpha, beta = first["betas"]
        call = (
            f"AdamWOptimizer <alpha = {alpha:f}, beta = {beta:f}, epsilon = {first['eps']:.12f}, "
            f"weight_decay = {first['weight_decay']:f}, adam_mode = 0, correct_bias = 1> "
            "(learning_rate, step, params, gradients, first_order_moments, second_order_moments)"
        )
        more = ", seq(float[]) second_order_moments"
    return onnx.parser.parse_model(_UPDATE.format(call=call, more=more))


def _write_checkpoint(manifest: Manifest, values: dict[str, Any], path: Path) -> None:
    """Write the initial values as a checkpoint, a format that only ONNX Runtime itself can write."""
    from onnxruntime.training.onnxblock import save_checkpoint

    held = {
        item.name: numpy_helper.from_array(values[item.name].astype(np.float32), item.name) for item in manifest.held
    }
    trained = [held.pop(item.name) for item in manifest.parameters if item.trainable]
    save_checkpoint((trained, [*held.values()]), path)
