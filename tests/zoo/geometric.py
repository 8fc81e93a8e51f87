"""Graph networks of PyTorch Geometric. A batch twice as large is another graph, with more nodes and edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.any_model import Inputs, add, integers, package, written_out

FAMILY, NEEDS = "PyTorch Geometric", "torch_geometric"
FEATURES, CLASSES = 6, 3


def edges(sources: int, targets: int) -> Tensor:
    """Two edges for each target, and as many between random nodes."""
    certain = torch.stack([integers(sources, 2 * targets), torch.arange(targets).repeat(2)])
    return torch.cat([certain, torch.stack([integers(sources, targets), integers(targets, targets)])], dim=1)


def graph(size: int) -> tuple[Any, ...]:
    """Features of 5 nodes for each graph that was asked for, and edges."""
    return torch.randn(5 * size, FEATURES), edges(5 * size, 5 * size)


def several_graphs(size: int) -> tuple[Any, ...]:
    """Nodes, edges, and to which graph each node belongs."""
    return (*graph(size), torch.arange(size).repeat_interleave(5))


def weighted(size: int) -> tuple[Any, ...]:
    """Nodes, edges, and three features of each edge."""
    features, index = graph(size)
    return features, index, torch.rand(index.shape[1], 3)


def conv(kind: str, *args: Any, **options: Any) -> nn.Module:
    """Make a layer or model of the library by the name of its class."""
    made = getattr(package("torch_geometric.nn"), kind)(*args, **options)
    assert isinstance(made, nn.Module)
    return made


def reader(name: str) -> Any:
    """A function of the library that sums up the nodes of each graph."""
    return getattr(package("torch_geometric.nn"), name)


def graph_model(name: str, inputs: Inputs, make: Callable[[], nn.Module]) -> None:
    """Register one layer or model as it is."""
    add(FAMILY, name, make, inputs, needs=NEEDS)


graph_model("gcn", graph, lambda: conv("GCN", FEATURES, 8, 2, CLASSES, dropout=0.2))
graph_model("sage", graph, lambda: conv("GraphSAGE", FEATURES, 8, 2, CLASSES, norm="BatchNorm"))
graph_model("gat", graph, lambda: conv("GAT", FEATURES, 8, 2, CLASSES, heads=2, dropout=0.2))
graph_model("gat_v2", weighted, lambda: conv("GATv2Conv", FEATURES, 4, heads=2, edge_dim=3))
graph_model("gin", graph, lambda: conv("GIN", FEATURES, 8, 2, CLASSES, jk="cat"))
graph_model("pna", graph, lambda: conv("PNAConv", FEATURES, 4, ["mean", "max", "std"], ["identity", "amplification"],
                                       torch.tensor([0, 1, 4, 3, 2])))  # fmt: skip
graph_model("transformer_conv", weighted, lambda: conv("TransformerConv", FEATURES, 4, heads=2, edge_dim=3, beta=True))
graph_model("edge_conv", graph, lambda: conv("EdgeConv", nn.Sequential(nn.Linear(2 * FEATURES, 8), nn.ReLU())))
graph_model("cheb", graph, lambda: conv("ChebConv", FEATURES, 4, K=3))


@written_out(FAMILY, several_graphs, needs=NEEDS, make=lambda: {
    "one": conv("GraphConv", FEATURES, 8), "pool": conv("TopKPooling", 8, ratio=0.6),
    "read": [reader("global_mean_pool"), reader("global_max_pool")], "head": nn.Linear(16, CLASSES)})  # fmt: skip
def top_k_pooling(self: Any, x: Tensor, index: Tensor, batch: Tensor) -> Any:
    x = F.relu(self.one(x, index))
    x, _, _, batch, _, _ = self.pool(x, index, None, batch)
    return self.head(torch.cat([read(x, batch) for read in self.read], dim=1)).log_softmax(-1)


@written_out(FAMILY, several_graphs, needs=NEEDS, make=lambda: {
    "one": conv("GCNConv", FEATURES, 8), "pool": conv("SAGPooling", 8, ratio=0.5),
    "read": reader("global_add_pool"), "head": nn.Linear(8, CLASSES)})  # fmt: skip
def self_attention_pooling(self: Any, x: Tensor, index: Tensor, batch: Tensor) -> Any:
    x = F.relu(self.one(x, index))
    x, _, _, batch, _, _ = self.pool(x, index, None, batch)
    return self.head(self.read(x, batch))


def two_kinds(size: int) -> tuple[Any, ...]:
    """A graph of readers and books."""
    readers, books = 3 * size, 4 * size
    features = {"reader": torch.randn(readers, FEATURES), "book": torch.randn(books, FEATURES)}
    return features, {("reader", "likes", "book"): edges(readers, books),
                      ("book", "liked_by", "reader"): edges(books, readers)}  # fmt: skip


KINDS = (["reader", "book"], [("reader", "likes", "book"), ("book", "liked_by", "reader")])


@written_out(FAMILY, two_kinds, needs=NEEDS, make=lambda: {
    "body": conv("HeteroConv", {kind: conv("SAGEConv", (FEATURES, FEATURES), 8) for kind in KINDS[1]}),
    "head": nn.Linear(8, CLASSES)})  # fmt: skip
def hetero_conv(self: Any, features: dict[str, Tensor], index: dict[Any, Tensor]) -> Any:
    hidden = self.body(features, index)
    return {kind: self.head(F.relu(value)) for kind, value in hidden.items()}


graph_model("to_hetero", two_kinds, lambda: package("torch_geometric.nn").to_hetero(
    conv("GraphSAGE", FEATURES, 8, 2, CLASSES), KINDS))  # fmt: skip
graph_model("hgt", two_kinds, lambda: conv("HGTConv", FEATURES, 8, KINDS, heads=2))


@written_out(FAMILY, graph, needs=NEEDS, make=lambda: {
    "encoder": conv("GAE", conv("GCNConv", FEATURES, 4)), "head": nn.Linear(4, CLASSES)})  # fmt: skip
def auto_encoder(self: Any, x: Tensor, index: Tensor) -> Any:
    hidden = self.encoder.encode(x, index)
    return self.encoder.decode(hidden, index), self.encoder.decoder.forward_all(hidden), self.head(hidden)
