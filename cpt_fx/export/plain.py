"""`export.onnx`: a transformed model in evaluation as one ONNX file that any ONNX Runtime runs, quantizers and all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import nn

from cpt_fx.export import functions
from cpt_fx.export.capture_modes import call_of, in_mode
from cpt_fx.export.evaluation import describe, embed, finish, run
from cpt_fx.export.functions import DOMAIN
from cpt_fx.export.model_file import new_file
from cpt_fx.export.program import BITS, Graph, states_of, trace
from cpt_fx.meta import Dial
from cpt_fx.runtime import width_of
from cpt_fx.schedules import Static
from cpt_fx.schedules.bits import Bits, as_bits
from cpt_fx.standalone import precision_of


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
    What the model has learned, its running ranges included, is in the file. For integers in the file and integer
    kernels where it runs see `export.qdq`.

    Args:
        result: what `transform` returned. It is left as it is, whatever mode it is in.
        example_inputs: a tuple of the model's arguments, or a dict of them by name. Sizes other than the batch are
            fixed to theirs.
        path: the file to write. One that exists is refused. Weights of more than 1.9 GB go to a file beside it.
        bits: None leaves widths open as inputs of the file, int64 without dims, called `bits.weight`,
            `bits.activation` and so on. A number of bits, or `Bits`, fixes them; layers that follow the schedule at
            a distance, or not at all, do so from there, and those with a schedule of their own have its evaluation
            bits at the model's position.
        dynamic_batch: let the first dim of every input vary from call to call.
        overwrite: replace the file, as soon as the new one is complete.

    Returns:
        The path of the file.

    Raises:
        ExportError: where the model cannot be exported, or the file cannot be written.
    """
    fixed = None if bits is None else as_bits("bits", bits)
    call = call_of(example_inputs)
    with new_file(path, overwrite=overwrite) as target:
        with in_mode(result, False, call) as module:
            run(module, call)
            graph = trace(module, call, dynamic_batch=dynamic_batch)
            embed(graph, {name: buffer.detach().cpu().numpy() for name, buffer in states_of(module).items()})
        if fixed is not None:
            embed(graph, fixed_widths(graph.dials, fixed, position_of(result)))
        model = finish(graph)
        add_functions(graph)
        describe(model, result, bits="open" if fixed is None else fixed)
        target.write(model)
    return target.path


def position_of(result: nn.Module) -> int:
    """Return the position at which a schedule is asked that a part has of its own."""
    schedule = precision_of(result).schedule
    return 0 if schedule is None else schedule.position


def fixed_widths(dials: dict[str, Dial], bits: Bits, position: int) -> dict[str, Any]:
    """Return the widths that inputs of a graph have at given bits, by the names of the inputs."""
    widths = {name: width_of(dial, Static(bits), position, training=False) for name, dial in dials.items()}
    return {BITS + name: np.array(width, np.int64) for name, width in widths.items()}


def add_functions(graph: Graph) -> None:
    """Add the functions that a graph's nodes call."""
    model = graph.model
    called = {node.op_type for node in model.graph if node.domain == DOMAIN}
    found = [functions.function(placed.kind) for placed in dict.fromkeys(graph.placed)]
    found += [functions.uniform(), functions.scatter_add()]
    for made in found:
        if made.name in called:
            function = ir.serde.deserialize_function(made)
            model.functions[function.identifier()] = function
    if called:
        model.opset_imports[DOMAIN] = 1
    else:
        model.opset_imports.pop(DOMAIN, None)
