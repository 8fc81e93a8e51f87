"""The figures of a study; the main one shows quality against relative cost, with a point for each schedule.

The others are about critical learning periods: deficits, windows, first cycles, delayed schedules.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from cpt_fx.schedules.plot import new_figure
from cpt_fx.study import analysis
from cpt_fx.study.analysis import FULL, GROUPS, Panel, ScheduleRow
from cpt_fx.study.findings import cost_and_quality, is_longer, number, trend, without_value
from cpt_fx.study.statistics import Array

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

INK, SOFT, RULE = "#16191d", "#5b636e", "#e4e7eb"
# From the palette of Okabe and Ito, which colour-blind readers can tell apart; each colour has its own marker.
COLOURS = {"small": "#0072b2", "medium": "#007a5a", "large": "#c44e00", "other": "#a3477f", "static": "#16191d"}
MARKERS = {"small": "o", "medium": "^", "large": "v", "other": "D", "static": "s"}
DPI = 160
WIDTH = 7.6
"""Size of a panel, in inches."""
_LINE = 104
"""Characters that fit in one line of a caption below a panel."""

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"],
    "font.size": 10,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "none",  # text stays text: small files that can be searched
    "svg.hashsalt": "cpt_fx",
    "text.parse_math": False,  # names come from stores: a dollar sign does not start a formula
}

_NEAR, _APART = 0.02, 0.031
"""Points closer than the first value, a share of the axis, are drawn the second value apart."""
_FAR = 1.2
"""A baseline farther from the others than this many times their range is drawn at the edge, with its value."""
_DISTANCES = (0.0, 0.7, 1.5, 2.5, 4.0)
"""How far from its point a label may be, in label heights."""
_DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1))
"""Directions from a point to its label, in order of preference."""
_OUTWARDS = np.array([-1, -1, 1, 1])
"""Times a margin, added to a box: enlarges the box by the margin."""


def figures(panels: Sequence[Panel]) -> dict[str, Figure]:
    """Return the figures that a study has data for, by name: "cost", "deficit", "window", "first-cycle", "delayed"."""
    import matplotlib

    # Full precision is a line in figures with other points, and gets no figure of its own.
    drawable = [panel for panel in panels if {row.group for row in _valued(panel)} - {FULL}]
    drawn: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        for experiment in dict.fromkeys(panel.experiment for panel in drawable):
            own = [panel for panel in drawable if panel.experiment == experiment]
            is_cost = experiment == "schedules"
            figure, axes = new(len(own), height=4.9 if is_cost else 4.2)
            points = [_DRAW.get(experiment, _draw_rows)(ax, panel) for ax, panel in zip(axes, own, strict=True)]
            figure.draw_without_rendering()  # computes the layout, once
            figure.set_layout_engine("none")
            if is_cost:  # labels are placed in pixels, which the layout determines
                for ax, placed in zip(axes, points, strict=True):
                    _label(ax, placed)
            drawn["cost" if is_cost else experiment] = figure
    return drawn


def _draw_cost(ax: Axes, panel: Panel) -> list[tuple[str, float, float, float]]:
    """Draw quality against relative cost; return label, x, y and half the length of the error bar of each point."""
    rows = [row for row in _valued(panel) if row.group != FULL]
    ax.set_xlabel(f"BitOps relative to static {panel.q_max}")
    low, high = _limits(panel)
    ax.set_ylim(low, high)
    places = _side_by_side([row.relative_cost for row in rows])
    points = []
    for row, x in zip(rows, places, strict=True):
        y, bar, label = _mean(row), row.deviation or 0.0, row.label
        if not low <= y <= high:  # a baseline far off is drawn at the edge, with its value
            label = f"{row.label}: {number(y, 3)} {'↓' if y < low else '↑'}"
            y, bar = (low if y < low else high), 0.0
        _point(ax, x, y, bar or None, row.group, clip_on=False)
        points.append((label, x, y, bar))
    said = [cost_and_quality(panel), f"{_bars(rows)} Points of nearly equal cost stand side by side."]
    if gaps := without_value(panel):
        said.append(f"{gaps}, and so no part in a mean.")
    frame(ax, panel, said, [*_keys(rows), *_full_precision(ax, panel)])
    return points


def _draw_deficits(ax: Axes, panel: Panel) -> None:
    """Draw quality against the length of a deficit at the start of training."""
    points = analysis.points(panel)
    lengths, means = [length for length, _ in points], [_mean(row) for _, row in points]
    ax.plot(lengths, means, color=COLOURS["small"], linewidth=1.4, zorder=2)
    for length, row in points:
        _point(ax, length, _mean(row), row.deviation, "small")
    ax.set_xlabel(f"first steps at {panel.q_min} bits")
    longer = "Each run is longer by its deficit: the steps at full width are the same."
    notes = [longer, trend(panel)] if is_longer(panel) else [trend(panel)]
    frame(ax, panel, [*notes, _bars_and_gaps(panel)], _baseline(ax, panel))


def _draw_windows(ax: Axes, panel: Panel) -> None:
    """Draw quality for a window of low precision that moves along training."""
    for window, row in ((low, row) for low, row in analysis.low_rows(panel) if low[1]):
        ax.plot(window, [_mean(row)] * 2, color=COLOURS["large"], linewidth=4, alpha=0.45, zorder=2,
                solid_capstyle="butt")  # fmt: skip
        _point(ax, sum(window) / 2, _mean(row), row.deviation, "large")
    ax.set_xlim(0, max(row.total_steps for row in _valued(panel)))
    ax.set_xlabel(f"steps at {panel.q_min} bits: each bar is the window of one schedule")
    frame(ax, panel, [trend(panel), _bars_and_gaps(panel)], _baseline(ax, panel))


def _draw_rows(ax: Axes, panel: Panel) -> None:
    """Draw a column for each schedule: every seed, mean and standard deviation."""
    rows = sorted(_valued(panel), key=analysis.beside)
    for column, row in enumerate(rows):
        group = row.group if row.group in COLOURS else "static"
        count = len(row.values)
        spots = [column + 0.18 + 0.06 * (index - (count - 1) / 2) for index in range(count)]
        ax.plot(spots, list(row.values.values()), "o", color=COLOURS[group], markersize=3.5, alpha=0.5, zorder=2)
        _point(ax, column, _mean(row), row.deviation, group)
    names = [_name(row, panel) for row in rows]
    # With eight or more rows, labels of this size would overlap.
    ax.set_xticks(range(len(rows)), names, fontsize="medium" if len(rows) < 8 else "x-small")
    ax.set_xlim(-0.6, len(rows) - 0.4)
    ax.grid(axis="x", visible=False)
    ax.margins(y=0.15)
    drop = 14 + 13 * max(name.count("\n") + 1 for name in names)
    frame(ax, panel, [f"Small dots: seeds. {_bars_and_gaps(panel)}"], drop=drop)


_DRAW: dict[str, Callable[[Axes, Panel], Any]] = {
    "schedules": _draw_cost, "deficit": _draw_deficits, "window": _draw_windows,
}  # fmt: skip


def _valued(panel: Panel) -> list[ScheduleRow]:
    return [row for row in panel.rows if row.values]


def _mean(row: ScheduleRow) -> float:
    assert row.mean is not None  # rows without values are not drawn
    return row.mean.value


def _point(ax: Axes, x: float, y: float, bar: float | None, group: str, **more: Any) -> None:
    ax.errorbar(x, y, yerr=bar, markersize=6.5, elinewidth=1.3, capsize=2.5, zorder=3, **_look(group), **more)


def _look(group: str) -> dict[str, Any]:
    """Return how points of a group are marked; those of the baselines are hollow."""
    hollow = {"markerfacecolor": "white"} if group == "static" else {}
    return {"linestyle": "", "marker": MARKERS[group], "color": COLOURS[group], "markeredgewidth": 1.5} | hollow


def _limits(panel: Panel) -> tuple[float, float]:
    """Return the range of the y axis: of all rows, unless a baseline or full precision would flatten the others."""
    bars = {row.label: (_mean(row), row.deviation or 0.0) for row in _valued(panel)}
    spans = {label: (mean - deviation, mean + deviation) for label, (mean, deviation) in bars.items()}
    core = [spans[row.label] for row in panel.cyclic if row.label in spans] or list(spans.values())
    core += [spans[row.label] for row in [panel.static] if row and row.label in spans]
    low, high = min(low for low, _ in core), max(high for _, high in core)
    size = (high - low) or abs(high) / 10 or 1.0
    for bottom, top in spans.values():
        if low - _FAR * size <= bottom and top <= high + _FAR * size:
            low, high = min(low, bottom), max(high, top)
    margin = 0.12 * ((high - low) or size)
    return low - margin, high + margin


def _side_by_side(costs: Sequence[float]) -> list[float]:
    """Move points of nearly equal cost apart, around their mean; `costs` are in ascending order."""
    length = (max(costs, default=0.0) - min(costs, default=0.0)) or 1.0
    places: list[float] = []
    cluster: list[float] = []
    for cost, following in pairwise([*costs, math.inf]):
        cluster.append(cost)
        if following - cost >= _NEAR * length:
            middle, half = sum(cluster) / len(cluster), (len(cluster) - 1) / 2
            places += [middle + (index - half) * _APART * length for index in range(len(cluster))]
            cluster = []
    return places


def _keys(rows: Sequence[ScheduleRow]) -> list[Line2D]:
    from matplotlib.lines import Line2D

    names = {group: f"{group} saving" for group in GROUPS} | {"other": "other schedules", "static": "static"}
    present = [group for group in names if group in {row.group for row in rows}]
    return [Line2D([], [], label=names[group], markersize=6, **_look(group)) for group in present]


def _full_precision(ax: Axes, panel: Panel) -> list[Line2D]:
    """Draw the level of full precision, without moving the limits; return its legend entries."""
    row = panel.row(FULL)
    if row is None or row.mean is None:
        return []
    value, (low, high) = row.mean.value, ax.get_ylim()
    label = FULL if low <= value <= high else f"{FULL}: {number(value, 3)}, {'below' if value < low else 'above'}"
    return [ax.axhline(value, color=SOFT, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1, label=label)]


def _baseline(ax: Axes, panel: Panel) -> list[Line2D]:
    """Draw the run that never had low precision, with its spread; return its legend entries."""
    row = analysis.undisturbed(panel)
    if row is None or row.mean is None:
        return []
    value, deviation = row.mean.value, row.deviation or 0.0
    label = "never at low precision, with its standard deviation"
    line = ax.axhline(value, color=INK, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1, label=label)
    ax.axhspan(value - deviation, value + deviation, color=SOFT, alpha=0.15, linewidth=0, zorder=0)
    return [line]


def _bars(rows: Sequence[ScheduleRow]) -> str:
    counts = sorted({len(row.values) for row in rows})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"Bars: one standard deviation over {seeds} seeds."


def _bars_and_gaps(panel: Panel) -> str:
    gaps = without_value(panel)
    return _bars(_valued(panel)) + f" {gaps}." * bool(gaps)


def _name(row: ScheduleRow, panel: Panel) -> str:
    if panel.experiment == "first-cycle" and row.first_cycle_bits is not None:
        return f"{row.label}\nfirst cycle: {row.first_cycle_bits:.1f} bits\ncost {row.relative_cost:.3f}"
    return row.label.replace(" delayed ", "\ndelayed\n").replace(" after deficit ", "\nafter\ndeficit\n")


def _label(ax: Axes, points: Sequence[tuple[str, float, float, float]]) -> None:
    renderer = ax.figure.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    scale = ax.figure.figure.dpi / 72
    texts = [
        ax.annotate(label, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=9, color=INK, ha="center",
                    va="center", zorder=4, annotation_clip=False)
        for label, x, y, _ in points
    ]  # fmt: skip
    x, y, bar = np.array([place for _, *place in points]).T
    middles, lowest, highest = (ax.transData.transform(np.column_stack([x, end])) for end in (y, y - bar, y + bar))
    marks = np.hstack([middles, middles]) + 4.5 * scale * _OUTWARDS
    reaches = np.hstack([np.minimum(marks[:, :2], lowest), np.maximum(marks[:, 2:], highest)])
    sizes = [text.get_window_extent(renderer).size for text in texts]
    boxes = labels(marks, reaches, sizes, np.array(ax.get_window_extent(renderer).extents), 2.5 * scale)
    for text, middle, reach, box in zip(texts, middles, reaches, boxes, strict=True):
        offset = tuple(((box[:2] + box[2:]) / 2 - middle) / scale)
        text.set_position(offset)
        if distance(box, reach) > 8 * scale:  # so far away that a thin line has to connect it to its point
            ax.annotate(
                "", text.xy, xytext=offset, textcoords="offset points", zorder=2, annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.6, "shrinkA": 7, "shrinkB": 5},
            )  # fmt: skip


# How figures look, and how they are saved: equal records give equal bytes.


def new(panels: int, *, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels below each other: two side by side would be too small to read on a page."""
    figure = new_figure(WIDTH, height * panels, dpi=DPI)
    return figure, figure.subplots(panels, 1, squeeze=False).ravel().tolist()


def frame(axes: Axes, panel: Panel, said: Sequence[str], keys: Sequence[Artist] = (), drop: float = 40) -> None:
    """Add the title, the name of the metric, the legend below the title, and a caption in small type.

    The caption is `drop` points below the axis; each of its sentences starts a line.
    """
    axes.set_title(f"q_min {panel.q_min}, q_max {panel.q_max}", pad=24 if keys else 10)
    axes.set_ylabel(f"{panel.metric} ({panel.better} is better)")
    if keys:
        axes.legend(handles=list(keys), loc="lower left", bbox_to_anchor=(0, 1), ncols=len(keys), columnspacing=1.2,
                    handletextpad=0.35, borderaxespad=0.2, borderpad=0.1, handlelength=1.9)  # fmt: skip
    axes.annotate(
        "\n".join(line for sentence in said for line in textwrap.wrap(sentence, _LINE)), xy=(0, 0),
        xycoords="axes fraction", xytext=(0, -drop), textcoords="offset points", va="top", ha="left", fontsize=8.5,
        color=SOFT, linespacing=1.35,
    )  # fmt: skip


def save(figure: Figure, kind: str) -> bytes:
    """Return the figure as "png" or "svg", without a date, so that equal records give equal files."""
    import matplotlib

    target = io.BytesIO()
    metadata: Any = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context(STYLE):
        figure.savefig(target, format=kind, metadata=metadata, facecolor="white", bbox_inches="tight", pad_inches=0.12)
    return target.getvalue()


# Placement of labels, so that they cover neither each other nor the points. A box is (left, bottom, right, top).


def labels(marks: Array, reaches: Array, sizes: Sequence[ArrayLike], bounds: Array, gap: float) -> list[Array]:
    """Return a box for each label: near its point, inside `bounds`, clear of all points and the other labels.

    A point has a mark, and a reach that includes its error bar: labels go beside the mark, or above or below the reach.
    `sizes` are widths and heights. Each label takes the place with the least overlap, and of several the nearest; a few
    rounds let earlier labels make room for later ones.
    """
    placed: dict[int, Array] = {}
    for _ in range(3):
        for index, (mark, reach, size) in enumerate(zip(marks, reaches, np.array(sizes), strict=True)):
            choices = _around(mark, reach, size, gap)
            others = [box + gap / 2 * _OUTWARDS for other, box in placed.items() if other != index]
            covered = overlap(choices[:, None], np.array([*reaches, *others])).sum(axis=1)
            outside = size.prod() - overlap(choices, bounds)
            # Distance decides only among places that cover nothing, or equally little. Of equally near places the
            # first wins: straight above, straight below, beside.
            near = distance(choices, reach) / size[1] / 10 + np.arange(len(choices)) / 50
            placed[index] = choices[np.argmin(100 * (2 * outside + covered) / size.prod() + near)]
    return list(placed.values())


def _around(mark: Array, reach: Array, size: Array, gap: float) -> Array:
    """Return candidate boxes of a label: beside the mark, or above or below the bar, straight or diagonally."""
    x, y = np.tile(_DIRECTIONS, (len(_DISTANCES), 1)).T
    away = gap + np.repeat(_DISTANCES, len(_DIRECTIONS)) * size[1]
    side = np.where(y == 0, (mark[2] - mark[0]) / 2, 0.0)
    across = (mark[0] + mark[2]) / 2 + x * (side + size[0] / 2 + away)
    above, below = reach[3] + away + size[1] / 2, reach[1] - away - size[1] / 2
    up = np.select([y > 0, y < 0], [above, below], (mark[1] + mark[3]) / 2)
    middles = np.column_stack([across, up])
    return np.hstack([middles - size / 2, middles + size / 2])


def overlap(one: Array, two: Array) -> Array:
    """Return the area that two boxes share; arrays of boxes are broadcast."""
    sides: Array = np.minimum(one[..., 2:], two[..., 2:]) - np.maximum(one[..., :2], two[..., :2])
    area: Array = sides.clip(0.0).prod(axis=-1)
    return area


def distance(one: Array, two: Array) -> Array:
    """Return the distance between boxes, on the axis where it is larger; 0 where they touch or overlap."""
    gaps: Array = np.maximum(one[..., :2], two[..., :2]) - np.minimum(one[..., 2:], two[..., 2:])
    farther: Array = gaps.max(axis=-1)
    return farther.clip(0.0)
