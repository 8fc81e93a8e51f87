"""From a traced graph to the files that ONNX Runtime trains with: functions, their gradients, the training graph."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import numpy_helper

from cpt_fx.errors import ExportError
from cpt_fx.export import functions, refusals
from cpt_fx.export.functions import DOMAIN
from cpt_fx.export.manifest import CHECKPOINT, TRAINING
from cpt_fx.export.program import Graph

_VERSION = 1


def with_functions(graph: Graph) -> onnx.ModelProto:
    """Return a graph with the local functions that its nodes call, checked."""
    proto = ir.to_proto(graph.model)
    found = dict(functions.FIXED)
    called = {node.op_type for node in proto.graph.node if node.domain == DOMAIN}
    called |= {functions.TAKE} if functions.SCATTER_ADD in called else set()
    for kind, is_gradient, _ in graph.placed:
        found[kind.name] = functions.function(kind)
        # What makes gradients is called by nobody yet: the backward graph will.
        if is_gradient:
            found[kind.gradient_name] = functions.gradient_marker(kind)
            called.add(kind.name)
        elif kind.source == "Learned":
            called.add(functions.LEARNED)
    proto.functions.extend(one for name, one in found.items() if name in called)
    if all(opset.domain != DOMAIN for opset in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, _VERSION))
    onnx.checker.check_model(proto, full_check=True)
    return proto


def keep_state(proto: onnx.ModelProto, values: dict[str, Any]) -> None:
    """Make initializers of inputs that hold state: only what is one gets into ONNX Runtime's checkpoint."""
    for value in list(proto.graph.input):
        if value.name in values:
            proto.graph.input.remove(value)
            proto.graph.initializer.append(numpy_helper.from_array(values[value.name], value.name))


def drop_unused_inputs(proto: onnx.ModelProto, names: tuple[str, ...]) -> None:
    """Take away those of some inputs that no node reads: nobody has to feed them."""
    read = {name for node in proto.graph.node for name in node.input}
    for value in list(proto.graph.input):
        if value.name in names and value.name not in read:
            proto.graph.input.remove(value)


def inputs_for_initializers(proto: onnx.ModelProto, names: tuple[str, ...]) -> None:
    """Make inputs of parameters, in an order, so that sessions can share their memory; take those nobody reads, too."""
    held = {tensor.name: tensor for tensor in proto.graph.initializer}
    for name in names:
        if name in held:
            tensor = held[name]
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
            proto.graph.initializer.remove(tensor)


def training_model(
    proto: onnx.ModelProto, graph: Graph, trainable: tuple[str, ...], frozen: tuple[str, ...],
    counters: dict[str, Any], directory: Path,
) -> onnx.ModelProto:  # fmt: skip
    """Build the backward graph of a model whose first output is its loss; write it, and the checkpoint."""
    from onnxruntime.training import artifacts

    refusals.check(graph.model, trainable)
    _register_gradients(graph)
    with tempfile.TemporaryDirectory() as made, _quiet():
        try:
            artifacts.generate_artifacts(
                proto, requires_grad=list(trainable), frozen_params=list(frozen), artifact_directory=made
            )
        except RuntimeError as error:
            raise ExportError(f"ONNX Runtime cannot differentiate this model: {_said(error)}") from error
        training = onnx.load(str(Path(made, TRAINING)))
        _write_checkpoint(Path(made, CHECKPOINT), counters, directory / CHECKPOINT)
    onnx.save(training, str(directory / TRAINING))
    return training


def _write_checkpoint(made: Path, counters: dict[str, Any], target: Path) -> None:
    """Write ONNX Runtime's checkpoint; whole numbers, which are no parameters to it, go among its properties."""
    from onnxruntime.training.api import CheckpointState

    state = CheckpointState.load_checkpoint(str(made))
    for name, value in counters.items():
        state.properties[name] = int(value)
    CheckpointState.save_checkpoint(state, str(target))


def _register_gradients(graph: Graph) -> None:
    """Tell ONNX Runtime the gradients of our functions: for all of this process, and the first word counts."""
    for placed in graph.placed:
        if placed.kind.source == "Learned":
            inputs = ["GO(0)", *(f"I({index})" for index in range(4))]
            _register(placed.kind.name, functions.LEARNED, DOMAIN, inputs, ["GI(0)", "GI(1)", "GI(2)"])
        elif placed.is_gradient:
            inputs = ["GO(0)", *(f"I({index + 1})" for index in range(len(functions.gradient_inputs(placed.kind))))]
            _register(placed.kind.gradient_name, placed.kind.name, DOMAIN, inputs)
        else:
            _register(placed.kind.name, "Identity", "", ["GO(0)"])
    _register(functions.WITH_GRADIENT_OF, "Identity", "", ["GO(0)"])
    _register(functions.SCATTER_ADD, functions.TAKE, DOMAIN, ["GO(0)", "I(1)"])
    from onnxruntime.capi import _pybind_state as binding

    binding.register_custom_stop_gradient_edges(f"{DOMAIN}::{functions.STOP}::detach::", {0})


def _register(
    function: str, gradient: str, domain: str, inputs: list[str], outputs: tuple[str, ...] | list[str] = ("GI(0)",)
) -> None:
    from onnxruntime.capi import _pybind_state as binding

    node = binding.GradientNodeDefinition()
    node.op_type, node.domain, node.inputs, node.outputs, node.attributes = gradient, domain, inputs, list(outputs), []
    binding.register_gradient_definition(f"{DOMAIN}::{function}", [node])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep ONNX Runtime from writing every step of its optimizers to the terminal: it makes sessions of its own."""
    from onnxruntime.training.onnxblock import _training_graph_utils as utils

    original = utils.SessionOptions

    def options() -> Any:
        made = original()
        made.log_severity_level = 3
        return made

    utils.SessionOptions = options
    try:
        yield
    finally:
        utils.SessionOptions = original


def _said(error: Exception) -> str:
    """Return what ONNX Runtime says, without the path of its own source."""
    text = str(error).strip()
    return text.rsplit(") ", 1)[-1].splitlines()[0] if text else type(error).__name__
