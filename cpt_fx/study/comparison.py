"""Compare two studies of the same schedules that differ in one thing, such as the recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cpt_fx.study.analysis import Panel, ScheduleRow, against, averaged, panels, verdict
from cpt_fx.study.findings import NOTHING, Table, decimals, signed, spread
from cpt_fx.study.records import Record
from cpt_fx.study.statistics import difference


def compare(first: Iterable[Record], second: Iterable[Record], *, names: tuple[str, str]) -> list[Table]:
    """Return a table for each experiment and (q_min, q_max) that both have: first minus second, for each schedule.

    Differences are paired by seed where the seeds agree. The last row is the mean over all schedules that both have,
    seed by seed. Schedules that only one of them has are named in the note.
    """
    others = {(panel.experiment, panel.bits): panel for panel in panels(second)}
    pairs = [(panel, others.get((panel.experiment, panel.bits))) for panel in panels(first)]
    made = [_table(one, two, names) for one, two in pairs if two is not None]
    if not made:
        raise ValueError(f"{names[0]} and {names[1]} have no experiment at the same (q_min, q_max)")
    return made


def _table(one: Panel, two: Panel, names: tuple[str, str]) -> Table:
    if (one.metric, one.better) != (two.metric, two.better):
        raise ValueError(
            f"{names[0]} is measured by {one.metric} ({one.better} is better) and {names[1]} by {two.metric} "
            f"({two.better} is better), which cannot be compared"
        )
    show = max(decimals(one), decimals(two))
    shared = [(row, other) for row in one.rows if (other := two.row(row.label)) is not None]
    rows = []
    for row, other in shared:
        estimate = against(row, other)
        means = (spread(each.mean, each.deviation, show) for each in (row, other))
        counts = ", ".join(dict.fromkeys(str(len(each.values)) for each in (row, other)))
        rows.append((row.label, *means, counts, signed(estimate, show), _word(verdict(estimate, one.better))))
    rows.extend(_overall(shared, one, show))
    lone = [row.label for row in one.rows if two.row(row.label) is None]
    lone += [row.label for row in two.rows if one.row(row.label) is None]
    note = f"{one.metric}: {one.better} is better; mean and standard deviation over seeds."
    if lone:
        note += f" Only one of both has {', '.join(lone)}."
    heading = f"{names[0]} less {names[1]} (95 % interval)"
    headings = ("schedule", *names, "seeds", heading, "verdict")
    return Table(f"{names[0]} and {names[1]} at {one.bits}", headings, tuple(rows), note)


def _overall(shared: list[tuple[ScheduleRow, ScheduleRow]], panel: Panel, show: int) -> Iterator[tuple[str, ...]]:
    """Yield the row of the mean over schedules, from the seeds for which all have a value; none for fewer than two."""
    valued = [pair for pair in shared if all(row.values for row in pair)]
    if len(valued) < 2:
        return
    ones, twos = map(averaged, zip(*valued, strict=True))
    if seeds := sorted(set(ones) & set(twos)):
        estimate = difference([ones[seed] for seed in seeds], [twos[seed] for seed in seeds], paired=True)
        word = _word(verdict(estimate, panel.better))
        yield f"mean of {len(valued)}", NOTHING, NOTHING, str(len(seeds)), signed(estimate, show), word


def _word(verdict: str) -> str:
    return NOTHING if verdict == "no interval" else verdict
