"""`export.qdq`: a trained model for integer deployment, in standard QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import version_converter
from torch import fx, nn

from cpt_fx.capture.standalone import precision_of
from cpt_fx.common.arrays import Array
from cpt_fx.common.files import new_file
from cpt_fx.errors import ExportError
from cpt_fx.export import qdq_formats as formats
from cpt_fx.export.examples import call_of, in_mode, run
from cpt_fx.export.functions import DOMAIN
from cpt_fx.export.lowering import QUANTIZER
from cpt_fx.export.plain import evaluation_of, finish, write
from cpt_fx.export.program import name_outputs
from cpt_fx.export.verify import Difference, compared
from cpt_fx.formats import Range
from cpt_fx.schedules.bits import Bits, as_bits

if TYPE_CHECKING:
    from cpt_fx.export.reporting import Attempts

ADVICE = (
    "What recipes.default() quantizes is exported exactly: symmetric weights per channel, activations with an integer "
    "zero point and a running range."
)
IN_STEPS = "in whole steps of input times weight, as integer kernels add"
_FOUR_BITS = 4
_FOUR_BIT_OPSET = 21
"""The first opset with 4-bit integers."""
_FORM = "form"
"""Key in a node's `meta`: the codes or the grid of the quantized values that it returns."""
_Step = tuple[str, tuple[ir.Value | None, ...], dict[str, Any]]
"""A standard node: its operator, its inputs after the first, and its attributes."""


@dataclass(frozen=True, kw_only=True)
class Converted:
    """How one quantizer was exported."""

    layer: str
    operand: str
    role: str
    format: str
    """The format that it was trained with."""
    bits: int
    status: str
    """`"exact"`, `"converted"` or `"float"`."""
    error: float
    """Norm of the difference between the file's values and PyTorch's on the examples, relative to PyTorch's."""
    note: str = ""

    def __str__(self) -> str:
        """Return a one-line summary."""
        error = "" if self.status == formats.EXACT else f" {self.error:.2%}"
        note = f": {self.note}" if self.note else ""
        return f"{self.layer} {self.operand} ({self.format}, {self.bits} bits): {self.status}{error}{note}"


@dataclass(frozen=True, kw_only=True)
class QdqReport:
    """What was written, and how close it is to the trained model. `print` shows a summary."""

    path: Path
    quantizers: tuple[Converted, ...]
    outputs: tuple[Difference, ...]
    """The difference of each output, in each installed runtime: ONNX Runtime, OpenVINO."""
    runtime: str
    """The runtimes in which the outputs were compared."""
    untrained: str = ""
    """Why the model looks untrained; empty if it does not."""

    @property
    def exact(self) -> bool:
        """Whether every quantizer is in the file exactly as it was trained."""
        return all(item.status == formats.EXACT for item in self.quantizers)

    def __str__(self) -> str:
        """Return the counts, every quantizer that is not exact, and the differences of the outputs."""
        others = [item for item in self.quantizers if item.status != formats.EXACT]
        exact = len(self.quantizers) - len(others)
        converted = sum(item.status == formats.CONVERTED for item in others)
        counts = f"{exact} exact, {converted} converted, {len(others) - converted} left in floating point"
        lines = [f"{self.path}: {len(self.quantizers)} quantizers: {counts}"]
        lines += [f"  WARNING: {self.untrained}"] if self.untrained else []
        lines += [f"  {item}" for item in others]
        lines += [f"  {ADVICE}"] if others else []
        rounded = max((item.error for item in self.quantizers if IN_STEPS in item.note), default=0.0)
        lines += [f"  biases are stored {IN_STEPS} them: off by {rounded:.2g} of their size at most"] if rounded else []
        lines += [f"  {item}" for item in self.outputs]
        return "\n".join((*lines, f"  {self.runtime}"))


def qdq(
    result: nn.Module,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    path: str | os.PathLike[str],
    bits: int | Bits | tuple[int, int, int] = 8,
    *,
    dynamic_batch: bool = True,
    overwrite: bool = False,
    verbose: bool = True,
) -> QdqReport:
    """Write a trained model with integer weights and integer activations, for deployment in ONNX Runtime and others.

    Weights are stored as symmetric integers per output channel, of 8 bits, or of 4 if the bit-width is 4 or less.
    Activations are unsigned 8-bit codes with one fixed range each, the running range of training; at narrower
    bit-widths the codes are clipped. Biases of integer products are stored in whole steps of input scale times weight
    scale; what was not quantized stays in floating point. Formats that QDQ cannot express are converted to the nearest
    one that it can, and listed in the report with the resulting error. Formats of `recipes.default()` are exact.

    Args:
        result: a trained model that `transform` returned. It is not modified, and may be in either mode.
        example_inputs: a tuple of the model's arguments, or a dict of them by name: real data, ideally a whole batch.
            Errors are measured on it, and ranges that training did not fix are taken from it.
        path: the file to write. An existing one is refused. Weights of more than 1.9 GB go to a file beside it.
        bits: 1 to 8, for all, or `Bits`. Layers with an offset from the schedule, or with a fixed bit-width, keep it;
            those with a schedule of their own use its evaluation bits at the model's position.
        dynamic_batch: keep sizes dynamic, as far as the model allows; otherwise fix them to those of the examples.
        overwrite: replace an existing file, once the new one is complete.
        verbose: print the report.

    Returns:
        How every quantizer was exported, and how far the outputs are from PyTorch's at the same bit-widths.

    Raises:
        ExportError: the model cannot be exported, or the file cannot be written.
    """
    widths = as_bits("bits", bits)
    for name, width in zip(("weight", "activation"), widths, strict=False):
        if not 1 <= width <= formats.MOST_BITS:
            raise ExportError(
                f"bits: {name}s of {width} bits are no integers of at most {formats.MOST_BITS}: pass widths from 1 to "
                f"{formats.MOST_BITS}, or write the model with export.onnx, which takes any"
            )
    call = call_of(example_inputs)
    with (
        new_file(path, overwrite=overwrite) as made,
        in_mode(result, False, call) as module,
        precision_of(module).at(widths),
    ):
        graph = evaluation_of(module, call, widths, dynamic_batch=dynamic_batch, plain=True)
        model = finish(graph)
        nodes = _quantizers(model)
        watched = formats.watched_in(module)
        for name in _constants(model, nodes):
            watched[name].constant = watched[name].quantizer.role != "activation"
        # The first run collects the ranges that decide the plans; the second run collects errors.
        with formats.watching(module, {name: item.see for name, item in watched.items()}):
            outputs = run(module, call)
        plans = {name: formats.plan_of(item) for name, item in watched.items() if name in nodes}
        with formats.watching(
            module, {name: partial(watched[name].compare, plan.values) for name, plan in plans.items()}
        ):
            run(module, call)
        for name, places in nodes.items():
            _replace(model, places, plans[name], watched[name].label)
        rounded = _complete(model)
        write(model, result, widths, made)
        report = QdqReport(
            path=Path(os.path.abspath(path)),
            quantizers=tuple(_row(watched[name], plan, rounded) for name, plan in plans.items()),
            untrained=_untrained(module, watched.values()),
            **compared(made, graph, call, outputs),
        )
    if verbose:
        print(report)
    return report


def _row(item: formats.Watched, plan: formats.QdqPlan, rounded: Mapping[str, tuple[float, float]]) -> Converted:
    """Return the report on a quantizer; `rounded` are the biases that were rounded to steps of a product, by name."""
    stored = rounded.get(f"{item.label}.quantized")
    difference, reference = stored or (item.difference, item.reference)
    return Converted(
        layer=", ".join(item.quantizer.layers),
        operand=item.quantizer.operand,
        role=item.quantizer.role,
        format=str(item.quantizer.format),
        bits=item.bits,
        status=plan.status,
        error=(difference / reference) ** 0.5 if reference else float("inf") if difference else 0.0,
        note="; ".join((*plan.notes, *((IN_STEPS,) if stored else ()))),
    )


def _untrained(module: fx.GraphModule, watched: Collection[formats.Watched]) -> str:
    """Return why a model looks untrained (ranges that saw no batch, a schedule at its start), or an empty string."""
    learns = [item for item in watched if item.value_range and item.quantizer.format.range is not Range.DYNAMIC]
    unseen = [item.label for item in learns if not item.learned]
    if unseen:
        others = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        return f"the model was never trained: the range of {unseen[0]}{others} has seen no batch in training mode"
    schedule = precision_of(module).schedule
    if schedule is not None and schedule.position == 0:
        return "the model has been trained for zero steps by its schedule: schedule.step() belongs behind each of them"
    return ""


def _quantizers(model: ir.Model) -> dict[str, list[ir.Node]]:
    """Return the nodes to replace by the name of their quantizer, in execution order."""
    found: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        if QUANTIZER not in node.attributes:
            raise ExportError(f"the model evaluates {node.op_type}, which QDQ has no words for: use export.onnx")
        found.setdefault(node.attributes[QUANTIZER].as_string(), []).append(node)
    return found


def _constants(model: ir.Model, found: dict[str, list[ir.Node]]) -> list[str]:
    """Return the names of quantizers whose input is the same in every run."""
    varying = {*model.graph.inputs}
    inner = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    for node in model.graph:
        # A subgraph inside a node may read anything.
        if varying & {*node.inputs} or any(attribute.type in inner for attribute in node.attributes.values()):
            varying |= {*node.outputs}
    return [name for name, nodes in found.items() if not varying & {node.inputs[0] for node in nodes}]


def _replace(model: ir.Model, nodes: list[ir.Node], plan: formats.QdqPlan, label: str) -> None:
    """Replace the nodes of a quantizer (several if its layer is called several times) by those of its plan."""
    steps, start = _steps(model, plan, label)
    for node in nodes:
        old, value = node.outputs[0], node.inputs[0] if start is None else start
        made = []
        for kind, inputs, attributes in steps:
            made.append(ir.node(kind, [value, *inputs], attributes, name=f"{label}.{kind}" if steps[1:] else label))
            value = made[-1].outputs[0]
        if isinstance(plan.form, (formats.Constant, formats.Activation)):
            made[-1].meta[_FORM] = plan.form
        made[-1].outputs[0].type, made[-1].outputs[0].shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], made, [old], [made[-1].outputs[0]])


def _steps(model: ir.Model, plan: formats.QdqPlan, label: str) -> tuple[list[_Step], ir.Value | None]:
    """Return the nodes of a plan, and the constant that they start with, if any."""
    form = plan.form

    def held(name: str, value: Any, dtype: Any = None) -> ir.Value:
        array = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        return _initializer(model, f"{label}.{name}", array if dtype is None else array.astype(dtype))

    if form is None:
        return [("Identity", (), {})], None
    if isinstance(form, torch.Tensor):
        return [("Identity", (), {})], held("quantized", form)
    if isinstance(form, formats.Constant):
        whole = ml_dtypes.int4 if form.bits <= _FOUR_BITS else np.int8
        grid = (held("scale", form.scale), held("zero_point", np.zeros(form.scale.shape), whole))
        axis = {} if form.axis is None else {"axis": form.axis}
        return [("DequantizeLinear", grid, axis)], held("quantized", form.codes.to(torch.int8), whole)
    grid = (held("scale", form.scale), held("zero_point", form.zero_point, np.uint8))
    steps: list[_Step] = [("QuantizeLinear", grid, {}), ("DequantizeLinear", grid, {})]
    if form.low is not None or form.high is not None:
        low = None if form.low is None else held("low", form.low, np.float32)
        high = None if form.high is None else held("high", form.high, np.float32)
        steps.insert(0, ("Clip", (low, high), {}))
    if form.lowest > 0 or form.highest < 255:
        ends = (held("lowest", form.lowest, np.uint8), held("highest", form.highest, np.uint8))
        steps.insert(-1, ("Clip", ends, {}))
    return steps, None


def _complete(model: ir.Model) -> dict[str, tuple[float, float]]:
    """Remove unused nodes, store biases as integers, and raise the opset if there are 4-bit integers.

    Return the biases that were rounded, by name, with the sums of the squared differences and of the squares.
    """
    rounded: dict[str, tuple[float, float]] = {}
    graph = model.graph
    names = tuple(str(value.name) for value in graph.outputs)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    for node in graph:
        bias = node.inputs[2] if node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.inputs) == 3 else None
        if bias is None or bias.const_value is None:
            continue
        if node.op_type == "Conv" and not np.any(bias.const_value.numpy()):
            # A floating point bias of zeros would keep a convolution from running on integers.
            node.resize_inputs(2)
        else:
            _settle_bias(model, node, bias, rounded)
    model.opset_imports.pop(DOMAIN, None)
    if any(value.dtype == ir.DataType.INT4 for value in graph.initializers.values()):
        version_converter.convert_version(model, _FOUR_BIT_OPSET)
    common.RemoveUnusedNodesPass()(model)
    # ONNX Runtime moves the quantizer behind a Transpose in front of it, and would return the quantized value.
    name_outputs(model, names, apart_from="Transpose")
    common.NameFixPass()(model)
    return rounded


def _initializer(model: ir.Model, name: str, values: Array) -> ir.Value:
    """Add a constant; append underscores to a name that is taken."""
    while name in model.graph.initializers:
        name += "_"
    tensor = ir.tensor(np.ascontiguousarray(values).reshape(values.shape), name=name)
    value = ir.val(name, const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _settle_bias(model: ir.Model, node: ir.Node, bias: ir.Value, rounded: dict[str, tuple[float, float]]) -> None:
    """Store a bias in the form that integer runtimes use; note the rounding error in `rounded`.

    Integer kernels add whole steps of input scale times weight scale. At 8 bits these are below all other rounding, and
    a bias in another form would keep the product in floating point. At narrower bit-widths the steps are coarse: at 2
    bits they moved outputs by half of the largest output. There, and where there is no integer kernel, signs are the
    codes and magnitudes the scales: newer versions of ONNX Runtime round plain biases themselves, but not those of
    a DequantizeLinear.
    """
    makers = [value.producer() for value in node.inputs[:2] if value is not None]
    forms = [maker.meta[_FORM] for maker in makers if maker is not None and _FORM in maker.meta]
    widths = [form.bits for form in forms]
    if bias.dtype != ir.DataType.FLOAT or bias.shape is None or bias.shape.rank() != 1 or not forms:
        return
    assert bias.const_value is not None
    values = bias.const_value.numpy()
    steps = _steps_of_product(node, *forms) if widths == [formats.MOST_BITS] * 2 else None
    if steps is not None and np.abs(values / steps).max(initial=0) < 2**31 - 1:
        scale, codes = steps, np.rint(values / steps).astype(np.int32)
        rounded[str(bias.name)] = formats.squares(torch.from_numpy(codes * scale), torch.from_numpy(values))
    elif min(widths) < formats.MOST_BITS or node.op_type == "ConvTranspose":
        scale, codes = np.where(values == 0, np.float32(1), np.abs(values)), np.sign(values).astype(np.int8)
    else:
        return
    stored = [_initializer(model, f"{bias.name}.codes", codes), _initializer(model, f"{bias.name}.scale", scale)]
    made = ir.node("DequantizeLinear", stored, {"axis": 0} if scale.ndim else {}, name=f"{bias.name}.DequantizeLinear")
    made.outputs[0].type, made.outputs[0].shape = bias.type, bias.shape
    model.graph.insert_before(node, made)
    node.replace_input_with(2, made.outputs[0])


def _steps_of_product(
    node: ir.Node, x: formats.Constant | formats.Activation, weight: formats.Constant | formats.Activation
) -> Array | None:
    """Return the scale of the sums of an integer product, for each channel or for all.

    None if there is no such scale, or if the product runs in floating point anyway: transposed convolutions have no
    integer kernel, other convolutions only one that returns codes.
    """
    if node.op_type == "ConvTranspose" or (node.op_type == "Conv" and not _becomes_codes(node)):
        return None
    if any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    channels = 1 if node.op_type == "Gemm" and not node.attributes.get_int("transB", 0) else 0
    if x.scale.ndim or (isinstance(weight, formats.Constant) and weight.axis not in (None, channels)):
        return None
    product: Array = (x.scale * weight.scale).cpu().numpy()
    return product


def _becomes_codes(node: ir.Node) -> bool:
    """Return whether the only user of a node's result quantizes it, directly or behind Relu or Clip."""
    after = [user for user, _ in node.outputs[0].uses()]
    return len(after) == 1 and (
        after[0].op_type == "QuantizeLinear" or (after[0].op_type in ("Relu", "Clip") and _becomes_codes(after[0]))
    )


def attempt(attempts: Attempts, folder: Path) -> tuple[str, ...]:
    """Export for `export.report`: fill its rows with the errors of quantizers; return notes."""
    made = qdq(attempts.result, attempts.example_inputs, folder / "made.onnx", verbose=False)
    found = {(item.layer, item.operand): item for item in made.quantizers}
    for row, view in zip(attempts.rows, attempts.views, strict=True):
        item = found.get((", ".join(view.layers), view.operand))
        if item is not None:
            row.verdicts["qdq"] = "exact" if item.status == formats.EXACT else f"approximated {item.error:.1%}"
    # All but the first line, which has the counts.
    return ("tried, at 8 bits", *(line.strip() for line in str(made).splitlines()[1:]))
