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


def choose(found: Measurement, priority: str, limit: float) -> Choice | None:
    """Return the schedules within a cost limit that a priority asks for, or None where none fits."""
    within = [name for name in NAMES if name in found.schedules and found.cost(name) <= limit]
    if not within:
        return None
    within.sort(key=found.quality, reverse=True)
    best = within[0]
    alike = [name for name in within if not found.worse(name, best)]
    if priority == "quality":
        names, rule = alike, _quality(found, alike)
    elif priority == "savings":
        names, rule = _savings(found, within, alike)
    else:
        names, rule = _balanced(found, alike)
    dropped = [name for name in within if name not in names]
    parts = [_task(found), rule]
    if dropped:
        parts.append(f"Measurably worse, and so not among them: {', '.join(dropped)}.")
    if missing := [name for name in NAMES if name not in found.schedules]:
        parts.append(f"Without a measured value: {', '.join(_left_out(found, missing))}.")
    parts.append(f"Figure: {found.figure}.")
    parts.append(f"What it cannot show: {found.limits}")
    return Choice(tuple(names), tuple(found.cost(name) for name in names), " ".join(parts))


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


def _quality(found: Measurement, alike: Sequence[str]) -> str:
    best, *others = alike
    text = f"{best} has the best mean: {_value(found, best)}."
    if others:
        text += f" The 95 % interval cannot tell it apart from {_list(found, others, best)}."
    return text


def _savings(found: Measurement, within: Sequence[str], alike: Sequence[str]) -> tuple[list[str], str]:
    """Order by cost what is not measurably worse than static q_max; or than the best, where all are worse."""
    static = f"static {found.q_max}"
    kept = [name for name in within if not found.worse(name, static)] if static in found.schedules else []
    reference, why = static, ""
    if not kept:
        reference, kept = within[0], list(alike)
        lack = "was not measured" if static not in found.schedules else "is measurably better than all of them"
        why = f" ({static} {lack}, so the best of them is the measure)"
    names = sorted(kept, key=found.cost)
    first = names[0]
    text = f"{first} is the cheapest that is not measurably worse than {reference}{why}: {_value(found, first)}."
    if first != reference:
        value, low, high = found.difference(first, reference)
        harm = low if found.better == "higher" else high
        text += f" Less {reference} it is {found.signed(value)} ({found.signed(low)} to {found.signed(high)})"
        bad = harm < 0 if found.better == "higher" else harm > 0
        text += f"; a loss of {found.signed(abs(harm))[1:]} is not ruled out." if bad else "."
    return names, text


def _balanced(found: Measurement, alike: Sequence[str]) -> tuple[list[str], str]:
    """Order by the sum of two ranks, by mean and by cost; of equal sums the cheaper one is first."""
    by_cost = sorted(alike, key=found.cost)
    names = sorted(alike, key=lambda name: (alike.index(name) + by_cost.index(name), found.cost(name)))
    best = alike[0]
    text = (
        f"Of those that are not measurably worse than the best, {best}, the smallest sum of ranks by mean and by cost "
        f"has {names[0]}: {_value(found, names[0])}."
    )
    if names[0] != best:
        text += f" {best}: {_value(found, best)}; the difference is {_list(found, [names[0]], best)}."
    return names, text


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
