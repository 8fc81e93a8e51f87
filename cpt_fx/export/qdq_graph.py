"""Our quantizer nodes replaced by DequantizeLinear for constants, and QuantizeLinear and DequantizeLinear otherwise."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import version_converter

from cpt_fx.errors import ExportError
from cpt_fx.export.functions import DOMAIN
from cpt_fx.export.lowering import QUANTIZER
from cpt_fx.export.program import name_outputs
from cpt_fx.export.qdq_formats import MOST_BITS, Activation, Constant, QdqPlan, squares

FOUR_BITS = 4
FOUR_BIT_OPSET = 21
"""The first opset with 4-bit integers."""
_FORM = "form"
"""Key in a node's `meta`: the codes or the grid of the quantized values that it returns."""
_Array = np.ndarray[Any, Any]
_Step = tuple[str, tuple[ir.Value | None, ...], dict[str, Any]]
"""A standard node: its operator, its inputs after the first, and its attributes."""


def quantizers(model: ir.Model) -> dict[str, list[ir.Node]]:
    """Return the nodes to replace by the name of their quantizer, in execution order."""
    found: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        if QUANTIZER not in node.attributes:
            raise ExportError(f"the model evaluates {node.op_type}, which QDQ has no words for: use export.onnx")
        found.setdefault(node.attributes[QUANTIZER].as_string(), []).append(node)
    return found


def constants(model: ir.Model, found: dict[str, list[ir.Node]]) -> list[str]:
    """Return the names of the quantizers whose input is the same in every run."""
    varying = {*model.graph.inputs}
    inner = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    for node in model.graph:
        # A subgraph inside a node may read anything.
        if varying & {*node.inputs} or any(attribute.type in inner for attribute in node.attributes.values()):
            varying |= {*node.outputs}
    return [name for name, nodes in found.items() if not varying & {node.inputs[0] for node in nodes}]


def replace(model: ir.Model, nodes: list[ir.Node], plan: QdqPlan, label: str) -> None:
    """Replace the nodes of a quantizer (several if its layer is called several times) by those of its plan."""
    steps, start = _steps(model, plan, label)
    for node in nodes:
        old, value = node.outputs[0], node.inputs[0] if start is None else start
        made = []
        for kind, inputs, attributes in steps:
            made.append(ir.node(kind, [value, *inputs], attributes, name=f"{label}.{kind}" if steps[1:] else label))
            value = made[-1].outputs[0]
        if isinstance(plan.form, (Constant, Activation)):
            made[-1].meta[_FORM] = plan.form
        made[-1].outputs[0].type, made[-1].outputs[0].shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], made, [old], [made[-1].outputs[0]])


def _steps(model: ir.Model, plan: QdqPlan, label: str) -> tuple[list[_Step], ir.Value | None]:
    """Return the nodes of a plan, and the constant that they start with, if any."""
    form = plan.form

    def held(name: str, value: Any, dtype: Any = None) -> ir.Value:
        array = value.cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
        return _initializer(model, f"{label}.{name}", array if dtype is None else array.astype(dtype))

    if form is None:
        return [("Identity", (), {})], None
    if isinstance(form, torch.Tensor):
        return [("Identity", (), {})], held("quantized", form)
    if isinstance(form, Constant):
        whole = ml_dtypes.int4 if form.bits <= FOUR_BITS else np.int8
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


def complete(model: ir.Model) -> dict[str, tuple[float, float]]:
    """Remove unused nodes, store biases as integers, and raise the opset if there are 4-bit integers.

    Returned are the biases that were rounded, by name, with the sums of the squared differences and of the squares.
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
        version_converter.convert_version(model, FOUR_BIT_OPSET)
    common.RemoveUnusedNodesPass()(model)
    # ONNX Runtime moves the quantizer behind a Transpose in front of it, and would return the quantized value.
    name_outputs(model, names, apart_from="Transpose")
    common.NameFixPass()(model)
    return rounded


def _initializer(model: ir.Model, name: str, values: _Array) -> ir.Value:
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
    bits they moved outputs by half of their largest. There, and where there is no integer kernel, signs are the codes
    and magnitudes the scales: newer versions of ONNX Runtime round plain biases themselves, but not those of a
    DequantizeLinear.
    """
    makers = [value.producer() for value in node.inputs[:2] if value is not None]
    forms = [maker.meta[_FORM] for maker in makers if maker is not None and _FORM in maker.meta]
    widths = [form.bits for form in forms]
    if bias.dtype != ir.DataType.FLOAT or bias.shape is None or bias.shape.rank() != 1 or not forms:
        return
    assert bias.const_value is not None
    values = bias.const_value.numpy()
    steps = _steps_of_product(node, *forms) if widths == [MOST_BITS] * 2 else None
    if steps is not None and np.abs(values / steps).max(initial=0) < 2**31 - 1:
        scale, codes = steps, np.rint(values / steps).astype(np.int32)
        rounded[str(bias.name)] = squares(torch.from_numpy(codes * scale), torch.from_numpy(values))
    elif min(widths) < MOST_BITS or node.op_type == "ConvTranspose":
        scale, codes = np.where(values == 0, np.float32(1), np.abs(values)), np.sign(values).astype(np.int8)
    else:
        return
    stored = [_initializer(model, f"{bias.name}.codes", codes), _initializer(model, f"{bias.name}.scale", scale)]
    made = ir.node("DequantizeLinear", stored, {"axis": 0} if scale.ndim else {}, name=f"{bias.name}.DequantizeLinear")
    made.outputs[0].type, made.outputs[0].shape = bias.type, bias.shape
    model.graph.insert_before(node, made)
    node.replace_input_with(2, made.outputs[0])


def _steps_of_product(node: ir.Node, x: Constant | Activation, weight: Constant | Activation) -> _Array | None:
    """Return the scale of the sums of an integer product, for each channel or for all.

    None if there is no such scale, or if the product runs in floating point anyway: transposed convolutions have no
    integer kernel, other convolutions only one that returns codes.
    """
    if node.op_type == "ConvTranspose" or (node.op_type == "Conv" and not _becomes_codes(node)):
        return None
    if any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    channels = 1 if node.op_type == "Gemm" and not node.attributes.get_int("transB", 0) else 0
    if x.scale.ndim or (isinstance(weight, Constant) and weight.axis not in (None, channels)):
        return None
    product: _Array = (x.scale * weight.scale).cpu().numpy()
    return product


def _becomes_codes(node: ir.Node) -> bool:
    """Return whether the only user of a node's result quantizes it, directly or behind Relu or Clip."""
    after = [user for user, _ in node.outputs[0].uses()]
    return len(after) == 1 and (
        after[0].op_type == "QuantizeLinear" or (after[0].op_type in ("Relu", "Clip") and _becomes_codes(after[0]))
    )
