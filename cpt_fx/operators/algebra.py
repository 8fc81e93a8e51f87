"""Linear algebra that stays in full precision: it multiplies matrices inside, forward or backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from cpt_fx.operators.row import left
from cpt_fx.operators.torch_private import LOW_RANK

_FACTORED = "linear algebra in full precision: rounding inside a decomposition or a solution has no meaning of its own"
_POWERS = "it multiplies a matrix with itself, and what it makes on the way is not seen: write the products"
_STATISTICS = "a product of deviations from a mean, which are made inside"
_NORM = "a norm that decomposes its matrix"
_LOW_RANK = (torch.svd_lowrank, torch.pca_lowrank, *LOW_RANK)


def _is_nuclear(input: Any = None, p: Any = "fro", *rest: Any, **more: Any) -> bool:
    return bool(p == "nuc")


def _decomposes(input: Any = None, ord: Any = None, dim: Any = None, *rest: Any, **more: Any) -> bool:
    """Return whether a norm may need singular values: the nuclear norm, and the spectral norm of a matrix."""
    return ord == "nuc" or (ord in (2, -2) and not isinstance(dim, int))


ROWS = (
    left(_POWERS, "matrix_power", "linalg_matrix_power"),
    left(_POWERS, "matrix_exp", "linalg_matrix_exp"),
    left(_STATISTICS, "cov"),
    left(_STATISTICS, "corrcoef"),
    left("distances are not quantized", "cdist", "_cdist_forward", "_cdist_backward", "_euclidean_dist"),
    left("distances are not quantized", "pdist", "_pdist_forward", "_pdist_backward"),
    left(_FACTORED, "inverse", "linalg_inv", "linalg_inv_ex"),
    left(_FACTORED, "pinverse", "linalg_pinv", name="pinv"),
    left(_FACTORED, "linalg_tensorinv", name="tensorinv"),
    left(
        _FACTORED, "linalg_solve", "linalg_solve_ex", "_linalg_solve_ex", "linalg_tensorsolve",
        "linalg_solve_triangular", "triangular_solve", "cholesky_solve", "_cholesky_solve_helper", "lu_solve",
        "linalg_lu_solve", "linalg_ldl_solve", "linalg_lstsq", "lstsq", name="solve",
    ),
    left(_FACTORED, "det", "linalg_det", "_linalg_det", "logdet", "slogdet", "linalg_slogdet", "_linalg_slogdet"),
    left(
        _FACTORED, "cholesky", "linalg_cholesky", "linalg_cholesky_ex", "cholesky_inverse", "linalg_ldl_factor",
        "linalg_ldl_factor_ex",
    ),
    left(_FACTORED, "svd", "linalg_svd", "linalg_svdvals", "_linalg_svd"),
    left(
        _FACTORED, "linalg_eigh", "linalg_eig", "linalg_eigvals", "linalg_eigvalsh", "_linalg_eigh", "_linalg_eigvals",
        "lobpcg", name="eig",
    ),
    left(_FACTORED, "qr", "linalg_qr", "geqrf"),
    left(
        _FACTORED, "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "_lu_with_info", "lu_unpack", "lu",
        name="lu",
    ),
    left(_FACTORED, "linalg_householder_product", "orgqr", "ormqr", name="householder_product"),
    left(_NORM, "linalg_cond", "linalg_matrix_rank", "nuclear_norm", name="condition"),
    left(_NORM, "linalg_matrix_norm", "linalg_norm", name="norm", when=_decomposes),
    left(_NORM, name="norm", when=_is_nuclear, others=(torch.norm, torch.Tensor.norm, "norm")),
    left("it multiplies a grid by a matrix inside", "affine_grid_generator", others=(F.affine_grid,)),
    left("a function of torch that the graph calls as a whole; it multiplies inside", name="lowrank", others=_LOW_RANK),
)  # fmt: skip
