"""Sums over neighbours, and products with sparse matrices."""

from __future__ import annotations

from typing import Any

from cpt_fx.operators.row import Row, left, with_in_place


def _scatter(name: str, *arguments: str) -> tuple[Row, Row]:
    """Return the rows of a sum over neighbours: to a new tensor, and in place."""
    source = next(place for place, argument in enumerate(arguments) if argument in ("source", "src", "values"))
    keywords = (("self", "input"),)
    return with_in_place(Row("aggregation", name, arguments, ((source, "input"),), names=(name,), keywords=keywords))


def _sparse(name: str, *arguments: str, **more: Any) -> Row:
    last = len(arguments) - 1
    return Row("aggregation", name, arguments, ((last - 1, "sparse"), (last, "input")), **more)


_RESULT = "a product with a sparse result is not in the operator table"
ROWS = (
    *_scatter("index_add", "input", "dim", "index", "source"),
    *_scatter("scatter_add", "input", "dim", "index", "src"),
    *_scatter("scatter_reduce", "input", "dim", "index", "src", "reduce"),
    *_scatter("index_reduce", "input", "dim", "index", "source", "reduce"),
    # With numbers instead of tensors, or unless told to accumulate, these two write values and sum nothing.
    *_scatter("scatter", "input", "dim", "index", "src"),
    *_scatter("index_put", "input", "indices", "values", "accumulate"),
    _sparse("sparse_mm", "input", "mat2", names=("_sparse_mm",),
            keywords=(("sparse", "input"), ("dense", "mat2")),
            kernels={"_sparse_mm_reduce_impl": (0, 1), "_sparse_mm_reduce_impl_backward": (0, 1, 2)}),
    _sparse("sparse_addmm", "input", "mat1", "mat2", names=("_sparse_addmm",), keywords=(("self", "input"),)),
    Row("aggregation", "segment_reduce", ("data", "reduce"), ((0, "input"),), names=("segment_reduce",)),
    left(f"{_RESULT}: call torch.sparse.mm", "hspmm", "smm", "_sparse_sparse_matmul", "_spsolve"),
    left(f"{_RESULT}: call torch.sparse.addmm", "sspaddmm"),
    left(_RESULT, "sparse_sampled_addmm", name="sampled_addmm"),
    left("an ATen operator that is not in the operator table", "_sparse_mm_reduce_impl"),
)  # fmt: skip
