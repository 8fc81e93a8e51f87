"""Plots of schedules."""

from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

from cpt_fx.schedules.base import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable for colour-blind readers, and each with its own line style.
_STYLES = {"forward": ("#0072b2", "-"), "activation": ("#009e73", "-."), "gradient": ("#d55e00", "--")}


def plot_schedule(
    schedule: Schedule, path: "str | PathLike[str] | None", *, ax: "Axes | None" = None, length: int | None = None
) -> "Axes":
    """Draw the bits of each step, and faintly the forward width before rounding."""
    bits = schedule.trajectory(length)
    if not len(bits):
        raise ValueError("length must be at least 1 to plot a schedule, got 0")
    values = schedule._values(schedule._within_run(np.arange(len(bits), dtype=np.int64)))
    if ax is None:
        ax = new_figure(8, 3).subplots()
        if path is None:
            from matplotlib import pyplot  # installed, or new_figure would have raised

            ax = pyplot.subplots(figsize=(8, 3), layout="constrained")[1]
    from matplotlib.ticker import MaxNLocator

    # One edge more than steps: a step's bits hold from its start to the start of the next.
    edges = np.arange(len(bits) + 1)
    for (label, (colour, style)), column in zip(_STYLES.items(), bits.T, strict=True):
        if label != "activation" or (column != bits[:, 0]).any():
            ax.stairs(column, edges, baseline=None, color=colour, linestyle=style, linewidth=1.6, zorder=3, label=label)
    if (values[:, 0] != bits[:, 0]).any():
        ax.plot(edges[:-1], values[:, 0], color="0.6", linewidth=1.0, zorder=2, label="before rounding")
    ax.set_xlabel("step")
    ax.set_ylabel("bits")
    ax.set_xlim(0, len(bits))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(y=0.12)
    if path is not None:
        ax.legend(loc="best", fontsize="small")
        ax.figure.figure.savefig(path)  # the whole figure, also for axes in a subfigure
    return ax


def new_figure(width: float, height: float, *, dpi: int = 150) -> "Figure":
    """Return a figure that pyplot does not manage: it opens no window, and pyplot does not keep it alive."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('plotting needs matplotlib: pip install "cpt_fx[viz]"') from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
