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
OFFSETS = torch.tensor([3], dtype=torch.int32)

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
    "scatter_add": (X, 0, torch.zeros(3, 3, dtype=torch.int64), W),
    "scatter_add_": (X, 0, torch.zeros(3, 3, dtype=torch.int64), W),
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
    "embedding": (CLASSES, W),
}  # fmt: skip
"""By the name of the row: positional arguments. What is floating point is given as an input or as a parameter."""
