"""The figures of a study. The main one: quality against relative cost, a point for each schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpt_fx.study import critical_figures
from cpt_fx.study.analysis import FULL, GROUPS, Panel, Row, cost_correlation
from cpt_fx.study.figure_style import COLOURS, INK, MARKERS, SOFT, STYLE, caption, fixed, heading, new
from cpt_fx.study.label_placement import Box, place
from cpt_fx.study.wording import correlated, number, without_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_NEAR, _APART = 0.02, 0.031
"""Points nearer than the first, in axis lengths, are drawn this far apart."""
_FAR = 1.2
"""A baseline this many ranges of all others away is drawn at the edge, with its value."""


def figures(panels: Sequence[Panel]) -> dict[str, Figure]:
    """Return the figures that a study has data for, by name: "cost", "deficit", "window", "first-cycle", "delayed"."""
    import matplotlib

    drawn: dict[str, Figure] = {}
    draw = {"schedules": cost_figure, **critical_figures.DRAW}
    with matplotlib.rc_context(STYLE):
        for experiment in dict.fromkeys(panel.experiment for panel in panels):
            own = [
                panel for panel in panels if panel.experiment == experiment and any(row.values for row in panel.rows)
            ]
            if own:
                figure = draw.get(experiment, critical_figures.rows_figure)(own)
                fixed(figure)
                drawn["cost" if experiment == "schedules" else experiment] = figure
    return drawn


def cost_figure(panels: Sequence[Panel]) -> Figure:
    """Draw quality against relative cost, a panel for each (q_min, q_max)."""
    figure, axes = new(len(panels))
    placed = [_cost_panel(ax, panel) for ax, panel in zip(axes, panels, strict=True)]
    fixed(figure)  # labels are measured in pixels
    for ax, points in zip(axes, placed, strict=True):
        _label(ax, points)
    return figure


def _cost_panel(ax: Axes, panel: Panel) -> list[tuple[str, float, float, float]]:
    """Draw a panel; return label, x, y and half the length of the bar of each point."""
    rows = [row for row in panel.rows if row.mean is not None and row.group != FULL]
    ax.set_xlabel(f"BitOps relative to static {panel.q_max}")
    low, high = _limits(panel)
    ax.set_ylim(low, high)
    places = _side_by_side([row.relative_cost for row in rows])
    points = []
    for row, x in zip(rows, places, strict=True):
        assert row.mean is not None  # such rows were left out
        y, bar = row.mean.value, row.deviation or 0.0
        label = row.label
        if not low <= y <= high:  # a baseline far off: its place at the edge, and its value
            label = f"{row.label}: {number(y, 3)} {'↓' if y < low else '↑'}"
            y, bar = (low if y < low else high), 0.0
        ax.errorbar(
            x, y, yerr=bar or None, fmt=MARKERS[row.group], color=COLOURS[row.group], markersize=6.5, elinewidth=1.3,
            capsize=2.5, clip_on=False, zorder=3, markerfacecolor="white" if row.group == "static" else None,
            markeredgewidth=1.5,
        )  # fmt: skip
        points.append((label, x, y, bar))
    heading(ax, panel, [*_keys(rows), *_full_precision(ax, panel)])
    caption(ax, _cost_caption(panel, rows))
    return points


def _limits(panel: Panel) -> tuple[float, float]:
    """The range of the y axis: of everything, unless a static baseline or full precision would flatten the rest."""
    spans = {
        row.label: (row.mean.value - (row.deviation or 0.0), row.mean.value + (row.deviation or 0.0))
        for row in panel.rows
        if row.mean is not None
    }
    core = [spans[row.label] for row in panel.cyclic if row.label in spans] or list(spans.values())
    if panel.static is not None and panel.static.label in spans:
        core.append(spans[panel.static.label])
    low, high = min(low for low, _ in core), max(high for _, high in core)
    size = (high - low) or abs(high) / 10 or 1.0
    for one in spans.values():
        if low - _FAR * size <= one[0] and one[1] <= high + _FAR * size:
            low, high = min(low, one[0]), max(high, one[1])
    margin = 0.12 * ((high - low) or size)
    return low - margin, high + margin


def _side_by_side(costs: Sequence[float]) -> list[float]:
    """Move points of nearly equal cost apart, around their middle. `costs` ascend."""
    if not costs:
        return []
    length = (max(costs) - min(costs)) or 1.0
    clusters: list[list[float]] = [[costs[0]]]
    for cost in costs[1:]:
        if cost - clusters[-1][-1] < _NEAR * length:
            clusters[-1].append(cost)
        else:
            clusters.append([cost])
    places: list[float] = []
    for cluster in clusters:
        middle = sum(cluster) / len(cluster)
        places.extend(middle + (index - (len(cluster) - 1) / 2) * _APART * length for index in range(len(cluster)))
    return places


def _keys(rows: Sequence[Row]) -> list[Line2D]:
    from matplotlib.lines import Line2D

    present = {row.group for row in rows}
    names = {group: f"{group} saving" for group in GROUPS} | {"other": "other schedules", "static": "static"}
    return [
        Line2D([], [], linestyle="", marker=MARKERS[group], color=COLOURS[group], label=name, markersize=6,
               markerfacecolor="white" if group == "static" else None, markeredgewidth=1.5)
        for group, name in names.items()
        if group in present
    ]  # fmt: skip


def _full_precision(ax: Axes, panel: Panel) -> list[Line2D]:
    """Draw the level of full precision, without moving the limits; return what the legend shows."""
    row = panel.row(FULL)
    if row is None or row.mean is None:
        return []
    value, (low, high) = row.mean.value, ax.get_ylim()
    label = FULL if low <= value <= high else f"{FULL}: {number(value, 3)}, {'below' if value < low else 'above'}"
    return [ax.axhline(value, color=SOFT, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1, label=label)]


def _cost_caption(panel: Panel, rows: Sequence[Row]) -> list[str]:
    found = cost_correlation(panel)
    rho, interval, tau, _ = correlated(found)
    lines = []
    if found.rho is not None:
        ends = f" (95 % interval {interval})" if found.rho_interval else f" (no interval: {interval})"
        lines.append(f"Cost and quality, {found.points} schedules: Spearman's rho {rho}{ends}, Kendall's tau-b {tau}.")
    counts = sorted({len(row.values) for row in rows})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    lines.append(f"Bars: one standard deviation over {seeds} seeds. Points of nearly equal cost stand side by side.")
    if gaps := without_value(panel):
        lines.append(f"{gaps}, and so no part in a mean.")
    return lines


def _label(ax: Axes, points: Sequence[tuple[str, float, float, float]]) -> None:
    renderer = ax.figure.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    scale = ax.figure.figure.dpi / 72
    texts = [
        ax.annotate(label, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=9, color=INK, ha="center",
                    va="center", zorder=4, annotation_clip=False)
        for label, x, y, _ in points
    ]  # fmt: skip
    marks, reaches = [], []
    for _, x, y, bar in points:
        across, up = ax.transData.transform((x, y))
        marks.append(Box(across, up, across, up).grown(4.5 * scale))
        ends = [ax.transData.transform((x, end))[1] for end in (y - bar, y + bar)]
        reaches.append(Box(across - 3 * scale, ends[0], across + 3 * scale, ends[1]).around(marks[-1]))
    extents = [text.get_window_extent(renderer) for text in texts]
    sizes = [(extent.width, extent.height) for extent in extents]
    inside = ax.get_window_extent(renderer)
    boxes = place(marks, reaches, sizes, Box(inside.x0, inside.y0, inside.x1, inside.y1), 2.5 * scale)
    for text, mark, reach, box in zip(texts, marks, reaches, boxes, strict=True):
        (x, y), (to_x, to_y) = mark.centre, box.centre
        offset = ((to_x - x) / scale, (to_y - y) / scale)
        text.set_position(offset)
        if box.distance(reach) > 8 * scale:  # far enough that a thin line must say whose label it is
            ax.annotate(
                "", text.xy, xytext=offset, textcoords="offset points", zorder=2, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.6, "shrinkA": 7, "shrinkB": 5},
            )  # fmt: skip
