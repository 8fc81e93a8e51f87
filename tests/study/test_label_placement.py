"""Labels keep off each other, off the points, and inside."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt_fx.study.label_placement import Box, place

BOUNDS = Box(0, 0, 1000, 600)
SIZE = (40.0, 18.0)


def points(*middles: tuple[float, float], bar: float = 0.0) -> tuple[list[Box], list[Box]]:
    marks = [Box(x, y, x, y).grown(8) for x, y in middles]
    return marks, [mark.around(Box(mark.left, mark.bottom - bar, mark.right, mark.top + bar)) for mark in marks]


def covered(boxes: list[Box], reaches: list[Box]) -> float:
    pairs = [(one, two) for index, one in enumerate(boxes) for two in boxes[index + 1 :]]
    return sum(one.overlap(two) for one, two in [*pairs, *((box, reach) for box in boxes for reach in reaches)])


def test_a_point_alone_has_its_label_above_its_bar() -> None:
    marks, reaches = points((500, 300), bar=50)
    (box,) = place(marks, reaches, [SIZE], BOUNDS, 4)
    assert box == Box(480, 362, 520, 380)


def test_at_the_top_it_moves() -> None:
    marks, reaches = points((500, 595))
    (box,) = place(marks, reaches, [SIZE], BOUNDS, 4)
    assert box.top <= BOUNDS.top and covered([box], reaches) == 0


def test_in_a_corner_it_stays_inside() -> None:
    marks, reaches = points((2, 2))
    (box,) = place(marks, reaches, [SIZE], BOUNDS, 4)
    assert box.overlap(BOUNDS) == pytest.approx(SIZE[0] * SIZE[1])


def test_six_points_side_by_side() -> None:
    """The schedules of medium saving: bars nearer to each other than a label is wide."""
    marks, reaches = points(*((400 + 30 * index, 300 + 7 * (index % 3)) for index in range(6)), bar=40)
    boxes = place(marks, reaches, [SIZE] * 6, BOUNDS, 4)
    assert covered(boxes, reaches) == 0
    assert all(box.distance(reach) < 60 for box, reach in zip(boxes, reaches, strict=True))


@given(st.lists(st.tuples(st.integers(2, 23), st.integers(2, 13)), min_size=1, max_size=10, unique=True))
@settings(max_examples=60)
def test_points_on_a_grid_never_share_room(cells: list[tuple[int, int]]) -> None:
    marks, reaches = points(*((40.0 * x, 40.0 * y) for x, y in cells))
    boxes = place(marks, reaches, [SIZE] * len(cells), BOUNDS, 2)
    assert covered(boxes, reaches) == 0
    assert len(boxes) == len(cells)


def test_the_same_points_give_the_same_labels() -> None:
    marks, reaches = points((100, 100), (110, 105), (120, 100), bar=10)
    assert place(marks, reaches, [SIZE] * 3, BOUNDS, 4) == place(marks, reaches, [SIZE] * 3, BOUNDS, 4)


def test_boxes() -> None:
    one, two = Box(0, 0, 10, 10), Box(5, 5, 20, 20)
    assert one.overlap(two) == 25 and one.overlap(Box(10, 0, 20, 10)) == 0
    assert one.around(two) == Box(0, 0, 20, 20)
    assert one.distance(Box(13, 0, 20, 10)) == 3 and one.distance(Box(12, 17, 20, 20)) == 7 and one.distance(two) == 0
