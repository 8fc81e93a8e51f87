"""Cases of the operator table: shapes, indexing, padding, products, losses, embeddings."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.export.operator_case import Section, classes, features

SHAPES = Section("Shapes")
op = SHAPES.op
op("reshape, view, flatten", lambda h: h.reshape(-1, 2, 6).view(-1, 3, 4).flatten(1), 3, 4)
op("unflatten, ravel", lambda h: h.unflatten(1, (2, 2)) * h.ravel()[0], 4)
op("transpose, permute, movedim", lambda h: h.transpose(1, 2).permute(0, 2, 1, 3).movedim(1, 3), 2, 3, 4)
op("mT, swapaxes", lambda h: h.mT.swapaxes(1, 2) * 2, 3, 4)
op("squeeze, unsqueeze", lambda h: h.unsqueeze(1).squeeze(1).unsqueeze(-1).squeeze())
op(
    "expand, broadcast_to",
    lambda h: h[:, :, None].expand(-1, -1, 3) * torch.broadcast_to(h[:, :1, None], h[:, :, None].shape),
)
op("repeat", lambda h: h.repeat(1, 3))
op("tile", lambda h: h.tile(2, 2)[: h.shape[0]])
op("repeat_interleave", lambda h: h.repeat_interleave(2, 1))
op("repeat_interleave, tensor", lambda h: h.repeat_interleave(torch.tensor([1, 2, 1, 3]), 1), 4)
op("cat", lambda h: torch.cat([h, h.sin(), h[:, :2]], 1))
op("cat over the batch", lambda h: torch.cat([h, h.sin()], 0)[h.shape[0] :])
op("stack", lambda h: torch.stack([h, h.sin()], 2))
op("hstack, vstack, dstack", lambda h: torch.hstack([h, torch.dstack([h, h.sin()]).flatten(1)]))
op("split", lambda h: torch.cat(h.split(3, 1)[::-1], 1))
op("split, unused outputs", lambda h: h.split(3, 1)[1])
op("split, sizes", lambda h: h.split([1, 5, 2], 1)[1] * h.split([1, 5, 2], 1)[0])
op("split, sizes, unused outputs", lambda h: h.split([1, 5, 2], 1)[2])
op("chunk", lambda h: h.chunk(2, 1)[0] * h.chunk(2, 1)[1].sigmoid())
op("chunk, unused outputs", lambda h: h.chunk(4, 1)[2])
op("tensor_split", lambda h: h.tensor_split(3, 1)[0])
op("unbind", lambda h: h.unbind(1)[0] * h.unbind(1)[2], 4, 3)
op("unbind, one used", lambda h: h.unbind(1)[1], 4, 3)
op("narrow, select", lambda h: h.narrow(1, 1, 2) * h.select(1, 0)[:, None], 4, 3)
op("slice", lambda h: h[:, 1:7:2])
op("slice, negative", lambda h: h[:, -3:-1] * h[..., :2])
op("flip", lambda h: h.flip(1))
op("flip, two dims", lambda h: h.flip(1, 2), 3, 4)
op("fliplr", lambda h: h.fliplr())
op("roll", lambda h: h.roll(2, 1))
op("roll, two dims", lambda h: h.roll((1, -1), (1, 2)), 3, 4)
op("rot90", lambda h: h.rot90(1, (1, 2)), 3, 4)
op("diagonal", lambda h: h.diagonal(dim1=1, dim2=2), 3, 4)
op("diagonal, offsets", lambda h: h.diagonal(1, 1, 2).sum(2) + h.diagonal(-2, 2, 1).prod(1), 3, 4, 2)
op("diagonal_scatter", lambda h: h.diagonal_scatter(h[:, 0].cos(), 0, 1, 2), 4, 4)
op("diag_embed", lambda h: h.diag_embed(), 4)
op("tril, triu", lambda h: h.tril() + h.triu(1), 4, 4)
op(
    "meshgrid",
    lambda h: h * torch.stack(torch.meshgrid(torch.arange(2.0), torch.arange(4.0), indexing="ij")).sum(0).flatten(),
)
op("as_strided", lambda h: h.as_strided((4, 8), (8, 1)) * 1, refused="as_strided")
op("pixel_shuffle", lambda h: F.pixel_shuffle(h, 2), 8, 3, 3)
op("pixel_unshuffle", lambda h: F.pixel_unshuffle(h, 2), 2, 4, 4)
op("channel_shuffle", lambda h: F.channel_shuffle(h, 2), 4, 3, 3)
op("contiguous, clone", lambda h: h.mT.contiguous().clone(), 3, 4)
op(
    "zeros_like, ones_like, full_like, new_zeros",
    lambda h: h * (torch.ones_like(h) + torch.full_like(h, 2.0)) + h.new_zeros(8),
)
op("arange, linspace, eye", lambda h: h @ torch.eye(8) * torch.arange(8) + torch.linspace(0, 1, 8))

INDEXING = Section("Indexing, sorting")
op = INDEXING.op
index = torch.tensor([2, 0, 2, 1])
op("index_select", lambda h: h.index_select(1, index), 4, 3)
op("index, tensor", lambda h: h[:, index], 4, 3)
op("index, two tensors", lambda h: h[:, index, torch.tensor([0, 1, 1, 2])], 4, 3)
op("index, boolean mask, a constant", lambda h: h[:, torch.tensor([True, False, True, True])], 4, 3)
op("index, boolean mask and a tensor", lambda h: h[:, torch.tensor([True, False, True, True]), index[:3]], 4, 3)
op("index, boolean mask of data", lambda h: h * h[h > 0].sum(), 4, 3)
op("gather", lambda h: h.gather(1, (h > 0).long()), 4)
op("take_along_dim", lambda h: h.take_along_dim(h.argsort(1), 1), refused="one size only")
op("take", lambda h: h * h.take(torch.tensor([0, 3])).sum())
op("take, negative", lambda h: h * h.take(torch.tensor([[0, -3], [-1, 0]])).sum())
op("put", lambda h: h.put(torch.tensor([-1, 2]), h[0, :2].cos()))
op("put, accumulate", lambda h: h.put(torch.tensor([2, 2]), h[0, :2].cos(), accumulate=True))
op("scatter", lambda h: torch.zeros_like(h).scatter(1, h.argsort(1), h))
op("scatter, both sides", lambda h: h.cos().scatter(1, torch.tensor([[1, 2]]).expand(h.shape[0], 2), h[:, :2]))
op("scatter_add", lambda h: h.cos().scatter_add(1, torch.tensor([[1, 1, 0]]).expand(h.shape[0], 3), h[:, :3]))
op("scatter_reduce, sum", lambda h: h.scatter_reduce(1, torch.tensor([[1, 1]]).expand(h.shape[0], 2), h[:, :2], "sum"))
op("scatter_reduce, amax",
   lambda h: h.scatter_reduce(1, torch.tensor([[1, 1]]).expand(h.shape[0], 2), h[:, :2], "amax"))  # fmt: skip
op("index_add", lambda h: torch.zeros_like(h).index_add(1, index, h), 4, 3)
op("index_copy", lambda h: h.index_copy(1, torch.tensor([2, 0]), h[:, :2].cos()), 4, 3)
op("index_fill", lambda h: h.index_fill(1, torch.tensor([2, 0]), 0.5), 4, 3)
op("index_put", lambda h: h.index_put((torch.tensor([0, 1]), torch.tensor([2, 0])), h[:2, 0]))
op("index_put, accumulate", lambda h: h.index_put((torch.tensor([1, 1]),), h[:2], accumulate=True))
op("slice_scatter", lambda h: h.slice_scatter(h[:, :2].cos(), 1, 2, 4))
op("select_scatter", lambda h: h.select_scatter(h[:, 0].cos(), 1, 2))
op("masked_select", lambda h: h * h.masked_select(h > 0).sum(), refused="masked_select")
op("masked_scatter", lambda h: h.masked_scatter(h > 0, h.cos()))
op("masked_scatter, broadcast", lambda h: h.masked_scatter(torch.arange(8) > 3, h.cos()))
op("sort", lambda h: h.sort(1).values)
op("sort, descending", lambda h: h.sort(1, descending=True)[0])
op("argsort", lambda h: h * h.argsort(1))
op("topk", lambda h: h.topk(3, 1).values)
op("topk, smallest, indices", lambda h: h.topk(3, 1, largest=False)[0] * h.topk(3, 1)[1])
op("kthvalue", lambda h: h.kthvalue(2, 1).values[:, None])
op("kthvalue, keepdim, ties", lambda h: h.kthvalue(2, 1, keepdim=True).values * torch.ones(8).kthvalue(3).values)
op("bucketize, searchsorted", lambda h: h * torch.bucketize(h, torch.tensor([-0.2, 0.0, 0.3])))
op("one_hot", lambda h: h[:, :3] * F.one_hot(h.argmax(1) % 3, 3))
op("nonzero", lambda h: h * h[0].nonzero().shape[0])
op("rows of a sparse matrix",
   lambda h: h * torch._convert_indices_from_coo_to_csr((h[0] > 0).long().sort()[0], 7))  # fmt: skip
op("unique", lambda h: h * h.round().unique().numel())

PADDING = Section("Padding and resizing")
op = PADDING.op
op("pad, constant", lambda h: F.pad(h, (1, 2, 0, 1), value=0.3), 3, 4, 4)
op("pad, negative", lambda h: F.pad(h, (-1, 2)), 3, 4)
for mode in ("reflect", "replicate", "circular"):
    op(f"pad, {mode}, 1d", lambda h, mode=mode: F.pad(h, (2, 1), mode), 3, 5)
    op(f"pad, {mode}, 2d", lambda h, mode=mode: F.pad(h, (2, 1, 0, 1), mode), 3, 5, 4)
    op(f"pad, {mode}, 3d", lambda h, mode=mode: F.pad(h, (1, 1, 0, 1, 1, 0), mode), 2, 3, 3, 3)
op("ZeroPad2d", nn.ZeroPad2d((1, 0, 2, 1)), 3, 4, 4)
op("interpolate, nearest", lambda h: F.interpolate(h, scale_factor=2), 3, 4, 4)
op("interpolate, nearest, uneven", lambda h: F.interpolate(h, (7, 3)), 3, 4, 4)
op("interpolate, nearest, 1d", lambda h: F.interpolate(h, scale_factor=3), 3, 4)
op("interpolate, nearest-exact", lambda h: F.interpolate(h, (7, 3), mode="nearest-exact"), 3, 4, 4)
op("interpolate, bilinear", lambda h: F.interpolate(h, scale_factor=2, mode="bilinear"), 3, 4, 4)
op(
    "interpolate, bilinear, align_corners",
    lambda h: F.interpolate(h, (7, 5), mode="bilinear", align_corners=True),
    3,
    4,
    4,
)
op("interpolate, linear", lambda h: F.interpolate(h, 7, mode="linear"), 3, 4)
op("interpolate, bicubic", lambda h: F.interpolate(h, (7, 5), mode="bicubic"), 3, 4, 4)
op("interpolate, area", lambda h: F.interpolate(h, (2, 2), mode="area"), 3, 4, 4)
op("interpolate, antialias", lambda h: F.interpolate(h, (3, 2), mode="bilinear", antialias=True), 3, 4, 4)
for mode, shape in (("nearest-exact", (4,)), ("nearest", (2, 3, 2)), ("trilinear", (2, 3, 2)), ("bicubic", (3, 4))):
    op(f"interpolate, {mode}, {len(shape)}d, scale_factor",
       lambda h, mode=mode: F.interpolate(h, scale_factor=1.7, mode=mode), 2, *shape)  # fmt: skip
op("interpolate, trilinear, align_corners",
   lambda h: F.interpolate(h, (3, 5, 2), mode="trilinear", align_corners=True), 2, 2, 3, 4)  # fmt: skip
op("interpolate, bicubic, antialias", lambda h: F.interpolate(h, (2, 3), mode="bicubic", antialias=True), 3, 6, 7)
op("Upsample", nn.Upsample(scale_factor=2), 3, 4, 4)
grid = torch.linspace(-0.9, 0.9, 18).reshape(1, 3, 3, 2)
op("grid_sample", lambda h: F.grid_sample(h, grid.expand(h.shape[0], 3, 3, 2), align_corners=False), 3, 4, 4)
for mode in ("bilinear", "nearest", "bicubic"):
    for border in ("zeros", "border", "reflection"):
        op(f"grid_sample, {mode}, {border}, moving",
           lambda h, mode=mode, border=border: F.grid_sample(
               h, grid.expand(h.shape[0], 3, 3, 2) * h.mean((1, 2, 3))[:, None, None, None].exp() * 1.3, mode, border,
               align_corners=border == "border"), 3, 4, 4)  # fmt: skip

for corners in (False, True):
    op(f"affine_grid, align_corners={corners}",
       lambda h, corners=corners: F.affine_grid(h, [h.shape[0], 1, 4, 5], align_corners=corners), 2, 3)  # fmt: skip
op("affine_grid, 3d", lambda h: F.affine_grid(h, [h.shape[0], 1, 3, 4, 5]), 3, 4)
op("affine_grid_generator", lambda h: torch.affine_grid_generator(h, [h.shape[0], 1, 4, 5], False), 2, 3)

PRODUCTS = Section("Products")
op = PRODUCTS.op
op("matmul", lambda h: h @ h.mT, 3, 4)
op("matmul, broadcast", lambda h: h[:, :, :, None] * 0.1 @ h[:, :, None] + h[:, :1, :, None], 3, 4)
op("matmul, vectors", lambda h: h * (h @ h[0])[:, None])
op("bmm", lambda h: torch.bmm(h, h.mT), 3, 4)
op("baddbmm", lambda h: torch.baddbmm(h, h, h, beta=0.5, alpha=2), 4, 4)
op("addmm", lambda h: torch.addmm(h, h, torch.ones(8, 8), beta=0.5, alpha=0.1))
op("mm", lambda h: h * torch.mm(h.T, h).sum())
op("mv, outer", lambda h: h * torch.mv(h, h[0])[:, None] + torch.outer(h[:, 0], h[0]))
op("dot", lambda h: h * torch.dot(h[0], h[1]))
op("einsum, matmul", lambda h: torch.einsum("bij,bkj->bik", h, h.cos()), 3, 4)
op("einsum, attention", lambda h: torch.einsum("bqhd,bkhd->bhqk", h, h.cos()), 3, 2, 4)
op("einsum, three operands", lambda h: torch.einsum("bi,bj,bk->bijk", h, h.sin(), h.cos()), 3)
op("einsum, sum and diagonal", lambda h: torch.einsum("bii->b", h)[:, None] * torch.einsum("bij->bj", h), 4, 4)
op("tensordot", lambda h: torch.tensordot(h, h[0], 1), 4, 4)
op("kron", lambda h: torch.kron(h[:1], torch.ones(1, 2)).expand(h.shape[0], -1) * h.repeat(1, 2))
for p in (0.0, 0.7, 1.0, 1.5, 2.0, 3.0, math.inf):
    op(f"cdist, p={p:g}", lambda h, p=p: torch.cdist(h, h.cos(), p), 3, 4)
op("cdist, to itself", lambda h: torch.cdist(h, h), 3, 4)
op("cdist, across the batch", lambda h: torch.cdist(h, torch.eye(8)))
op("cdist, many", lambda h: torch.cdist(h, h.cos()), 26, 2)
op("cosine_similarity", lambda h: F.cosine_similarity(h, h.cos(), dim=1)[:, None])
op("pairwise_distance", lambda h: F.pairwise_distance(h, h.cos(), keepdim=True))
op("cross", lambda h: torch.linalg.cross(h, h.cos()), 4, 3)
op("linalg.inv", lambda h: torch.linalg.inv(h + 5 * torch.eye(3)), 3, 3, refused="linalg_inv")
op("linalg.det", lambda h: torch.linalg.det(h)[:, None], 3, 3, refused="linalg_lu_solve")
op("linalg.svd", lambda h: torch.linalg.svdvals(h), 3, 3, refused="svd")
op("linalg.cholesky", lambda h: torch.linalg.cholesky(h @ h.mT + 5 * torch.eye(3)), 3, 3, refused="cholesky")

LOSSES = Section("Losses")
loss = LOSSES.loss


def _labels(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 2, (batch, 3)).float(),)


def _probabilities(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3).softmax(1),)


def _ignored(batch: int) -> tuple[Tensor, ...]:
    return (torch.tensor([0, -100, 2, 1, 1, -100, 0, 2])[:batch],)


weight = torch.tensor([0.2, 1.0, 3.0])
loss("mse_loss", F.mse_loss)
loss("mse_loss, sum", lambda y, t: F.mse_loss(y, t, reduction="sum"))
loss("mse_loss, none", lambda y, t: F.mse_loss(y, t, reduction="none").mean())
loss("l1_loss", F.l1_loss)
loss("smooth_l1_loss", lambda y, t: F.smooth_l1_loss(y, t, beta=0.5))
loss("huber_loss", lambda y, t: F.huber_loss(y, t, delta=0.5))
loss("cross_entropy", F.cross_entropy, classes)
loss("cross_entropy, sum", lambda y, t: F.cross_entropy(y, t, reduction="sum"), classes)
loss("cross_entropy, none", lambda y, t: F.cross_entropy(y, t, reduction="none").mean(), classes)
loss("cross_entropy, class weights", lambda y, t: F.cross_entropy(y, t, weight), classes)
loss("cross_entropy, ignore_index", F.cross_entropy, _ignored)
loss("cross_entropy, ignore_index=1, weights", lambda y, t: F.cross_entropy(y, t, weight, ignore_index=1), classes)
loss("cross_entropy, label_smoothing", lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1), classes)
loss("cross_entropy, label_smoothing, weights, ignore_index",
     lambda y, t: F.cross_entropy(y, t, weight, label_smoothing=0.1), _ignored)  # fmt: skip
loss("cross_entropy, probabilities", F.cross_entropy, _probabilities)
loss("cross_entropy, probabilities, label_smoothing, weights",
     lambda y, t: F.cross_entropy(y, t, weight, label_smoothing=0.1), _probabilities)  # fmt: skip
loss(
    "cross_entropy, (N, C, d)",
    lambda y, t: F.cross_entropy(y[:, :, None] * torch.ones(4), t[:, None].expand(-1, 4)),
    classes,
)
loss("CrossEntropyLoss", nn.CrossEntropyLoss(), classes)
loss("nll_loss", lambda y, t: F.nll_loss(y.log_softmax(1), t), classes)
loss("nll_loss, weights, ignore_index", lambda y, t: F.nll_loss(y.log_softmax(1), t, weight), _ignored)
loss("nll_loss, sum", lambda y, t: F.nll_loss(y.log_softmax(1), t, reduction="sum"), classes)
loss("binary_cross_entropy", lambda y, t: F.binary_cross_entropy(y.sigmoid(), t), _labels)
loss("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, _labels)
loss("binary_cross_entropy_with_logits, pos_weight, weight",
     lambda y, t: F.binary_cross_entropy_with_logits(y, t, weight, pos_weight=2 * weight), _labels)  # fmt: skip
loss("kl_div", lambda y, t: F.kl_div(y.log_softmax(1), t, reduction="batchmean"), _probabilities)
loss("kl_div, log_target", lambda y, t: F.kl_div(y.log_softmax(1), t.log(), log_target=True), _probabilities)
loss("poisson_nll_loss", F.poisson_nll_loss)
loss(
    "gaussian_nll_loss",
    lambda y, t: F.gaussian_nll_loss(y, t, y.exp()),
    refused="the loss: aten._local_scalar_dense: the values of a tensor decide",
)
loss("hinge_embedding_loss", lambda y, t: F.hinge_embedding_loss(y, 2 * t - 1), _labels)
loss("margin_ranking_loss", lambda y, t: F.margin_ranking_loss(y[:, 0], y[:, 1], t[:, 0].sign()))
loss("cosine_embedding_loss", lambda y, t: F.cosine_embedding_loss(y, t, torch.ones(1)))
loss("triplet_margin_loss", lambda y, t: F.triplet_margin_loss(y, t, t.cos()))
loss("soft_margin_loss", lambda y, t: F.soft_margin_loss(y, 2 * t - 1), _labels)
loss("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, _labels)
loss("multi_margin_loss", F.multi_margin_loss, classes)
loss("multi_margin_loss, p=2, weights, none",
     lambda y, t: F.multi_margin_loss(y, t, 2, 0.3, weight, reduction="none").square().mean(), classes)  # fmt: skip
loss("multilabel_margin_loss, none",
     lambda y, t: F.multilabel_margin_loss(y, t.long(), reduction="none").square().mean(), _labels)  # fmt: skip
loss("multilabel_margin_loss", lambda y, t: F.multilabel_margin_loss(y, t.long()), _labels)
loss("ctc_loss",
     lambda y, t: F.ctc_loss(y[:, None].log_softmax(2), t[:1, None], torch.tensor([4]), torch.tensor([1])),
     classes, "ctc_loss")  # fmt: skip


class _OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.first(x).relu()), target, label_smoothing=0.1)


LOSSES.model("inside the model, label_smoothing", _OwnLoss, lambda batch: (*features(batch), *classes(batch)),
             targets=lambda batch: (), loss=lambda loss: loss)  # fmt: skip

EMBEDDINGS = Section("Embeddings")


def _tokens(batch: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 7, (batch, 4)),)


class _Words(nn.Module):
    def __init__(self, embedding: nn.Module, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = embedding
        self.last = nn.Linear(5, 7 if tied else 3, bias=False)
        if tied:
            self.last.weight = embedding.weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.last(h.mean(1) if h.ndim == 3 else h)[:, :3]  # type: ignore[no-any-return]


EMBEDDINGS.model("Embedding", lambda: _Words(nn.Embedding(7, 5)), _tokens)
EMBEDDINGS.model("Embedding, padding_idx", lambda: _Words(nn.Embedding(7, 5, padding_idx=2)), _tokens)
EMBEDDINGS.model("Embedding, tied to the last layer", lambda: _Words(nn.Embedding(7, 5), tied=True), _tokens)
EMBEDDINGS.model(
    "Embedding, max_norm", lambda: _Words(nn.Embedding(7, 5, max_norm=1.0)), _tokens, refused="only the optimizer may"
)
EMBEDDINGS.model("Embedding, scale_grad_by_freq", lambda: _Words(nn.Embedding(7, 5, scale_grad_by_freq=True)), _tokens)


def _bags(**options: Any) -> nn.Module:
    return _Words(nn.EmbeddingBag(7, 5, **options))


EMBEDDINGS.model("EmbeddingBag, mean", partial(_bags), _tokens)
EMBEDDINGS.model("EmbeddingBag, sum", partial(_bags, mode="sum", padding_idx=2), _tokens)
EMBEDDINGS.model("EmbeddingBag, max", partial(_bags, mode="max"), _tokens)
EMBEDDINGS.model("EmbeddingBag, scaled", partial(_bags, scale_grad_by_freq=True), _tokens,
                 refused="counts of other rows")  # fmt: skip
