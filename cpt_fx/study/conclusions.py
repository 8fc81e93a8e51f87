"""What a study says in sentences, made from its numbers alone, each with its spread and with what it cannot show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cpt_fx.study import analysis
from cpt_fx.study.analysis import GROUPS, Panel, Row, against
from cpt_fx.study.statistics import Estimate
from cpt_fx.study.tables import TITLES, correlated, counted, decimals, plus, signed, spread, without_value

NONE = "no difference that these seeds can show"


@dataclass(frozen=True)
class Conclusion:
    """What one panel says: where it holds, and the findings."""

    where: str
    findings: tuple[str, ...]


def conclusions(panels: Sequence[Panel]) -> list[Conclusion]:
    """Return what each panel says."""
    found = []
    for panel in panels:
        title = TITLES.get(panel.experiment, panel.experiment)
        seeds = counted(len(panel.seeds), "seed")
        where = f"{title} at {panel.bits}, by {panel.metric} ({panel.better} is better), over {seeds}."
        found.append(Conclusion(where, tuple(_findings(panel))))
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
    yield _cost(panel)
    cyclic = [row for row in panel.cyclic if row.mean is not None]
    if cyclic:
        best = max(cyclic, key=lambda row: panel.sign * row.mean.value if row.mean else 0.0)
        cheapest = min(cyclic, key=lambda row: row.relative_cost)
        yield f"The best mean among the schedules: {_named(best, show)}. The cheapest: {_named(cheapest, show)}."
    yield from _against_static(panel, cyclic, show)
    yield from _groups(panel, show)
    yield from _first_cycle(panel)


def _cost(panel: Panel) -> str:
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


def _against_static(panel: Panel, cyclic: Sequence[Row], show: int) -> Iterator[str]:
    static = panel.static
    if static is None or not static.values or not cyclic:
        return
    told: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in cyclic:
        estimate = against(row, static)
        told[analysis.verdict(estimate, panel.better)].append((row.label, signed(estimate, show)))
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
    told = [f"{one} less {two}: {_told(estimate, panel, show)}" for one, two, estimate in differences]
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
    told = _told(against(high, low), panel, decimals(panel))
    yield f"RTV and ETV cost the same but begin differently ({bits}): RTV less ETV is {told}."


def _deficit(panel: Panel) -> Iterator[str]:
    points = [(low[1], row) for low, row in analysis.low_rows(panel)]
    if len({row.total_steps for _, row in points}) > 1:
        yield (
            "Each run is longer by its deficit, so that all have the same steps at full width: where training is far "
            "from its end, the steps at low width help as well."
        )
    yield from _order(panel, points, "A longer deficit")


def _window(panel: Panel) -> Iterator[str]:
    found = analysis.low_rows(panel)
    yield from _order(panel, [(low[0], row) for low, row in found if low[1]], "A later window")
    for row in (row for low, row in found if low[1] == row.total_steps):
        yield (
            f"{row.label} ends at {panel.q_min} bits and is evaluated at {panel.q_max}: if the net has batch norm, its "
            "statistics are those of the low width, unless they were estimated anew. So this number is of the window "
            "and of that."
        )


def _delayed(panel: Panel) -> Iterator[str]:
    show = decimals(panel)
    for row in sorted(panel.rows, key=analysis.beside):
        other = analysis.reference(row, panel)
        if other is not None and row.values and other.values and not other.label.startswith("static "):
            yield f"{row.label} less {other.label}: {_told(against(row, other), panel, show)}."


def _order(panel: Panel, points: Sequence[tuple[int, Row]], subject: str) -> Iterator[str]:
    """Say whether the points are a trend, and how each compares with the run that never had low precision."""
    found = analysis.correlation(points, panel)
    rho, interval, _, _ = correlated(found)
    if found.points < analysis.FEWEST_POINTS:
        yield f"{subject}: {found.points} points are too few for a trend, which takes {analysis.FEWEST_POINTS}."
    elif found.rho is not None and found.rho_interval is not None:
        word = "shows no order of quality that these seeds and points can show"
        if analysis.is_trend(found):
            word = f"goes with {'better' if found.rho > 0 else 'worse'} quality"
        yield f"{subject} {word}: rank correlation {rho} (95 % interval {interval}), {found.points} points."
    base, show = analysis.undisturbed(panel), decimals(panel)
    if base is not None and base.values:
        told = [f"{row.label} {_told(against(row, base), panel, show)}" for _, row in points if row is not base]
        level = spread(base.mean, base.deviation, show)
        yield f"Against training without low precision, at {level}: {'; '.join(told)}."


def _told(estimate: Estimate | None, panel: Panel, show: int) -> str:
    if estimate is None:
        return "not known, for lack of values"
    word = analysis.verdict(estimate, panel.better)
    if word == "no interval":
        return f"{plus(estimate.value, show)}, from too few seeds for an interval"
    return f"{signed(estimate, show)}, {NONE if word == 'not told apart' else word}"


def _named(row: Row, show: int) -> str:
    return f"{row.label}, {spread(row.mean, row.deviation, show)} at a cost of {row.relative_cost:.3f}"
