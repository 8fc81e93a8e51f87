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
from cpt_fx.export.program import BITS, name_outputs
from cpt_fx.export.qdq_formats import MOST_BITS, Activation, Constant, Plan, squares

FOUR_BITS = 4
FOUR_BIT_OPSET = 21
"""The first that knows integers of 4 bits."""
_BITS = "bits"
"""Key in the `meta` of a node: the width of what it returns."""


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


def constants(model: ir.Model, found: dict[str, list[ir.Node]]) -> frozenset[str]:
    """Return the names of those quantizers whose tensor is the same in every run."""
    known = {value: str(value.name).startswith(BITS) for value in model.graph.inputs}
    inner = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    for node in model.graph:
        fixed = all(known.get(value, True) for value in node.inputs if value is not None)
        # A graph inside a node reads what it likes.
        fixed = fixed and not any(attribute.type in inner for attribute in node.attributes.values())
        known.update(dict.fromkeys(node.outputs, fixed))
    return frozenset(
        name
        for name, nodes in found.items()
        if all(known.get(value, True) for node in nodes if (value := node.inputs[0]) is not None)
    )


def replace(model: ir.Model, node: ir.Node, plan: Plan, label: str) -> None:
    """Put what a plan says in the place of a quantizer."""
    x, old = node.inputs[0], node.outputs[0]
    assert x is not None
    if plan.form is None:
        made = [ir.node("Identity", [x])]
    elif isinstance(plan.form, Constant):
        made = _constant(model, plan.form, label)
    elif isinstance(plan.form, Activation):
        made = _activation(model, plan.form, x, label)
    else:
        values = plan.form.cpu().numpy()
        made = [ir.node("Identity", [_initializer(model, f"{label}.quantized", values)])]
    if isinstance(plan.form, (Constant, Activation)):
        made[-1].meta[_BITS] = plan.form.bits
    new = made[-1].outputs[0]
    new.type, new.shape = old.type, old.shape
    for position, item in enumerate(made):
        item.name = f"{label}.{item.op_type}" if position or len(made) > 1 else label
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], made, [old], [new])


def complete(model: ir.Model) -> dict[str, tuple[float, float]]:
    """Drop what is not read any more, let biases be integers, raise the version where integers of 4 bits ask for it.

    Returned are the biases that were rounded, by name, with the squares of the difference and of their values.
    """
    rounded: dict[str, tuple[float, float]] = {}
    graph = model.graph
    names = tuple(str(value.name) for value in graph.outputs)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    for value in list(graph.inputs):
        if str(value.name).startswith(BITS):
            assert not value.uses(), value.name
            graph.inputs.remove(value)
    for node in graph:
        # Without a bias a convolution of integers is one; a bias of zeros in floating point keeps it from being one.
        if node.op_type == "Conv" and len(node.inputs) == 3 and _is_zero(node.inputs[2]):
            node.resize_inputs(2)
        elif node.op_type in ("Conv", "ConvTranspose", "Gemm") and len(node.inputs) == 3 and (held := node.inputs[2]):
            changed = _settle_bias(model, node)
            if changed is not None:
                rounded[str(held.name)] = changed
    model.opset_imports.pop(DOMAIN, None)
    if any(value.dtype in (ir.DataType.INT4, ir.DataType.UINT4) for value in graph.initializers.values()):
        version_converter.convert_version(model, FOUR_BIT_OPSET)
    common.RemoveUnusedNodesPass()(model)
    name_outputs(model, names)
    common.NameFixPass()(model)
    return rounded


def _constant(model: ir.Model, form: Constant, label: str) -> list[ir.Node]:
    signed = not form.zero_point and float(form.codes.amin()) < 0 if form.codes.numel() else True
    small: Any = ml_dtypes.int4 if signed else ml_dtypes.uint4
    whole: Any = np.int8 if signed else np.uint8
    kind = small if form.bits <= FOUR_BITS else whole
    inputs = [
        _initializer(model, f"{label}.quantized", form.codes.to(torch.int16).cpu().numpy().astype(kind)),
        _initializer(model, f"{label}.scale", form.scale.cpu().numpy()),
        _initializer(model, f"{label}.zero_point", np.full(form.scale.shape, form.zero_point, kind)),
    ]
    return [ir.node("DequantizeLinear", inputs, {} if form.axis is None else {"axis": form.axis})]


def _activation(model: ir.Model, form: Activation, x: ir.Value, label: str) -> list[ir.Node]:
    grid = [
        _initializer(model, f"{label}.scale", form.scale.cpu().numpy()),
        _initializer(model, f"{label}.zero_point", np.array(form.zero_point, np.uint8)),
    ]
    made = []
    if form.low is not None or form.high is not None:
        bounds = [
            None if bound is None else _initializer(model, f"{label}.{name}", np.array(bound, np.float32))
            for name, bound in (("low", form.low), ("high", form.high))
        ]
        made.append(ir.node("Clip", [x, *bounds]))
        x = made[-1].outputs[0]
    made.append(ir.node("QuantizeLinear", [x, *grid]))
    if form.clips:
        ends = [
            _initializer(model, f"{label}.{name}", np.array(code, np.uint8))
            for name, code in (("lowest", form.lowest), ("highest", form.highest))
        ]
        made.append(ir.node("Clip", [made[-1].outputs[0], *ends]))
    made.append(ir.node("DequantizeLinear", [made[-1].outputs[0], *grid]))
    return made


def _initializer(model: ir.Model, name: str, values: np.ndarray[Any, Any]) -> ir.Value:
    """Add a constant, or return it where a quantizer of that name has added it before."""
    free, number = name, 0
    while free in model.graph.initializers:
        held = model.graph.initializers[free].const_value
        assert held is not None
        if held.numpy().dtype == values.dtype and np.array_equal(held.numpy(), values):
            return model.graph.initializers[free]
        number += 1
        free = f"{name}_{number}"
    tensor = ir.tensor(np.ascontiguousarray(values).reshape(values.shape), name=free)
    value = ir.Value(name=free, shape=ir.Shape(values.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value


def _settle_bias(model: ir.Model, node: ir.Node) -> tuple[float, float] | None:
    """Store a bias as what runtimes that multiply on integers make of it; return what that changes, where it does.

    They add whole steps of the product: of the input's scale times the weight's. At 8 bits these are below all other
    rounding, and a bias that is not made of them would keep the product in floating point. Of narrower widths the steps
    are coarse: at 2 bits they moved outputs by half of their largest. There, and where there is no integer kernel, the
    codes are signs, and the scales are the values: newer versions of ONNX Runtime round plain biases themselves, those
    of a DequantizeLinear they leave alone.
    """
    bias = node.inputs[2]
    held = None if bias is None else bias.const_value
    makers = [value.producer() for value in node.inputs[:2] if value is not None]
    widths = [maker.meta[_BITS] for maker in makers if maker is not None and _BITS in maker.meta]
    if bias is None or held is None or held.dtype != ir.DataType.FLOAT or held.shape.rank() != 1 or not widths:
        return None
    values = held.numpy()
    steps = _steps_of_product(node) if widths == [MOST_BITS] * 2 else None
    if steps is not None and np.abs(values / steps).max(initial=0) < 2**31 - 1:
        scale, codes = steps, np.rint(values / steps).astype(np.int32)
    elif min(widths) < MOST_BITS or node.op_type == "ConvTranspose":
        scale, codes = np.where(values == 0, np.float32(1), np.abs(values)), np.sign(values).astype(np.int8)
    else:
        return None
    stored = [_initializer(model, f"{bias.name}.codes", codes), _initializer(model, f"{bias.name}.scale", scale)]
    made = ir.node("DequantizeLinear", stored, {"axis": 0} if scale.ndim else {}, name=f"{bias.name}.DequantizeLinear")
    made.outputs[0].type, made.outputs[0].shape = bias.type, bias.shape
    model.graph.insert_before(node, made)
    node.replace_input_with(2, made.outputs[0])
    return squares(torch.from_numpy(codes * scale), torch.from_numpy(values)) if codes.dtype == np.int32 else None


def _steps_of_product(node: ir.Node) -> np.ndarray[Any, Any] | None:
    """Return what a step of the sums of a product of integers is worth, for each channel or for all.

    None where it has none, or where it runs in floating point anyway: there are no integer kernels of transposed
    convolutions, and those of others return codes.
    """
    if node.op_type == "ConvTranspose" or (node.op_type == "Conv" and not _becomes_codes(node)):
        return None
    if any(node.attributes.get_float(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return None
    scales, axes = [], []
    for value in node.inputs[:2]:
        maker = None if value is None else value.producer()
        held = None if maker is None or maker.inputs[1] is None else maker.inputs[1].const_value
        if maker is None or held is None:
            return None
        scales.append(held.numpy())
        axes.append(maker.attributes.get_int("axis", 1))
    channels = 1 if node.op_type == "Gemm" and not node.attributes.get_int("transB", 0) else 0
    if scales[0].ndim or (scales[1].ndim and axes[1] != channels):
        return None
    product: np.ndarray[Any, Any] = np.asarray(scales[0] * scales[1], np.float32)
    return product


def _becomes_codes(node: ir.Node) -> bool:
    """Whether the next thing that happens to what a node returns is that it is quantized."""
    after = [user for user, _ in node.outputs[0].uses()]
    return len(after) == 1 and (
        after[0].op_type == "QuantizeLinear" or (after[0].op_type in ("Relu", "Clip") and _becomes_codes(after[0]))
    )


def _is_zero(value: ir.Value | None) -> bool:
    held = None if value is None else value.const_value
    return held is not None and not np.any(held.numpy())
