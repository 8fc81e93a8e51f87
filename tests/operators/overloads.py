"""Products by the names that ATen has for them, by those that write their result somewhere, and as methods."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Table = dict[str, tuple[Any, ...]]
"""A function and its arguments; a dict at the end has those with a name."""


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


def spd(n: int = 5) -> Tensor:
    made = r(n, n)
    return made @ made.T + n * torch.eye(n)


_ATEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mm": lambda: (r(5, 6), r(6, 7)), "bmm": lambda: (r(2, 5, 6), r(2, 6, 7)), "mv": lambda: (r(5, 6), r(6)),
    "dot": lambda: (r(7), r(7)), "vdot": lambda: (r(7), r(7)), "matmul": lambda: (r(5, 6), r(6, 7)),
    "inner": lambda: (r(5, 6), r(7, 6)), "outer": lambda: (r(5), r(6)), "ger": lambda: (r(5), r(6)),
    "addmm": lambda: (r(7), r(5, 6), r(6, 7)), "addmv": lambda: (r(5), r(5, 6), r(6)),
    "addbmm": lambda: (r(5, 7), r(2, 5, 6), r(2, 6, 7)), "baddbmm": lambda: (r(2, 5, 7), r(2, 5, 6), r(2, 6, 7)),
    "addr": lambda: (r(5, 6), r(5), r(6)), "kron": lambda: (r(3, 4), r(2, 5)),
    "linear": lambda: (r(5, 4), r(6, 4), r(6)), "bilinear": lambda: (r(5, 4), r(5, 3), r(6, 4, 3), None),
    "_trilinear": lambda: (r(5, 4), r(6, 4, 3), r(5, 3), [1, 3], [0], [1, 2], [2, 3]),
    "linalg_multi_dot": lambda: ([r(5, 6), r(6, 7), r(7, 8)],), "linalg_vecdot": lambda: (r(5, 6), r(5, 6)),
    "linalg_matmul": lambda: (r(5, 6), r(6, 7)), "chain_matmul": lambda: ([r(5, 6), r(6, 7), r(7, 8)],),
    "matrix_power": lambda: (r(5, 5), 3), "linalg_matrix_power": lambda: (r(5, 5), 3),
    "matrix_exp": lambda: (r(5, 5),), "linalg_matrix_exp": lambda: (r(5, 5),),
    "convolution": lambda: (r(2, 3, 7), r(4, 3, 3), None, [1], [0], [1], False, [0], 1),
    "_convolution": lambda: (r(2, 3, 7), r(4, 3, 3), None, [1], [0], [1], False, [0], 1, False, False, True, True),
    "conv1d": lambda: (r(2, 3, 7), r(4, 3, 3)), "conv2d": lambda: (r(2, 3, 7, 7), r(4, 3, 3, 3)),
    "conv_transpose2d": lambda: (r(2, 3, 7, 7), r(3, 4, 3, 3)), "conv_tbc": lambda: (r(7, 2, 3), r(3, 3, 4), r(4)),
    "conv3d": lambda: (r(2, 3, 5, 5, 5), r(4, 3, 3, 3, 3)),
    "mkldnn_convolution": lambda: (r(2, 3, 5, 5), r(4, 3, 3, 3), r(4), [0, 0], [1, 1], [1, 1], 1),
    "scaled_dot_product_attention": lambda: (r(2, 2, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4)),
    "_scaled_dot_product_attention_math": lambda: (r(2, 2, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4)),
    "_scaled_dot_product_flash_attention_for_cpu": lambda: (r(2, 2, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4)),
    "_addmm_activation": lambda: (r(7), r(5, 6), r(6, 7)), "cdist": lambda: (r(5, 6), r(7, 6)),
    "_cdist_forward": lambda: (r(5, 6), r(7, 6), 2.0, None), "_euclidean_dist": lambda: (r(5, 6), r(7, 6)),
    "pdist": lambda: (r(5, 6),), "_pdist_forward": lambda: (r(5, 6),), "cov": lambda: (r(5, 7),),
    "corrcoef": lambda: (r(5, 7),), "affine_grid_generator": lambda: (r(2, 2, 3), [2, 3, 4, 5], False),
    "rnn_tanh_cell": lambda: (r(3, 5), r(3, 6), r(6, 5), r(6, 6)),
    "gru_cell": lambda: (r(3, 5), r(3, 6), r(18, 5), r(18, 6)),
    "linalg_solve": lambda: (spd(), r(5, 2)), "linalg_inv": lambda: (spd(),), "inverse": lambda: (spd(),),
    "linalg_pinv": lambda: (r(5, 6), 1e-15), "pinverse": lambda: (r(5, 6),), "linalg_svd": lambda: (r(5, 6), False),
    "linalg_qr": lambda: (r(6, 5),), "linalg_cholesky": lambda: (spd(),), "linalg_eigh": lambda: (spd(),),
    "linalg_det": lambda: (spd(),), "ormqr": lambda: (r(5, 3), r(3), r(5, 4)),
    "linalg_householder_product": lambda: (r(5, 3), r(3)),
    "_sparse_mm": lambda: (r(5, 5).relu().to_sparse(), r(5, 4)),
    "_grouped_mm": lambda: (r(16, 16).bfloat16(), r(3, 16, 8).bfloat16(), torch.tensor([2, 8, 16], dtype=torch.int32)),
    "linalg_lstsq": lambda: (r(6, 5), r(6, 2)), "linalg_solve_triangular": lambda: (spd().triu(), r(5, 2),
                                                                                     {"upper": True}),
}  # fmt: skip


def overloads() -> Table:
    """Each operator of ATen by its packet and by its first overload."""
    found: Table = {}
    for name, arguments in _ATEN.items():
        packet = getattr(aten, name)
        names = [found for found in packet.overloads() if found not in ("out", "deprecated")] or ["out"]
        overload = getattr(packet, names[0])
        found[f"aten.{name}"] = (packet, *arguments())
        found[f"{overload}"] = (overload, *arguments())
    return found


_WRITING = {
    "mm": (5, 7), "bmm": (2, 5, 7), "addmm": (5, 7), "baddbmm": (2, 5, 7), "addbmm": (5, 7), "matmul": (5, 7),
    "mv": (5,), "addmv": (5,), "dot": (), "linear": (5, 6), "inner": (5, 7), "outer": (5, 6), "addr": (5, 6),
}  # fmt: skip


def writing() -> Table:
    """The same with `out`, by the function of torch and by the overload, and in place."""
    found: Table = {}
    for name, shape in _WRITING.items():
        overload = getattr(aten, name).out
        found[f"aten.{name}.out"] = (overload, *_ATEN[name](), {"out": torch.empty(shape)})
        if hasattr(torch, name):
            found[f"torch.{name}(out=)"] = (getattr(torch, name), *_ATEN[name](), {"out": torch.empty(shape)})
    for name in ("addmm", "baddbmm", "addbmm", "addmv", "addr"):
        args = _ATEN[name]()
        args = (torch.randn(_WRITING[name]), *args[1:])
        found[f"Tensor.{name}_"] = (getattr(Tensor, f"{name}_"), *args)
        found[f"aten.{name}_"] = (getattr(aten, f"{name}_"), *args)
        found[f"aten.{name}_.default_"] = (getattr(aten, f"{name}_").default, *args)
    return found


def methods() -> Table:
    pairs = {name: _ATEN[name]() for name in (
        "mm", "bmm", "mv", "dot", "vdot", "matmul", "inner", "outer", "ger", "addmm", "addmv", "addbmm", "baddbmm",
        "addr", "kron", "matrix_power", "matrix_exp", "cov", "corrcoef", "inverse", "pinverse")}  # fmt: skip
    found: Table = {f"Tensor.{name}": (_method(name), *args) for name, args in pairs.items() if hasattr(Tensor, name)}
    found |= {
        "Tensor.__matmul__": (_method("__matmul__"), r(5, 6), r(6, 7)),
        "Tensor.__rmatmul__": (_method("__rmatmul__"), r(6, 7), r(5, 6)),
        "Tensor.__imatmul__": (operator.imatmul, r(5, 6), r(6, 6)),
        "Tensor.smm": (_method("smm"), r(5, 5).relu().to_sparse(), r(5, 4)),
        "Tensor.sspaddmm": (_method("sspaddmm"), r(5, 4).to_sparse(), r(5, 5).relu().to_sparse(), r(5, 4)),
        "Tensor.cholesky_solve": (_method("cholesky_solve"), r(5, 2), torch.linalg.cholesky(spd())),
        "Tensor.det": (_method("det"), spd()), "Tensor.logdet": (_method("logdet"), spd()),
        "Tensor.svd": (_method("svd"), r(5, 6)), "Tensor.qr": (_method("qr"), r(6, 5)),
        "Tensor.ormqr": (_method("ormqr"), r(5, 3), r(3), r(5, 4)),
        "Tensor.cholesky": (_method("cholesky"), spd()),
    }  # fmt: skip
    return found


def _method(name: str) -> Callable[..., Any]:
    """Call a method on a value, so that a graph has it as a method."""

    def called(value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, name)(*args, **kwargs)

    return called
