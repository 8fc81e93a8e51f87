"""The graph that limits gathered gradients before an update, as `torch.nn.utils.clip_grad_value_` and `_norm_` do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from cpt_fx.export.program import GRADIENT, NEXT
from cpt_fx.export.updates import GRADIENT_SCALE, model_of, value_of

MAX_VALUE, MAX_NORM = "max_value", "max_norm"
"""Inputs: float32, the limits of what the update makes of the gradients, which is their sum by `gradient_scale`."""
_EPSILON = 1e-6
"""Added to a norm before it divides, as torch does."""


def clipping_graph(shapes: Mapping[str, Iterable[int]]) -> ir.Model:
    """Return the graph for gradients of these names and shapes: elements are limited first, then the norm of all."""
    limit, norm, scale = numbers = [value_of(name, "float32") for name in (MAX_VALUE, MAX_NORM, GRADIENT_SCALE)]
    nodes: list[ir.Node] = []

    def made(kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(kind, list(inputs), attributes))
        nodes[-1].outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        return nodes[-1].outputs[0]

    def number(value: float) -> ir.Value:
        nodes.append(ir.node("Constant", [], {"value_float": value}))
        return nodes[-1].outputs[0]

    gradients = {name: value_of(name + GRADIENT, "float32", shape) for name, shape in shapes.items()}
    high = made("Div", limit, scale)
    low = made("Neg", high)
    limited = {name: made("Clip", gradient, low, high) for name, gradient in gradients.items()}
    squares = [made("ReduceSumSquare", value, keepdims=0) for value in limited.values()]
    total = made("Mul", made("Sqrt", made("Sum", *squares)), scale)
    factor = made("Min", made("Div", norm, made("Add", total, number(_EPSILON))), number(1.0))
    outputs = []
    for name, value in limited.items():
        outputs.append(made("Mul", value, factor))
        outputs[-1].name, outputs[-1].shape = name + GRADIENT + NEXT, gradients[name].shape
    return model_of("clipping", [*numbers, *gradients.values()], outputs, nodes)
