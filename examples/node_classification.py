"""Classify the nodes of a graph under a cyclic precision schedule: GCN, GraphSAGE and GAT.

    python examples/node_classification.py                                  # GCN on Cora
    python examples/node_classification.py --aggregation q                  # messages quantized too
    python examples/node_classification.py --model sage --neighbours 10,10  # on sampled neighbourhoods
    python examples/node_classification.py --fast                           # the karate club, a few seconds
    python examples/node_classification.py --preset ogbn-arxiv              # the published settings

The models `gcn`, `sage` and `gat` are those of PyTorch Geometric, unmodified. `paper-gcn` and `paper-sage` are those of
the published experiments, in plain PyTorch. Only the recipe is about precision.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from support import graph_models, graphs
from support.neighbours import Neighbourhood, NeighbourSampler
from support.script import Script
from support.task import Task, epoch_order
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx import recipes
from cpt_fx.schedules import Schedule, learning_rates

Inputs = tuple[Any, ...]
Batch = tuple[Inputs, Tensor, Tensor]
"""The model's inputs, the rows of its output that count, and the nodes of the graph that these stand for."""

ARXIV = {"data": "ogbn-arxiv", "model": "paper-gcn", "hidden": 512, "layers": 3, "dropout": 0.2, "epochs": 500,
         "lr": 1e-3, "weight_decay": 0.0, "cycles": 8, "period": "published", "eval_bits": "current"}  # fmt: skip
PRODUCTS = {"data": "ogbn-products", "model": "paper-sage", "hidden": 512, "layers": 2, "dropout": 0.2, "epochs": 80,
            "batch": 1024, "neighbours": "32,32", "evaluate_on": "samples", "lr": 1e-3, "weight_decay": 1e-4,
            "cycles": 8, "period": "published", "eval_bits": "current"}  # fmt: skip
PRESETS = {
    "ogbn-arxiv": ARXIV | {"q_min": 3, "q_max": 8},
    "ogbn-arxiv-6": ARXIV | {"q_min": 3, "q_max": 6},
    "ogbn-products": PRODUCTS | {"q_min": 4, "q_max": 8},
    "ogbn-products-6": PRODUCTS | {"q_min": 4, "q_max": 6},
    "ogbn-products-q": PRODUCTS | {"q_min": 3, "q_max": 8, "aggregation": "q"},
    "ogbn-products-q-6": PRODUCTS | {"q_min": 3, "q_max": 6, "aggregation": "q"},
}
FAST = {"data": "karate", "hidden": 16, "epochs": 60, "lr": 0.02, "weight_decay": 0.0}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of graphs, and set the defaults: GCN on Cora."""
    group = parser.add_argument_group("graph")
    add = group.add_argument
    sums = "sums over neighbours in full precision, or of quantized messages (default: %(default)s)"
    add("--aggregation", choices=("fp", "q"), default="fp", help=sums)
    add("--quantize-norm", action="store_true", help="quantize products with degree norms too")
    split = "train on 20 nodes of each class, or on all that are not held out (default: %(default)s)"
    add("--split", choices=graphs.SPLITS, default="public", help=split)
    add("--hidden", type=int, default=64, help="width of hidden layers (default: %(default)s)")
    add("--layers", type=int, default=2, help="convolutions (default: %(default)s)")
    add("--dropout", type=float, default=0.5, help="default: %(default)s")
    add("--heads", type=int, default=4, help="attention heads of gat (default: %(default)s)")
    neighbours = "train on batches with so many sampled neighbours for each convolution (default: on the whole graph)"
    add("--neighbours", metavar="N,N", help=neighbours)
    evaluate = "evaluate on the whole graph, or on neighbourhoods sampled as in training (default: %(default)s)"
    add("--evaluate-on", choices=("graph", "samples"), default="graph", help=evaluate)
    loss = "published: the negative of the label's logit, without a softmax, as in the ogbn-arxiv script"
    add("--loss", choices=("cross-entropy", "published"), default="cross-entropy", help=loss)
    parser.set_defaults(data="cora", model="gcn", epochs=300, batch=256, lr=0.01, weight_decay=5e-4)


class NodeClassification(Task):
    """One graph, some labelled nodes to learn from, others to be tested on."""

    metric = "accuracy"
    better = "higher"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data = graphs.load(options.data, options.split)
        self.counts = _counts(options)
        self.recipe = recipes.paper(
            family="graph", aggregation=options.aggregation, quantize_norm=options.quantize_norm
        )
        self.steps_per_epoch = -(-len(self.data.train) // options.batch) if self.counts else 1
        self.sampler = NeighbourSampler(self.data.edges, self.data.nodes) if self.counts else None
        self.whole = None if self.counts and options.evaluate_on == "samples" else self._whole_graph()

    def model(self) -> nn.Module:
        """Return the network."""
        chosen = self.options
        return graph_models.make(chosen.model, self.data.features.shape[1], chosen.hidden, self.data.classes,
                                 layers=chosen.layers, dropout=chosen.dropout, heads=chosen.heads)  # fmt: skip

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(model.parameters(), lr=self.options.lr, weight_decay=self.options.weight_decay)

    def learning_rate(self, step: int, total_steps: int) -> float:
        """Return the rate, which falls along half a cosine to a tenth."""
        return learning_rates.cosine(step, lr=self.options.lr, total_steps=total_steps)

    def batch(self, step: int, seed: int) -> Batch:
        """Return the whole graph, or a sampled neighbourhood of some of the nodes."""
        if self.sampler is None:
            assert self.whole is not None
            return self.whole, self.data.train, self.data.train
        epoch, place = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.data.train), epoch, seed)
        size = self.options.batch
        return self._sampled(self.data.train[order[place * size : (place + 1) * size]], 1_000_003 * seed + step)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross entropy over the nodes of the batch."""
        inputs, rows, nodes = batch
        logits, labels = model(*inputs)[rows], self.data.labels[nodes]
        return F.nll_loss(logits, labels) if self.options.loss == "published" else F.cross_entropy(logits, labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the share of nodes that are classified right, and the cross entropy, which shows finer differences."""
        test, validation = self.data.test, self.data.validation
        if self.whole is not None:
            output = model(*self.whole)
            logits, other = output[test], output[validation]
        else:
            logits, other = self._on_samples(model, test), self._on_samples(model, validation)
        labels = self.data.labels
        return {
            "accuracy": (logits.argmax(dim=1) == labels[test]).float().mean().item(),
            "loss": F.cross_entropy(logits, labels[test]).item(),
            "validation_accuracy": (other.argmax(dim=1) == labels[validation]).float().mean().item(),
        }

    def _on_samples(self, model: nn.Module, nodes: Tensor) -> Tensor:
        """Return the output on sampled neighbourhoods, the same ones at every evaluation."""
        parts = []
        for place, part in enumerate(nodes.split(self.options.batch)):
            inputs, rows, _ = self._sampled(part, -1 - place)
            parts.append(model(*inputs)[rows])
        return torch.cat(parts)

    def _sampled(self, nodes: Tensor, seed: int) -> Batch:
        assert self.sampler is not None
        found = self.sampler.sample(nodes, self.counts, torch.Generator().manual_seed(seed % 2**63))
        x = self.data.features[found.nodes]
        inputs = (x, *_blocks(found)) if self.options.model == "paper-sage" else (x, found.edges)
        return inputs, torch.arange(len(nodes)), nodes

    def _whole_graph(self) -> Inputs:
        x, edges, nodes = self.data.features, self.data.edges, self.data.nodes
        if self.options.model == "paper-gcn":
            edges = graph_models.with_self_loops(edges, nodes)
            return (x, edges, *(graph_models.degree_norm(index, nodes) for index in edges))
        if self.options.model == "paper-sage":
            layers = self.options.layers
            return x, [edges] * layers, [graph_models.degrees(edges, nodes)] * layers
        return x, edges


def _blocks(found: Neighbourhood) -> tuple[list[Tensor], list[Tensor]]:
    """Return the edges and degrees of each convolution: the first reaches the furthest, the last ends at the seeds."""
    edges = [torch.cat(found.hops[: last + 1], dim=1) for last in reversed(range(len(found.hops)))]
    return edges, [graph_models.degrees(part, found.sizes[-2 - place]) for place, part in enumerate(edges)]


def _counts(options: argparse.Namespace) -> tuple[int, ...]:
    """Return how many neighbours each hop samples; none for training on the whole graph."""
    if not options.neighbours:
        if options.evaluate_on == "samples":
            raise ValueError("--evaluate-on samples needs --neighbours: how many each convolution samples")
        return ()
    try:
        counts = tuple(int(part) for part in str(options.neighbours).split(","))
    except ValueError:
        counts = ()
    if len(counts) != options.layers or min(counts) < 1:
        raise ValueError(
            f"--neighbours needs one number for each of the {options.layers} convolutions, as in "
            f"{','.join(['10'] * options.layers)}; got {options.neighbours!r}"
        )
    if options.model not in graph_models.SAMPLED:
        raise ValueError(f"--model {options.model} trains on the whole graph: leave out --neighbours")
    return counts


def make_task(options: argparse.Namespace) -> NodeClassification:
    """Return the task that the options describe."""
    if options.recipe == "paper":
        options.recipe = (
            None  # the preset of that name is for convolutions: the published way for graphs is the default
        )
    if options.recipe is not None and (options.aggregation == "q" or options.quantize_norm):
        raise ValueError(
            f"--aggregation q and --quantize-norm belong to the published recipe for graphs; leave out --recipe "
            f"{options.recipe}"
        )
    return NodeClassification(options)


SCRIPT = Script(description=__doc__ or "", presets=PRESETS, fast=FAST, add_options=add_options, make_task=make_task)


def train(schedule: Schedule, seed: int = 0, **options: Any) -> dict[str, float]:
    """Train under a schedule and return the metrics; `cpt-fx study` calls this."""
    return SCRIPT.train(schedule, seed, **options)


if __name__ == "__main__":
    SCRIPT.main()
