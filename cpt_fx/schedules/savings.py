"""What a schedule costs, by the published formula, and which one to choose by it.

One training step at forward width q and gradient width g costs q*q/32^2 of a full precision forward pass and
2*q*g/32^2 of a backward pass. The step average is a third of their sum. Nothing of that knows about quality;
what was measured is in :mod:`cpt_fx.schedules.measured`, and :func:`recommend` answers from both.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from cpt_fx.errors import check_choice
from cpt_fx.schedules import measured
from cpt_fx.schedules.base import IntArray, Schedule
from cpt_fx.schedules.bits import FULL_PRECISION, Bits, as_bits, check_range
from cpt_fx.schedules.cyclic import NAMES, named

_GROUPS = {
    "large": ("RR", "RTH"),
    "medium": ("LR", "LT", "CR", "CT", "ETV", "RTV"),
    "small": ("ER", "ETH"),
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names}
_PRIORITIES = {"quality": "small", "balanced": "medium", "savings": "large"}
_PUBLISHED = {
    "cnn": "convolutional networks used q_min 3 (CIFAR ResNets) or 4 (MobileNetV2, ImageNet), q_max 6 or 8, 8 cycles",
    "detector": "detectors used q_min 5, q_max 6 or 8, 8 cycles, from a pretrained backbone",
    "gnn": "graph networks used q_min 3 or 4, q_max 6 or 8, 8 cycles",
    "rnn": "the language-model LSTM used q_min 5, q_max 6 or 8, 8 cycles",
    "transformer": "fine-tuning BERT used q_min 5, q_max 8, 2 cycles",
}

FAMILIES = tuple(_PUBLISHED)


@dataclass(frozen=True)
class StepCost:
    """Cost of a mean step relative to full precision, and the mean forward width."""

    forward: float
    backward: float
    average: float
    mean_bits: float


@dataclass(frozen=True)
class Recommendation:
    """Schedules to try, in order, what each costs relative to static q_max, and why.

    ``measured`` says whether measurements chose them, or the cost formula alone; ``known`` whether these measurements
    show that the first one loses no more than a margin. Where they do not, the reason says "Not known", and the names
    are only what to try first. ``figure`` is where the measurements are drawn, in the repository.
    """

    names: tuple[str, ...]
    group: str
    relative_costs: tuple[float, ...]
    reason: str
    measured: bool = False
    figure: str | None = None
    known: bool = False

    def __str__(self) -> str:
        """Return the first schedule with the reason; without the name where it is not known."""
        return self.reason if self.measured and not self.known else f"{self.names[0]}. {self.reason}"

    @property
    def relative_cost(self) -> float:
        """The relative cost of the first schedule."""
        return self.relative_costs[0]


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
    return _GROUP_OF[check_choice("name", name, NAMES)]


def recommend(
    *,
    priority: str = "balanced",
    family: str | None = None,
    budget: float | None = None,
    q_min: int = 3,
    q_max: int = 8,
) -> Recommendation:
    """Return the published schedules that fit a priority and a budget, best first, and why.

    ``priority`` is "quality", "balanced" or "savings"; ``budget`` the largest cost allowed, relative to static q_max.
    With a ``family`` ("cnn", "detector", "gnn", "rnn", "transformer") that was measured at these widths, the answer
    comes from the measurements: for quality the best mean, for savings the cheapest that is shown to lose at most a
    margin against static q_max, balanced by both; or it is "Not known", where too few or too different seeds show
    nothing. The margin is 0.01 of accuracy, or 1 % by other metrics. Otherwise the answer comes from the cost formula
    alone, and the reason says so.
    """
    wanted = _PRIORITIES[check_choice("priority", priority, _PRIORITIES)]
    if family is not None:
        check_choice("family", family, _PUBLISHED)
    low, high = check_range(q_min, q_max)
    costs = _costs(low, high)
    limit = _check_budget(budget, min(costs.values()))
    unmeasured = ""
    if family is not None:
        found = measured.find(family, low, high)
        choice = measured.choose(found[0], priority, limit) if found else None
        if choice is not None:
            others = measured.also(found[1:])
            reason = choice.reason + others
            group = savings_group(choice.names[0])
            return Recommendation(
                choice.names, group, choice.relative_costs, reason, True, found[0].figure, choice.known
            )
        unmeasured = measured.why_not(family, low, high, budget)
    order = ["small", "medium", "large"]
    # The group asked for, or else the first one that saves more and fits.
    for group in order[order.index(wanted) :]:
        names = tuple(sorted((name for name in _GROUPS[group] if costs[name] <= limit), key=costs.__getitem__))
        if names:
            break
    chosen = tuple(costs[name] for name in names)
    reason = _reason(priority, wanted, group, chosen, budget)
    if family is not None:
        reason += f" {unmeasured} Published runs: {_PUBLISHED[family]}."
    return Recommendation(names, group, chosen, reason)


@cache
def _costs(low: int, high: int) -> dict[str, float]:
    return {name: relative_cost(named(name, q_min=low, q_max=high, total_steps=64_000)) for name in NAMES}


def _check_budget(budget: object, cheapest: float) -> float:
    if budget is None:
        return float("inf")
    if isinstance(budget, bool) or not isinstance(budget, int | float | np.number):
        raise TypeError(f"budget must be a number, the largest cost relative to static q_max, got {budget!r}")
    if not budget >= cheapest:
        raise ValueError(f"budget must be at least {cheapest:.3f}, the cost of the cheapest schedule, got {budget!r}")
    return float(budget)


def _reason(priority: str, wanted: str, group: str, costs: tuple[float, ...], budget: float | None) -> str:
    spread = " to ".join(f"{cost:.3f}" for cost in sorted({costs[0], costs[-1]}))
    text = f'Priority "{priority}" asks for the group with {wanted} savings. '
    if group != wanted:
        text += f"None of it fits the budget of {budget}, so these are from the group with {group} savings. "
    return text + (
        f"They cost {spread} of static q_max by the BitOps formula (cheapest first; 8 cycles). This is the published "
        "grouping by cost; which one trains best on a given model is not predicted."
    )
