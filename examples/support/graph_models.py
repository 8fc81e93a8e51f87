"""Graph networks: the library's own, unmodified, and those of the published experiments in plain PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LIBRARY = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT"}
"""Models of PyTorch Geometric, by their names there."""
PUBLISHED = ("paper-gcn", "paper-sage")
NAMES = (*LIBRARY, *PUBLISHED)
SAMPLED = ("sage", "gat", "gcn", "paper-sage")
"""Models that work on sampled neighbourhoods; the others normalize by degrees of the whole graph."""


def make(name: str, inputs: int, hidden: int, classes: int, *, layers: int, dropout: float, heads: int) -> nn.Module:
    """Return a fresh model."""
    if name == "paper-gcn":
        return PaperGCN((inputs, *(hidden,) * (layers - 1), classes), dropout)
    if name == "paper-sage":
        return PaperSAGE((inputs, *(hidden,) * (layers - 1), classes), dropout)
    if name not in LIBRARY:
        raise ValueError(f"--model must be one of {', '.join(NAMES)}, got {name!r}")
    try:
        from torch_geometric import nn as library
    except ImportError as error:
        raise ImportError(f"--model {name} is PyTorch Geometric's: pip install torch_geometric") from error
    options = {"heads": heads} if name == "gat" else {}
    made: nn.Module = getattr(library, LIBRARY[name])(inputs, hidden, layers, classes, dropout=dropout, **options)
    return made


def neighbour_sum(x: Tensor, edges: Tensor, like: Tensor) -> Tensor:
    """Sum over in-neighbours, one row for each row of `like`."""
    return x.new_zeros(like.shape[0], x.shape[1]).index_add(0, edges[1], x[edges[0]])


def whole_norm(x: Tensor) -> Tensor:
    """Layer norm over all nodes and features at once, without parameters."""
    return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5)


class GraphConv(nn.Module):
    """GCN, normalized on both sides; the product comes first where it shrinks the features."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.project_first = inputs > outputs
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, edges: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """`left` and `right` are the degrees of sources and targets, to the power of -1/2, as columns."""
        h = x * left
        if self.project_first:
            h = h @ self.weight
        h = neighbour_sum(h, edges, right)
        if not self.project_first:
            h = h @ self.weight
        return h * right + self.bias


class PaperGCN(nn.Module):
    """Convolutions, and between them relu, a layer norm over everything, and dropout."""

    def __init__(self, sizes: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GraphConv(inputs, outputs) for inputs, outputs in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edges: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return the logits of all nodes."""
        for place, conv in enumerate(self.convs):
            x = conv(x, edges, left, right)
            if place < len(self.convs) - 1:
                x = self.dropout(whole_norm(torch.relu(x)))
        return x


class MeanConv(nn.Module):
    """GraphSAGE with the mean; the targets are the first rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own = nn.Linear(inputs, outputs, bias=False)
        self.neighbours = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.project_first = inputs > outputs

    def forward(self, x: Tensor, edges: Tensor, degree: Tensor) -> Tensor:
        """`degree` says how many edges each target has, as a column."""
        if self.project_first:
            mean = neighbour_sum(self.neighbours(x), edges, degree) / degree
        else:
            mean = self.neighbours(neighbour_sum(x, edges, degree) / degree)
        y: Tensor = self.own(x[: degree.shape[0]]) + mean + self.bias
        return y


class PaperSAGE(nn.Module):
    """Convolutions from larger to smaller neighbourhoods; between them relu, layer norm over everything, dropout."""

    def __init__(self, sizes: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.convs = nn.ModuleList(MeanConv(inputs, outputs) for inputs, outputs in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, edges: list[Tensor], degrees: list[Tensor]) -> Tensor:
        """Return the logits of the targets of the last convolution; each convolution has edges of its own."""
        for place, conv in enumerate(self.convs):
            x = conv(x, edges[place], degrees[place])
            if place < len(self.convs) - 1:
                x = self.dropout(whole_norm(F.relu(x)))
        return x


def degree_norm(index: Tensor, nodes: int) -> Tensor:
    """Return degrees to the power of -1/2, as a column; a node without edges counts as having one."""
    return torch.bincount(index, minlength=nodes).clamp(min=1).float().pow(-0.5).unsqueeze(1)


def with_self_loops(edges: Tensor, nodes: int) -> Tensor:
    """Return the edges and one from each node to itself."""
    return torch.cat([edges, torch.arange(nodes).expand(2, nodes)], dim=1)


def degrees(edges: Tensor, targets: int) -> Tensor:
    """Return how many edges each target has, at least 1, as a column."""
    return torch.bincount(edges[1], minlength=targets).clamp(min=1).float().unsqueeze(1)
