"""What an operator counts of its products: how often each was made, and how."""

from __future__ import annotations

from enum import IntEnum

DIRECTIONS = ("forward", "left", "right")
"""The products of an operator: its result, the gradient of its left operand, the gradient of its right one."""


class Outcome(IntEnum):
    """How one product was executed: on integers, or in floating point and why."""

    INTEGER = 0
    WIDTH = 1
    SIZE = 2
    GROUPS = 3
    NO_CODES = 4
    DIFFERENTIATED = 5


REASONS = {
    Outcome.WIDTH: "an operand is not at 1 to 8 bits",
    Outcome.SIZE: "too small to be faster on integers here",
    Outcome.GROUPS: "a scale differs along what this product sums over",
    Outcome.NO_CODES: "an operand has no codes: empty, float64, complex, sparse, not on a CPU, or in a torch.func "
    "transform",
    Outcome.DIFFERENTIATED: "a gradient was itself to be differentiated (create_graph=True)",
}
RATIO = len(Outcome)
"""Behind the counts of a direction: how many times as fast its last product is on integers, in thousandths, where that
was measured."""
COUNTS = (len(DIRECTIONS), len(Outcome) + 1)
"""The shape of the tensor in which an operator counts its products."""
