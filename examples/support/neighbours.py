"""Sampling neighbourhoods: what `NeighborLoader` of PyTorch Geometric does, without the extensions that it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Neighbourhood:
    """Some nodes, their sampled neighbours, the neighbours of these, and so on.

    `nodes` are the ids in the whole graph; the seeds come first, then what each hop found. `hops` holds the edges that
    each hop took, (source, target) in numbers of this neighbourhood; `sizes` how many nodes there were after it, the
    seeds alone first.
    """

    nodes: Tensor
    hops: tuple[Tensor, ...]
    sizes: tuple[int, ...]

    @property
    def edges(self) -> Tensor:
        """All edges, as the models of PyTorch Geometric take them."""
        return torch.cat(self.hops, dim=1)


class NeighbourSampler:
    """Draws neighbours uniformly and without replacement; the same generator draws the same ones."""

    def __init__(self, edges: Tensor, nodes: int) -> None:
        source, target = edges
        order = torch.argsort(target, stable=True)
        self._sources = source[order]
        self._degrees = torch.bincount(target, minlength=nodes)
        self._starts = torch.cumsum(self._degrees, 0) - self._degrees
        self._nodes = nodes

    def sample(self, seeds: Tensor, counts: tuple[int, ...], generator: torch.Generator) -> Neighbourhood:
        """Return a neighbourhood with at most `counts[i]` neighbours of each node that hop i starts from."""
        number = torch.full((self._nodes,), -1)
        number[seeds] = torch.arange(len(seeds))
        found, hops, sizes = [seeds], [], [len(seeds)]
        for count in counts:
            sources, targets = self._draw(found[-1], count, generator)
            new = torch.unique(sources[number[sources] < 0])
            number[new] = torch.arange(sizes[-1], sizes[-1] + len(new))
            found.append(new)
            hops.append(torch.stack([number[sources], number[targets]]))
            sizes.append(sizes[-1] + len(new))
        return Neighbourhood(torch.cat(found), tuple(hops), tuple(sizes))

    def _draw(self, targets: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return at most `count` edges to each target."""
        degrees = self._degrees[targets]
        owner = torch.repeat_interleave(torch.arange(len(targets)), degrees)
        first = torch.cumsum(degrees, 0) - degrees
        place = torch.arange(len(owner)) - first[owner] + self._starts[targets][owner]
        # All edges of a target in random order: the first of them are a draw without replacement.
        order = torch.argsort(owner + torch.rand(len(owner), generator=generator, dtype=torch.float64))
        rank = torch.arange(len(owner)) - first[owner]
        kept = order[rank < count]
        return self._sources[place[kept]], targets[owner[kept]]
