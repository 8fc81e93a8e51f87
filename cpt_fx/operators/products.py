"""Products of matrices and vectors, sums over neighbours, and linear algebra, which stays in full precision."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from cpt_fx.operators.row import Call, Groups, Row, left

_VF: Any = torch._C._VariableFunctions
"""What the functions of torch call that are written in Python."""


def _product(name: str, *names: str, addend: bool = False, right: int = -2, **more: Any) -> Row:
    arguments = ("input", "mat1", "mat2") if addend else ("input", "other")
    first = 1 if addend else 0
    operands = ((first, "either"), (first + 1, "either"))
    # Rank-free: the left operand's output axis is its rows, the right one's its columns, batched or not, or its rows.
    channels: tuple[tuple[int, Groups], ...] = ((first, ((), (-1,))), (first + 1, ((), (right,))))
    bias = ((0, "bias"),) if addend else ()
    more.setdefault("keywords", (("self", "input"), ("mat2", "other")) if not addend else (("self", "input"),))
    return Row("matmul", name, arguments, bias + operands, channels, names=names or (name,), **more)


def _added(name: str, *keywords: tuple[str, str], **more: Any) -> tuple[Row, Row]:
    """Return a product that is added to something, to a new tensor and in place."""
    renamed = (("self", "input"), *keywords)
    in_place = f"{name}_"
    return (
        _product(name, addend=True, keywords=renamed, **more),
        _product(in_place, addend=True, keywords=renamed, function=getattr(torch.Tensor, in_place), fresh=False),
    )


def _either(name: str, **more: Any) -> Row:
    """A product whose output axes depend on how it is called: no operand has channels."""
    return Row(
        "matmul", name, ("input", "other"), ((0, "either"), (1, "either")), names=(name,), keywords=_SELF, **more
    )


def _several(name: str, argument: str, start: int = 0, **more: Any) -> Row:
    """A product of as many operands as are given."""
    return Row("matmul", name, (argument,), variadic=start, between=True, **more)


def _reversed(self: Any, other: Any) -> Call:
    return torch.matmul, (other, self), {}


def _by_dims(self: Any, other: Any, dims_self: Any, dims_other: Any) -> Call:
    return torch.tensordot, (self, other, (dims_self, dims_other)), {}


def _listed(matrices: Any) -> Call:
    return torch.chain_matmul, tuple(matrices), {}


def _einsum(equation: Any, tensors: Any, *, path: Any = None) -> Call:
    return torch.einsum, (equation, *tensors), {}


def _matrix_by_vector(place: int) -> Any:
    def flops(*shapes: Any, out_shape: Any, **options: Any) -> int:
        return 2 * torch.Size(shapes[place]).numel()

    return flops


def _grouped_flops(a: Any, b: Any, *rest: Any, out_shape: Any, **options: Any) -> int:
    return 2 * torch.Size(out_shape).numel() * int(a[-1])


_SELF = (("self", "input"),)
_GROUPED = (("mat_a", "input"), ("mat_b", "other"), ("mat2", "other"), ("self", "input"))
_SCALED = tuple(getattr(F, name) for name in ("scaled_mm", "scaled_grouped_mm") if hasattr(F, name))
_PACKED = "a product of a backend, whose operands are packed or have scales of their own"
_LOW = "a product of numbers that are quantized already"

_PRODUCTS = (
    _product(
        "matmul", "matmul", "linalg_matmul", "__matmul__", integer="matmul", function=torch.matmul,
        kernels={"matmul_backward": (0, 1, 2)},
        others=(operator.matmul, operator.imatmul),
        converts=dict.fromkeys((torch.Tensor.__rmatmul__, "__rmatmul__"), _reversed),
    ),
    _product("mm", integer="matmul"),
    _product("bmm", integer="matmul"),
    _product("mv", keywords=(("vec", "other"), ("self", "input")), flops={"aten::mv": _matrix_by_vector(0)}),
    _product("dot", keywords=(("tensor", "other"), ("self", "input")), flops={"aten::dot": _matrix_by_vector(0)}),
    _product("vdot", flops={"aten::vdot": _matrix_by_vector(0)}),
    _product("outer", "outer", "ger", keywords=(("vec2", "other"), ("self", "input"))),
    _product("inner", right=-1),
    _product("vecdot", "linalg_vecdot", right=-1, keywords=(("x", "input"), ("y", "other"))),
    *_added("addmm", integer="matmul"),
    *_added("addbmm", ("batch1", "mat1"), ("batch2", "mat2")),
    *_added("baddbmm", ("batch1", "mat1"), ("batch2", "mat2")),
    *_added("addmv", ("mat", "mat1"), ("vec", "mat2"), flops={"aten::addmv": _matrix_by_vector(1)}),
    *_added("addr", ("vec1", "mat1"), ("vec2", "mat2")),
    _product("addmm_activation", "_addmm_activation", addend=True),
    _either("kron"),
    Row(
        "matmul", "tensordot", ("input", "other"), ((0, "either"), (1, "either")), function=torch.tensordot,
        keywords=(("a", "input"), ("b", "other")),
        converts=dict.fromkeys((_VF.tensordot, "aten::tensordot"), _by_dims),
    ),
    # Products of experts: rows of the left operand meet the matrix of their group.
    _product(
        "grouped_mm", "_grouped_mm", "transformers::grouped_mm_fallback", function=torch._grouped_mm,
        others=(F.grouped_mm,), keywords=_GROUPED,
        flops={"aten::_grouped_mm": _grouped_flops},
    ),
    _several(
        "einsum", "equation", 1, function=torch.einsum,
        converts=dict.fromkeys((_VF.einsum, "aten::einsum"), _einsum),
    ),
    _several("multi_dot", "tensors", names=("linalg_multi_dot",)),
    _several(
        "chain_matmul", "matrices", function=torch.chain_matmul, fresh=False,
        converts=dict.fromkeys((_VF.chain_matmul, "aten::chain_matmul"), _listed),
    ),
    left("fused products: what it multiplies in between is not seen", "_compute_linear_combination", "_foreach_mm"),
    left(
        _LOW, "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2",
        name="scaled_mm", others=_SCALED,
    ),
    left(
        _PACKED, "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu",
        "_weight_int4pack_mm_with_scales_and_zeros", "_dyn_quant_matmul_4bit", "_cslt_sparse_mm",
        "_sparse_semi_structured_mm", "_sparse_semi_structured_addmm", name="packed_mm",
    ),
)  # fmt: skip


def _scatter(name: str, *arguments: str) -> tuple[Row, Row]:
    """Return a sum over neighbours, to a new tensor and in place."""
    source = next(place for place, argument in enumerate(arguments) if argument in ("source", "src", "values"))
    keywords = (("self", "input"),)
    operands, in_place = ((source, "input"),), f"{name}_"
    return (
        Row("aggregation", name, arguments, operands, names=(name,), keywords=keywords),
        Row("aggregation", in_place, arguments, operands, names=(in_place,), keywords=keywords, fresh=False,
            function=getattr(torch.Tensor, in_place)),
    )  # fmt: skip


def _sparse(name: str, *arguments: str, **more: Any) -> Row:
    last = len(arguments) - 1
    return Row("aggregation", name, arguments, ((last - 1, "sparse"), (last, "input")), **more)


_RESULT = "a product with a sparse result is not in the operator table"
_AGGREGATIONS = (
    *_scatter("index_add", "input", "dim", "index", "source"),
    *_scatter("scatter_add", "input", "dim", "index", "src"),
    *_scatter("scatter_reduce", "input", "dim", "index", "src", "reduce"),
    *_scatter("index_reduce", "input", "dim", "index", "source", "reduce"),
    # With numbers instead of tensors, and unless told to add up, these two write values and sum nothing.
    *_scatter("scatter", "input", "dim", "index", "src"),
    *_scatter("index_put", "input", "indices", "values", "accumulate"),
    _sparse("sparse_mm", "input", "mat2", names=("_sparse_mm",),
            keywords=(("sparse", "input"), ("dense", "mat2")),
            kernels={"_sparse_mm_reduce_impl_backward": (0, 1, 2)}),
    _sparse("sparse_addmm", "input", "mat1", "mat2", names=("_sparse_addmm",), keywords=(("self", "input"),)),
    Row("aggregation", "segment_reduce", ("data", "reduce"), ((0, "input"),), names=("segment_reduce",)),
    left(f"{_RESULT}: call torch.sparse.mm", "hspmm", "smm", "_sparse_sparse_matmul", "_spsolve"),
    left(f"{_RESULT}: call torch.sparse.addmm", "sspaddmm"),
    left(_RESULT, "sparse_sampled_addmm", name="sampled_addmm"),
    left("an ATen operator that is not in the operator table", "_sparse_mm_reduce_impl"),
)  # fmt: skip


_FACTORED = "linear algebra in full precision: rounding inside a decomposition or a solution has no meaning of its own"
_POWERS = "it multiplies a matrix with itself, and what it makes on the way is not seen: write the products"
_STATISTICS = "a product of deviations from a mean, which are made inside"
_NORM = "a norm that decomposes its matrix"
_LOW_RANK = (
    torch.svd_lowrank, torch.pca_lowrank, torch._lowrank.get_approximate_basis, torch._lowrank._svd_lowrank,
    torch._linalg_utils.matmul, torch._linalg_utils.bform, torch._linalg_utils.qform, torch._linalg_utils.basis,
    torch._linalg_utils.symeig,
)  # fmt: skip


def _is_nuclear(input: Any, p: Any = "fro", *rest: Any, **more: Any) -> bool:
    return bool(p == "nuc")


def _decomposes(input: Any, ord: Any = None, dim: Any = None, *rest: Any, **more: Any) -> bool:
    """Whether a norm may be that of singular values: the nuclear one, and the spectral one of a matrix."""
    return ord == "nuc" or (ord in (2, -2) and not isinstance(dim, int))


_ALGEBRA = (
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

ROWS = (*_PRODUCTS, *_AGGREGATIONS, *_ALGEBRA)
