"""Recommend a schedule, based on measurements on real tasks or on cost.

The measurements are in measured.json beside this file, which :func:`cpt_fx.study.measured.update` writes from the
records of studies. It includes differences and their intervals, so that reading it needs no statistics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cpt_fx.common.resources import shipped
from cpt_fx.errors import check_choice
from cpt_fx.schedules.bits import check_range
from cpt_fx.schedules.cyclic import NAMES, named
from cpt_fx.schedules.savings import GROUPS, relative_cost, savings_group

PATH = shipped("schedules/measured.json")
MARGIN = 0.01
_SHARES = ("accuracy", "f1", "map")
"""Metrics from 0 to 1, whose margin is a difference; for others it is a share of the mean."""
FEWEST = 3
"""The fewest seeds that allow conclusions: two may agree by chance, and then have no spread."""
_PRIORITIES = {"quality": "small", "balanced": "medium", "savings": "large"}
_PUBLISHED = {
    "cnn": "convolutional networks used q_min 3 (CIFAR ResNets) or 4 (MobileNetV2, ImageNet), q_max 6 or 8, 8 cycles",
    "detector": "detectors used q_min 5, q_max 6 or 8, 8 cycles, from a pretrained backbone",
    "gnn": "graph networks used q_min 3 or 4, q_max 6 or 8, 8 cycles",
    "rnn": "the language-model LSTM used q_min 5, q_max 6 or 8, 8 cycles",
    "transformer": "fine-tuning BERT used q_min 5, q_max 8, 2 cycles",
}

FAMILIES = tuple(_PUBLISHED)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What was trained: the data, the model, their size, the figure in docs/results, and the limits of the study."""

    dataset: str
    model: str
    size: str
    figure: str
    limits: str = "one dataset, one model and this length of training; others may rank the schedules differently."


@dataclass(frozen=True, kw_only=True)
class Measurement(Task):
    """One study of one task at one (q_min, q_max).

    ``schedules`` maps labels to mean, sd, n and relative_cost. ``differences[a][b]`` is the mean of a minus that of b
    with the ends of its 95 % interval, for each pair once.
    """

    study: str
    steps: int
    seeds: Sequence[int]
    q_min: int
    q_max: int
    metric: str
    better: str
    schedules: Mapping[str, Mapping[str, float]]
    differences: Mapping[str, Mapping[str, Sequence[float]]]
    left_out: Mapping[str, str]

    @property
    def bits(self) -> str:
        """Return "(3, 8)"."""
        return f"({self.q_min}, {self.q_max})"

    @property
    def decimals(self) -> int:
        """The number of decimals that shows two digits of the median standard deviation."""
        return decimals([row["sd"] for row in self.schedules.values()], 4)

    def signed(self, value: float) -> str:
        """Return a difference as text, with a true minus."""
        return f"{value:+.{self.decimals}f}".replace("-", "−")

    def cost(self, label: str) -> float:
        """Return a schedule's cost relative to static q_max."""
        return self.schedules[label]["relative_cost"]

    def quality(self, label: str) -> float:
        """Return a schedule's mean, with the sign changed if lower is better."""
        return self.schedules[label]["mean"] * (1 if self.better == "higher" else -1)

    def difference(self, one: str, other: str) -> tuple[float, float, float]:
        """Return the mean of `one` minus that of `other`, and the ends of its interval."""
        if other in self.differences.get(one, {}):
            value, low, high = self.differences[one][other]
            return value, low, high
        value, low, high = self.differences[other][one]
        return -value, -high, -low

    @property
    def static(self) -> str:
        """The label of the baseline: "static 8"."""
        return f"static {self.q_max}"

    def loss(self, one: str, others: Iterable[str]) -> float:
        """Return the largest loss against any of the others that its 95 % interval does not rule out."""
        found = [0.0]
        for other in others:
            if other != one:
                _, low, high = self.difference(one, other)
                few = min(self.schedules[name]["n"] for name in (one, other)) < FEWEST
                found.append(math.inf if few else -low if self.better == "higher" else high)
        return max(found)

    def worse(self, one: str, other: str) -> bool:
        """Return whether `one` is measurably worse: the interval of the difference lies on the wrong side of zero."""
        if one == other:
            return False
        _, low, high = self.difference(one, other)
        return high < 0 if self.better == "higher" else low > 0


def decimals(deviations: Iterable[float | None], otherwise: int) -> int:
    """Return the number of decimals that shows two digits of the median deviation."""
    known = sorted(deviation for deviation in deviations if deviation)
    return min(max(1 - math.floor(math.log10(known[len(known) // 2])), 0), 8) if known else otherwise


@dataclass(frozen=True)
class Recommendation:
    """Schedules to try, in order, what each costs relative to static q_max, and why.

    ``measured`` says whether measurements chose them, or the cost formula alone; ``known`` whether these measurements
    show that the first one loses no more than a margin. If they do not, the reason says "Not known", and the names are
    only suggestions of what to try first. ``figure`` is the path of a figure of the measurements, in the repository.
    """

    names: tuple[str, ...]
    group: str
    relative_costs: tuple[float, ...]
    reason: str
    measured: bool = False
    figure: str | None = None
    known: bool = False

    def __str__(self) -> str:
        """Return the first schedule with the reason, or the reason alone if the measurements do not decide."""
        return self.reason if self.measured and not self.known else f"{self.names[0]}. {self.reason}"

    @property
    def relative_cost(self) -> float:
        """The relative cost of the first schedule."""
        return self.relative_costs[0]


def read(path: Path | None = None) -> dict[str, list[Measurement]]:
    """Return all measurements, by family."""
    path = PATH if path is None else path
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        wanted = [field.name for field in fields(Measurement)]
        return {
            family: [Measurement(**{name: entry[name] for name in wanted}) for entry in entries]
            for family, entries in data["families"].items()
        }
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no file of measurements: {type(error).__name__}: {error}") from error


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
    margin against static q_max, for balanced the best by both ranks. It is "Not known" if there are too few
    seeds, or they differ too much. The margin is 0.01 for metrics from 0 to 1, or 1 % for others. Otherwise the answer
    comes from the cost formula alone, and the reason says so.
    """
    wanted = _PRIORITIES[check_choice("priority", priority, _PRIORITIES)]
    if family is not None:
        check_choice("family", family, _PUBLISHED)
    low, high = check_range(q_min, q_max)
    costs = _costs(low, high)
    limit = _check_budget(budget, min(costs.values()))
    known = [] if family is None else read().get(family, [])
    found = [one for one in known if (one.q_min, one.q_max) == (low, high)]
    if found and (choice := _choose(found, priority, limit)) is not None:
        return choice
    order = ["small", "medium", "large"]
    # The requested group, or else the first one that saves more and fits.
    for group in order[order.index(wanted) :]:
        names = tuple(sorted((name for name in GROUPS[group] if costs[name] <= limit), key=costs.__getitem__))
        if names:
            break
    chosen = tuple(costs[name] for name in names)
    reason = _reason(priority, wanted, group, chosen, budget)
    if family is not None:
        reason += f" {_why_not(family, known, low, high, budget)}"
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


def _why_not(family: str, known: Sequence[Measurement], low: int, high: int, budget: object) -> str:
    """Return why the answer does not come from measurements."""
    if not known:
        why = f'The family "{family}" was not measured here'
    elif any((one.q_min, one.q_max) == (low, high) for one in known):
        why = f'None of the schedules that were measured for the family "{family}" fits the budget of {budget}'
    else:
        pairs = ", ".join(dict.fromkeys(one.bits for one in known))
        why = f'The family "{family}" was measured at (q_min, q_max) = {pairs}, not at ({low}, {high})'
    return f"{why}, so this is by the cost formula alone. Published runs: {_PUBLISHED[family]}."


def margin(found: Measurement) -> float:
    """Return the loss that is tolerated: 0.01 for metrics from 0 to 1, else 1 % of the mean of static q_max."""
    if found.metric in _SHARES:
        return MARGIN
    label = found.static if found.static in found.schedules else max(found.schedules, key=found.quality)
    return MARGIN * abs(found.schedules[label]["mean"])


def _choose(several: Sequence[Measurement], priority: str, limit: float) -> Recommendation | None:
    """Return the schedules within a cost limit that a priority asks for, or None if none was measured within it.

    The first of several measurements decides; the others are listed.

    A schedule is recommended if its loss, at the far end of the 95 % interval, is at most the margin: against static
    q_max for savings, else against the best, which itself must not lose more than that against any other. So noise
    leads to "Not known", never to a recommendation.
    """
    found, *others = several
    within = [name for name in NAMES if name in found.schedules and found.cost(name) <= limit]
    if not within:
        return None
    within.sort(key=found.quality, reverse=True)
    allowed, static = margin(found) + 1e-12, [found.static] * (found.static in found.schedules)
    if priority == "savings":
        rivals, reference = static or within, found.static
    else:
        rivals, reference = [*within, *(one for one in static if found.cost(one) <= limit)], within[0]
    known = bool(static) if priority == "savings" else found.loss(reference, rivals) <= allowed
    safe = [name for name in within if known and found.loss(name, [reference]) <= allowed]
    names = _ordered(found, safe, priority) if safe else _least_risk(found, within, rivals, allowed)
    rule = _rule(found, names[0], reference, priority) if safe else _not_known(found, names, rivals)
    parts = [
        f"Measured on {found.dataset} with {found.model} ({found.size}): {found.steps:,} steps, {len(found.seeds)} "
        f"seeds, at {found.bits}, by {found.metric} ({found.better} is better).",
        rule,
    ]
    if worse := [name for name in within if name not in names and any(found.worse(name, one) for one in rivals)]:
        parts.append(f"Measurably worse, and so not among them: {', '.join(worse)}.")
    if unsafe := [name for name in within if name not in (*names, *worse)]:
        parts.append(f"Not shown to be within the margin: {', '.join(unsafe)}.")
    if missing := [name for name in NAMES if name not in found.schedules]:
        reasons = {name: f"{name} ({reason})" for name, reason in found.left_out.items()}
        parts.append(f"Without a measured value: {', '.join(reasons.get(name, name) for name in missing)}.")
    parts += [f"Figure: {found.figure}.", f"What it cannot show: {found.limits}"]
    if others:
        listed = "; ".join(f"{one.dataset}, {one.model} ({one.figure})" for one in others)
        parts.append(f"Also measured: {listed}.")
    costs = tuple(found.cost(name) for name in names)
    group, reason = savings_group(names[0]), " ".join(parts)
    return Recommendation(tuple(names), group, costs, reason, True, found.figure, bool(safe))


def _ordered(found: Measurement, safe: Sequence[str], priority: str) -> list[str]:
    """Order by mean, by cost, or by the sum of the two ranks, where the cheaper schedule wins a tie."""
    by_cost = sorted(safe, key=found.cost)
    if priority == "balanced":
        return sorted(safe, key=lambda name: (safe.index(name) + by_cost.index(name), found.cost(name)))
    return list(safe) if priority == "quality" else by_cost


def _least_risk(found: Measurement, within: Sequence[str], rivals: Sequence[str], allowed: float) -> list[str]:
    """Order those with a mean within the margin by the largest loss not ruled out; else return the least risky."""
    risky = sorted(within, key=lambda name: (found.loss(name, rivals), -found.quality(name)))
    top = max(map(found.quality, rivals))
    return [name for name in risky if top - found.quality(name) <= allowed] or risky[:1]


def _rule(found: Measurement, first: str, reference: str, priority: str) -> str:
    show = found.signed(margin(found))[1:]
    role = {"quality": "has the best mean", "balanced": "has the smallest sum of ranks by mean and by cost"}
    text = f"{first} {role.get(priority, 'is the cheapest')} of those that lose at most {show}"
    text += f" against {reference}, by the 95 % interval: {_value(found, first)}."
    if first == reference:
        return text
    difference, low, high = map(found.signed, found.difference(first, reference))
    return f"{text} Less {reference}: {first} ({difference}, {low} to {high})."


def _not_known(found: Measurement, names: Sequence[str], rivals: Sequence[str]) -> str:
    show, loss = found.signed(margin(found))[1:], found.loss(names[0], rivals)
    against = found.static if list(rivals) == [found.static] else "every other one"
    text = f"Not known: none is shown to lose at most {show} against {against}, by the 95 % interval. "
    if found.static not in found.schedules:
        text += f"{found.static.capitalize()} was not measured. "
    if math.isinf(loss):
        return text + f"Fewer than {FEWEST} seeds rule out no loss. {names[0]} is only the first to try."
    text += f"The smallest loss that is not ruled out is {found.signed(loss)[1:]}, of {names[0]}: "
    return text + f"{_value(found, names[0])}. It is the first to try; more seeds would tell."


def _value(found: Measurement, label: str) -> str:
    row = found.schedules[label]
    show = found.decimals
    spread = f"{row['mean']:.{show}f} ± {row['sd']:.{show}f}"
    return f"{spread} at {row['relative_cost']:.3f} of the cost of static {found.q_max}"
