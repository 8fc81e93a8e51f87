"""The graph of a model in evaluation, made ready to be read by anyone: state and widths inside, readable names."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import fx, nn

from cpt_fx.api import history_of
from cpt_fx.errors import ExportError
from cpt_fx.export.functions import DOMAIN, STOP, WITH_GRADIENT_OF
from cpt_fx.export.program import BITS, SEEDS, Call, Graph
from cpt_fx.standalone import precision_of
from cpt_fx.trial import trial

BATCH = "batch"


def run(module: fx.GraphModule, call: Call) -> Any:
    """Return what a model returns on the examples; leave no trace in it."""
    try:
        with torch.no_grad(), trial(module):
            return module(*call.args, **call.kwargs)
    except Exception as error:
        raise ExportError(f"the model does not run on example_inputs: {type(error).__name__}: {error}") from error


def embed(graph: Graph, values: Mapping[str, Any]) -> None:
    """Make constants of inputs: of running state, of widths that are fixed."""
    model = graph.model.graph
    for value in list(model.inputs):
        if value.name in values:
            model.inputs.remove(value)
            value.const_value = ir.tensor(np.asarray(values[value.name]), name=value.name)
            model.register_initializer(value)


def finish(graph: Graph) -> ir.Model:
    """Simplify a graph whose state is inside, and drop what only training has a use for."""
    model = graph.model
    for value in list(model.graph.outputs):
        # State is inside: what it would be after a run is of no use.
        if value.name not in graph.outputs:
            model.graph.outputs.remove(value)
    _drop_gradients(model)
    # Here weights are constants like any other, unlike in training.
    optimizer.fold_constants(model)
    common.IdentityEliminationPass()(model)
    for node in model.graph:
        # The second output of a normalization is for training.
        while len(node.outputs) > 1 and node.domain == "" and _is_spare(node, model):
            node.resize_outputs(len(node.outputs) - 1)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for value in list(model.graph.inputs):
        ours = str(value.name).startswith(BITS) or value.name == SEEDS or str(value.name) in graph.states
        if ours and not value.uses() and value not in model.graph.outputs:
            model.graph.inputs.remove(value)
    common.RemoveUnusedNodesPass()(model)
    _name_batch(graph)
    common.NameFixPass()(model)
    return model


def _drop_gradients(model: ir.Model) -> None:
    """Take away what only says where gradients go."""
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type in (STOP, WITH_GRADIENT_OF):
            made = ir.node("Identity", [node.inputs[-1]])
            made.outputs[0].type, made.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], [made], node.outputs, made.outputs)


def _is_spare(node: ir.Node, model: ir.Model) -> bool:
    last = node.outputs[-1]
    return node.op_type in ("LayerNormalization", "Dropout") and not last.uses() and last not in model.graph.outputs


def _name_batch(graph: Graph) -> None:
    """Call the size that varies by its name, wherever it stands."""
    symbols = {
        str(dim.value)
        for value in graph.model.graph.inputs
        if value.name in graph.inputs and value.shape is not None and len(value.shape)
        for dim in value.shape[:1]
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }
    if len(symbols) != 1:
        return
    symbol = re.compile(rf"\b{re.escape(symbols.pop())}\b")

    def renamed(value: ir.Value) -> None:
        if value.shape is not None:
            value.shape = ir.Shape(
                symbol.sub(BATCH, dim.value) if isinstance(dim, ir.SymbolicDim) and dim.value else dim
                for dim in value.shape
            )

    for value in graph.model.graph.inputs:
        renamed(value)
    for node in graph.model.graph:
        for value in node.outputs:
            renamed(value)


def describe(model: ir.Model, result: nn.Module, **more: object) -> None:
    """Write into a file where it comes from."""
    schedule = precision_of(result).schedule
    version = str(vars(sys.modules["cpt_fx"])["__version__"])
    model.producer_name, model.producer_version = "cpt_fx", version
    model.metadata_props.update(
        {
            "cpt_fx.version": version,
            "cpt_fx.pipeline": history_of(result).pipeline,
            "cpt_fx.schedule": repr(schedule),
            **{f"cpt_fx.{name}": str(value) for name, value in more.items()},
        }
    )
