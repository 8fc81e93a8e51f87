"""Standard nodes in the place of our own: DequantizeLinear behind constants, QuantizeLinear and it behind the rest."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from onnxscript import version_converter

from cpt_fx.errors import ExportError
from cpt_fx.export.local_functions import DOMAIN
from cpt_fx.export.lowering import QUANTIZER
from cpt_fx.export.program import name_outputs
from cpt_fx.export.qdq_formats import MOST_BITS, Activation, Constant, Plan, squares

FOUR_BITS = 4
FOUR_BIT_OPSET = 21
"""The first that knows integers of 4 bits."""
_FORM = "form"
"""Key in the `meta` of a node that returns quantized values: the codes or the grid that they are on."""
_Array = np.ndarray[Any, Any]
_Step = tuple[str, tuple[ir.Value | None, ...], dict[str, Any]]
"""A standard node: its operator, what it takes besides the value before it, and its attributes."""


def quantizers(model: ir.Model) -> dict[str, list[ir.Node]]:
    """Return the nodes to replace, in the order they run in, by the name of the quantizer that each is."""
    found: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if node.domain != DOMAIN:
            continue
        if QUANTIZER not in node.attributes:
            raise ExportError(f"the model evaluates {node.op_type}, which QDQ has no words for: use export.onnx")
        found.setdefault(node.attributes[QUANTIZER].as_string(), []).append(node)
    return found


def constants(model: ir.Model, found: dict[str, list[ir.Node]]) -> list[str]:
    """Return the names of those quantizers whose tensor is the same in every run."""
    varying = {*model.graph.inputs}
    inner = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    for node in model.graph:
        # A graph inside a node reads what it likes.
        if varying & {*node.inputs} or any(attribute.type in inner for attribute in node.attributes.values()):
            varying |= {*node.outputs}
    return [name for name, nodes in found.items() if not varying & {node.inputs[0] for node in nodes}]


def replace(model: ir.Model, nodes: list[ir.Node], plan: Plan, label: str) -> None:
    """Put what a plan says in the place of a quantizer: of several nodes where its layer is called several times."""
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


def _steps(model: ir.Model, plan: Plan, label: str) -> tuple[list[_Step], ir.Value | None]:
    """Return the nodes of a plan, and the constant that they begin with, if any."""
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
    """Drop what is not read any more, let biases be integers, raise the version where integers of 4 bits ask for it.

    Returned are the biases that were rounded, by name, with the squares of the difference and of their values.
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
            # A bias of zeros in floating point keeps a convolution of integers from being one.
            node.resize_inputs(2)
        else:
            _settle_bias(model, node, bias, rounded)
    model.opset_imports.pop(DOMAIN, None)
    if any(value.dtype == ir.DataType.INT4 for value in graph.initializers.values()):
        version_converter.convert_version(model, FOUR_BIT_OPSET)
    common.RemoveUnusedNodesPass()(model)
    # ONNX Runtime moves the quantizer behind a Transpose before it, and then returned the quantized value.
    name_outputs(model, names, apart_from="Transpose")
    common.NameFixPass()(model)
    return rounded


def _initializer(model: ir.Model, name: str, values: _Array) -> ir.Value:
    """Add a constant, under another name where that one is taken."""
    while name in model.graph.initializers:
        name += "_"
    tensor = ir.tensor(np.ascontiguousarray(values).reshape(values.shape), name=name)
    value = ir.val(name, const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _settle_bias(model: ir.Model, node: ir.Node, bias: ir.Value, rounded: dict[str, tuple[float, float]]) -> None:
    """Store a bias as what runtimes that multiply on integers make of it; note what that changes, where it does.

    They add whole steps of the product: of the input's scale times the weight's. At 8 bits these are below all other
    rounding, and a bias that is not made of them would keep the product in floating point. Of narrower widths the steps
    are coarse: at 2 bits they moved outputs by half of their largest. There, and where there is no integer kernel, the
    codes are signs, and the scales are the values: newer versions of ONNX Runtime round plain biases themselves, those
    of a DequantizeLinear they leave alone.
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
    """Return what a step of the sums of a product of integers is worth, for each channel or for all.

    None where it has none, or where it runs in floating point anyway: there are no integer kernels of transposed
    convolutions, and those of others return codes.
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
    """Whether the next thing that happens to what a node returns is that it is quantized."""
    after = [user for user, _ in node.outputs[0].uses()]
    return len(after) == 1 and (
        after[0].op_type == "QuantizeLinear" or (after[0].op_type in ("Relu", "Clip") and _becomes_codes(after[0]))
    )
