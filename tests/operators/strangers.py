"""Calls that multiply, or look as if they did, and that torch's database of operators does not have."""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.operators.entries import Call
from tests.operators.overloads import Table, methods, overloads, r, spd, writing

aten = torch.ops.aten
_C: Any = torch._C
_GRAD: Any = importlib.import_module("torch.nn.grad")
_VF: Any = torch._VF


def strangers() -> Iterator[Call]:
    """Walk over them; tensors are made anew each time."""
    torch.manual_seed(0)
    for variant, table in _TABLES.items():
        for name, (function, *args) in table().items():
            given = [*args]
            kwargs = given.pop() if given and isinstance(given[-1], dict) else {}
            out = "out" in kwargs
            writes = name.split(".")[-1].endswith("_") and not name.endswith("__")
            yield Call(name, variant, function, tuple(given), kwargs, writes=writes, out=out)
    for name, (layer, *args) in _layers().items():
        yield Call(name, "layer", layer, tuple(args), layer=layer)


def _functions() -> Table:
    weight, bias = r(12, 4), r(12)
    heads: tuple[Any, ...] = (
        r(3, 2, 4), r(3, 2, 4), r(3, 2, 4), 4, 2, weight, bias, None, None, False, 0.0, r(4, 4), r(4))  # fmt: skip
    found: Table = {
        "F.linear": (F.linear, r(5, 4), r(6, 4), r(6)),
        "F.bilinear": (F.bilinear, r(5, 4), r(5, 3), r(6, 4, 3)),
        "F.multi_head_attention_forward": (F.multi_head_attention_forward, *heads),
        "torch.conv_tbc": (torch.conv_tbc, r(7, 2, 3), r(3, 3, 4), r(4)),
        "F.conv_tbc": (F.conv_tbc, r(7, 2, 3), r(3, 3, 4), r(4)),
        "torch.convolution": (torch.convolution, r(2, 3, 7), r(4, 3, 3), r(4), [1], [0], [1], False, [0], 1),
        "torch._convolution": (
            torch._convolution, r(2, 3, 7), r(4, 3, 3), r(4), [1], [0], [1], False, [0], 1, False, False, True, True),
        "F.pairwise_distance": (F.pairwise_distance, r(5, 6), r(5, 6)),
        "F.pdist": (F.pdist, r(5, 6)),
        "torch.pdist": (torch.pdist, r(5, 6)),
        "torch.cdist": (torch.cdist, r(5, 6), r(7, 6)),
        "torch.cdist (many)": (torch.cdist, r(30, 6), r(31, 6)),
        "F.affine_grid": (F.affine_grid, r(2, 2, 3), [2, 3, 4, 5], {"align_corners": False}),
        "torch.affine_grid_generator": (torch.affine_grid_generator, r(2, 2, 3), [2, 3, 4, 5], False),
        "F.interpolate": (F.interpolate, r(2, 3, 5, 5), {"scale_factor": 2, "mode": "bilinear"}),
        "F.grid_sample": (F.grid_sample, r(2, 3, 5, 5), r(2, 4, 4, 2), {"align_corners": False}),
        "F.fold": (F.fold, r(2, 12, 9), [4, 4], [2, 2]),
        "F.unfold": (F.unfold, r(2, 3, 4, 4), [2, 2]),
        "F.cosine_similarity": (F.cosine_similarity, r(5, 6), r(5, 6)),
        "F.gaussian_nll_loss": (F.gaussian_nll_loss, r(5), r(5), r(5).exp()),
        "F.scaled_dot_product_attention": (F.scaled_dot_product_attention, r(2, 2, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4)),
        "F.scaled_dot_product_attention gqa": (
            F.scaled_dot_product_attention, r(2, 4, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4), {"enable_gqa": True}),
        "F.embedding_bag": (F.embedding_bag, torch.randint(0, 9, (3, 4)), r(9, 5)),
        "F.linear_cross_entropy": (F.linear_cross_entropy, r(6, 5), r(7, 5), torch.randint(0, 7, (6,))),
        "torch.cov": (torch.cov, r(5, 7)),
        "torch.corrcoef": (torch.corrcoef, r(5, 7)),
        "torch.cartesian_prod": (torch.cartesian_prod, r(5), r(6)),
        "torch.block_diag": (torch.block_diag, r(2, 3), r(4, 5)),
        "torch.combinations": (torch.combinations, r(6)),
        "torch.trapz": (torch.trapz, r(3, 6)),
        "torch.cross": (torch.cross, r(5, 3), r(5, 3)),
        "torch.chain_matmul": (torch.chain_matmul, r(3, 4), r(4, 5), r(5, 6)),
        "torch.matrix_power": (torch.matrix_power, r(5, 5), 3),
        "torch.matrix_exp": (torch.matrix_exp, r(5, 5)),
        "torch._addmm_activation": (torch._addmm_activation, r(6), r(5, 4), r(4, 6)),
        "torch.addr": (torch.addr, r(5, 6), r(5), r(6)),
        "torch.kron": (torch.kron, r(3, 4), r(2, 5)),
        "torch.ger": (torch.ger, r(5), r(6)),
        "torch.vdot": (torch.vdot, r(7), r(7)),
        "torch._int_mm": (torch._int_mm, torch.randint(-9, 9, (32, 16), dtype=torch.int8),
                          torch.randint(-9, 9, (16, 8), dtype=torch.int8)),
        "torch.lobpcg": (torch.lobpcg, spd(12), {"k": 2}),
        "torch.pca_lowrank": (torch.pca_lowrank, r(9, 7), {"q": 3}),
        "torch.svd_lowrank": (torch.svd_lowrank, r(9, 7), {"q": 3}),
        "torch.get_lowrank": (torch._lowrank.get_approximate_basis, r(9, 7), 3),
        "torch._linalg_utils.matmul": (torch._linalg_utils.matmul, r(5, 6), r(6, 7)),
        "torch._linalg_utils.bform": (torch._linalg_utils.bform, r(6, 5), r(6, 6), r(6, 7)),
        "torch._linalg_utils.qform": (torch._linalg_utils.qform, r(6, 6), r(6, 5)),
        "operator.matmul": (operator.matmul, r(5, 6), r(6, 7)),
        "torch._fused_sdp_choice": (torch._fused_sdp_choice, r(2, 2, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4)),
        "torch.ormqr": (torch.ormqr, r(5, 3), r(3), r(5, 4)),
        "torch.orgqr": (torch.orgqr, r(5, 3), r(3)),
        "torch.inverse": (torch.inverse, spd()),
        "torch.pinverse": (torch.pinverse, r(5, 6)),
        "torch.cholesky_solve": (torch.cholesky_solve, r(5, 2), torch.linalg.cholesky(spd())),
        "torch.cholesky_inverse": (torch.cholesky_inverse, torch.linalg.cholesky(spd())),
        "torch.logdet": (torch.logdet, spd()),
        "torch.lu_solve": (torch.lu_solve, r(5, 2), *torch.linalg.lu_factor(spd())),
        "torch.triangular_solve": (torch.triangular_solve, r(5, 2), spd().triu()),
        "torch.nuclear_norm": (torch.nuclear_norm, r(5, 6)),
        "torch.norm nuc": (torch.norm, r(5, 6), {"p": "nuc"}),
        "torch.rnn_tanh_cell": (torch.rnn_tanh_cell, r(3, 5), r(3, 6), r(6, 5), r(6, 6)),
        "torch.lstm_cell": (torch.lstm_cell, r(3, 5), [r(3, 6), r(3, 6)], r(24, 5), r(24, 6)),
        "torch.quantize (product of integers)": (_quantized_linear, r(5, 8)),
        "F.conv2d same": (F.conv2d, r(2, 3, 7, 7), r(4, 3, 3, 3), {"padding": "same"}),
        "aten.conv2d.padding": (aten.conv2d.padding, r(2, 3, 7, 7), r(4, 3, 3, 3), None, [1, 1], "same"),
        "aten._slow_conv2d_forward": (
            aten._slow_conv2d_forward, r(2, 3, 7, 7), r(4, 3, 3, 3), [3, 3], None, [1, 1], [0, 0]),
        "aten.slow_conv3d_forward.default": (
            aten.slow_conv3d_forward.default, r(2, 3, 5, 5, 5), r(4, 3, 3, 3, 3), [3, 3, 3], None, [1, 1, 1],
            [0, 0, 0]),
        "aten.conv_tbc_backward": (aten.conv_tbc_backward, r(5, 2, 4), r(7, 2, 3), r(3, 3, 4), r(4), 0),
        "torch.nn.grad.conv2d_weight": (
            _GRAD.conv2d_weight, r(2, 3, 7, 7), (4, 3, 3, 3), r(2, 4, 5, 5)),
        "torch.nn.grad.conv2d_input": (_GRAD.conv2d_input, (2, 3, 7, 7), r(4, 3, 3, 3), r(2, 4, 5, 5)),
        "torch.nn.grad.conv1d_weight": (_GRAD.conv1d_weight, r(2, 3, 7), (4, 3, 3), r(2, 4, 5)),
        "torch.functional.lu": (torch.functional.lu, r(5, 5)),
        "torch.lstm": (
            torch.lstm, r(4, 3, 5), [r(1, 3, 6), r(1, 3, 6)], [r(24, 5), r(24, 6)], False, 1, 0.0, False, False, False),
        "_VF.gru": (_VF.gru, r(4, 3, 5), r(1, 3, 6), [r(18, 5), r(18, 6)], False, 1, 0.0, False, False, False),
        "vmap of dot": (_dots, r(5, 6), r(5, 6)),
        "grad of a product": (_inner_gradient, r(5, 6), r(6, 7)),
        "jvp of a product": (_forward_mode, r(5, 6), r(6, 7)),
        "scripted helper": (torch.jit.script(_helper), r(5, 6), r(6, 7)),
        "traced helper": (torch.jit.trace(_helper, (r(5, 6), r(6, 7))), r(5, 6), r(6, 7)),
        "torch.linalg.multi_dot(out=)": (
            torch.linalg.multi_dot, [r(5, 6), r(6, 7), r(7, 8)], {"out": torch.empty(5, 8)}),
        "torch.einsum of one that is summed": (torch.einsum, "ij,ik->jk", r(5, 6), r(5, 7)),
        "torch.multi_dot by functools": (functools.reduce, torch.matmul, [r(5, 6), r(6, 7), r(7, 8)]),
        "nested": (_nested_product, r(3, 6), r(2, 6), r(6, 7)),
        "mkldnn tensors": (_mkldnn_product, r(5, 6), r(6, 7)),
        "half on the CPU": (torch.mm, r(5, 6).half(), r(6, 7).half()),
        "integers": (torch.mm, torch.randint(0, 9, (5, 6)), torch.randint(0, 9, (6, 7))),
        "double": (torch.mm, r(5, 6).double(), r(6, 7).double()),
        "complex": (torch.mm, r(5, 6) + 1j * r(5, 6), r(6, 7) + 1j * r(6, 7)),
        "compiled helper": (torch.compile(_helper, backend="eager"), r(5, 6), r(6, 7)),
        "wrapped by numpy": (_by_numpy, r(5, 6), r(6, 7)),
        "Tensor.cov": (Tensor.cov, r(5, 7)),
        "torch.sparse.mm": (torch.sparse.mm, r(5, 5).relu().to_sparse(), r(5, 4)),
        "torch.sparse @": (operator.matmul, r(5, 5).relu().to_sparse(), r(5, 4)),
        "torch.sparse.mm csr": (torch.sparse.mm, r(5, 5).relu().to_sparse_csr(), r(5, 4)),
        "torch.mm sparse": (torch.mm, r(5, 5).relu().to_sparse(), r(5, 4)),
        "torch.sparse.addmm": (torch.sparse.addmm, r(5, 4), r(5, 5).relu().to_sparse(), r(5, 4)),
        "torch.smm": (torch.smm, r(5, 5).relu().to_sparse(), r(5, 4)),
        "torch.hspmm": (torch.hspmm, r(5, 5).relu().to_sparse(), r(5, 4)),
        "torch.sspaddmm": (torch.sspaddmm, r(5, 4).to_sparse(), r(5, 5).relu().to_sparse(), r(5, 4)),
        "torch.bmm sparse": (torch.bmm, r(2, 5, 5).relu().to_sparse(), r(2, 5, 4)),
        "torch.sparse.mm of two": (torch.sparse.mm, r(5, 5).relu().to_sparse(), r(5, 5).relu().to_sparse()),
    }  # fmt: skip
    offsets = torch.tensor([2, 8, 16], dtype=torch.int32)
    grouped = (r(16, 16).bfloat16(), r(3, 16, 8).bfloat16(), {"offs": offsets})
    return found | {"F.grouped_mm": (F.grouped_mm, *grouped), "torch._grouped_mm": (torch._grouped_mm, *grouped)}


def _helper(one: Tensor, other: Tensor) -> Tensor:
    return (one @ other).relu()


def _dots(one: Tensor, other: Tensor) -> Tensor:
    made: Tensor = torch.vmap(torch.dot)(one, other)
    return made


def _inner_gradient(one: Tensor, other: Tensor) -> Tensor:
    made: Tensor = torch.func.grad(lambda value: (value @ other).sin().sum())(one)
    return made


def _forward_mode(one: Tensor, other: Tensor) -> Any:
    return torch.func.jvp(lambda value: value @ other, (one,), (one.sin(),))


def _nested_product(one: Tensor, more: Tensor, other: Tensor) -> Tensor:
    made = torch.nested.as_nested_tensor([one, more], layout=torch.jagged) @ other
    values: Tensor = made.values()
    return values


def _mkldnn_product(one: Tensor, other: Tensor) -> Tensor:
    return (
        torch.mm(one.detach().to_mkldnn().to_dense(), other)
        + F.linear(one.detach().to_mkldnn(), other.detach().T.contiguous().to_mkldnn()).to_dense()
    )


def _by_numpy(one: Tensor, other: Tensor) -> Tensor:
    return torch.from_numpy(one.detach().numpy() @ other.detach().numpy())


def _quantized_linear(x: Tensor) -> Tensor:
    weight = torch.quantize_per_tensor(torch.ones(4, 8), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    made: Tensor = torch.ops.quantized.linear_dynamic(x, packed)
    return made


def _einsums() -> Table:
    a, b, c, d = r(5, 6), r(6, 7), r(7, 8), r(8, 9)
    return {
        "one": (torch.einsum, "ij->ji", a),
        "one, a sum": (torch.einsum, "ij->i", a),
        "two": (torch.einsum, "ij,jk->ik", a, b),
        "two, element by element": (torch.einsum, "ij,ij->ij", a, r(5, 6)),
        "three": (torch.einsum, "ij,jk,kl->il", a, b, c),
        "four": (torch.einsum, "ij,jk,kl,lm->im", a, b, c, d),
        "sublists": (torch.einsum, a, [0, 1], b, [1, 2], [0, 2]),
        "list": (torch.einsum, "ij,jk->ik", [a, b]),
        "batched": (torch.einsum, "...ij,...jk->...ik", r(2, 5, 6), r(2, 6, 7)),
        "aten": (aten.einsum.default, "ij,jk,kl->il", [a, b, c]),
        "aten with a path": (aten.einsum.default, "ij,jk,kl->il", [a, b, c], {"path": [1, 2, 0, 1]}),
        "_VF": (_VF.einsum, "ij,jk->ik", [a, b]),
        "bilinear": (torch.einsum, "bi,oij,bj->bo", r(4, 5), r(6, 5, 7), r(4, 7)),
        "tensordot 1": (torch.tensordot, a, b, 1),
        "tensordot 0": (torch.tensordot, a, b, 0),
        "tensordot 2": (torch.tensordot, r(3, 4, 5), r(4, 5, 6), 2),
        "tensordot lists": (torch.tensordot, r(3, 4, 5), r(5, 4, 6), ([1, 2], [1, 0])),
        "tensordot dims=": (torch.tensordot, r(3, 4, 5), r(4, 5, 6), {"dims": 2}),
        "_VF.tensordot": (_VF.tensordot, r(3, 4, 5), r(5, 4, 6), [1, 2], [1, 0]),
        "aten.tensordot": (aten.tensordot.default, r(3, 4, 5), r(5, 4, 6), [1, 2], [1, 0]),
    }  # fmt: skip


def _linalg() -> Table:
    space = torch.linalg
    square, wide, positive = r(5, 5), r(5, 6), spd()
    return {
        "matmul": (space.matmul, r(5, 6), r(6, 7)),
        "vecdot": (space.vecdot, wide, r(5, 6)),
        "multi_dot": (space.multi_dot, [r(5, 6), r(6, 7), r(7, 8)]),
        "multi_dot of two": (space.multi_dot, [r(5, 6), r(6, 7)]),
        "matrix_power": (space.matrix_power, square, 3),
        "matrix_power -2": (space.matrix_power, positive, -2),
        "matrix_exp": (space.matrix_exp, square),
        "inv": (space.inv, positive), "inv_ex": (space.inv_ex, positive), "pinv": (space.pinv, wide),
        "pinv hermitian": (space.pinv, positive, {"hermitian": True}),
        "solve": (space.solve, positive, r(5, 2)), "solve_ex": (space.solve_ex, positive, r(5, 2)),
        "solve_triangular": (space.solve_triangular, positive.triu(), r(5, 2), {"upper": True}),
        "lstsq": (space.lstsq, r(6, 5), r(6, 2)),
        "cholesky": (space.cholesky, positive), "cholesky_ex": (space.cholesky_ex, positive),
        "qr": (space.qr, wide), "svd": (space.svd, wide, False), "svdvals": (space.svdvals, wide),
        "eigh": (space.eigh, positive), "eigvalsh": (space.eigvalsh, positive), "eig": (space.eig, square),
        "eigvals": (space.eigvals, square), "det": (space.det, positive), "slogdet": (space.slogdet, positive),
        "lu": (space.lu, square), "lu_factor": (space.lu_factor, square),
        "lu_solve": (space.lu_solve, *space.lu_factor(positive), r(5, 2)),
        "ldl_factor": (space.ldl_factor, positive),
        "ldl_solve": (space.ldl_solve, *space.ldl_factor(positive), r(5, 2)),
        "householder_product": (space.householder_product, r(5, 3), r(3)),
        "tensorinv": (space.tensorinv, r(4, 6, 8, 3), {"ind": 2}),
        "tensorsolve": (space.tensorsolve, r(2, 3, 6), r(2, 3)),
        "matrix_norm 2": (space.matrix_norm, wide, 2), "matrix_norm nuc": (space.matrix_norm, wide, "nuc"),
        "norm 2": (space.norm, wide, 2), "cond": (space.cond, square), "matrix_rank": (space.matrix_rank, wide),
        "cross": (space.cross, r(5, 3), r(5, 3)), "vander": (space.vander, r(5)),
        "_C._linalg.linalg_matmul": (_C._linalg.linalg_matmul, r(5, 6), r(6, 7)),
        "_C._linalg.linalg_vecdot": (_C._linalg.linalg_vecdot, wide, r(5, 6)),
        "_C._linalg.linalg_multi_dot": (_C._linalg.linalg_multi_dot, [r(5, 6), r(6, 7)]),
        "_C._linalg.linalg_matrix_power": (_C._linalg.linalg_matrix_power, square, 3),
        "_C._linalg.linalg_matrix_exp": (_C._linalg.linalg_matrix_exp, square),
        "_C._linalg.linalg_inv": (_C._linalg.linalg_inv, positive),
        "_C._nn.linear": (_C._nn.linear, r(5, 4), r(6, 4), r(6)),
        "_C._nn.scaled_dot_product_attention": (
            _C._nn.scaled_dot_product_attention, r(2, 2, 5, 4), r(2, 2, 5, 4), r(2, 2, 5, 4)),
        "_VF.matmul": (_VF.matmul, r(5, 6), r(6, 7)),
        "_VF.conv2d": (_VF.conv2d, r(2, 3, 5, 5), r(4, 3, 3, 3)),
        "_C._VariableFunctions.mm": (_C._VariableFunctions.mm, r(5, 6), r(6, 7)),
        "_C._nn.slow_conv3d": (_C._nn.slow_conv3d, r(2, 3, 5, 5, 5), r(4, 3, 3, 3, 3), [3, 3, 3]),
        "_C._nn.slow_conv_transpose2d": (_C._nn.slow_conv_transpose2d, r(2, 3, 5, 5), r(3, 4, 3, 3), [3, 3]),
        "_C._nn.thnn_conv2d": (_C._nn.thnn_conv2d, r(2, 3, 5, 5), r(4, 3, 3, 3), [3, 3]),
        "_C._nn.slow_conv_dilated2d": (_C._nn.slow_conv_dilated2d, r(2, 3, 5, 5), r(4, 3, 3, 3), [3, 3]),
        "torch.mkldnn_convolution": (
            torch.mkldnn_convolution, r(2, 3, 5, 5), r(4, 3, 3, 3), r(4), [0, 0], [1, 1], [1, 1], 1),
        "special.expit": (torch.special.expit, r(5, 6)), "special.softmax": (torch.special.softmax, r(5, 6), 1),
        "fft.fft": (torch.fft.fft, r(5, 6)), "fft.rfft2": (torch.fft.rfft2, r(5, 6)),
    }  # fmt: skip


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        packed, _ = self.rnn(pack_padded_sequence(x, [4, 3, 2], batch_first=True))
        made: Tensor = packed.data
        return made


class InEvaluation(nn.Module):
    """The fast path of torch's encoder: evaluation, and nothing that is trained."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.encoder(x)
        return made


class Flexible(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v)


def _layers() -> Table:
    return {
        "nn.Bilinear": (lambda: nn.Bilinear(4, 3, 6), r(5, 4), r(5, 3)),
        "nn.LSTM packed": (Packed, r(3, 4, 5)),
        "nn.GRU": (lambda: nn.GRU(5, 6), r(4, 3, 5)),
        "nn.RNNCell": (lambda: nn.RNNCell(5, 6), r(3, 5)),
        "nn.MultiheadAttention": (
            lambda: nn.MultiheadAttention(8, 2, batch_first=True), r(2, 5, 8), r(2, 5, 8), r(2, 5, 8)),
        "nn.TransformerEncoder evaluated": (InEvaluation, r(2, 5, 8)),
        "nn.Transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), r(2, 5, 8), r(2, 4, 8)),
        "nn.CosineSimilarity": (nn.CosineSimilarity, r(5, 6), r(5, 6)),
        "nn.PairwiseDistance": (nn.PairwiseDistance, r(5, 6), r(5, 6)),
        "nn.EmbeddingBag": (lambda: nn.EmbeddingBag(9, 5), torch.randint(0, 9, (3, 4))),
        "nn.AdaptiveLogSoftmaxWithLoss": (
            lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4]), r(6, 8), torch.randint(0, 12, (6,))),
        "compiled layer": (_compiled_layer, r(5, 6)),
        "nn.LazyLinear": (lambda: nn.LazyLinear(4), r(5, 6)),
        "flex_attention": (Flexible, r(1, 2, 16, 8), r(1, 2, 16, 8), r(1, 2, 16, 8)),
        "quantized dynamic": (_quantized_layer, r(5, 8)),
    }  # fmt: skip


def _compiled_layer() -> nn.Module:
    made: Any = torch.compile(nn.Linear(6, 7), backend="eager")
    layer: nn.Module = made
    return layer


def _quantized_layer() -> nn.Module:
    made: Any = torch.ao.nn.quantized.dynamic.Linear(8, 4)
    made.set_weight_bias(torch.quantize_per_tensor(torch.ones(4, 8), 0.1, 0, torch.qint8), torch.ones(4))
    layer: nn.Module = made
    return layer


_TABLES: dict[str, Callable[[], Table]] = {
    "function": _functions, "einsum": _einsums, "linalg": _linalg, "overload": overloads, "writing": writing,
    "method": methods,
}  # fmt: skip
