"""The tables of a study: rows, groups, correlations, failed runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpt_fx.study.analysis import GROUPS, Panel, Row, against, cost_correlation, group_differences, groups, verdict
from cpt_fx.study.critical_rows import low_steps, reference
from cpt_fx.study.statistics import Estimate
from cpt_fx.study.wording import NOTHING, correlated, decimals, estimated, markdown, signed, signed_ends, spread

TITLES = {
    "schedules": "Schedules",
    "deficit": "Low precision at the start",
    "window": "A window of low precision",
    "first-cycle": "The first cycle",
    "delayed": "Schedules that begin later",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with its title and a note on how to read it. Cells are text."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """Return the table with its note, without the title."""
        rule = ("---", *["---:"] * (len(self.headings) - 1))
        lines = ["| " + " | ".join(map(markdown, row)) + " |" for row in (self.headings, rule, *self.rows)]
        return "\n".join([*lines, *(["", markdown(self.note)] if self.note else [])])


def tables(panels: Sequence[Panel]) -> list[Table]:
    """Return the tables of a study, in the order in which a report shows them."""
    made = [table for panel in panels for table in _of_panel(panel)]
    return [*made, *failures(panels)]


def schedule_table(panel: Panel) -> Table:
    """Return a row for each schedule, cheapest first."""
    show = decimals(panel)
    others = list(dict.fromkeys(other.label for row in panel.rows if (other := reference(row, panel)) is not None))
    rows = []
    for row in panel.rows:
        other = reference(row, panel)
        estimate = against(row, other) if other else None
        rows.append(
            (
                row.label,
                row.group if row.group in GROUPS else NOTHING,
                f"{row.relative_cost:.3f}",
                f"{row.mean_bits:.2f}",
                *_places(panel, row),
                spread(row.mean, row.deviation, show),
                f"{len(row.values)}" + f" ({row.gaps})" * bool(row.gaps),
                _compared(other, estimate, show, named=len(others) > 1),
                verdict(estimate, panel.better) if other else NOTHING,
            )
        )
    headings = ("schedule", "saving", "cost", "mean bits", *_place_headings(panel), f"{panel.metric} ± sd", "seeds")
    difference = f"less {others[0]} (95 % interval)" if len(others) == 1 else "difference (95 % interval)"
    note = (
        f"{panel.metric}: {panel.better} is better; mean and standard deviation over seeds. Cost: BitOps relative to "
        f"static {panel.q_max}. A difference whose interval holds zero is none that these seeds can show."
    )
    return Table(
        title=f"{TITLES.get(panel.experiment, panel.experiment)} at {panel.bits}",
        headings=(*headings, difference, "verdict"),
        rows=tuple(rows),
        note=note,
    )


def group_table(panel: Panel) -> Table | None:
    """Return the savings groups and their differences; None where a panel has fewer than two groups."""
    found, show = groups(panel), decimals(panel)
    if len(found) < 2:
        return None
    rows = [
        (
            f"{group.name} saving",
            ", ".join(group.labels),
            f"{group.relative_cost:.3f}",
            *estimated(group.mean, show),
            NOTHING,
        )
        for group in found
    ]
    for one, two, estimate in group_differences(panel):
        value = signed(estimate, show, interval=False)
        rows.append((f"{one} less {two}", "", "", value, *signed_ends(estimate, show), verdict(estimate, panel.better)))
    return Table(
        title=f"Savings groups at {panel.bits}",
        headings=("group", "schedules", "cost", panel.metric, "95 % interval", "seeds", "verdict"),
        rows=tuple(rows),
        note=(
            "A group's value is the mean over its schedules, seed by seed, over the seeds that all of them finished. "
            "Differences are of these, paired by seed."
        ),
    )


def correlation_table(panels: Sequence[Panel]) -> Table | None:
    """Return the rank correlations of cost and quality; None without a panel of at least three schedules."""
    rows = []
    for panel in panels:
        for name, baselines in (("schedules", False), ("schedules and static", True)):
            found = cost_correlation(panel, baselines=baselines)
            if found.points >= 3:
                rows.append((panel.bits, name, str(found.points), *correlated(found)))
    if not rows:
        return None
    return Table(
        title="Rank correlation of cost and quality",
        headings=("bits", "points", "number", "Spearman's rho", "95 % interval", "Kendall's tau-b", "95 % interval"),
        rows=tuple(rows),
        note=(
            "Positive: more compute, better quality. For the intervals the seeds within each schedule are resampled "
            "and all schedules are kept."
        ),
    )


def failures(panels: Sequence[Panel]) -> list[Table]:
    """Return the runs without a value, or nothing where there are none."""
    rows: list[tuple[Panel, str, int, str]] = []
    for panel in panels:
        for row in panel.rows:
            rows.extend((panel, row.label, seed, reason) for seed, reason in row.failed.items())
            rows.extend((panel, row.label, seed, "was not run, or not finished") for seed in row.missing)
    if not rows:
        return []
    return [
        Table(
            title="Runs without a value",
            headings=("experiment", "bits", "schedule", "seed", "reason"),
            rows=tuple(
                (p.experiment, p.bits, label, str(seed), _first_line(reason)) for p, label, seed, reason in rows
            ),
            note=f"{len(rows)} of {_planned(panels)} runs have no value. They count in no mean.",
        )
    ]


def _of_panel(panel: Panel) -> Iterator[Table]:
    yield schedule_table(panel)
    if panel.experiment == "schedules":
        for table in (correlation_table([panel]), group_table(panel)):
            if table is not None:
                yield table


def _place_headings(panel: Panel) -> tuple[str, ...]:
    names = {"deficit": ("low steps",), "window": ("low steps",), "first-cycle": ("bits of first cycle",)}
    return names.get(panel.experiment, ())


def _places(panel: Panel, row: Row) -> tuple[str, ...]:
    if panel.experiment in ("deficit", "window"):
        low = low_steps(row, panel)
        place = NOTHING if low is None else "none" if low == (0, 0) else f"{low[0]} to {low[1]}"
        return (f"{place} of {row.total_steps}",)
    if panel.experiment == "first-cycle":
        return (NOTHING if row.first_cycle_bits is None else f"{row.first_cycle_bits:.2f}",)
    return ()


def _compared(other: Row | None, estimate: Estimate | None, show: int, *, named: bool) -> str:
    if other is None:
        return NOTHING
    return f"less {other.label}: " * named + signed(estimate, show)


def _planned(panels: Sequence[Panel]) -> int:
    return sum(len(panel.rows) * len(panel.seeds) for panel in panels)


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines and lines[0].startswith("Traceback") else (lines or [""])[0]
