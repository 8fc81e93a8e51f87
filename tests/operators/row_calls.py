"""One call of every operator of the list that a CPU can run: small tensors, by the names of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tensor(*shape: int) -> Tensor:
    """Return numbers that are far from each other, so that every grid tells them apart."""
    return torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).sin().reshape(shape) + 0.01


def positive(size: int) -> Tensor:
    """Return a positive definite matrix."""
    return torch.eye(size) * 2 + 0.1


X, W = tensor(3, 3), tensor(3, 3) * 0.5 + torch.eye(3)
VECTOR = tensor(3)
CLASSES = torch.tensor([0, 2, 1])
PLACES = torch.zeros(3, 3, dtype=torch.int64)

CALLS: dict[str, tuple[Any, ...]] = {
    "conv1d": (tensor(1, 2, 5), tensor(3, 2, 2)),
    "conv2d": (tensor(1, 2, 4, 4), tensor(3, 2, 2, 2)),
    "conv3d": (tensor(1, 1, 3, 3, 3), tensor(2, 1, 2, 2, 2)),
    "conv_transpose1d": (tensor(1, 2, 4), tensor(2, 3, 2)),
    "conv_transpose2d": (tensor(1, 2, 3, 3), tensor(2, 3, 2, 2)),
    "conv_transpose3d": (tensor(1, 1, 2, 2, 2), tensor(1, 2, 2, 2, 2)),
    "conv_tbc": (tensor(4, 2, 3), tensor(2, 3, 2), tensor(2)),
    "linear": (X, W),
    "bilinear": (X, X, tensor(2, 3, 3)),
    "linear_cross_entropy": (X, W, CLASSES),
    "matmul": (X, W),
    "mm": (X, W),
    "bmm": (X[None], W[None]),
    "mv": (X, VECTOR),
    "dot": (VECTOR, VECTOR.flip(0)),
    "vdot": (VECTOR, VECTOR.flip(0)),
    "outer": (VECTOR, VECTOR),
    "inner": (X, W),
    "vecdot": (X, W),
    "addmm": (X, X, W), "addmm_": (X, X, W),
    "addbmm": (X, X[None], W[None]), "addbmm_": (X, X[None], W[None]),
    "baddbmm": (X[None], X[None], W[None]), "baddbmm_": (X[None], X[None], W[None]),
    "addmv": (VECTOR, X, VECTOR), "addmv_": (VECTOR, X, VECTOR),
    "addr": (X, VECTOR, VECTOR), "addr_": (X, VECTOR, VECTOR),
    "addmm_activation": (VECTOR, X, W),
    "kron": (X, W),
    "tensordot": (X, W, 1),
    "einsum": ("ij,jk->ik", X, W),
    "multi_dot": ([X, W, X],),
    "chain_matmul": (X, W, X),
    "scaled_dot_product_attention": (X[None], W[None], X[None]),
    "index_add": (X, 0, CLASSES, W), "index_add_": (X, 0, CLASSES, W),
    "scatter_add": (X, 0, PLACES, W),
    "scatter_add_": (X, 0, PLACES, W),
    "matrix_power": (W, 2),
    "matrix_exp": (W,),
    "cov": (X,),
    "corrcoef": (X,),
    "cdist": (X, W),
    "pdist": (X,),
    "inverse": (W,),
    "pinv": (W,),
    "det": (W,),
    "cholesky": (positive(3),),
    "qr": (W,),
    "svd": (W,),
    "lstm_cell": (X, (X, X), tensor(12, 3), tensor(12, 3)),
    "gru_cell": (X, X, tensor(9, 3), tensor(9, 3)),
    "rnn_tanh_cell": (X, X, W, W),
    "rnn_relu_cell": (X, X, W, W),
    "lstm": (X[None], (X[None], X[None]), [tensor(12, 3), tensor(12, 3)], False, 1, 0.0, False, False, False),
    "gru": (X[None], X[None], [tensor(9, 3), tensor(9, 3)], False, 1, 0.0, False, False, False),
    "rnn_tanh": (X[None], X[None], [W, W], False, 1, 0.0, False, False, False),
    "rnn_relu": (X[None], X[None], [W, W], False, 1, 0.0, False, False, False),
    "multi_head_attention_forward": (
        X, X, X, 3, 1, tensor(9, 3), None, None, None, False, 0.0, W, None, True, None, False,
    ),
    "_native_multi_head_attention": (
        X[None], X[None], X[None], 3, 1, tensor(9, 3), tensor(9), W, VECTOR, None, False,
    ),
    "_transformer_encoder_layer_fwd": (
        X[None], 3, 1, tensor(9, 3), tensor(9), W, VECTOR, False, False, 1e-5, VECTOR, VECTOR, VECTOR, VECTOR, W,
        VECTOR, W, VECTOR,
    ),
    "grouped_mm": (tensor(4, 16).bfloat16(), tensor(2, 16, 8).bfloat16(), torch.tensor([2, 4], dtype=torch.int32)),
    "embedding": (CLASSES, W),
    "embedding_bag": (CLASSES[None], W),
    "scatter_reduce": (X, 0, PLACES, W, "sum"), "scatter_reduce_": (X, 0, PLACES, W, "sum"),
    "index_reduce": (X, 0, CLASSES, W, "mean"), "index_reduce_": (X, 0, CLASSES, W, "mean"),
    "scatter": (X, 0, PLACES, W), "scatter_": (X, 0, PLACES, W),
    "index_put": (X, (CLASSES,), W, True), "index_put_": (X, (CLASSES,), W, True),
    "sparse_mm": (torch.eye(3).to_sparse(), W),
    "sparse_addmm": (X, torch.eye(3).to_sparse(), W),
    "hspmm": (torch.eye(3).to_sparse(), W),
    "tensorinv": (positive(4).reshape(2, 2, 2, 2),),
    "solve": (W, X),
    "eig": (positive(3),),
    "lu": (W,),
    "householder_product": (X, VECTOR),
    "condition": (W,),
    "norm": (W, "nuc"),
    "affine_grid_generator": (tensor(1, 2, 3), [1, 1, 2, 2], True),
}  # fmt: skip
"""By the name of the row: positional arguments. What is floating point is given as an input or as a parameter."""

BREAKS = {"cov", "corrcoef", "sparse_mm", "sparse_addmm", "hspmm"}
"""Where Dynamo ends a graph: together with them, all others would be captured one by one, which takes minutes."""
NO_PROGRAM = {"cov", "corrcoef"}
"""What torch.export itself cannot export."""
