"""What a study says in sentences, made from its numbers alone, each with its spread and with what it cannot show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpt_fx.study.analysis import (
    FEWEST_POINTS,
    GROUPS,
    Panel,
    Row,
    against,
    correlation,
    cost_correlation,
    group_differences,
    groups,
    is_trend,
    verdict,
)
from cpt_fx.study.critical_rows import beside, first_cycles, low_steps, reference, undisturbed
from cpt_fx.study.statistics import Estimate
from cpt_fx.study.tables import TITLES
from cpt_fx.study.wording import correlated, decimals, plus, signed, spread, without_value

NONE = "no difference that these seeds can show"


@dataclass(frozen=True)
class Conclusion:
    """What one panel says: where it holds, and the findings."""

    where: str
    findings: tuple[str, ...]


def conclusions(panels: Sequence[Panel]) -> list[Conclusion]:
    """Return what each panel says."""
    makers = {"deficit": _deficit, "window": _window, "delayed": _delayed, "first-cycle": _first_cycle}
    found = []
    for panel in panels:
        title = TITLES.get(panel.experiment, panel.experiment)
        where = f"{title} at {panel.bits}, by {panel.metric} ({panel.better} is better), over {seeds(panel)}."
        sentences = _common(panel, makers.get(panel.experiment, _schedules)(panel))
        found.append(Conclusion(where, tuple(sentences)))
    return found


def _common(panel: Panel, sentences: Iterator[str]) -> Iterator[str]:
    if not any(row.values for row in panel.rows):
        yield "No run has a value."
        return
    if gaps := without_value(panel):
        yield f"{gaps}; what follows is from the others."
    if len(panel.seeds) < 2:
        yield "With one seed there is no spread, so nothing below says what another seed would give."
    yield from sentences


def seeds(panel: Panel) -> str:
    """Return "3 seeds"."""
    return f"{len(panel.seeds)} seed{'s' * (len(panel.seeds) != 1)}"


def _schedules(panel: Panel) -> Iterator[str]:
    show = decimals(panel)
    yield _cost(panel)
    cyclic = [row for row in panel.cyclic if row.mean is not None]
    if cyclic:
        best = _best(cyclic, panel)
        cheapest = min(cyclic, key=lambda row: row.relative_cost)
        yield f"The best mean among the schedules: {_named(best, show)}. The cheapest: {_named(cheapest, show)}."
    yield from _against_static(panel, cyclic, show)
    yield from _groups(panel, show)
    yield from _first_cycle(panel)


def _cost(panel: Panel) -> str:
    found = cost_correlation(panel)
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


def _against_static(panel: Panel, cyclic: Sequence[Row], show: int) -> Iterator[str]:
    static = panel.static
    if static is None or not static.values or not cyclic:
        return
    compared = [(row, against(row, static)) for row in cyclic]
    start = f"Against static {panel.q_max} at {spread(static.mean, static.deviation, show)}: "
    parts = []
    for word in ("better", "worse"):
        found = [f"{row.label} {signed(one, show)}" for row, one in compared if verdict(one, panel.better) == word]
        parts.append(f"{word} {', '.join(found) or 'none'}")
    alike = [row.label for row, one in compared if verdict(one, panel.better) == "not told apart"]
    if alike:
        parts.append(f"{NONE} for {', '.join(alike)}")
    unknown = [row.label for row, one in compared if verdict(one, panel.better) == "no interval"]
    if unknown:
        parts.append(f"too few seeds to say for {', '.join(unknown)}")
    chance = ""
    if (tried := len(compared) - len(unknown)) > 1:
        chance = f" Of {tried} such comparisons at 95 %, {tried * 0.05:.2g} would stand out by chance."
    yield start + "; ".join(parts) + "." + chance


def _groups(panel: Panel, show: int) -> Iterator[str]:
    found = groups(panel)
    if len(found) < 2:
        return
    means = ", ".join(f"{one.name} {spread(one.mean, None, show)}" for one in found)
    told = [f"{one} less {two}: {_told(estimate, panel, show)}" for one, two, estimate in group_differences(panel)]
    absent = [name for name in GROUPS if name not in {one.name for one in found}]
    lack = f" The group with {absent[0]} saving has no schedule with a value." if absent else ""
    yield f"Means of the groups by saving: {means}. {'; '.join(told).capitalize()}.{lack}"


def _first_cycle(panel: Panel) -> Iterator[str]:
    pair, show = first_cycles(panel), decimals(panel)
    if pair is None or not all(row.values for row in pair):
        return
    high, low = pair
    bits = ", ".join(
        f"{row.label} {row.first_cycle_bits:.1f} bits in its first cycle and cost {row.relative_cost:.3f}"
        for row in pair
        if row.first_cycle_bits is not None
    )
    told = _told(against(high, low), panel, show)
    yield f"RTV and ETV cost the same but begin differently ({bits}): RTV less ETV is {told}."


def _deficit(panel: Panel) -> Iterator[str]:
    rows = [(low[1], row) for row in panel.rows if row.values and (low := low_steps(row, panel)) is not None]
    rows.sort(key=lambda item: item[0])
    if len({row.total_steps for _, row in rows}) > 1:
        yield (
            "Each run is longer by its deficit, so that all have the same steps at full width: where training is far "
            "from its end, the steps at low width help as well."
        )
    yield from _order(panel, [row for _, row in rows], [length for length, _ in rows], "A longer deficit")
    yield from _each(panel, [row for _, row in rows])


def _window(panel: Panel) -> Iterator[str]:
    found = [(low_steps(row, panel), row) for row in panel.rows if row.values]
    rows = sorted(((low[0], row) for low, row in found if low is not None and low[1]), key=lambda item: item[0])
    yield from _order(panel, [row for _, row in rows], [start for start, _ in rows], "A later window")
    yield from _each(panel, [row for _, row in rows])
    for row in (row for low, row in found if low is not None and low[1] == row.total_steps):
        yield (
            f"{row.label} ends at {panel.q_min} bits and is evaluated at {panel.q_max}: if the net has batch norm, its "
            "statistics are those of the low width, unless they were estimated anew. So this number is of the window "
            "and of that."
        )


def _delayed(panel: Panel) -> Iterator[str]:
    show = decimals(panel)
    for row in sorted(panel.rows, key=beside):
        other = reference(row, panel)
        if other is not None and row.values and other.values and not other.label.startswith("static "):
            yield f"{row.label} less {other.label}: {_told(against(row, other), panel, show)}."


def _order(panel: Panel, rows: Sequence[Row], x: Sequence[float], subject: str) -> Iterator[str]:
    found = correlation(rows, x, panel.better)
    if found.points < FEWEST_POINTS:
        yield f"{subject}: {found.points} points are too few for a trend, which takes {FEWEST_POINTS}."
        return
    if found.rho is None or found.rho_interval is None:
        return
    rho, interval, _, _ = correlated(found)
    if is_trend(found):
        word = f"goes with {'better' if found.rho > 0 else 'worse'} quality"
    else:
        word = "shows no order of quality that these seeds and points can show"
    yield f"{subject} {word}: rank correlation {rho} (95 % interval {interval}), {found.points} points."


def _each(panel: Panel, rows: Sequence[Row]) -> Iterator[str]:
    base, show = undisturbed(panel), decimals(panel)
    if base is None or not base.values:
        return
    told = [f"{row.label} {_told(against(row, base), panel, show)}" for row in rows if row is not base]
    level = spread(base.mean, base.deviation, show)
    yield f"Against training without low precision, at {level}: {'; '.join(told)}."


def _told(estimate: Estimate | None, panel: Panel, show: int) -> str:
    if estimate is None:
        return "not known, for lack of values"
    word = verdict(estimate, panel.better)
    if word == "no interval":
        return f"{plus(estimate.value, show)}, from too few seeds for an interval"
    return f"{signed(estimate, show)}, {NONE if word == 'not told apart' else word}"


def _best(rows: Sequence[Row], panel: Panel) -> Row:
    sign = 1.0 if panel.better == "higher" else -1.0
    return max(rows, key=lambda row: sign * row.mean.value if row.mean else -float("inf"))


def _named(row: Row, show: int) -> str:
    return f"{row.label}, {spread(row.mean, row.deviation, show)} at a cost of {row.relative_cost:.3f}"
