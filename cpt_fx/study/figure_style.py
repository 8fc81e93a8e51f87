"""How the figures of a study look, how they are saved, the same bytes every time, and how a page holds them."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cpt_fx.study.analysis import Panel

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, RULE = "#16191d", "#5b636e", "#e4e7eb"
# From the palette of Okabe and Ito, which colour-blind readers can tell apart; each colour has a marker of its own.
COLOURS = {"small": "#0072b2", "medium": "#007a5a", "large": "#c44e00", "other": "#a3477f", "static": "#16191d"}
MARKERS = {"small": "o", "medium": "^", "large": "v", "other": "D", "static": "s"}
DPI = 160
PANEL = (7.6, 4.9)
"""Width and height of a panel, in inches."""
_LINE = 112
"""Characters of a caption that fit below a panel."""
DARK = {"small": "#56b4e9", "medium": "#3fc79a", "large": "#ff9a57", "other": "#dd8fc0"}
"""The same hues on a dark page, light enough to read."""
VARIABLES = {COLOURS[name]: f"--{name}" for name in DARK}
VARIABLES |= {INK: "--ink", SOFT: "--soft", RULE: "--rule", "#ffffff": "--page"}
"""What the page calls the colours of drawings."""

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
    "svg.fonttype": "none",  # letters stay letters: small files, and text that can be searched
    "svg.hashsalt": "cpt_fx",
    "text.parse_math": False,  # names come from stores: a dollar is a dollar
}


def new(panels: int, *, height: float = PANEL[1]) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels below each other: on a page two side by side would be too small to read."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PANEL[0], height * panels), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(panels, 1, squeeze=False).ravel().tolist()


def heading(axes: Axes, panel: Panel, keys: Sequence[Artist] = ()) -> None:
    """Write the title, the name of the metric, and below the title the legend."""
    axes.set_title(f"q_min {panel.q_min}, q_max {panel.q_max}", pad=24 if keys else 10)
    axes.set_ylabel(f"{panel.metric} ({panel.better} is better)")
    if keys:
        axes.legend(handles=list(keys), loc="lower left", bbox_to_anchor=(0, 1), ncols=len(keys), columnspacing=1.2,
                    handletextpad=0.35, borderaxespad=0.2, borderpad=0.1, handlelength=1.9)  # fmt: skip


def caption(axes: Axes, sentences: Sequence[str], *, drop: float = 40) -> None:
    """Write sentences in small type below the axis, `drop` points under it; each starts a line."""
    lines = [line for sentence in sentences for line in textwrap.wrap(sentence, _LINE)]
    axes.annotate(
        "\n".join(lines), xy=(0, 0), xycoords="axes fraction", xytext=(0, -drop), textcoords="offset points",
        va="top", ha="left", fontsize=8.5, color=SOFT, linespacing=1.35,
    )  # fmt: skip


def save(figure: Figure, kind: str) -> bytes:
    """Return the figure as "png" or "svg", without a date, so that equal records give equal files."""
    import matplotlib

    target = io.BytesIO()
    metadata: Any = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context(STYLE):
        figure.savefig(target, format=kind, metadata=metadata, facecolor="white", bbox_inches="tight", pad_inches=0.12)
    return target.getvalue()


def inlined(svg: str, name: str, title: str, colours: Mapping[str, str] = VARIABLES) -> str:
    """Return a drawing for a page that holds several: its ids are its own, its colours are the page's."""
    svg = svg[svg.index("<svg") :]
    # Inside a page the drawing's style element would be everyone's; what it sets are the lines' joins.
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    head = rf'<svg style="stroke-linejoin: round; stroke-linecap: butt" viewBox="\1" role="img" aria-label="{title}">'
    svg = re.sub(r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>', head, svg)
    for colour, variable in colours.items():
        svg = re.sub(re.escape(colour), f"var({variable})", svg, flags=re.IGNORECASE)
    return svg
