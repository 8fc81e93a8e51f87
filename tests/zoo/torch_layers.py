"""Models of plain torch.nn whose products are hidden inside a layer: recurrent layers, attention, and the rest."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.zoo.any_model import add, integers, normal, written_out

RECURRENT, ATTENTION, LAYERS = "torch.nn recurrent", "torch.nn attention", "torch.nn others"
TIME, WIDTH = 4, 6


def _lengths(size: int) -> Tensor:
    """Lengths of sequences, not sorted, from 1 to TIME."""
    return torch.arange(size) % TIME + 1


# Recurrent layers

add(RECURRENT, "lstm_two_layers", lambda: nn.LSTM(WIDTH, 4, num_layers=2, batch_first=True), normal(TIME, WIDTH))
add(RECURRENT, "lstm_bidirectional", lambda: nn.LSTM(WIDTH, 4, bidirectional=True, batch_first=True),
    normal(TIME, WIDTH))  # fmt: skip
add(RECURRENT, "lstm_projected", lambda: nn.LSTM(WIDTH, 5, num_layers=2, proj_size=3, bias=False),
    lambda size: (torch.randn(TIME, size, WIDTH),))  # fmt: skip
add(RECURRENT, "lstm_of_packed_input", lambda: nn.LSTM(WIDTH, 4, bidirectional=True),
    lambda size: (pack_padded_sequence(torch.randn(size, TIME, WIDTH), _lengths(size), True, enforce_sorted=False),)
    )  # fmt: skip
add(RECURRENT, "gru_with_state", lambda: nn.GRU(WIDTH, 4, num_layers=2, bidirectional=True),
    lambda size: (torch.randn(TIME, size, WIDTH), torch.randn(4, size, 4)))  # fmt: skip
add(RECURRENT, "rnn_relu_dropout", lambda: nn.RNN(WIDTH, 4, num_layers=3, nonlinearity="relu", dropout=0.3),
    lambda size: (torch.randn(TIME, size, WIDTH),))  # fmt: skip


@written_out(RECURRENT, lambda size: (torch.randn(size, TIME, WIDTH), _lengths(size)),
             make=lambda: {"rnn": nn.GRU(WIDTH, 4, batch_first=True), "head": nn.Linear(4, 3)})  # fmt: skip
def gru_packed_inside(self: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output, last = self.rnn(packed)
    assert isinstance(output, PackedSequence)
    return self.head(pad_packed_sequence(output, batch_first=True)[0]), last


@written_out(RECURRENT, lambda size: (torch.randn(TIME, size, WIDTH),), make=lambda: {
    "rnn": nn.RNNCell(WIDTH, 4), "gru": nn.GRUCell(4, 4), "lstm": nn.LSTMCell(4, 3, bias=False)})  # fmt: skip
def cells_in_a_loop(self: Any, x: Tensor) -> Any:
    one, two, three = x.new_zeros(x.shape[1], 4), None, (x.new_zeros(x.shape[1], 3), x.new_zeros(x.shape[1], 3))
    outputs = []
    for step in x:
        one = self.rnn(step, one)
        two = self.gru(one, two)
        three = self.lstm(two, three)
        outputs.append(three[0])
    return torch.stack(outputs), three[1]


def _language_model() -> dict[str, Any]:
    table, head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
    head.weight = table.weight
    return {"table": table, "rnn": nn.LSTM(WIDTH, WIDTH, batch_first=True), "head": head, "drop": nn.Dropout(0.2)}


@written_out(RECURRENT, lambda size: (integers(11, size, TIME),), make=_language_model)
def tied_language_model(self: Any, tokens: Tensor) -> Any:
    hidden, state = self.rnn(self.drop(self.table(tokens)))
    return self.head(self.drop(hidden)), state


# Attention


def _padding(size: int) -> Tensor:
    """True where a sequence has ended."""
    return torch.arange(TIME)[None] >= _lengths(size)[:, None]


@written_out(ATTENTION, lambda size: (torch.randn(size, TIME, 8), _padding(size)),
             make=lambda: {"attention": nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)})  # fmt: skip
def attention_padded(self: Any, x: Tensor, padding: Tensor) -> Any:
    return self.attention(x, x, x, key_padding_mask=padding, average_attn_weights=False)


@written_out(ATTENTION, lambda size: (torch.randn(3, size, 8), torch.randn(TIME, size, 5), torch.randn(TIME, size, 7)),
             make=lambda: {"attention": nn.MultiheadAttention(8, 2, kdim=5, vdim=7)})  # fmt: skip
def attention_cross(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
    return self.attention(query, key, value, need_weights=False)[0]


@written_out(ATTENTION, lambda size: (torch.randn(TIME, size, 8),), make=lambda: {
    "attention": nn.MultiheadAttention(8, 4, add_bias_kv=True, add_zero_attn=True, bias=False)})  # fmt: skip
def attention_bias_and_zero(self: Any, x: Tensor) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(TIME)
    return self.attention(x, x, x, attn_mask=mask)


def _layer(kind: Any = nn.TransformerEncoderLayer, **options: Any) -> Any:
    return kind(8, 2, dim_feedforward=12, batch_first=True, **options)


add(ATTENTION, "encoder_layer_pre_norm", lambda: _layer(norm_first=True, activation="gelu"), normal(TIME, 8))
add(ATTENTION, "encoder_causal",
    lambda: nn.TransformerEncoder(_layer(), 2, norm=nn.LayerNorm(8), enable_nested_tensor=False),
    lambda size: {"src": torch.randn(size, TIME, 8), "is_causal": True,
                  "mask": nn.Transformer.generate_square_subsequent_mask(TIME)})  # fmt: skip
add(ATTENTION, "decoder", lambda: nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer), 2),
    lambda size: {"tgt": torch.randn(size, 3, 8), "memory": torch.randn(size, TIME, 8),
                  "tgt_mask": nn.Transformer.generate_square_subsequent_mask(3), "tgt_is_causal": True})  # fmt: skip
add(ATTENTION, "transformer", lambda: nn.Transformer(8, 2, 1, 1, dim_feedforward=12, batch_first=True),
    lambda size: {"src": torch.randn(size, TIME, 8), "tgt": torch.randn(size, 3, 8),
                  "memory_key_padding_mask": _padding(size), "src_key_padding_mask": _padding(size)})  # fmt: skip


@written_out(ATTENTION, lambda size: (torch.randn(size, TIME, 8), _padding(size)),
             make=lambda: {"encoder": nn.TransformerEncoder(_layer(dropout=0.0), 2)})  # fmt: skip
def encoder_fast_path(self: Any, x: Tensor, padding: Tensor) -> Any:
    """In evaluation plain torch leaves the padding out of the computation; what stands there is nobody's number."""
    return self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)


@written_out(ATTENTION, normal(TIME, 8), make=lambda: {"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})
def sdpa_causal_dropout(self: Any, x: Tensor) -> Any:
    q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
    dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
    return self.out(dropped.transpose(1, 2).flatten(2))


@written_out(ATTENTION, lambda size: (torch.randn(size, TIME, 8), ~_padding(size), torch.randn(size, 1, TIME, TIME)),
             make=lambda: {"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})  # fmt: skip
def sdpa_masks(self: Any, x: Tensor, keep: Tensor, bias: Tensor) -> Any:
    q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
    boolean = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None], scale=0.3)
    added = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return self.out((boolean + added).transpose(1, 2).flatten(2))


@written_out(ATTENTION, normal(TIME, 8), make=lambda: {"q": nn.Linear(8, 16), "kv": nn.Linear(8, 16)})
def sdpa_grouped_queries(self: Any, x: Tensor) -> Any:
    q = self.q(x).view(*x.shape[:2], 4, 4).transpose(1, 2)
    k, v = self.kv(x).view(*x.shape[:2], 2, 2, 4).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


# The rest of torch.nn


@written_out(LAYERS, lambda size: (torch.randn(size, 4), torch.randn(size, 5)),
             make=lambda: {"both": nn.Bilinear(4, 5, 6), "out": nn.Linear(6, 2)})  # fmt: skip
def bilinear(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.out(torch.tanh(self.both(x, y)))


@written_out(LAYERS, lambda size: (torch.randn(size, 2, 9), torch.randn(size, 2, 4, 5, 6)), make=lambda: {
    "one": nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.PReLU(), nn.ConvTranspose1d(4, 2, 2, stride=2)),
    "three": nn.Sequential(nn.Conv3d(2, 3, 2), nn.InstanceNorm3d(3), nn.Mish(), nn.ConvTranspose3d(3, 2, 2))}
    )  # fmt: skip
def convolutions(self: Any, sound: Tensor, film: Tensor) -> Any:
    return {"sound": self.one(sound), "film": self.three(film)}


@written_out(LAYERS, lambda size: (integers(9, 3 * size), torch.arange(size) * 3, torch.rand(3 * size)),
             make=lambda: {"bag": nn.EmbeddingBag(9, WIDTH, mode="sum"), "head": nn.Linear(WIDTH, 3)})  # fmt: skip
def embedding_bag(self: Any, words: Tensor, starts: Tensor, weights: Tensor) -> Any:
    return self.head(self.bag(words, starts, per_sample_weights=weights))


@written_out(LAYERS, lambda size: (torch.randn(4 * size, WIDTH), integers(12, 4 * size)), make=lambda: {
    "body": nn.Linear(WIDTH, 8), "head": nn.AdaptiveLogSoftmaxWithLoss(8, 12, cutoffs=[4, 8], div_value=2.0)}
    )  # fmt: skip
def adaptive_softmax(self: Any, x: Tensor, target: Tensor) -> Any:
    return self.head(self.body(x), target)


@written_out(LAYERS, normal(3, 8, 8), make=lambda: {"conv": nn.Conv2d(3, 8, 3, stride=2), "norm": nn.GroupNorm(2, 8),
             "head": nn.Linear(8, 3), "up": nn.PixelShuffle(2)})  # fmt: skip
def group_norm_net(self: Any, x: Tensor) -> Any:
    y = F.silu(self.norm(self.conv(x)))
    return self.head(y.mean((2, 3))), self.up(y)


@written_out(LAYERS, lambda size: (torch.randn(size, 3, 4), torch.randn(size, 4, 3)), make=lambda: {
    "w": Parameter(torch.randn(4, 5)), "v": Parameter(torch.randn(5, 2)), "bias": Parameter(torch.randn(3, 3))}
    )  # fmt: skip
def products(self: Any, x: Tensor, y: Tensor) -> Any:
    chained = torch.linalg.multi_dot([x.flatten(0, 1), self.w, self.v])
    batched = torch.baddbmm(self.bias, x, y, beta=0.5, alpha=2.0)
    three = torch.einsum("bij,jk,kl->bil", x, self.w, self.v)
    return chained, batched, three, torch.tensordot(x, self.w, dims=1), torch.kron(self.v, self.v)


@written_out(LAYERS, normal(3, 6, 6), make=lambda: {"weight": Parameter(torch.randn(4, 27)), "out": nn.Linear(4, 2)})
def convolution_by_unfolding(self: Any, x: Tensor) -> Any:
    return self.out((self.weight @ F.unfold(x, 3)).transpose(1, 2))
