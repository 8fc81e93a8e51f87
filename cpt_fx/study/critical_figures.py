"""The figures of critical learning periods: deficits, windows, first cycles, delayed schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cpt_fx.study.analysis import FEWEST_POINTS, Panel, Row, correlation
from cpt_fx.study.critical_rows import beside, low_steps, undisturbed
from cpt_fx.study.figure_style import COLOURS, INK, MARKERS, SOFT, caption, heading, new
from cpt_fx.study.wording import correlated, without_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_HEIGHT = 4.2


def deficit_figure(panels: Sequence[Panel]) -> Figure:
    """Draw quality against the length of a deficit at the start of training."""
    figure, axes = new(len(panels), height=_HEIGHT)
    for ax, panel in zip(axes, panels, strict=True):
        rows = [(window[1], row) for row in _valued(panel) if (window := low_steps(row, panel)) is not None]
        rows.sort(key=lambda item: item[0])
        x = [length for length, _ in rows]
        ax.plot(x, [row.mean.value for _, row in rows if row.mean], color=COLOURS["small"], linewidth=1.4, zorder=2)
        for length, row in rows:
            _point(ax, length, row, "small")
        heading(ax, panel, _baseline(ax, panel))
        ax.set_xlabel(f"first steps at {panel.q_min} bits")
        longer = len({row.total_steps for _, row in rows}) > 1
        said = ["Each run is longer by its deficit: the steps at full width are the same."] * longer
        caption(ax, [*said, _order([row for _, row in rows], x, panel, "length of the deficit"), _bars(panel)])
    return figure


def window_figure(panels: Sequence[Panel]) -> Figure:
    """Draw quality for a window of low precision that moves along training."""
    figure, axes = new(len(panels), height=_HEIGHT)
    for ax, panel in zip(axes, panels, strict=True):
        rows = _valued(panel)
        found = [(low_steps(row, panel), row) for row in rows]
        windows = sorted(((low, row) for low, row in found if low is not None and low[1]), key=lambda item: item[0])
        for window, row in windows:
            assert row.mean is not None  # rows without values were left out
            ax.plot(window, [row.mean.value] * 2, color=COLOURS["large"], linewidth=4, alpha=0.45, zorder=2,
                    solid_capstyle="butt")  # fmt: skip
            _point(ax, sum(window) / 2, row, "large")
        heading(ax, panel, _baseline(ax, panel))
        ax.set_xlim(0, max(row.total_steps for row in rows))
        ax.set_xlabel(f"steps at {panel.q_min} bits: each bar is the window of one schedule")
        starts = [window[0] for window, _ in windows]
        caption(ax, [_order([row for _, row in windows], starts, panel, "start of the window"), _bars(panel)])
    return figure


def rows_figure(panels: Sequence[Panel]) -> Figure:
    """Draw a column for each schedule: every seed, mean and standard deviation."""
    figure, axes = new(len(panels), height=_HEIGHT)
    for ax, panel in zip(axes, panels, strict=True):
        rows = sorted(_valued(panel), key=beside)
        for place, row in enumerate(rows):
            group = row.group if row.group in COLOURS else "static"
            count = len(row.values)
            spots = [place + 0.18 + 0.06 * (index - (count - 1) / 2) for index in range(count)]
            ax.plot(spots, list(row.values.values()), "o", color=COLOURS[group], markersize=3.5, alpha=0.5, zorder=2)
            _point(ax, place, row, group)
        names = [_name(row, panel) for row in rows]
        # From eight on, words of this size would run into each other.
        ax.set_xticks(range(len(rows)), names, fontsize="medium" if len(rows) < 8 else "x-small")
        ax.set_xlim(-0.6, len(rows) - 0.4)
        ax.grid(axis="x", visible=False)
        ax.margins(y=0.15)
        heading(ax, panel)
        caption(ax, [f"Small dots: seeds. {_bars(panel)}"], drop=14 + 13 * max(name.count("\n") + 1 for name in names))
    return figure


DRAW: dict[str, Callable[[Sequence[Panel]], Figure]] = {"deficit": deficit_figure, "window": window_figure}


def _valued(panel: Panel) -> list[Row]:
    return [row for row in panel.rows if row.values]


def _point(ax: Axes, x: float, row: Row, group: str) -> None:
    assert row.mean is not None  # rows without values are not drawn
    ax.errorbar(
        x, row.mean.value, yerr=row.deviation, fmt=MARKERS[group], color=COLOURS[group], markersize=6.5,
        elinewidth=1.3, capsize=2.5, zorder=3, markerfacecolor="white" if group == "static" else None,
        markeredgewidth=1.5,
    )  # fmt: skip


def _baseline(ax: Axes, panel: Panel) -> list[Line2D]:
    """Draw the run that never had low precision, with its spread; return what the legend shows."""
    row = undisturbed(panel)
    if row is None or row.mean is None:
        return []
    value, deviation = row.mean.value, row.deviation or 0.0
    label = "never at low precision, with its standard deviation"
    line = ax.axhline(value, color=INK, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1, label=label)
    ax.axhspan(value - deviation, value + deviation, color=SOFT, alpha=0.15, linewidth=0, zorder=0)
    return [line]


def _order(rows: Sequence[Row], x: Sequence[float], panel: Panel, name: str) -> str:
    found = correlation(rows, x, panel.better)
    if found.points < FEWEST_POINTS:
        return f"{found.points} points are too few for a trend."
    rho, interval, _, _ = correlated(found)
    if found.rho is None:
        return f"Too few or too equal points for a rank correlation of {name} and quality."
    ends = f"95 % interval {interval}" if found.rho_interval else f"no interval: {interval}"
    return f"Rank correlation of {name} and quality: Spearman's rho {rho} ({ends}), {found.points} points."


def _bars(panel: Panel) -> str:
    counts = sorted({len(row.values) for row in _valued(panel)})
    seeds = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    gaps = without_value(panel)
    return f"Bars: one standard deviation over {seeds} seeds." + f" {gaps}." * bool(gaps)


def _name(row: Row, panel: Panel) -> str:
    if panel.experiment == "first-cycle" and row.first_cycle_bits is not None:
        return f"{row.label}\nfirst cycle: {row.first_cycle_bits:.1f} bits\ncost {row.relative_cost:.3f}"
    return row.label.replace(" delayed ", "\ndelayed\n").replace(" after deficit ", "\nafter\ndeficit\n")
