"""The findings of a study as tables and sentences, made from its numbers alone, and how numbers are formatted.

Numbers are rounded to what their spread supports, with typographic minus signs. Sentences say what they cannot show.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from cpt_fx.schedules import measured
from cpt_fx.study import analysis
from cpt_fx.study.analysis import GROUPS, Panel, ScheduleRow, against, reference, verdict
from cpt_fx.study.records import said
from cpt_fx.study.statistics import Correlation, Estimate, Interval

NOTHING = "–"
NONE = "no difference that these seeds can show"
TITLES = {
    "schedules": "Schedules",
    "deficit": "Low precision at the start",
    "window": "A window of low precision",
    "first-cycle": "The first cycle",
    "delayed": "Schedules that begin later",
}


@dataclass(frozen=True)
class Table:
    """A table of text cells, with its title and a note on how to read it."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """Return the table with its note as Markdown, without the title."""
        rule = ("---", *["---:"] * (len(self.headings) - 1))
        lines = ["| " + " | ".join(map(markdown, row)) + " |" for row in (self.headings, rule, *self.rows)]
        return "\n".join([*lines, *(["", markdown(self.note)] if self.note else [])])


def tables(panels: Sequence[Panel]) -> list[Table]:
    """Return the tables of a study, in the order in which a report shows them."""
    made = []
    for panel in panels:
        made.append(schedule_table(panel))
        if panel.experiment == "schedules":
            made += [correlation_table(panel), group_table(panel)]
    return [table for table in (*made, failures(panels)) if table.rows]


def schedule_table(panel: Panel) -> Table:
    """Return a table with a row for each schedule, cheapest first."""
    show = decimals(panel)
    compared = [(row, reference(row, panel)) for row in panel.rows]
    others = list(dict.fromkeys(other.label for _, other in compared if other is not None))
    rows = []
    for row, other in compared:
        estimate = against(row, other) if other else None
        difference = f"less {other.label}: " * (len(others) > 1) + signed(estimate, show) if other else NOTHING
        saving = row.group if row.group in GROUPS else NOTHING
        costs = (f"{row.relative_cost:.3f}", f"{row.mean_bits:.2f}", *_place(panel, row).values())
        seeds = f"{len(row.values)}" + f" ({row.gaps})" * bool(row.gaps)
        word = verdict(estimate, panel.better) if other else NOTHING
        rows.append((row.label, saving, *costs, spread(row.mean, row.deviation, show), seeds, difference, word))
    difference = f"{f'less {others[0]}' if len(others) == 1 else 'difference'} (95 % interval)"
    note = (
        f"{panel.metric}: {panel.better} is better; mean and standard deviation over seeds. Cost: BitOps relative to "
        f"static {panel.q_max}. A difference whose interval holds zero is none that these seeds can show."
    )
    names = ("schedule", "saving", "cost", "mean bits", *_place(panel, panel.rows[0]), f"{panel.metric} ± sd", "seeds")
    return Table(_title(panel), (*names, difference, "verdict"), tuple(rows), note)


def group_table(panel: Panel) -> Table:
    """Return a table of the savings groups and their differences; empty if a panel has fewer than two groups."""
    found, show = analysis.groups(panel), decimals(panel)
    rows = []
    for group in found if len(found) > 1 else []:
        name, labels = f"{group.name} saving", ", ".join(group.labels)
        rows.append((name, labels, f"{group.relative_cost:.3f}", *_told(group.mean, show, number), NOTHING))
    for one, two, estimate in analysis.group_differences(panel):
        word = verdict(estimate, panel.better)
        rows.append((f"{one} less {two}", "", "", *_told(estimate, show, plus), word))
    headings = ("group", "schedules", "cost", panel.metric, "95 % interval", "seeds", "verdict")
    note = (
        "A group's value is the mean over its schedules, seed by seed, over the seeds that all of them finished. "
        "Differences are of these, paired by seed."
    )
    return Table(f"Savings groups at {panel.bits}", headings, tuple(rows), note)


def correlation_table(panel: Panel) -> Table:
    """Return a table of the rank correlations of cost and quality; empty for fewer than three points."""
    rows = []
    for name, baselines in (("schedules", False), ("schedules and static", True)):
        found = analysis.cost_correlation(panel, baselines=baselines)
        if found.points >= 3:
            rows.append((panel.bits, name, str(found.points), *correlated(found)))
    headings = ("bits", "points", "number", "Spearman's rho", "95 % interval", "Kendall's tau-b", "95 % interval")
    note = (
        "Positive: more compute, better quality. For the intervals the seeds within each schedule are resampled and "
        "all schedules are kept."
    )
    return Table("Rank correlation of cost and quality", headings, tuple(rows), note)


def failures(panels: Sequence[Panel]) -> Table:
    """Return a table of the runs without a value."""
    rows: list[tuple[str, ...]] = []
    for panel in panels:
        for row in panel.rows:
            lost = {**row.failed, **dict.fromkeys(row.missing, "was not run, or not finished")}
            rows.extend((panel.experiment, panel.bits, row.label, str(seed), said(lost[seed])) for seed in lost)
    planned = sum(len(panel.rows) * len(panel.seeds) for panel in panels)
    headings = ("experiment", "bits", "schedule", "seed", "reason")
    note = f"{len(rows)} of {planned} runs have no value. They count in no mean."
    return Table("Runs without a value", headings, tuple(rows), note)


def _title(panel: Panel) -> str:
    return f"{TITLES.get(panel.experiment, panel.experiment)} at {panel.bits}"


def _place(panel: Panel, row: ScheduleRow) -> dict[str, str]:
    """Return the additional cells of an experiment, by heading: the steps at low width, or the first cycle's bits."""
    if panel.experiment in ("deficit", "window"):
        low = analysis.low_steps(row, panel)
        place = NOTHING if low is None else "none" if low == (0, 0) else f"{low[0]} to {low[1]}"
        return {"low steps": f"{place} of {row.total_steps}"}
    if panel.experiment == "first-cycle":
        return {"bits of first cycle": NOTHING if row.first_cycle_bits is None else f"{row.first_cycle_bits:.2f}"}
    return {}


# Sentences.


@dataclass(frozen=True)
class Conclusion:
    """The findings of one panel, and where they hold."""

    where: str
    findings: tuple[str, ...]


def conclusions(panels: Sequence[Panel]) -> list[Conclusion]:
    """Return the findings of each panel."""
    found = []
    for panel in panels:
        by = f"by {panel.metric} ({panel.better} is better), over {counted(len(panel.seeds), 'seed')}"
        found.append(Conclusion(f"{_title(panel)}, {by}.", tuple(_findings(panel))))
    return found


def _findings(panel: Panel) -> Iterator[str]:
    if not any(row.values for row in panel.rows):
        yield "No run has a value."
        return
    if gaps := without_value(panel):
        yield f"{gaps}; what follows is from the others."
    if len(panel.seeds) < 2:
        yield "With one seed there is no spread, so nothing below says what another seed would give."
    makers = {"deficit": _deficit, "window": _window, "delayed": _delayed, "first-cycle": _first_cycle}
    yield from makers.get(panel.experiment, _schedules)(panel)


def _schedules(panel: Panel) -> Iterator[str]:
    show = decimals(panel)
    yield cost_and_quality(panel)
    cyclic = [row for row in panel.cyclic if row.mean is not None]
    if cyclic:
        best = max(cyclic, key=lambda row: panel.sign * row.mean.value if row.mean else 0.0)
        cheapest = min(cyclic, key=lambda row: row.relative_cost)
        yield f"The best mean among the schedules: {_named(best, show)}. The cheapest: {_named(cheapest, show)}."
    yield from _against_static(panel, cyclic, show)
    yield from _groups(panel, show)
    yield from _first_cycle(panel)


def cost_and_quality(panel: Panel) -> str:
    """Say whether more compute comes with better quality."""
    found = analysis.cost_correlation(panel)
    if found.rho is None:
        return f"There is no rank correlation of cost and quality to tell: {found.reason}."
    rho, interval, tau, taus = correlated(found)
    text = f"Cost and quality of the {found.points} schedules have a rank correlation (Spearman) of {rho}"
    if found.rho_interval is None:
        return f"{text}, Kendall's tau-b {tau}, without an interval: {found.reason}."
    text += f" (95 % interval {interval}; Kendall's tau-b {tau}, {taus})"
    if found.rho_interval.covers(0.0):
        return f"{text}: no order that these seeds can show."
    return f"{text}: more compute goes with {'better' if found.rho > 0 else 'worse'} quality."


def _against_static(panel: Panel, cyclic: Sequence[ScheduleRow], show: int) -> Iterator[str]:
    static = panel.static
    if static is None or not static.values or not cyclic:
        return
    told: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in cyclic:
        estimate = against(row, static)
        told[verdict(estimate, panel.better)].append((row.label, signed(estimate, show)))
    parts = [f"{word} {', '.join(map(' '.join, told[word])) or 'none'}" for word in ("better", "worse")]
    for word, lead in (("not told apart", NONE), ("no interval", "too few seeds to say")):
        if told[word]:
            parts.append(f"{lead} for {', '.join(label for label, _ in told[word])}")
    chance = ""
    if (tried := len(cyclic) - len(told["no interval"])) > 1:
        chance = f" Of {tried} such comparisons at 95 %, {tried * 0.05:.2g} would stand out by chance."
    level = spread(static.mean, static.deviation, show)
    yield f"Against static {panel.q_max} at {level}: {'; '.join(parts)}.{chance}"


def _groups(panel: Panel, show: int) -> Iterator[str]:
    found = analysis.groups(panel)
    if len(found) < 2:
        return
    means = ", ".join(f"{one.name} {spread(one.mean, None, show)}" for one in found)
    differences = analysis.group_differences(panel)
    told = [f"{one} less {two}: {_difference(estimate, panel, show)}" for one, two, estimate in differences]
    absent = [name for name in GROUPS if name not in {one.name for one in found}]
    lack = f" The group with {absent[0]} saving has no schedule with a value." if absent else ""
    yield f"Means of the groups by saving: {means}. {'; '.join(told).capitalize()}.{lack}"


def _first_cycle(panel: Panel) -> Iterator[str]:
    high, low = panel.row("RTV"), panel.row("ETV")
    if high is None or low is None or not (high.values and low.values):
        return
    bits = ", ".join(
        f"{row.label} {row.first_cycle_bits:.1f} bits in its first cycle and cost {row.relative_cost:.3f}"
        for row in (high, low)
        if row.first_cycle_bits is not None
    )
    told = _difference(against(high, low), panel, decimals(panel))
    yield f"RTV and ETV cost the same but begin differently ({bits}): RTV less ETV is {told}."


def _deficit(panel: Panel) -> Iterator[str]:
    if is_longer(panel):
        yield (
            "Each run is longer by its deficit, so that all have the same steps at full width: where training is far "
            "from its end, the steps at low width help as well."
        )
    yield from _order(panel)


def _window(panel: Panel) -> Iterator[str]:
    yield from _order(panel)
    for row in (row for low, row in analysis.low_rows(panel) if low[1] == row.total_steps):
        yield (
            f"{row.label} ends at {panel.q_min} bits and is evaluated at {panel.q_max}: if the net has batch norm, its "
            "statistics are those of the low width, unless they were estimated anew. So this number is of the window "
            "and of that."
        )


def _delayed(panel: Panel) -> Iterator[str]:
    show = decimals(panel)
    for row in sorted(panel.rows, key=analysis.beside):
        other = reference(row, panel)
        if other is not None and row.values and other.values and not other.label.startswith("static "):
            yield f"{row.label} less {other.label}: {_difference(against(row, other), panel, show)}."


def _order(panel: Panel) -> Iterator[str]:
    """Say whether there is a trend, and how each run compares with the one that never had low precision."""
    yield trend(panel)
    base, show = analysis.undisturbed(panel), decimals(panel)
    if base is not None and base.values:
        rows = [row for _, row in analysis.points(panel) if row is not base]
        told = [f"{row.label} {_difference(against(row, base), panel, show)}" for row in rows]
        level = spread(base.mean, base.deviation, show)
        yield f"Against training without low precision, at {level}: {'; '.join(told)}."


def is_longer(panel: Panel) -> bool:
    """Return whether each run is longer by its deficit."""
    return len({row.total_steps for _, row in analysis.points(panel)}) > 1


def trend(panel: Panel) -> str:
    """Say whether quality follows the length of the deficit, or the start of the window."""
    found = analysis.correlation(analysis.points(panel), panel)
    subject = "A longer deficit" if panel.experiment == "deficit" else "A later window"
    if found.points < analysis.FEWEST_POINTS:
        return f"{subject}: {found.points} points are too few for a trend, which takes {analysis.FEWEST_POINTS}."
    if found.rho is None or found.rho_interval is None:
        return f"{subject}: no rank correlation with quality can be told: {found.reason}."
    rho, interval, _, _ = correlated(found)
    word = "shows no order of quality that these seeds and points can show"
    if analysis.is_trend(found):
        word = f"goes with {'better' if found.rho > 0 else 'worse'} quality"
    return f"{subject} {word}: rank correlation {rho} (95 % interval {interval}), {found.points} points."


def _difference(estimate: Estimate | None, panel: Panel, show: int) -> str:
    if estimate is None:
        return "not known, for lack of values"
    word = verdict(estimate, panel.better)
    if word == "no interval":
        return f"{plus(estimate.value, show)}, from too few seeds for an interval"
    return f"{signed(estimate, show)}, {NONE if word == 'not told apart' else word}"


def _named(row: ScheduleRow, show: int) -> str:
    return f"{row.label}, {spread(row.mean, row.deviation, show)} at a cost of {row.relative_cost:.3f}"


# How numbers are written.


def markdown(text: str) -> str:
    """Escape text for Markdown: no tags, links or code, and on one line."""
    return re.sub(r"([\\`\[\]|])", r"\\\1", escape(" ".join(text.split()), quote=False))


def decimals(panel: Panel) -> int:
    """Return how many decimals show two digits of the median standard deviation, or of a hundredth of the values."""
    largest = max((abs(value) for row in panel.rows for value in row.values.values()), default=1.0)
    return measured.decimals([row.deviation for row in panel.rows], measured.decimals([largest / 100], 2))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in "3 seeds"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def without_value(panel: Panel) -> str:
    """Say how many runs of a panel have no value; empty where all have one."""
    gaps = sum(len(row.failed) + len(row.missing) for row in panel.rows)
    return f"{gaps} run{'s have' if gaps > 1 else ' has'} no value" if gaps else ""


def spread(estimate: Estimate | None, deviation: float | None, show: int) -> str:
    """Return a mean and its standard deviation as text, as in "0.912 ± 0.004"."""
    if estimate is None:
        return NOTHING
    return f"{estimate.value:.{show}f}" + (f" ± {deviation:.{show}f}" if deviation is not None else "")


def signed(estimate: Estimate | None, show: int) -> str:
    """Return a difference and its interval as text, as in "−0.004 (−0.010 to +0.002)"."""
    if estimate is None:
        return NOTHING
    return plus(estimate.value, show) + (f" ({ends(estimate.interval, show)})" if estimate.interval else "")


def plus(value: float, show: int) -> str:
    """Return a number with its sign, with a typographic minus; zero has no sign."""
    text = f"{value:+.{show}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def number(value: float, show: int) -> str:
    """Return a number with a typographic minus."""
    return f"{value:.{show}f}".replace("-", "−")


def ends(interval: Interval, show: int, write: Callable[[float, int], str] = plus) -> str:
    """Return an interval as text, as in "−0.010 to +0.002"."""
    return f"{write(interval.low, show)} to {write(interval.high, show)}"


def correlated(found: Correlation) -> tuple[str, str, str, str]:
    """Return rho, its interval, tau-b and its interval as text."""
    rho, tau = (NOTHING if value is None else plus(value, 2) for value in (found.rho, found.tau))
    rhos, taus = (ends(one, 2) if one else found.reason or NOTHING for one in (found.rho_interval, found.tau_interval))
    return rho, rhos, tau, taus


def _told(estimate: Estimate | None, show: int, write: Callable[[float, int], str]) -> tuple[str, str, str]:
    """Return value, interval and number of seeds as text."""
    if estimate is None:
        return NOTHING, NOTHING, "0"
    interval = ends(estimate.interval, show, write) if estimate.interval else NOTHING
    return write(estimate.value, show), interval, str(estimate.n)
