"""Learning-rate rules of the critical-period experiments, as plain functions of the step.

With a deficit, the rules hold the rate constant until it is over, and decay over the remaining steps ("no deficit
decay"), so that runs with deficits of different lengths see the same decay at full precision.
"""

import math

from cpt_fx.errors import check_int

# The published cosine uses this value of pi; it shifts the rate by about 1e-11 of the base rate.
_PI = 3.141592653


def piecewise(step: int, *, lr: float, total_steps: int, deficit: int = 0) -> float:
    """Return ``lr``, a tenth of it after 50 % of the steps that follow the deficit, a hundredth after 75 %."""
    position, total = _after(step, total_steps, deficit)
    rate = lr
    # Truncated to whole steps as published, and decayed in two multiplications for the same rounding.
    for change in (int(0.5 * total), int(0.75 * total)):
        if position >= change:
            rate *= 0.1
    return rate


def cosine(step: int, *, lr: float, total_steps: int, deficit: int = 0) -> float:
    """Return the rate on a half cosine from ``lr`` down to a tenth of it, over the steps after the deficit."""
    position, total = _after(step, total_steps, deficit)
    lowest = lr * 0.1
    return lowest + (lr - lowest) * 0.5 * (1 + math.cos(min(position, total) / total * _PI))


piecewise_no_def_decay, cosine_no_def_decay = piecewise, cosine
"""The published names of the rules with a deficit."""


def _after(step: int, total_steps: int, deficit: int) -> tuple[int, int]:
    """Return the step counted from the end of the deficit (0 within it) and the number of steps after it."""
    total = check_int("total_steps", total_steps, 1)
    length = check_int("deficit", deficit, 0, total - 1)
    return max(check_int("step", step, 0) - length, 0), total - length
