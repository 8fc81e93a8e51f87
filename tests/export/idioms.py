"""What people write in models: the pieces of well-known networks that are no layers of torch, small and by themselves.

`IDIOMS` maps names to builders, as the zoo's registers do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Buffer, Parameter
from torch.nn.utils.parametrizations import spectral_norm

from tests.zoo.layers import Build, ints, normal, zoo

IDIOMS: dict[str, Build] = {}
"""Every model by name."""
idiom = partial(zoo, into=IDIOMS)


def positive(*shape: int) -> Callable[[], Tensor]:
    """Make a random input between 0 and 1."""
    return lambda: torch.rand(*shape)


# Attention, and where things are


@idiom(normal(3, 5, 8), make=lambda: {"layer": nn.Linear(8, 8)})
def sinusoidal_positions(self: Any, x: Tensor) -> Any:
    length, width = x.shape[1:]
    positions = torch.arange(length).unsqueeze(1)
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(positions * rates)
    table[:, 1::2] = torch.cos(positions * rates)
    return self.layer(x + table)


@idiom(normal(3, 5, 8), make=lambda: {"qkv": nn.Linear(8, 24), "mask": Buffer(torch.ones(16, 16).tril().bool())})
def causal_mask_in_a_buffer(self: Any, x: Tensor) -> Any:
    length, width = x.shape[1:]
    q, k, v = self.qkv(x).chunk(3, -1)
    scores = q @ k.transpose(1, 2) / math.sqrt(width)
    return scores.masked_fill(~self.mask[:length, :length], float("-inf")).softmax(-1) @ v


@idiom(normal(3, 5, 8), make=lambda: {"qkv": nn.Linear(8, 24)})
def linear_biases(self: Any, x: Tensor) -> Any:
    length, width = x.shape[1:]
    q, k, v = self.qkv(x).split(width, -1)
    distance = torch.arange(length)[None] - torch.arange(length)[:, None]
    return (q @ k.mT / width**0.5 + distance * 0.5).softmax(-1) @ v


@idiom(normal(3, 6, 8), make=lambda: {"qkv": nn.Linear(8, 24)})
def rotary_positions(self: Any, x: Tensor) -> Any:
    batch, length, width = x.shape
    q, k, v = self.qkv(x).view(batch, length, 3, 2, 4).unbind(2)
    angles = torch.outer(torch.arange(length).float(), 1 / 10000 ** (torch.arange(0, 4, 2) / 4))
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]

    def turned(h: Tensor) -> Tensor:
        a, b = h[..., ::2], h[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).transpose(1, 2)

    made = F.scaled_dot_product_attention(turned(q), turned(k), v.transpose(1, 2), is_causal=True)
    return made.transpose(1, 2).reshape(batch, length, width)


@idiom(normal(2, 8, 8, 4), make=lambda: {"qkv": nn.Linear(4, 12), "bias": Parameter(torch.randn(16, 16)),
       "norm": nn.LayerNorm(16), "merge": nn.Linear(16, 8, bias=False)})  # fmt: skip
def shifted_windows(self: Any, x: Tensor) -> Any:
    batch, height, width, channels = x.shape
    x = torch.roll(x, (-2, -2), (1, 2)).view(batch, height // 4, 4, width // 4, 4, channels)
    q, k, v = self.qkv(x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, channels)).chunk(3, -1)
    x = ((q @ k.mT / 2 + self.bias).softmax(-1) @ v).view(batch, height // 4, width // 4, 4, 4, channels)
    x = torch.roll(x.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels), (2, 2), (1, 2))
    corners = [x[:, row::2, column::2] for column in range(2) for row in range(2)]
    return self.merge(self.norm(torch.cat(corners, -1)))


@idiom(normal(4, 7, 6), make=lambda: {"query": Parameter(torch.randn(1, 1, 6)),
                                      "pool": nn.MultiheadAttention(6, 2, batch_first=True)})  # fmt: skip
def attention_pooling(self: Any, x: Tensor) -> Any:
    return self.pool(self.query.expand(x.size(0), -1, -1), x, x, need_weights=False)[0].squeeze(1)


@idiom(normal(4, 7, 6), make=lambda: {
       "token": Parameter(torch.randn(1, 1, 6)), "places": Parameter(torch.randn(1, 12, 6)),
       "layer": nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True, norm_first=True)})  # fmt: skip
def class_token(self: Any, x: Tensor) -> Any:
    x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
    return self.layer(x + self.places[:, : x.size(1)])[:, 0]


@idiom(normal(4, 6), make=lambda: {"inputs": Parameter(torch.randn(2, 3, 6)), "out": Parameter(torch.randn(2, 3, 6))})
def attention_in_einsums(self: Any, x: Tensor) -> Any:
    h = torch.einsum("bd,hkd->bhk", x, self.inputs)
    shares = torch.einsum("bhk,chk->hbc", h, h).softmax(-1)
    return torch.einsum("bhk,hkd->bd", torch.einsum("hbc,chk->bhk", shares, h), self.out)


@idiom(normal(4, 3, 8, 8), make=lambda: {"query": nn.Conv2d(3, 2, 1), "key": nn.Conv2d(3, 2, 1),
                                         "value": nn.Conv2d(3, 2, 1), "out": nn.Conv2d(2, 3, 1)})  # fmt: skip
def non_local_block(self: Any, x: Tensor) -> Any:
    batch, _, height, width = x.shape
    key, value = (F.max_pool2d(layer(x), 2).flatten(2) for layer in (self.key, self.value))
    shares = (self.query(x).flatten(2).mT @ key).softmax(-1)
    return x + self.out((shares @ value.mT).mT.reshape(batch, 2, height, width))


# Images


@idiom(normal(2, 3, 8, 8), make=lambda: {
       "wide": nn.Conv2d(3, 4, 3, padding=2, dilation=2), "narrow": nn.Conv2d(3, 4, 1), "out": nn.Conv2d(12, 2, 1),
       "whole": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.ReLU())})  # fmt: skip
def atrous_pyramid(self: Any, x: Tensor) -> Any:
    whole = F.interpolate(self.whole(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
    return self.out(torch.cat([self.wide(x), self.narrow(x), whole], 1))


@idiom(normal(2, 3, 8, 8), make=lambda: {"first": nn.Conv2d(3, 4, 3, 2, 1), "second": nn.Conv2d(4, 4, 3, 2, 1),
                                         "side": nn.Conv2d(4, 4, 1)})  # fmt: skip
def feature_pyramid(self: Any, x: Tensor) -> Any:
    large = self.first(x).relu()
    small = self.side(self.second(large).relu())
    return [self.side(large) + F.interpolate(small, scale_factor=2, mode="nearest"), small]


@idiom(normal(2, 3, 9, 11), make=lambda: {
       "down": nn.Conv2d(3, 4, 3, padding=1), "bottom": nn.Conv2d(4, 8, 3, padding=1),
       "up": nn.ConvTranspose2d(8, 4, 2, 2), "out": nn.Conv2d(8, 2, 3, padding=1)})  # fmt: skip
def padded_to_the_skip(self: Any, x: Tensor) -> Any:
    skip = self.down(x).relu()
    up = self.up(self.bottom(F.max_pool2d(skip, 2)).relu())
    rows, columns = skip.size(2) - up.size(2), skip.size(3) - up.size(3)
    up = F.pad(up, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
    return self.out(torch.cat([skip, up], 1))


@idiom(normal(4, 3, 8, 8), make=lambda: {
       "conv": nn.Conv2d(3, 8, 3, padding=1), "norm": nn.BatchNorm2d(8),
       "gate": nn.Sequential(nn.Linear(8, 2), nn.SiLU(), nn.Linear(2, 8), nn.Hardsigmoid())})  # fmt: skip
def squeeze_and_excite(self: Any, x: Tensor) -> Any:
    h = F.hardswish(self.norm(self.conv(x)))
    return h * self.gate(h.mean((2, 3)))[:, :, None, None]


@idiom(normal(4, 3, 8, 8), make=lambda: {
       "depthwise": nn.Conv2d(3, 3, 7, padding=3, groups=3), "norm": nn.LayerNorm(3), "up": nn.Linear(3, 12),
       "down": nn.Linear(12, 3), "gain": Parameter(torch.rand(12)), "shift": Parameter(torch.rand(12))})  # fmt: skip
def response_normalised(self: Any, x: Tensor) -> Any:
    h = F.gelu(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
    energy = h.norm(p=2, dim=(1, 2), keepdim=True)
    h = self.gain * (h * energy / (energy.mean(-1, keepdim=True) + 1e-6)) + self.shift + h
    return x + self.down(h).permute(0, 3, 1, 2)


@idiom(positive(3, 1, 8, 8), make=lambda: {"place": nn.Linear(64, 6), "conv": nn.Conv2d(1, 2, 3)})
def spatial_transformer(self: Any, x: Tensor) -> Any:
    still = torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.8, 0.05]])
    theta = still + 0.1 * self.place(x.flatten(1)).view(-1, 2, 3).tanh()
    size: Any = x.size()
    grid = F.affine_grid(theta, size, align_corners=False)
    return self.conv(F.grid_sample(x, grid, align_corners=False))


@idiom(normal(4, 3, 8, 8), make=lambda: {"stem": nn.Conv2d(3, 4, 3, 2, 1), "mix": nn.Conv2d(4, 4, 1, groups=2),
                                         "out": nn.Conv2d(4, 16, 1)})  # fmt: skip
def channel_shuffle(self: Any, x: Tensor) -> Any:
    h = self.stem(x)
    batch, channels, height, width = h.shape
    h = self.mix(h).view(batch, 2, channels // 2, height, width).transpose(1, 2)
    return F.pixel_shuffle(self.out(h.reshape(batch, channels, height, width)), 2)


def _blur() -> Tensor:
    line = torch.tensor([1.0, 2.0, 1.0]) / 4
    return (line[:, None] * line).expand(4, 1, 3, 3).clone()


@idiom(normal(4, 3, 8, 8), make=lambda: {"kernel": Buffer(_blur()), "conv": nn.Conv2d(3, 4, 3, padding=1)})
def blurred_pooling(self: Any, x: Tensor) -> Any:
    return F.conv2d(F.pad(self.conv(x), (1, 1, 1, 1), mode="reflect"), self.kernel, stride=2, groups=4)


@idiom(normal(2, 3, 6, 6), make=lambda: {"kernel": nn.Conv2d(3, 9, 1)})
def involution(self: Any, x: Tensor) -> Any:
    batch, channels, height, width = x.shape
    windows = F.unfold(x, 3, padding=1).view(batch, channels, 9, height, width)
    return (self.kernel(x).view(batch, 1, 9, height, width) * windows).sum(2)


@idiom(normal(2, 2, 4, 6, 6), make=lambda: {"conv": nn.Conv3d(2, 4, 3, padding=1), "norm": nn.BatchNorm3d(4),
                                            "up": nn.ConvTranspose3d(4, 2, 2, 2)})  # fmt: skip
def video_net(self: Any, x: Tensor) -> Any:
    h = self.conv(x)
    return self.up(F.max_pool3d(self.norm(h).relu(), 2)), F.adaptive_avg_pool3d(h, 1)


# Texts, sounds and sequences


@idiom(ints(9, 4, 5), make=lambda: {"words": nn.Embedding(9, 6, padding_idx=0), "out": nn.Linear(6, 3)})
def mean_of_words(self: Any, x: Tensor) -> Any:
    mask = (x != 0).float().unsqueeze(-1)
    return self.out((self.words(x) * mask).sum(1) / mask.sum(1).clamp(min=1))


@idiom(ints(9, 4, 12), make=lambda: {"words": nn.Embedding(9, 6), "out": nn.Linear(12, 3),
       "convs": nn.ModuleList(nn.Conv1d(6, 4, size) for size in (2, 3, 4))})  # fmt: skip
def text_convolutions(self: Any, x: Tensor) -> Any:
    h = self.words(x).transpose(1, 2)
    found = [conv(h).relu() for conv in self.convs]
    return self.out(torch.cat([F.max_pool1d(part, part.shape[-1]).squeeze(-1) for part in found], 1))


@idiom(ints(9, 4, 12), make=lambda: {"words": nn.Embedding(9, 6), "conv": nn.Conv1d(6, 4, 3), "out": nn.Linear(4, 3)})
def max_over_time(self: Any, x: Tensor) -> Any:
    return self.out(self.conv(self.words(x).mT).relu().max(-1).values)


@idiom(normal(3, 4, 10), make=lambda: {
       "convs": nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**depth) for depth in range(3)),
       "mixes": nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))})  # fmt: skip
def gated_dilated_convolutions(self: Any, x: Tensor) -> Any:
    total: Any = 0
    for depth, (conv, mix) in enumerate(zip(self.convs, self.mixes, strict=True)):
        a, b = conv(F.pad(x, (2**depth, 0))).chunk(2, 1)
        h = mix(a.tanh() * b.sigmoid())
        x, total = x + h, total + h
    return total


@idiom(normal(4, 6), make=lambda: {"cell": nn.GRUCell(6, 5), "out": nn.Linear(5, 6)})
def fed_its_own_output(self: Any, x: Tensor) -> Any:
    h, made = x.new_zeros(x.size(0), 5), []
    for _ in range(3):
        h = self.cell(x, h)
        x = self.out(h)
        made.append(x)
    return torch.stack(made, 1)


@idiom(normal(4, 6, 5), make=lambda: {
       "first": nn.BatchNorm1d(6), "conv": nn.Conv1d(6, 4, 3, padding="same", padding_mode="circular"),
       "last": nn.InstanceNorm1d(4, affine=True, track_running_stats=True)})  # fmt: skip
def normalised_sequence(self: Any, x: Tensor) -> Any:
    return self.last(self.conv(self.first(x)))


# Experts, codebooks, pairs


@idiom(normal(4, 8), make=lambda: {"gate": nn.Linear(8, 3),
                                   "experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})  # fmt: skip
def mixture_of_experts(self: Any, x: Tensor) -> Any:
    shares, chosen = self.gate(x).softmax(-1).topk(2, -1)
    weights = torch.zeros(len(x), 3).scatter(1, chosen, shares)
    return (weights.unsqueeze(-1) * torch.stack([expert(x) for expert in self.experts], 1)).sum(1)


@idiom(normal(4, 8), make=lambda: {"layer": nn.Linear(8, 4), "codes": nn.Embedding(5, 4), "out": nn.Linear(4, 8)})
def codebook_by_distance(self: Any, x: Tensor) -> Any:
    z = self.layer(x)
    code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
    loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(code.detach(), z)
    return self.out(z + (code - z).detach()), loss


@idiom(normal(4, 8), make=lambda: {"layer": nn.Linear(8, 4), "codes": Parameter(torch.randn(5, 4))})
def codebook_by_products(self: Any, x: Tensor) -> Any:
    z = self.layer(x)
    distance = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.pow(2).sum(1)
    code = F.one_hot(distance.argmin(1), 5).float() @ self.codes
    return z + (code - z).detach(), distance


@idiom(normal(4, 8), make=lambda: {"layer": nn.Linear(8, 8)})
def contrastive(self: Any, x: Tensor) -> Any:
    z = F.normalize(self.layer(x), dim=-1)
    return (z @ z.T / 0.1).masked_fill(torch.eye(len(x), dtype=torch.bool), -1e9).log_softmax(-1)


@idiom(normal(6, 4), make=lambda: {
       "body": nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))})  # fmt: skip
def siamese(self: Any, x: Tensor) -> Any:
    a, b = self.body(x), self.body(x.flip(1))
    return F.pairwise_distance(a, b), (a * b).sum(-1)


@idiom(normal(6, 4), make=lambda: {"layer": nn.Linear(4, 4)})
def halves_of_the_batch(self: Any, x: Tensor) -> Any:
    a, b = self.layer(x).chunk(2, 0)
    return a * b


@idiom(normal(5, 6), make=lambda: {"layer": nn.Linear(6, 4)})
def segments(self: Any, x: Tensor) -> Any:
    h, places = self.layer(x), torch.arange(len(x)) // 2
    count = torch.zeros(3).index_add(0, places, torch.ones(len(x))).clamp(min=1)
    largest = torch.zeros(3, 4).scatter_reduce(0, places[:, None].expand(-1, 4), h, "amax", include_self=False)
    return torch.zeros(3, 4).index_add(0, places, h) / count[:, None], largest


# Weights that are computed, and state


@idiom(normal(4, 6), make=lambda: {"weight": Parameter(torch.randn(3, 6)), "bias": Parameter(torch.zeros(6))})
def tied_auto_encoder(self: Any, x: Tensor) -> Any:
    return F.linear(F.linear(x, self.weight).relu(), self.weight.t(), self.bias)


@idiom(normal(4, 6), make=lambda: {"base": nn.Linear(6, 6).requires_grad_(False), "down": Parameter(torch.randn(2, 6)),
                                   "up": Parameter(torch.randn(6, 2))})  # fmt: skip
def merged_low_rank(self: Any, x: Tensor) -> Any:
    return F.linear(x, self.base.weight + self.up @ self.down * 0.5, self.base.bias)


@idiom(normal(4, 6), make=lambda: {"layer": spectral_norm(nn.Linear(6, 6))})
def spectrally_normalised(self: Any, x: Tensor) -> Any:
    return self.layer(x).tanh()


@idiom(normal(4, 6), make=lambda: {"layer": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6, affine=False),
                                   "condition": nn.Linear(6, 12)})  # fmt: skip
def conditional_norm(self: Any, x: Tensor) -> Any:
    gain, shift = self.condition(x).chunk(2, 1)
    return self.norm(self.layer(x)) * (1 + gain) + shift


@idiom(normal(4, 16), make=lambda: {"layer": nn.Linear(16, 12), "slope": nn.PReLU(4), "norm": nn.RMSNorm(4)})
def maxout(self: Any, x: Tensor) -> Any:
    return self.norm(self.slope(self.layer(x).unflatten(1, (4, 3)).amax(-1)))


@idiom(normal(4, 6), make=lambda: {"layer": nn.Linear(6, 3), "center": Buffer(torch.zeros(1, 3))})
def moving_average(self: Any, x: Tensor) -> Any:
    h = self.layer(x)
    with torch.no_grad():
        self.center.mul_(0.9).add_(h.mean(0, keepdim=True) * 0.1)
    return (h - self.center).log_softmax(-1)


@idiom(normal(4, 6), make=lambda: {"layer": nn.Linear(6, 3), "teacher": nn.Linear(6, 3).requires_grad_(False)})
def teacher_inside(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        target = self.teacher(x).softmax(-1)
    return -(target * self.layer(x).log_softmax(-1)).sum(-1)


@idiom(normal(4, 6), make=lambda: {"layer": nn.Linear(6, 6), "helper": nn.Linear(6, 2)})
def helper_in_training(self: Any, x: Tensor) -> Any:
    h = self.layer(x).relu()
    return (h, self.helper(h)) if self.training else h


# Losses and numbers


@idiom(positive(4, 3, 8, 8), make=lambda: {"conv": nn.Conv2d(3, 2, 3, padding=1)})
def dice(self: Any, x: Tensor) -> Any:
    p = self.conv(x).softmax(1)
    target = F.one_hot((x[:, 0] > 0.5).long(), 2).permute(0, 3, 1, 2).float()
    return 1 - (2 * (p * target).sum((2, 3)) + 1) / ((p + target).sum((2, 3)) + 1)


@idiom(positive(4, 8), make=lambda: {"layer": nn.Linear(8, 4)})
def losses_inside(self: Any, x: Tensor) -> Any:
    h, target = self.layer(x), x[:, :4]
    label = target.argmax(1)
    p = h.softmax(1).gather(1, label[:, None])
    return (
        F.cross_entropy(h, label, label_smoothing=0.1),
        F.kl_div(h.log_softmax(1), target.softmax(1), reduction="batchmean"),
        F.huber_loss(h, target),
        F.binary_cross_entropy_with_logits(h, target.sigmoid(), pos_weight=torch.full((4,), 2.0)),
        (-((1 - p) ** 2) * p.log()).mean(),  # focal
        F.poisson_nll_loss(h, target),
        F.triplet_margin_loss(h, target, target.flip(0)),
        F.cosine_embedding_loss(h, target, torch.ones(len(x))),
        F.nll_loss(h.log_softmax(1), label, ignore_index=2),
    )


@idiom(normal(4, 8), make=lambda: {"layer": nn.Linear(8, 8)})
def norms_and_distances(self: Any, x: Tensor) -> Any:
    h = self.layer(x)
    norms = h.norm(dim=1), torch.linalg.vector_norm(h, 1, dim=1), h.abs().amax(1), torch.logsumexp(h, 1)
    return *norms, h.var(1), h.std(1, unbiased=False), F.cosine_similarity(h, x), torch.cdist(h, h, p=1)


@idiom(normal(4, 8), make=lambda: {"layer": nn.Linear(8, 8)})
def running_numbers(self: Any, x: Tensor) -> Any:
    h = self.layer(x)
    along = h.cumsum(1), h.prod(1), torch.logcumsumexp(h, 1), h.diff(dim=1)
    ordered = h.sort(1)[0], h.median(1)[0], h.flip(1), torch.roll(h, 1, 0)
    return *along, *ordered, torch.where(h > 0, h, h * h), h.clamp(-0.5, 0.5), torch.lerp(h, x, 0.3)


@idiom(normal(4, 8), make=lambda: {"layer": nn.Linear(8, 8)})
def running_maximum(self: Any, x: Tensor) -> Any:
    return self.layer(x).cummax(1)[0]
