"""Where boxes go: rows by topological generation, an order in each row that keeps edges short, then coordinates.

Rows and orders depend on the graph alone; coordinates also on the sizes of the boxes, which change when a module is
expanded. The page (`page.js`) starts with all modules placed collapsed; expanding one only pushes its neighbours aside.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import networkx as nx
import numpy as np

from cpt_fx.inspection.boxes import Box
from cpt_fx.inspection.tree import IN, OUT, Item

GAP_X, GAP_Y, PORT_Y, LANE = 18.0, 32.0, 18.0, 10.0
SWEEPS = 8
TIGHT = 6.0
"""The smallest gap between a straightened lane and a box."""

TALL, MOST, RATIO = 1100.0, 8, 1.35
"""Height above which a drawing is split into columns, their largest number, and the ratio of width to height sought."""
GUTTER = 64.0

Boxes = dict[str, Box]
_LANE = Box(LANE, 0.0)


@dataclass
class RowPlan:
    """Rows of ids, and every edge as the chain of ids it runs through.

    An id with `..`, which no name of a module can hold, is a lane: the place of a long edge in a row that it crosses.
    An edge that shares lanes with an earlier one starts at the last of them.
    """

    rows: list[list[str]]
    chains: list[list[str]]
    links: nx.DiGraph
    """The links of all chains, each from one row to the next."""
    back: list[tuple[str, str]] = field(default_factory=list)
    """Edges against the flow: a module that is needed both before and after another."""


def plan(item: Item) -> RowPlan:
    """Arrange the children of a module in rows."""
    order = {child.id: (child.order, place) for place, child in enumerate(item.children)}
    order[IN], order[OUT] = (-1, -1), (1 << 60, 0)
    forward = [(a, b) for a, b in item.edges if order[a] < order[b]]
    back = [(a, b) for a, b in item.edges if order[a] > order[b]]
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted((child.id for child in item.children), key=order.__getitem__))
    graph.add_edges_from(forward)
    ranks = _ranks(graph, {child.id: child.kind for child in item.children})
    nodes = sorted(graph, key=order.__getitem__)
    rows = [[node for node in nodes if ranks[node] == rank] for rank in sorted(set(ranks.values()))]
    chains = _lanes(rows, ranks, forward)
    links = nx.DiGraph()
    links.add_nodes_from(itertools.chain.from_iterable(rows))
    for chain in chains:
        nx.add_path(links, chain)
    return RowPlan(_untangle(rows, links), chains, links, back)


def _ranks(graph: nx.DiGraph, kinds: dict[str, str]) -> dict[str, int]:
    """Assign a row to each node; a node that depends on parameters alone goes right above its first use."""
    ranks = {node: rank for rank, row in enumerate(nx.topological_generations(graph)) for node in row}
    entered = [node for node in graph if node == IN or kinds.get(node) == "input"]
    flowing = {node for first in entered for node in (first, *nx.descendants(graph, first))}
    for node in sorted(ranks, key=ranks.__getitem__, reverse=True):
        below = [ranks[after] for after in graph.successors(node)]
        if node not in flowing and below:
            ranks[node] = min(below) - 1
    if OUT in ranks:
        ranks[OUT] = max(ranks.values()) + (max(ranks.values()) != ranks[OUT])
    used = {rank: place for place, rank in enumerate(sorted(set(ranks.values())))}
    return {node: used[rank] for node, rank in ranks.items()}


def _lanes(rows: list[list[str]], ranks: dict[str, int], edges: list[tuple[str, str]]) -> list[list[str]]:
    """Return the chain of each edge, with a lane in every row it skips; edges of one source share their lanes."""
    chains = []
    for a, b in edges:
        chain = [a]
        for rank in range(ranks[a] + 1, ranks[b]):
            lane = f"{a}..{rank}"
            if lane in rows[rank]:
                chain = [lane]
            else:
                rows[rank].append(lane)
                chain.append(lane)
        chains.append([*chain, b])
    return chains


def _untangle(rows: list[list[str]], links: nx.DiGraph) -> list[list[str]]:
    """Sort each row by the mean position of neighbours above, then below; keep the order with the fewest crossings."""
    best, fewest = rows, _crossings(rows, links)
    current = rows
    for sweep in range(SWEEPS):
        if not fewest:
            break
        down = sweep % 2 == 0
        neighbours = links.pred if down else links.succ
        current = list(current)
        for place in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            fixed = {node: at for at, node in enumerate(current[place - 1 if down else place + 1])}
            means = {}
            for at, node in enumerate(current[place]):
                near = [fixed[other] for other in neighbours[node]] or [at]
                means[node] = sum(near) / len(near)
            current[place] = sorted(means, key=means.__getitem__)
        crossings = _crossings(current, links)
        if crossings < fewest:
            best, fewest = current, crossings
    return best


def _crossings(rows: list[list[str]], links: nx.DiGraph) -> int:
    total = 0
    for row, following in itertools.pairwise(rows):
        fixed = {node: at for at, node in enumerate(following)}
        ends = [(at, fixed[other]) for at, node in enumerate(row) for other in links[node]]
        above, below = np.array(ends, dtype=int).reshape(-1, 2).T
        total += int((np.subtract.outer(above, above) * np.subtract.outer(below, below) < 0).sum()) // 2
    return total


@dataclass
class Placed:
    """Coordinates: centre x and top y of each id, height of each row, and the size of the whole."""

    x: dict[str, float]
    top: dict[str, float] = field(default_factory=dict)
    row_of: dict[str, int] = field(default_factory=dict)
    row_top: list[float] = field(default_factory=list)
    row_height: list[float] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0
    cuts: dict[int, float] = field(default_factory=dict)
    """Rows at which a new column starts -> x of the gutter through which edges go up to it."""


def place(plan: RowPlan, boxes: Boxes) -> Placed:
    """Return the coordinates of all boxes, each straight below its inputs where there is room."""
    width = {node: boxes.get(node, _LANE).width for row in plan.rows for node in row}
    axis = {node: _axis(boxes.get(node, _LANE)) for node in width}
    x: dict[str, float] = {}
    for row in plan.rows:
        _settle(row, [0.0] * len(row), width, x)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in plan.rows if down else plan.rows[::-1]:
            wanted = []
            for node in row:
                above, below = list(plan.links.pred[node]), list(plan.links.succ[node])
                # The first sweeps follow one side only, so that chains become straight lines.
                near = above if down else below
                if sweep > 5 or not near:
                    near = above + below
                # Links between boxes weigh most, so that the main path is straight and lanes move aside.
                weights = [(8.0, 0.05, 4.0)[(".." in node) + (".." in other)] for other in near]
                wish = sum((x[other] + axis[other]) * weight for other, weight in zip(near, weights, strict=True))
                wanted.append(wish / sum(weights) - axis[node] if near else x[node])
            _settle(row, wanted, width, x)
    _straighten(plan, width, x)
    return _stacked(plan, boxes, x, [0])


def _stacked(plan: RowPlan, boxes: Boxes, x: dict[str, float], starts: list[int]) -> Placed:
    """Stack the rows, in columns that begin at the rows in `starts`."""
    placed = Placed({}, row_of={node: place for place, row in enumerate(plan.rows) for node in row})
    left = -GUTTER
    for first, end in itertools.pairwise([*starts, len(plan.rows)]):
        nodes = [(node, boxes.get(node, _LANE).width / 2) for row in plan.rows[first:end] for node in row]
        low = min((x[node] - half for node, half in nodes), default=0.0)
        if first:
            placed.cuts[first] = left + GUTTER / 2
        left += GUTTER
        placed.x |= {node: x[node] - low + left for node, _ in nodes}
        left += max((x[node] + half for node, half in nodes), default=0.0) - low
        y = gap = 0.0
        for row in plan.rows[first:end]:
            height = max(boxes.get(node, _LANE).height for node in row)
            y += gap if height and y else min(gap, PORT_Y)
            placed.row_top.append(y)
            placed.row_height.append(height)
            placed.top |= {node: y + (height - boxes[node].height) / 2 if node in boxes else y for node in row}
            y += height
            gap = GAP_Y if height else PORT_Y
        placed.height = max(placed.height, y)
    placed.width = left
    return placed


def _straighten(plan: RowPlan, width: dict[str, float], x: dict[str, float]) -> None:
    """Move the lanes of an edge onto one vertical line, as far down as their neighbours leave room."""
    lanes: dict[str, list[tuple[str, str | None, str | None]]] = {}
    for row in plan.rows:
        for node, before, after in zip(row, [None, *row[:-1]], [*row[1:], None], strict=True):
            if ".." in node:
                lanes.setdefault(node.rpartition("..")[0], []).append((node, before, after))
    for chain in (*lanes.values(), *lanes.values()):
        line: list[str] = []
        low, high = -math.inf, math.inf
        for node, before, after in chain:
            least = -math.inf if before is None else x[before] + (width[before] + LANE) / 2 + TIGHT
            most = math.inf if after is None else x[after] - (width[after] + LANE) / 2 - TIGHT
            if max(low, least) > min(high, most):
                _align(line, low, high, x)
                line, low, high = [], -math.inf, math.inf
            line.append(node)
            low, high = max(low, least), min(high, most)
        _align(line, low, high, x)


def arrivals(plan: RowPlan, placed: Placed, boxes: Boxes) -> list[float]:
    """Return for each chain how far from the centre of its last box it arrives: several arrive side by side."""
    found = []
    for chain in plan.chains:
        arriving = sorted((one for one in plan.chains if one[-1] == chain[-1]), key=lambda one: placed.x[one[-2]])
        width = boxes[chain[-1]].width if chain[-1] in boxes else 0.0
        found.append((arriving.index(chain) - (len(arriving) - 1) / 2) * min(16.0, width * 0.7 / len(arriving)))
    return found


def _align(line: list[str], low: float, high: float, x: dict[str, float]) -> None:
    if line and low <= high:
        middle = min(max(sum(x[node] for node in line) / len(line), low), high)
        x.update(dict.fromkeys(line, middle))


def _axis(box: Box) -> float:
    """Return the offset of the port to align by, if values leave a module straight below where they enter.

    Otherwise it is 0, the centre: aligned by ports, a series of such modules would drift further and further sideways.
    """
    enter, leave = box.port or (0.0, 0.0)
    return enter if abs(enter - leave) < 6 else 0.0


def _settle(row: list[str], wanted: list[float], width: dict[str, float], x: dict[str, float]) -> None:
    """Place the boxes of a row as close to their wanted positions as the gaps allow (pool adjacent violators)."""
    gaps = ((width[a] + width[b]) / 2 + GAP_X for a, b in itertools.pairwise(row))
    offsets = list(itertools.accumulate(gaps, initial=0.0))
    pools: list[tuple[float, float, int]] = []
    for node, want, shift in zip(row, wanted, offsets, strict=True):
        mean, weight, count = want - shift, 0.1 if ".." in node else 1.0, 1
        while pools and pools[-1][0] > mean:
            other, others, members = pools.pop()
            mean = (mean * weight + other * others) / (weight + others)
            weight, count = weight + others, count + members
        pools.append((mean, weight, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    x.update((node, mean + offset) for node, mean, offset in zip(row, means, offsets, strict=True))


def in_columns(plan: RowPlan, placed: Placed, boxes: Boxes) -> Placed:
    """Return coordinates in as many columns as fit a page best; unchanged if the drawing is not tall.

    A column may start only at a row that a single edge enters, into a box; those nearest to equal heights are taken.
    """
    entering = [[node for node in row for _ in plan.links.pred[node]] for row in plan.rows]
    possible = [row for row, nodes in enumerate(entering) if len(nodes) == 1 and ".." not in nodes[0]]
    if placed.height <= TALL or plan.back or not possible:
        return placed
    fitting = []
    for count in range(2, MOST + 1):
        heights = [placed.height * part / count for part in range(1, count)]
        starts = {min(possible, key=lambda row: abs(placed.row_top[row] - height)) for height in heights}
        fitting.append(_stacked(plan, boxes, placed.x, sorted({0, *starts})))
    lower = [found for found in fitting if found.height < 0.8 * placed.height]
    return min(lower, key=lambda found: max(found.width / RATIO, found.height), default=placed)
