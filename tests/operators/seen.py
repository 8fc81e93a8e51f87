"""The operators of ATen that multiply matrices, seen below everything while something runs, forward and backward.

This is the census's own eye: it shares nothing with the package, so what the package does not know it sees as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

LEVELS = 4
"""What two bits allow."""

FACTORS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("mm", "bmm", "mv", "dot", "vdot", "linear", "mkldnn_linear", "_int_mm", "_scaled_mm", "_scaled_mm_v2",
         "_grouped_mm",
         "_scaled_grouped_mm", "_sparse_mm", "_sparse_sparse_matmul", "_sparse_mm_reduce_impl", "hspmm", "smm",
         "convolution", "convolution_overrideable", "mkldnn_convolution", "_slow_conv2d_forward",
         "slow_conv3d_forward", "slow_conv_transpose2d", "slow_conv_transpose3d", "slow_conv_dilated2d",
         "slow_conv_dilated3d", "_conv_depthwise2d", "conv_depthwise3d", "conv_tbc"),
        (0, 1),
    ),
    **dict.fromkeys(
        ("addmm", "addbmm", "baddbmm", "addmv", "addr", "_addmm_activation", "_sparse_addmm", "sspaddmm",
         "sparse_sampled_addmm"),
        (1, 2),
    ),
    **dict.fromkeys(
        ("convolution_backward", "convolution_backward_overrideable", "conv_tbc_backward", "_trilinear",
         "_sparse_mm_reduce_impl_backward", "_scaled_dot_product_flash_attention_for_cpu",
         "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
         "_scaled_dot_product_attention_math"),
        (0, 1, 2),
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3),
}  # fmt: skip
"""Operators that multiply matrices, by name, and the places of the factors."""

INSIDE = frozenset(
    {"matrix_exp", "linalg_matrix_exp", "linalg_pinv", "ormqr", "affine_grid_generator", "_cdist_forward",
     "_cdist_backward",
     "_euclidean_dist", "_pdist_forward", "_pdist_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward",
     "_native_multi_head_attention", "_transformer_encoder_layer_fwd", "quantized_lstm", "_weight_int4pack_mm_for_cpu",
     "_weight_int8pack_mm"}
)  # fmt: skip
"""Operators that multiply inside of one kernel, checked by hand: no quantizer reaches what they multiply."""

KNOWN = ("aten", "prims", "prim", "profiler", "cpt_fx", "torch_nn")
"""Where operators come from that can be looked at; what others multiply is their own."""


@dataclass(frozen=True)
class Product:
    """One product that ran."""

    name: str
    off_grid: bool
    """Whether a factor has more levels than two bits allow."""

    def __str__(self) -> str:
        """Name the operator."""
        return self.name if "::" in self.name else f"aten.{self.name}"


class Products(TorchDispatchMode):
    """Notes each product that runs while the mode is active. Dynamo does not mind it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Product] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Captured graphs run as they would without the mode."""
        return True

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the factors, then go on."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            self.seen += [Product(func.name(), off_grid=True)] if "attention" in func.name() else []
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        bare = name.removesuffix("_")
        if name in INSIDE or func.namespace not in KNOWN:
            self.seen.append(Product(name, off_grid=True))
        elif func.namespace == "aten" and bare in FACTORS:
            factors = [args[place] for place in FACTORS[bare] if place < len(args)]
            tensors = [factor for factor in factors if isinstance(factor, Tensor)]
            if not any(isinstance(factor, FakeTensor) for factor in tensors):
                self.seen.append(Product(bare, off_grid=any(map(_is_off_grid, tensors))))
        return func(*args, **(kwargs or {}))


def _is_off_grid(factor: Tensor) -> bool:
    """Whether a factor has more levels than two bits allow; what is zero anyway does not count."""
    if not (factor.is_floating_point() or factor.is_complex()):
        return False
    return any(part[part != 0].unique().numel() > LEVELS for part in _numbers(factor.detach()))


def _numbers(factor: Tensor) -> Iterator[Tensor]:
    if factor.layout is torch.sparse_coo:
        factor = factor.coalesce().values()
    elif factor.layout is not torch.strided:
        factor = factor.to_dense() if factor.is_mkldnn else factor.values()
    factor = factor.resolve_conj().resolve_neg()
    # Real and imaginary parts share a range, but one of them may have been conjugated since.
    yield from (factor.real, factor.imag) if factor.is_complex() else (factor.float(),)
