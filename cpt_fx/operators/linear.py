"""Linear layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cpt_fx.operators.row import FIRST_DIM, Row, left


def _linear(name: str, *inputs: str, **more: Any) -> Row:
    kinds = (*["input"] * len(inputs), "weight", "bias")
    arguments = (*inputs, "weight", "bias")
    return Row("linear", name, arguments, tuple(enumerate(kinds)), ((len(inputs), FIRST_DIM),), names=(name,), **more)


def _trilinear_flops(x: Any, weight: Any, y: Any, expand_x: Any, expand_weight: Any, expand_y: Any, sums: Any,
                     *rest: Any, **options: Any) -> int:  # fmt: skip
    """Count two products: with the weight, which sums over one dim, and of the result with the other operand."""
    sizes = []
    for given, expanded in ((x, expand_x), (weight, expand_weight), (y, expand_y)):
        left_over = iter(given)
        sizes.append([1 if dim in expanded else next(left_over) for dim in range(len(given) + len(expanded))])
    terms = torch.Size(map(max, *sizes))
    count: int = terms.numel() + terms.numel() // max(1, terms[sums[0]])
    return 2 * count


ROWS = (
    _linear(
        "linear", "input", modules=(nn.Linear,), integer="linear",
        kernels={
            "linear_backward": (0, 1, 2), "mkldnn_linear": (0, 1), "mkldnn_linear_backward": (0, 1, 2),
            "mkldnn_linear_backward_input": (1, 2), "mkldnn_linear_backward_weights": (0, 1),
        },
    ),
    _linear("bilinear", "input1", "input2", modules=(nn.Bilinear,), kernels={"_trilinear": (0, 1, 2)},
            flops={"aten::_trilinear": _trilinear_flops}),
    Row(
        "", "linear_cross_entropy", function=F.linear_cross_entropy, modules=(nn.LinearCrossEntropyLoss,),
        left="a linear layer and its loss in one: the product is not a separate operator in this graph",
    ),
    left(
        "a linear layer of one backend: call torch.nn.functional.linear", "mkldnn_linear", "_mixed_dtypes_linear",
        "fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight_fp32_activation", "fbgemm_linear_int8_weight",
        "fbgemm_linear_int8_weight_fp32_activation", "_wrapped_quantized_linear_prepacked",
        "_sparse_semi_structured_linear",
    ),
    left("a product of three tensors: call torch.bilinear", "_trilinear"),
)  # fmt: skip
