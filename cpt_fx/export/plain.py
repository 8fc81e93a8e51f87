"""`export.onnx`: a transformed model in evaluation as one ONNX file that any ONNX Runtime runs, quantizers and all.

What makes a graph in evaluation ready to be read by anyone, state and widths inside, serves `export.qdq` too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import checker
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import fx, nn

from cpt_fx.api import history_of
from cpt_fx.arrays import array_of
from cpt_fx.export.capture_modes import call_of, in_mode, run
from cpt_fx.export.comparing import Unquantized, at_full_precision
from cpt_fx.export.directory import new_file
from cpt_fx.export.environment import check_runtime
from cpt_fx.export.functions import add_functions
from cpt_fx.export.normalize import strip
from cpt_fx.export.program import Call, Graph, drop_unused, name_outputs, states_of, trace
from cpt_fx.export.sizes import settle_sizes, with_several
from cpt_fx.export.verify import TOLERANCE, check
from cpt_fx.history import LOGGER
from cpt_fx.schedules.bits import Bits, as_bits
from cpt_fx.standalone import precision_of
from cpt_fx.trial import tensors_in

INLINE_LIMIT = 1_900_000_000
"""Bytes of weights that one ONNX file holds. A protobuf message ends at 2 GiB, and the graph needs room, too."""


def onnx(
    result: nn.Module,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    path: str | os.PathLike[str],
    bits: int | Bits | tuple[int, int, int] | None = None,
    *,
    dynamic_batch: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write a transformed model as ONNX, as it evaluates: every quantizer is one node of the domain `cpt_fx`.

    The nodes are functions that the file defines, of standard operators: nothing has to be installed where it runs.
    What the model has learned, its running ranges included, is in the file. Where ONNX Runtime is installed, outputs at
    32 bits are compared with PyTorch's before the file appears. For integers in the file and integer kernels where it
    runs see `export.qdq`.

    Args:
        result: what `transform` returned. It is left as it is, whatever mode it is in.
        example_inputs: a tuple of the model's arguments, or a dict of them by name.
        path: the file to write. One that exists is refused. Weights of more than 1.9 GB go to a file beside it.
        bits: None leaves widths open as inputs of the file, int64 without dims, called `bits.weight`,
            `bits.activation` and so on. A number of bits, or `Bits`, fixes them; layers that follow the schedule at
            a distance, or not at all, do so from there, and those with a schedule of their own have its evaluation
            bits at the model's position.
        dynamic_batch: let sizes vary from call to call, as far as the model does; else they are those of the examples.
        overwrite: replace the file, as soon as the new one is complete.

    Returns:
        The path of the file.

    Raises:
        ExportError: where the model cannot be exported, the file cannot be written, or it computes something else.
    """
    fixed = None if bits is None else as_bits("bits", bits)
    call = call_of(example_inputs)
    with new_file(path, overwrite=overwrite) as made, in_mode(result, False, call) as module:

        def export(widths: Bits | None) -> Graph:
            graph = evaluation_of(module, call, widths, dynamic_batch=dynamic_batch)
            model = finish(graph)
            add_functions(graph)
            write(model, result, widths or "open", made)
            return graph

        if fixed is None or check_runtime().works:
            _verify(export(None), module, call, made)
        if fixed is not None:
            export(fixed)
    return Path(os.path.abspath(path))


def _verify(graph: Graph, module: fx.GraphModule, call: Call, path: Path) -> None:
    """Refuse a file that computes something else than PyTorch at full precision, where that can be compared."""
    if graph.draws or not check_runtime().works:
        why = "it draws at random" if graph.draws else "there is no ONNX Runtime here"
        LOGGER.info("%s was not compared with PyTorch: %s", path.name, why)
        return
    with Unquantized():
        outputs = tensors_in(run(module, call))
    ours = {name: array_of(value) for name, value in zip(graph.outputs, outputs, strict=True)}
    check("output", ours, at_full_precision(path, graph, call), TOLERANCE)


def evaluation_of(
    module: fx.GraphModule, call: Call, bits: Bits | None = None, *, dynamic_batch: bool = True, plain: bool = False
) -> Graph:
    """Trace a model in evaluation, with what it has learned inside, at given widths or any, for all sizes it takes."""
    run(module, call)
    call = with_several(call, module) if dynamic_batch else call
    graph = trace(module, call, dynamic_batch=dynamic_batch, plain=plain)
    settle_sizes((graph,), call, module)
    held = {**dict(module.named_parameters()), **states_of(module)}
    values: dict[str, Any] = {name: array_of(value) for name, value in held.items()}
    if bits is not None:
        state = precision_of(module)
        with state.at(bits):
            widths = {name: state.width(dial, training=False) for name, dial in graph.dials.items()}
        values |= {name: np.array(width, np.int64) for name, width in widths.items()}
    inputs = graph.model.graph.inputs
    for value in [value for value in inputs if value.name in values]:
        inputs.remove(value)
        value.const_value = ir.tensor(values[str(value.name)], name=value.name)
        graph.model.graph.register_initializer(value)
    return graph


def finish(graph: Graph) -> ir.Model:
    """Simplify a graph whose state is inside, and drop what only training has a use for."""
    model = graph.model
    for value in list(model.graph.outputs):
        # State is inside: what it would be after a run is of no use.
        if value.name not in graph.outputs:
            model.graph.outputs.remove(value)
    strip(model)
    optimizer.fold_constants(model)
    common.IdentityEliminationPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    drop_unused(model, graph.inputs)
    common.RemoveUnusedNodesPass()(model)
    name_outputs(model, graph.outputs)
    common.NameFixPass()(model)
    return model


def write(model: ir.Model, result: nn.Module, bits: object, path: Path) -> None:
    """Write and check a file that says where it comes from. Many weights go to a file `<name>.data` beside it."""
    model.producer_name, model.producer_version = "cpt_fx", str(vars(sys.modules["cpt_fx"])["__version__"])
    model.metadata_props.update(
        {
            "cpt_fx.version": model.producer_version,
            "cpt_fx.pipeline": history_of(result).pipeline,
            "cpt_fx.schedule": repr(precision_of(result).schedule),
            "cpt_fx.bits": str(bits),
        }
    )
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    ir.save(model, path, external_data=None if weights <= INLINE_LIMIT else f"{path.name}.data")
    # By its path: a model with weights in another file cannot be checked otherwise.
    checker.check_model(str(path), full_check=True)
