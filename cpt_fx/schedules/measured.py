"""What was measured: how schedules did on real tasks, and the choice that follows from it.

The data are in measured.json beside this file, written by :func:`cpt_fx.study.measured.update` from the records of
studies. Differences and their intervals are in it too, so that reading it needs no statistics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cpt_fx.schedules.cyclic import NAMES

PATH = Path(__file__).with_name("measured.json")
MARGIN = 0.01
_SHARES = ("accuracy", "f1", "map")
"""Metrics from 0 to 1, where the margin is a difference; of others it is a part of the mean."""
FEWEST = 3
"""Two seeds may agree by chance, and then have no spread."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One study of one task at one (q_min, q_max).

    ``schedules`` maps labels to mean, sd, n and relative_cost. ``differences[a][b]`` is the mean of a minus that of b
    with the ends of its 95 % interval, for each pair once.
    """

    study: str
    dataset: str
    model: str
    size: str
    limits: str
    steps: int
    seeds: Sequence[int]
    q_min: int
    q_max: int
    metric: str
    better: str
    figure: str
    schedules: Mapping[str, Mapping[str, float]]
    differences: Mapping[str, Mapping[str, Sequence[float]]]
    left_out: Mapping[str, str]

    @property
    def bits(self) -> str:
        """Return "(3, 8)"."""
        return f"({self.q_min}, {self.q_max})"

    @property
    def decimals(self) -> int:
        """How many decimals show two digits of the usual standard deviation."""
        spreads = sorted(row["sd"] for row in self.schedules.values() if row["sd"] > 0)
        return min(max(1 - math.floor(math.log10(spreads[len(spreads) // 2])), 0), 8) if spreads else 4

    def signed(self, value: float) -> str:
        """Return a difference as text, with a true minus."""
        return f"{value:+.{self.decimals}f}".replace("-", "−")

    def cost(self, label: str) -> float:
        """Return a schedule's cost relative to static q_max."""
        return self.schedules[label]["relative_cost"]

    def quality(self, label: str) -> float:
        """Return a schedule's mean, turned so that more is better."""
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
        """What schedules are compared with: "static 8"."""
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
        """Say whether `one` is measurably worse: its interval excludes zero, on the wrong side."""
        if one == other:
            return False
        _, low, high = self.difference(one, other)
        return high < 0 if self.better == "higher" else low > 0


@dataclass(frozen=True)
class Choice:
    """Schedules in order, with their costs, and the reason in numbers."""

    names: tuple[str, ...]
    relative_costs: tuple[float, ...]
    reason: str
    known: bool
    """Whether the measurements show it; else the names are only what to try first."""


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


def find(family: str, q_min: int, q_max: int) -> list[Measurement]:
    """Return the measurements of a family at these widths."""
    return [one for one in read().get(family, []) if (one.q_min, one.q_max) == (q_min, q_max)]


def margin(found: Measurement) -> float:
    """Return the loss that counts as none: a point of accuracy, or 1 % of static q_max's mean by any other metric."""
    if found.metric in _SHARES:
        return MARGIN
    label = found.static if found.static in found.schedules else max(found.schedules, key=found.quality)
    return MARGIN * abs(found.schedules[label]["mean"])


def choose(found: Measurement, priority: str, limit: float) -> Choice | None:
    """Return the schedules within a cost limit that a priority asks for, or None where none was measured within it.

    A schedule is named where its loss, to the far end of the 95 % interval, is at most the margin: against static q_max
    for savings, else against the best, which itself must not lose more than that against any other. So noise leads to
    "not known", never to a name.
    """
    within = [name for name in NAMES if name in found.schedules and found.cost(name) <= limit]
    if not within:
        return None
    within.sort(key=found.quality, reverse=True)
    allowed, static = margin(found) + 1e-12, [found.static] * (found.static in found.schedules)
    if priority == "savings":
        rivals, reference = static or within, found.static
    else:
        rivals, reference = (
            [*within, *(static if found.cost(static[0]) <= limit else [])] if static else within,
            within[0],
        )
    known = bool(static) if priority == "savings" else found.loss(reference, rivals) <= allowed
    safe = [name for name in within if known and found.loss(name, [reference]) <= allowed]
    names = _ordered(found, safe, priority) if safe else _least_risk(found, within, rivals, allowed)
    rule = _rule(found, names[0], reference, priority) if safe else _not_known(found, names, rivals)
    parts = [_task(found), rule]
    if worse := [name for name in within if name not in names and any(found.worse(name, one) for one in rivals)]:
        parts.append(f"Measurably worse, and so not among them: {', '.join(worse)}.")
    if others := [name for name in within if name not in (*names, *worse)]:
        parts.append(f"Not shown to be within the margin: {', '.join(others)}.")
    if missing := [name for name in NAMES if name not in found.schedules]:
        parts.append(f"Without a measured value: {', '.join(_left_out(found, missing))}.")
    parts.append(f"Figure: {found.figure}.")
    parts.append(f"What it cannot show: {found.limits}")
    return Choice(tuple(names), tuple(found.cost(name) for name in names), " ".join(parts), bool(safe))


def _ordered(found: Measurement, safe: Sequence[str], priority: str) -> list[str]:
    """Order by mean, by cost, or by the sum of the two ranks; of equal sums the cheaper one is first."""
    by_cost = sorted(safe, key=found.cost)
    if priority == "balanced":
        return sorted(safe, key=lambda name: (safe.index(name) + by_cost.index(name), found.cost(name)))
    return list(safe) if priority == "quality" else by_cost


def _least_risk(found: Measurement, within: Sequence[str], rivals: Sequence[str], allowed: float) -> list[str]:
    """Order by the largest loss that is not ruled out, those whose mean is within the margin; or else the first."""
    risky = sorted(within, key=lambda name: (found.loss(name, rivals), -found.quality(name)))
    top = max(map(found.quality, rivals))
    return [name for name in risky if top - found.quality(name) <= allowed] or risky[:1]


def _rule(found: Measurement, first: str, reference: str, priority: str) -> str:
    show = found.signed(margin(found))[1:]
    role = {"quality": "has the best mean", "balanced": "has the smallest sum of ranks by mean and by cost"}
    text = f"{first} {role.get(priority, 'is the cheapest')} of those that lose at most {show}"
    text += f" against {reference}, by the 95 % interval: {_value(found, first)}."
    return text if first == reference else f"{text} Less {reference}: {_list(found, [first], reference)}."


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


def also(others: Sequence[Measurement]) -> str:
    """Name further measurements of the same family and widths."""
    if not others:
        return ""
    return " Also measured: " + "; ".join(f"{one.dataset}, {one.model} ({one.figure})" for one in others) + "."


def why_not(family: str, q_min: int, q_max: int, budget: object) -> str:
    """Say why the answer does not come from measurements."""
    known = read().get(family, [])
    if not known:
        return f'The family "{family}" was not measured here, so this is by the cost formula alone.'
    if any((one.q_min, one.q_max) == (q_min, q_max) for one in known):
        return (
            f'None of the schedules that were measured for the family "{family}" fits the budget of {budget}, so this '
            "is by the cost formula alone."
        )
    pairs = ", ".join(dict.fromkeys(one.bits for one in known))
    return (
        f'The family "{family}" was measured at (q_min, q_max) = {pairs}, not at ({q_min}, {q_max}), so this is by the '
        "cost formula alone."
    )


def _task(found: Measurement) -> str:
    return (
        f"Measured on {found.dataset} with {found.model} ({found.size}): {found.steps:,} steps, {len(found.seeds)} "
        f"seeds, at {found.bits}, by {found.metric} ({found.better} is better)."
    )


def _value(found: Measurement, label: str) -> str:
    row = found.schedules[label]
    show = found.decimals
    spread = f"{row['mean']:.{show}f} ± {row['sd']:.{show}f}"
    return f"{spread} at {row['relative_cost']:.3f} of the cost of static {found.q_max}"


def _list(found: Measurement, names: Iterable[str], reference: str) -> str:
    parts = []
    for name in names:
        value, low, high = found.difference(name, reference)
        parts.append(f"{name} ({found.signed(value)}, {found.signed(low)} to {found.signed(high)})")
    return ", ".join(parts)


def _left_out(found: Measurement, names: Iterable[str]) -> list[str]:
    return [f"{name} ({found.left_out[name]})" if name in found.left_out else name for name in names]
