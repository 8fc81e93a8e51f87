"""Products of matrices and vectors."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from cpt_fx.operators.row import Call, Groups, Row, left, with_in_place
from cpt_fx.operators.torch_private import VF, grouped_mm

"""Namespace of the builtins that torch's functions in Python call."""


def _product(name: str, *names: str, addend: bool = False, right: int = -2, **more: Any) -> Row:
    arguments = ("input", "mat1", "mat2") if addend else ("input", "other")
    first = 1 if addend else 0
    operands = ((first, "either"), (first + 1, "either"))
    # For any rank: the left operand has a range per row, the right one per column (per row with right=-1).
    channels: tuple[tuple[int, Groups], ...] = ((first, ((), (-1,))), (first + 1, ((), (right,))))
    bias = ((0, "bias"),) if addend else ()
    more.setdefault("keywords", _SELF if addend else (*_SELF, ("mat2", "other")))
    return Row("matmul", name, arguments, bias + operands, channels, names=names or (name,), **more)


def _added_flops(addend: Any, left: Any, right: Any, *rest: Any, **options: Any) -> int:
    return 2 * torch.Size(left).numel() * int(right[-1])


def _added(name: str, *keywords: tuple[str, str], flops: Any = _added_flops, **more: Any) -> tuple[Row, Row]:
    """Return the rows of a product with an addend: to a new tensor, and in place."""
    renamed = (*_SELF, *keywords)
    return with_in_place(_product(name, addend=True, keywords=renamed, flops={f"aten::{name}": flops}, **more))


def _several(name: str, argument: str, start: int = 0, **more: Any) -> Row:
    """Return a product of any number of operands."""
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


_BOTH = ((0, "either"), (1, "either"))
_SELF = (("self", "input"),)
_GROUPED = (("mat_a", "input"), ("self", "input"), ("mat_b", "other"), ("mat2", "other"), ("weight", "other"))
_SCALED = tuple(getattr(F, name) for name in ("scaled_mm", "scaled_grouped_mm") if hasattr(F, name))
_PACKED = "a product of a backend, whose operands are packed or have scales of their own"
_LOW = "a product of numbers that are quantized already"

ROWS = (
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
    _product("vecdot", "linalg_vecdot", right=-1, keywords=(("x", "input"), ("y", "other"), ("axis", "dim"))),
    *_added("addmm", integer="matmul"),
    *_added("addbmm", ("batch1", "mat1"), ("batch2", "mat2")),
    *_added("baddbmm", ("batch1", "mat1"), ("batch2", "mat2")),
    *_added("addmv", ("mat", "mat1"), ("vec", "mat2"), flops=_matrix_by_vector(1)),
    *_added("addr", ("vec1", "mat1"), ("vec2", "mat2")),
    _product("addmm_activation", "_addmm_activation", addend=True, flops={"aten::_addmm_activation": _added_flops}),
    # The output axes of these two depend on the call: no operand has channels.
    Row("matmul", "kron", ("input", "other"), _BOTH, names=("kron",), keywords=_SELF),
    Row(
        "matmul", "tensordot", ("input", "other"), _BOTH, function=torch.tensordot,
        keywords=(("a", "input"), ("b", "other")),
        converts=dict.fromkeys((VF.tensordot, "aten::tensordot"), _by_dims),
    ),
    # Mixture of experts: each row of the left operand is multiplied by the matrix of its group.
    _product(
        "grouped_mm", "_grouped_mm", "transformers::grouped_mm_fallback", function=grouped_mm,
        others=(F.grouped_mm,), keywords=_GROUPED,
        flops={"aten::_grouped_mm": _grouped_flops},
    ),
    _several(
        "einsum", "equation", 1, function=torch.einsum,
        converts=dict.fromkeys((VF.einsum, "aten::einsum"), _einsum),
    ),
    _several("multi_dot", "tensors", names=("linalg_multi_dot",)),
    _several(
        "chain_matmul", "matrices", function=torch.chain_matmul, fresh=False,
        converts=dict.fromkeys((VF.chain_matmul, "aten::chain_matmul"), _listed),
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
