"""The paper's layers in plain PyTorch, unquantized: what a user would write. `transform` does the rest."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LSTM(nn.Module):
    """One layer, unrolled over a fixed number of steps; time first, gates input, forget, cell, output."""

    def __init__(self, input_size: int, hidden_size: int, steps: int) -> None:
        super().__init__()
        self.W = nn.Linear(input_size, 4 * hidden_size)
        self.U = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.steps = steps

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = []
        for step in range(self.steps):
            gates = self.W(x[step : step + 1]) + self.U(h)
            i, f, g, o = gates.chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.cat(outputs), h, c


class LanguageModel(nn.Module):
    """Embedding, LSTM, decoder."""

    def __init__(self, tokens: int, embedding: int, hidden: int, steps: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(tokens, embedding)
        self.rnn = LSTM(embedding, hidden, steps)
        self.decoder = nn.Linear(hidden, tokens)

    def forward(self, tokens: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, h, c = self.rnn(self.encoder(tokens), h, c)
        # Decoded as one matrix: the gradient of a 2-D output has one range, that of a 3-D one has one per position.
        decoded = self.decoder(output.flatten(0, 1))
        return decoded.unflatten(0, output.shape[:2]), h, c


class SelfAttention(nn.Module):
    """BERT's self attention; returns the probabilities too."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.0)
        self.heads = heads
        self.width = hidden // heads

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.width).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / self.width**0.5
        if mask is not None:
            scores = scores + mask
        probabilities = self.dropout(torch.softmax(scores, dim=-1))
        context = torch.matmul(probabilities, v).permute(0, 2, 1, 3).contiguous()
        return context.view(x.shape[0], x.shape[1], -1), probabilities


class _SelfOutput(nn.Module):
    def __init__(self, inputs: int, hidden: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y: Tensor = self.LayerNorm(self.dense(x) + residual)
        return y


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, eps: float) -> None:
        super().__init__()
        self.self = SelfAttention(hidden, heads)
        self.output = _SelfOutput(hidden, hidden, eps)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        context, probabilities = self.self(x, mask)
        return self.output(context, x), probabilities


class _Intermediate(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, intermediate)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class BertLayer(nn.Module):
    """One encoder layer."""

    def __init__(self, hidden: int, heads: int, intermediate: int, eps: float) -> None:
        super().__init__()
        self.attention = _Attention(hidden, heads, eps)
        self.intermediate = _Intermediate(hidden, intermediate)
        self.output = _SelfOutput(intermediate, hidden, eps)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        attended, probabilities = self.attention(x, mask)
        return self.output(self.intermediate(attended), attended), probabilities


def neighbour_sum(messages: Tensor, src: Tensor, dst: Tensor, nodes: int) -> Tensor:
    """Sum over in-neighbours."""
    return torch.zeros(nodes, messages.shape[1]).index_add(0, dst, messages[src])


def degrees(index: Tensor, nodes: int) -> Tensor:
    """How often each node occurs, at least 1, as a column."""
    return torch.zeros(nodes).index_add(0, index, torch.ones(index.shape[0])).clamp(min=1).unsqueeze(1)


class GraphConv(nn.Module):
    """GCN, normalized on both sides; products come first where they shrink the features."""

    def __init__(self, in_features: int, out_features: int, nodes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.project_first = in_features > out_features
        self.nodes = nodes

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        h = x * degrees(src, self.nodes).pow(-0.5)
        if self.project_first:
            h = h @ self.weight
        h = neighbour_sum(h, src, dst, self.nodes)
        if not self.project_first:
            h = h @ self.weight
        h = h * degrees(dst, self.nodes).pow(-0.5)
        return h + self.bias


class SageConv(nn.Module):
    """GraphSAGE with the mean; destinations are the first `targets` nodes."""

    def __init__(self, in_features: int, out_features: int, targets: int) -> None:
        super().__init__()
        self.fc_self = nn.Linear(in_features, out_features, bias=False)
        self.fc_neigh = nn.Linear(in_features, out_features, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.project_first = in_features > out_features
        self.targets = targets

    def mean(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        return neighbour_sum(x, src, dst, self.targets) / degrees(dst, self.targets)

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        if self.project_first:
            neighbours = self.mean(self.fc_neigh(x), src, dst)
        else:
            neighbours = self.fc_neigh(self.mean(x, src, dst))
        y: Tensor = self.fc_self(x[: self.targets]) + neighbours + self.bias
        return y


class GATLayer(nn.Module):
    """Graph attention on a graph of equal in-degrees, neighbourhoods as (node, neighbour, feature)."""

    def __init__(self, in_features: int, out_features: int, degree: int) -> None:
        super().__init__()
        self.fc = nn.Linear(in_features, out_features, bias=False)
        self.attn_fc = nn.Linear(2 * out_features, 1, bias=False)
        self.proj_norm = nn.LayerNorm(out_features)
        self.agg_norm = nn.LayerNorm(out_features)
        self.degree = degree
        self.width = out_features

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        z = self.proj_norm(self.fc(x))
        order = torch.argsort(dst, stable=True)
        score = self.attn_fc(torch.cat([z[src], z[dst]], dim=1)) / (2 * self.width) ** 0.5
        score = F.leaky_relu(score)
        neighbours = z[src][order].view(-1, self.degree, self.width)
        alpha = torch.softmax(score[order].view(-1, self.degree, 1), dim=1)
        y: Tensor = self.agg_norm((alpha * neighbours).sum(dim=1))
        return y


class GCN(nn.Module):
    """Three graph convolutions; after the first two relu and a layer norm over all nodes and features at once."""

    def __init__(self, sizes: tuple[int, ...], nodes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphConv(inputs, outputs, nodes) for inputs, outputs in pairwise(sizes))

    def forward(self, x: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, src, dst)
            if index < len(self.layers) - 1:
                x = torch.relu(x)
                x = (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)
        return x
