"""Where labels go so that they cover neither each other nor the points: plain geometry, in any units with y upwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PASSES = 3
_DISTANCES = (0.0, 0.7, 1.5, 2.5, 4.0)
# Directions from a point to its label, in order of preference.
_DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))


@dataclass(frozen=True)
class Box:
    """A rectangle with sides along the axes."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def centre(self) -> tuple[float, float]:
        """The middle."""
        return (self.left + self.right) / 2, (self.bottom + self.top) / 2

    def around(self, other: Box) -> Box:
        """Return the smallest box around both."""
        return Box(
            min(self.left, other.left),
            min(self.bottom, other.bottom),
            max(self.right, other.right),
            max(self.top, other.top),
        )

    def distance(self, other: Box) -> float:
        """Return how far the boxes are apart along the axis on which they are farther; 0 where they touch."""
        across = max(self.left, other.left) - min(self.right, other.right)
        up = max(self.bottom, other.bottom) - min(self.top, other.top)
        return max(across, up, 0.0)

    def overlap(self, other: Box) -> float:
        """Return the area that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0.0) * max(height, 0.0)

    def grown(self, margin: float) -> Box:
        """Return the box with a margin around it."""
        return Box(self.left - margin, self.bottom - margin, self.right + margin, self.top + margin)


def place(
    marks: Sequence[Box], reaches: Sequence[Box], sizes: Sequence[tuple[float, float]], bounds: Box, gap: float
) -> list[Box]:
    """Return a box for each label: near its point, inside `bounds`, off all points and the other labels.

    A point is a mark, and a reach that also holds its error bar: labels stand beside the one, above or below the
    other. `sizes` are widths and heights. Each label takes the place with the least overlap, the nearest one of those;
    a few rounds let the first ones make room for the later ones.
    """
    points = list(zip(marks, reaches, strict=True))
    options = [list(_options(mark, reach, size, gap)) for (mark, reach), size in zip(points, sizes, strict=True)]
    placed: list[Box | None] = [None] * len(points)
    for _ in range(PASSES):
        for index, choices in enumerate(options):
            others = [box for other, box in enumerate(placed) if box is not None and other != index]
            taken = [*reaches, *(box.grown(gap / 2) for box in others)]
            # Among equals the earlier option wins: straight above, straight below, beside.
            costs = [_cost(box, reaches[index], taken, bounds) + rank / 50 for rank, box in enumerate(choices)]
            placed[index] = choices[costs.index(min(costs))]
    return [box for box in placed if box is not None]


def _options(mark: Box, reach: Box, size: tuple[float, float], gap: float) -> Iterator[Box]:
    width, height = size
    middle_x, middle_y = mark.centre
    for distance in _DISTANCES:
        away = gap + distance * height
        for x, y in _DIRECTIONS:
            # Beside the mark; above or below the error bar, straight or with a corner near its end.
            side = (mark.right - mark.left) / 2 if not y else 0.0
            centre_x = middle_x + x * (side + width / 2 + away)
            centre_y = middle_y
            if y > 0:
                centre_y = reach.top + away + height / 2
            elif y < 0:
                centre_y = reach.bottom - away - height / 2
            yield Box(centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2)


def _cost(box: Box, reach: Box, taken: Sequence[Box], bounds: Box) -> float:
    area = (box.right - box.left) * (box.top - box.bottom)
    outside = area - box.overlap(bounds)
    covered = sum(box.overlap(other) for other in taken)
    # Distance decides only among places that cover nothing, or equally little.
    return 100 * (2 * outside + covered) / area + box.distance(reach) / (box.top - box.bottom) / 10
