"""The cost of a schedule, by the published formula.

One training step at forward width q and gradient width g costs q*q/32^2 of a full precision forward pass and
2*q*g/32^2 of a backward pass. The step average is a third of their sum. This says nothing about quality:
:mod:`cpt_fx.schedules.measured` recommends schedules by measured results.
"""

from dataclasses import dataclass

import numpy as np

from cpt_fx.errors import check_choice
from cpt_fx.schedules.base import IntArray, Schedule
from cpt_fx.schedules.bits import FULL_PRECISION, Bits, as_bits
from cpt_fx.schedules.cyclic import NAMES

GROUPS = {
    "large": ("RR", "RTH"),
    "medium": ("LR", "LT", "CR", "CT", "ETV", "RTV"),
    "small": ("ER", "ETH"),
}


@dataclass(frozen=True)
class StepCost:
    """Cost of a mean step relative to full precision, and the mean forward width."""

    forward: float
    backward: float
    average: float
    mean_bits: float


def mean_costs(schedule: Schedule, total_steps: int | None = None) -> StepCost:
    """Return the mean cost of a step; ``total_steps`` is needed for a schedule without an end."""
    return costs_of(schedule.trajectory(total_steps))


def costs_of(widths: IntArray) -> StepCost:
    """Return the mean cost of steps, given the widths of each."""
    bits = widths.astype(np.float64)
    if not len(bits):
        raise ValueError("the cost of no steps at all is not defined, got total_steps=0")
    bits[bits == 0] = FULL_PRECISION  # switched off: the operation runs in full precision
    weight, activation, gradient = np.ascontiguousarray(bits.T)
    # The input gradient multiplies weights, the weight gradient activations; with both at q this is 2*q*g. The mean of
    # the thirds, rather than a third of the means, is the published order of operations.
    forward = weight * activation / FULL_PRECISION**2
    backward = (weight + activation) * gradient / FULL_PRECISION**2
    means = (values.mean() for values in (forward, backward, (forward + backward) / 3, weight))
    return StepCost(*(float(mean) for mean in means))


def relative_cost(schedule: Schedule, static_bits: int | Bits | None = None) -> float:
    """Return the mean step cost relative to training at ``static_bits`` (default: the largest forward width).

    For an int, gradients of the static run have that width too, as in the published ratios.
    """
    if static_bits is None:
        best = schedule._widest()
        if best is None:
            raise ValueError(f"static_bits must be given, since the largest width of {schedule!r} is not known")
        static_bits = best._replace(gradient=max(best.weight or FULL_PRECISION, best.activation or FULL_PRECISION))
    return mean_costs(schedule).average / static_cost(static_bits)


def static_cost(bits: int | Bits) -> float:
    """Return what a step at fixed widths costs, relative to full precision."""
    weight, activation, gradient = (width or FULL_PRECISION for width in as_bits("static_bits", bits))
    return (weight * activation + (weight + activation) * gradient) / FULL_PRECISION**2 / 3


def savings_group(name: str) -> str:
    """Return "large", "medium" or "small": how many BitOps a published schedule saves against static q_max."""
    check_choice("name", name, NAMES)
    return next(group for group, names in GROUPS.items() if name in names)
