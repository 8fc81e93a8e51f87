"""Counters of the products of an operator: how often each ran, on integers or not, and why not."""

from __future__ import annotations

from enum import IntEnum

DIRECTIONS = ("forward", "left", "right")
"""The products of an operator: its result, the gradient of its left operand, the gradient of its right one."""


class ProductOutcome(IntEnum):
    """How one product was executed: on integers, or in floating point and why."""

    INTEGER = 0
    WIDTH = 1
    SIZE = 2
    GROUPS = 3
    NO_CODES = 4
    DIFFERENTIATED = 5


REASONS = {
    ProductOutcome.WIDTH: "an operand is not at 1 to 8 bits",
    ProductOutcome.SIZE: "too small to be faster on integers here",
    ProductOutcome.GROUPS: "a scale differs along what this product sums over",
    ProductOutcome.NO_CODES: "an operand has no codes: empty, float64, complex, sparse, not on a CPU, or in a "
    "torch.func transform",
    ProductOutcome.DIFFERENTIATED: "a gradient was itself to be differentiated (create_graph=True)",
}
RATIO = len(ProductOutcome)
"""Index after the counts of a direction: the relative speed of its last product on integers, in thousandths, if that
was measured."""
COUNTS = (len(DIRECTIONS), len(ProductOutcome) + 1)
"""The shape of the tensor in which an operator counts its products."""
