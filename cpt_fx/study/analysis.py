"""Analysis of a study's records: rows and panels, differences, groups, correlations; missing runs are counted.

For critical learning periods also the steps at low precision of each run, and the run that it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from cpt_fx.schedules import NAMES, Deficit, savings_group
from cpt_fx.study import statistics
from cpt_fx.study.cells import PERIODS
from cpt_fx.study.records import Record, rebuild
from cpt_fx.study.statistics import Correlation, Estimate

FULL = "full precision"
GROUPS = ("small", "medium", "large")
"""The savings groups, from the most compute to the least."""
FEWEST_POINTS = 4
"""By chance three points are in perfect order, up or down, once in three times; four points once in twelve."""
_BY_CHANCE = {4: 1.0, 5: 1.0, 6: 0.886, 7: 0.786, 8: 0.738, 9: 0.7, 10: 0.649}
"""Points -> Spearman's rho that chance reaches once in twenty times (4: perfect order); above 10 from Student's t."""


@dataclass(frozen=True, kw_only=True)
class SeedValues:
    """A value for each seed, and the relative cost."""

    relative_cost: float
    values: Mapping[int, float]

    @cached_property
    def mean(self) -> Estimate | None:
        """The mean over the seeds that have a value, or None where none has."""
        return statistics.mean(list(self.values.values())) if self.values else None


@dataclass(frozen=True, kw_only=True)
class ScheduleRow(SeedValues):
    """One schedule at one (q_min, q_max): a value for each seed, and why other seeds have none."""

    label: str
    group: str
    schedule: str
    mean_bits: float
    first_cycle_bits: float | None
    total_steps: int
    failed: Mapping[int, str]
    missing: tuple[int, ...]

    @cached_property
    def deviation(self) -> float | None:
        """The standard deviation over the seeds, or None for fewer than two."""
        return statistics.deviation(list(self.values.values())) if self.values else None

    @property
    def gaps(self) -> str:
        """How many seeds have no value, and why; an empty string if all have one."""
        parts = (f"{len(self.failed)} failed" * bool(self.failed), f"{len(self.missing)} missing" * bool(self.missing))
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """All rows of one experiment at one (q_min, q_max), cheapest first."""

    experiment: str
    q_min: int
    q_max: int
    metric: str
    better: str
    seeds: tuple[int, ...]
    rows: tuple[ScheduleRow, ...]

    def row(self, label: str) -> ScheduleRow | None:
        """Return the row with a label, or None."""
        return next((row for row in self.rows if row.label == label), None)

    @property
    def static(self) -> ScheduleRow | None:
        """The row of static q_max, which other rows are compared with by default."""
        return self.row(f"static {self.q_max}")

    @property
    def cyclic(self) -> tuple[ScheduleRow, ...]:
        """The rows that are neither static nor in full precision."""
        return tuple(row for row in self.rows if row.group not in ("static", FULL))

    @property
    def sign(self) -> float:
        """The factor that turns the metric so that higher is better."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def bits(self) -> str:
        """The widths as text, as in "(3, 8)"."""
        return f"({self.q_min}, {self.q_max})"


@dataclass(frozen=True, kw_only=True)
class SavingsGroup(SeedValues):
    """A savings group: the mean over its schedules, for each seed that all of them finished."""

    name: str
    labels: tuple[str, ...]


def panels(records: Iterable[Record]) -> list[Panel]:
    """Group the records of one study into panels, experiments in the order of the paper, high q_max first."""
    found: dict[tuple[str, int, int], list[Record]] = {}
    for record in records:
        found.setdefault((record.experiment, record.q_min, record.q_max), []).append(record)
    order = {name: index for index, name in enumerate(("schedules", *PERIODS))}
    keys = sorted(found, key=lambda key: (order.get(key[0], len(order)), -key[2], key[1]))
    return [_panel(found[key]) for key in keys]


def against(one: SeedValues, other: SeedValues) -> Estimate | None:
    """Return the mean of one minus that of the other; paired by seed where both have the same seeds."""
    if not one.values or not other.values:
        return None
    first, second = ([each.values[seed] for seed in sorted(each.values)] for each in (one, other))
    return statistics.difference(first, second, paired=set(one.values) == set(other.values))


def verdict(estimate: Estimate | None, better: str) -> str:
    """Return "better", "worse" or "not told apart", or "no interval" if there are too few seeds."""
    if estimate is None or estimate.interval is None:
        return "no interval"
    if not estimate.told_apart:
        return "not told apart"
    return "better" if (estimate.value > 0) == (better == "higher") else "worse"


def groups(panel: Panel) -> list[SavingsGroup]:
    """Return the savings groups for which a panel has values, from the most compute to the least."""
    result = []
    for name in GROUPS:
        if rows := [row for row in panel.rows if row.group == name and row.values]:
            cost, labels = sum(row.relative_cost for row in rows) / len(rows), tuple(row.label for row in rows)
            result.append(SavingsGroup(name=name, labels=labels, relative_cost=cost, values=averaged(rows)))
    return result


def averaged(rows: Sequence[ScheduleRow]) -> dict[int, float]:
    """Return the mean over rows, for each seed for which all of them have a value."""
    common = set.intersection(*(set(row.values) for row in rows))
    return {seed: sum(row.values[seed] for row in rows) / len(rows) for seed in sorted(common)}


def group_differences(panel: Panel) -> list[tuple[str, str, Estimate | None]]:
    """Return each pair of groups, the one with more compute first, and the difference of their means."""
    return [(one.name, two.name, against(one, two)) for one, two in combinations(groups(panel), 2)]


def cost_correlation(panel: Panel, *, baselines: bool = False) -> Correlation:
    """Correlate relative cost with quality over the schedules; positive: more compute, better quality.

    `baselines` includes the static runs. Costs that agree to three decimals count as equal.
    """
    rows = [row for row in panel.rows if row in panel.cyclic or (baselines and row.group == "static")]
    return correlation([(round(row.relative_cost, 3), row) for row in rows], panel)


def correlation(points: Sequence[tuple[float, ScheduleRow]], panel: Panel) -> Correlation:
    """Correlate a number for each row with its quality: the metric, turned so that higher is better."""
    kept = [(place, row) for place, row in points if row.values]
    if not kept:
        return Correlation(points=0, runs=0, reason="no run has a value")
    values = [[panel.sign * value for value in row.values.values()] for _, row in kept]
    return statistics.rank_correlation([place for place, _ in kept], values)


def is_trend(found: Correlation) -> bool:
    """Return whether a correlation exceeds what so few points, and their seeds, show by chance."""
    if found.rho is None or found.rho_interval is None or found.points < FEWEST_POINTS:
        return False
    t = statistics.t_quantile(found.points - 2)
    bound = _BY_CHANCE.get(found.points, t / math.sqrt(found.points - 2 + t**2))
    return abs(found.rho) >= bound - 1e-9 and not found.rho_interval.covers(0.0)


def low_steps(row: ScheduleRow, panel: Panel) -> tuple[int, int] | None:
    """Return the first step at low precision and the one after the last, (0, 0) for none; None if not known."""
    if row.schedule.startswith("Deficit("):
        with suppress(ValueError):  # a store may hold any text
            made = rebuild(row.schedule)
            assert isinstance(made, Deficit)
            end = min(made.end + made.inclusive, row.total_steps)
            return (made.start, end) if end > made.start else (0, 0)
    if row.label == f"static {panel.q_max}":
        return (0, 0)
    if row.label == f"static {panel.q_min}":
        return (0, row.total_steps)
    return None


def low_rows(panel: Panel) -> list[tuple[tuple[int, int], ScheduleRow]]:
    """Return the rows with a value whose steps at low precision are known, with these steps, ordered by their end."""
    found = [(low, row) for row in panel.rows if row.values and (low := low_steps(row, panel)) is not None]
    return sorted(found, key=lambda pair: pair[0][::-1])


def points(panel: Panel) -> list[tuple[int, ScheduleRow]]:
    """Return the rows of a trend, each with its place in it: where the deficit ends, or where the window starts."""
    windows = panel.experiment == "window"
    return [(low[0 if windows else 1], row) for low, row in low_rows(panel) if low[1] or not windows]


def undisturbed(panel: Panel) -> ScheduleRow | None:
    """Return the row that never had low precision."""
    return next((row for row in panel.rows if low_steps(row, panel) == (0, 0)), None)


def reference(row: ScheduleRow, panel: Panel) -> ScheduleRow | None:
    """Return the row that a row is compared with, or None if there is none.

    In the deficit and window experiments it is the run that never had low precision. ETV is compared with RTV in
    the first-cycle experiment, a delayed schedule with the same one without delay, all others with static q_max.
    """
    found = panel.static
    if panel.experiment in ("deficit", "window"):
        found = undisturbed(panel)
    elif panel.experiment == "first-cycle" and row.label == "ETV":
        found = panel.row("RTV")
    elif panel.experiment == "delayed" and not row.label.startswith("static "):
        # "RR delayed 100" and "RR after deficit 100" belong to "RR".
        plain = panel.row(row.label.partition(" ")[0])
        found = panel.static if plain is row else plain
    return None if found is row else found


def beside(row: ScheduleRow) -> tuple[str, bool, int]:
    """Return a sort key that puts a delayed schedule beside the same one without delay, and baselines at the end."""
    if row.group in ("static", FULL):
        return ("~", False, 0)
    first, *rest = row.label.split()
    return (first, "after" in rest, int(rest[-1][:18]) if rest and rest[-1].isdecimal() else 0)


def _panel(records: Sequence[Record]) -> Panel:
    # A failed run may not know the metric.
    first = next((record for record in records if record.status == "done"), records[0])
    for name in ("metric", "better"):
        found = {getattr(record, name) for record in records if record.status == "done"}
        if len(found) > 1:
            raise ValueError(f"the runs of one experiment must agree in {name}, got {sorted(found)}")
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(record.label, []).append(record)
    seeds = tuple(sorted({record.seed for record in records}))
    rows = [_row(label, members, seeds) for label, members in cells.items()]
    # Schedules of equal cost are in the order of the paper.
    place = {name: index for index, name in enumerate(NAMES)}
    rows.sort(key=lambda row: (round(row.relative_cost, 3), place.get(row.label, len(place))))
    names = ("experiment", "q_min", "q_max", "metric", "better")
    return Panel(**{name: getattr(first, name) for name in names}, seeds=seeds, rows=tuple(rows))


def _row(label: str, members: Sequence[Record], seeds: Sequence[int]) -> ScheduleRow:
    values: dict[int, float] = {}
    failed: dict[int, str] = {}
    for record in sorted(members, key=lambda record: record.seed):
        if record.status != "done":
            failed[record.seed] = record.error or "no reason was recorded"
        elif record.value is None or not math.isfinite(record.value):
            failed[record.seed] = f"{record.metric} is {record.value}"
        elif record.seed in values:
            raise ValueError(f'"{label}" with seed {record.seed} is there twice: {values[record.seed]}, {record.value}')
        else:
            values[record.seed] = record.value
    failed = {seed: reason for seed, reason in failed.items() if seed not in values}  # a retry may have succeeded
    first = members[0]
    # The cost of a schedule that keeps state differs between runs; that of a failed run is only the planned one.
    known = [record for record in members if record.status == "done"] or members
    group = savings_group(label) if label in NAMES else FULL if label == FULL else "other"
    group = "static" if label.startswith("static ") else group
    if different := sorted({record.total_steps for record in members} - {first.total_steps}):
        raise ValueError(
            f'"{label}" was run for {first.total_steps} and for {different[0]} steps, which cannot be averaged: '
            "write runs of different lengths as studies of their own"
        )
    return ScheduleRow(
        label=label,
        group=group,
        schedule=first.schedule,
        relative_cost=_common([record.relative_cost for record in known]),
        mean_bits=_common([record.mean_bits for record in known]),
        first_cycle_bits=first.first_cycle_bits,
        total_steps=first.total_steps,
        values=values,
        failed=failed,
        missing=tuple(sorted(set(seeds) - set(values) - set(failed))),
    )


def _common(values: Sequence[float]) -> float:
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)
