"""Labels keep off each other, off the points, and inside."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt_fx.study.figures import distance, labels, overlap
from cpt_fx.study.statistics import Array

BOUNDS = np.array([0.0, 0.0, 1000.0, 600.0])
SIZE = (40.0, 18.0)


def points(*middles: tuple[float, float], bar: float = 0.0) -> tuple[Array, Array]:
    marks = np.array([(x - 8, y - 8, x + 8, y + 8) for x, y in middles])
    return marks, marks + np.array([0, -bar, 0, bar])


def covered(boxes: list[Array], reaches: Array) -> float:
    pairs = [*combinations(boxes, 2), *((box, reach) for box in boxes for reach in reaches)]
    return float(sum(overlap(one, two) for one, two in pairs))


def test_a_point_alone_has_its_label_above_its_bar() -> None:
    marks, reaches = points((500, 300), bar=50)
    (box,) = labels(marks, reaches, [SIZE], BOUNDS, 4)
    assert box.tolist() == [480, 362, 520, 380]


def test_at_the_top_it_moves() -> None:
    marks, reaches = points((500, 595))
    (box,) = labels(marks, reaches, [SIZE], BOUNDS, 4)
    assert box[3] <= BOUNDS[3] and covered([box], reaches) == 0


def test_in_a_corner_it_stays_inside() -> None:
    marks, reaches = points((2, 2))
    (box,) = labels(marks, reaches, [SIZE], BOUNDS, 4)
    assert overlap(box, BOUNDS) == pytest.approx(SIZE[0] * SIZE[1])


def test_six_points_side_by_side() -> None:
    """The schedules of medium saving: bars nearer to each other than a label is wide."""
    marks, reaches = points(*((400 + 30 * index, 300 + 7 * (index % 3)) for index in range(6)), bar=40)
    boxes = labels(marks, reaches, [SIZE] * 6, BOUNDS, 4)
    assert covered(boxes, reaches) == 0
    assert all(distance(box, reach) < 60 for box, reach in zip(boxes, reaches, strict=True))


@given(st.lists(st.tuples(st.integers(2, 23), st.integers(2, 13)), min_size=1, max_size=10, unique=True))
@settings(max_examples=60)
def test_points_on_a_grid_never_share_room(cells: list[tuple[int, int]]) -> None:
    marks, reaches = points(*((40.0 * x, 40.0 * y) for x, y in cells))
    boxes = labels(marks, reaches, [SIZE] * len(cells), BOUNDS, 2)
    assert covered(boxes, reaches) == 0
    assert len(boxes) == len(cells)


def test_the_same_points_give_the_same_labels() -> None:
    marks, reaches = points((100, 100), (110, 105), (120, 100), bar=10)
    one, two = (labels(marks, reaches, [SIZE] * 3, BOUNDS, 4) for _ in range(2))
    assert np.array_equal(one, two)


def test_boxes() -> None:
    one, two = np.array([0, 0, 10, 10]), np.array([5, 5, 20, 20])
    assert overlap(one, two) == 25 and overlap(one, np.array([10, 0, 20, 10])) == 0
    assert distance(one, np.array([13, 0, 20, 10])) == 3 and distance(one, np.array([12, 17, 20, 20])) == 7
    assert distance(one, two) == 0
