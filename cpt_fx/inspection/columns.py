"""A long drawing on a page: broken into columns where a single value goes from one row to the next."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from cpt_fx.inspection.boxes import number
from cpt_fx.inspection.layout import Placed, Plan, Sizes

TALL = 1100.0
MOST = 8
RATIO = 1.35
GUTTER = 64.0
TURN, ROUND = 16.0, 8.0


def in_columns(plan: Plan, placed: Placed, sizes: Sizes) -> Placed:
    """Return coordinates in as many columns as make the drawing fit a page best; as they are if it is not long."""
    if placed.height <= TALL or plan.back:
        return placed
    candidates = []
    for count in range(1, MOST + 1):
        first = _broken(plan, placed, sizes, placed.height / count)
        # Again with the height of its highest column: what now fits below needs no column of its own.
        candidates.append(_broken(plan, placed, sizes, first.height))
    lower = [found for found in candidates if found.height < 0.8 * placed.height]
    return min(lower, key=lambda found: abs(math.log(found.width / found.height / RATIO)), default=placed)


def _broken(plan: Plan, placed: Placed, sizes: Sizes, height: float) -> Placed:
    """Start a new column at the last possible row before each would become higher than `height`."""
    possible = _bridges(plan, placed)
    starts = [0]
    for row in range(1, len(plan.rows)):
        if placed.row_top[row] + placed.row_height[row] - placed.row_top[starts[-1]] > height * 1.02:
            cuts = [place for place in possible if starts[-1] < place <= row]
            starts += cuts[-1:]
    result = replace(placed, x=dict(placed.x), top=dict(placed.top), row_top=list(placed.row_top), cuts={})
    left, lowest = 0.0, 0.0
    for first, end in pairwise([*starts, len(plan.rows)]):
        nodes = [node for row in plan.rows[first:end] for node in row]
        half = {node: sizes.get(node, (10.0, 0.0))[0] / 2 for node in nodes}
        low = min(placed.x[node] - half[node] for node in nodes)
        high = max(placed.x[node] + half[node] for node in nodes)
        if first:
            result.cuts[first] = left - GUTTER / 2
        up = placed.row_top[first]
        for node in nodes:
            result.x[node] += left - low
            result.top[node] -= up
        for row in range(first, end):
            result.row_top[row] -= up
            lowest = max(lowest, result.row_top[row] + placed.row_height[row])
        left += high - low + GUTTER
    result.width, result.height = left - GUTTER, lowest
    return result


def _bridges(plan: Plan, placed: Placed) -> list[int]:
    """Return the rows that only one value enters, for one box."""
    entering: dict[int, set[tuple[str, str]]] = {}
    for chain in plan.chains:
        for pair in pairwise(chain):
            entering.setdefault(placed.row_of[pair[1]], set()).add(pair)
    return [row for row, pairs in sorted(entering.items()) if len(pairs) == 1 and "~" not in next(iter(pairs))[1]]


def around(x: float, bottom: float, gutter: float, target: float, top: float) -> str:
    """Return the way from the foot of a column to the head of the next one."""
    low, high = bottom + TURN, top - TURN
    corner = [
        f"V{number(low - ROUND)}Q{number(x)} {number(low)} {number(x + ROUND)} {number(low)}",
        f"H{number(gutter - ROUND)}Q{number(gutter)} {number(low)} {number(gutter)} {number(low - ROUND)}",
        f"V{number(high + ROUND)}Q{number(gutter)} {number(high)} {number(gutter + ROUND)} {number(high)}",
        f"H{number(target - ROUND)}Q{number(target)} {number(high)} {number(target)} {number(high + ROUND)}",
    ]
    return "".join([*corner, f"V{number(top)}"])
