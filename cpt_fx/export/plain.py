"""`export.onnx`: a transformed model in evaluation mode as one ONNX file with quantizers, for any ONNX Runtime.

`export.qdq` also uses `evaluation_of`, `finish` and `write`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx import checker
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import fx, nn

from cpt_fx.api import history_of
from cpt_fx.capture.dry_run import tensors_in
from cpt_fx.capture.standalone import precision_of
from cpt_fx.common.arrays import array_of
from cpt_fx.common.files import new_file
from cpt_fx.export.examples import call_of, in_mode, run, settle_sizes, with_several
from cpt_fx.export.functions import add_functions
from cpt_fx.export.program import Call, Graph, drop_unused, name_outputs, states_of, trace
from cpt_fx.export.recording import strip
from cpt_fx.export.verify import TOLERANCE, at_full_precision, check
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.ir.history import LOGGER
from cpt_fx.ort.environment import check_runtime
from cpt_fx.schedules.bits import Bits, as_bits

if TYPE_CHECKING:
    from cpt_fx.export.reporting import Attempts

INLINE_LIMIT = 1_900_000_000
"""Largest size in bytes of weights inside an ONNX file. A protobuf message is limited to 2 GiB, graph included."""


def onnx(
    result: nn.Module,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    path: str | os.PathLike[str],
    bits: int | Bits | tuple[int, int, int] | None = None,
    *,
    dynamic_batch: bool = True,
    overwrite: bool = False,
) -> Path:
    """Write a transformed model in evaluation mode as ONNX: every quantizer is one node of the domain `cpt_fx`.

    The nodes call functions that the file defines in standard operators: nothing has to be installed to run it.
    Parameters, buffers and running ranges are in the file. If ONNX Runtime is installed, outputs at 32 bits are
    compared with PyTorch's before the file appears. For integer weights and integer kernels see `export.qdq`.

    Args:
        result: a model that `transform` returned. It is not modified, and may be in either mode.
        example_inputs: a tuple of the model's arguments, or a dict of them by name.
        path: the file to write. An existing one is refused. Weights of more than 1.9 GB go to a file beside it.
        bits: None makes the bit-widths inputs of the file (int64, 0-dim), called `bits.weight`, `bits.activation` and
            so on. An int, or `Bits`, fixes them: layers with an offset from the schedule, or with a fixed bit-width,
            keep it; those with a schedule of their own use its evaluation bits at the model's position.
        dynamic_batch: keep sizes dynamic, as far as the model allows; otherwise fix them to those of the examples.
        overwrite: replace an existing file, once the new one is complete.

    Returns:
        The path of the file.

    Raises:
        ExportError: the model cannot be exported, the file cannot be written, or its outputs differ from PyTorch's.
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
    """Compare a file with PyTorch at full precision where that is possible; refuse a file that differs."""
    if graph.draws or not check_runtime().works:
        why = "it draws at random" if graph.draws else "there is no ONNX Runtime here"
        LOGGER.info("%s was not compared with PyTorch: %s", path.name, why)
        return
    with precision_of(module).at(FULL_PRECISION):
        outputs = tensors_in(run(module, call))
    ours = {name: array_of(value) for name, value in zip(graph.outputs, outputs, strict=True)}
    check("output", ours, at_full_precision(path, graph, call), TOLERANCE)


def evaluation_of(
    module: fx.GraphModule, call: Call, bits: Bits | None = None, *, dynamic_batch: bool = True, plain: bool = False
) -> Graph:
    """Trace a model in evaluation mode with its state inside; without `bits`, the bit-widths stay inputs."""
    run(module, call)
    call = with_several(call, module) if dynamic_batch else call
    graph = trace(module, call, dynamic_batch=dynamic_batch, plain=plain)
    settle_sizes((graph,), call, module)
    held = {**dict(module.named_parameters()), **states_of(module)}
    values: dict[str, Any] = {name: array_of(value) for name, value in held.items()}
    if bits is not None:
        state = precision_of(module)
        with state.at(bits):
            widths = {name: state.width(source, training=False) for name, source in graph.width_sources.items()}
        values |= {name: np.array(width, np.int64) for name, width in widths.items()}
    inputs = graph.model.graph.inputs
    for value in [value for value in inputs if value.name in values]:
        inputs.remove(value)
        value.const_value = ir.tensor(values[str(value.name)], name=value.name)
        graph.model.graph.register_initializer(value)
    return graph


def finish(graph: Graph) -> ir.Model:
    """Simplify a graph whose state is inside, and drop what only training needs."""
    model = graph.model
    for value in list(model.graph.outputs):
        # The state is a constant of the file: its new values are not needed.
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
    """Write a file with its provenance as metadata, and check it. Large weights go to `<name>.data` beside it."""
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
    # By path: a model with external weights cannot be checked otherwise.
    checker.check_model(str(path), full_check=True)


def attempt(attempts: Attempts, folder: Path) -> tuple[str, ...]:
    """Export for `export.report`; return notes."""
    made = onnx(attempts.result, attempts.example_inputs, folder / "made.onnx")
    return (*attempts.look("onnx", made), "tried: the graph was made, and passed the checker of ONNX")
