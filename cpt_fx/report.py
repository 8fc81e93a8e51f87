"""Charts as SVG and a page around them: one file, no scripts, nothing to load, light and dark."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 880, 240
LEFT, RIGHT, TOP, BOTTOM = 66, 22, 10, 40


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart. `colour` counts the page's colours from 1; a faint line is left out of the legend."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    faint: bool = False
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over a common axis. `steps` draws stairs: a value holds until the next one.

    `y_range` clips what lies outside; without it the range is that of the data. `marks` are vertical lines.
    """

    title: str
    note: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_range: tuple[float, float]
    y_range: tuple[float, float] | None = None
    log: bool = False
    steps: bool = False
    marks: Sequence[float] = ()
    ticks: int = 5

    def svg(self) -> str:
        """Draw the chart. Its colours are the page's, so it follows light and dark."""
        low, high = self._limits()
        ticks = log_ticks(low, high) if self.log else linear_ticks(low, high, self.ticks)
        to_y = _scale((low, high), (HEIGHT - BOTTOM, TOP), self.log)
        to_x = _scale(self.x_range, (LEFT, WIDTH - RIGHT), False)
        clip = f"clip-{''.join(character for character in self.title.lower() if character.isalnum())}"
        drawn = list(self._drawn(to_x, to_y, low))
        return "\n".join(
            [
                f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
                f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP - 4}" width="{WIDTH - LEFT - RIGHT}" '
                f'height="{HEIGHT - TOP - BOTTOM + 4}"/></clipPath>',
                *(_line("mark", to_x(mark), TOP, to_x(mark), HEIGHT - BOTTOM) for mark in self.marks),
                *(_line("grid", LEFT, to_y(tick), WIDTH - RIGHT, to_y(tick)) for tick in ticks),
                *(_text("tick", LEFT - 8, to_y(tick) + 4, _number(tick), "end") for tick in ticks),
                *self._x_axis(to_x),
                f'<text class="label" text-anchor="middle" transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2:g}) '
                f'rotate(-90)">{escape(self.y_label)}</text>',
                f'<g clip-path="url(#{clip})">',
                *drawn,
                "</g>",
                "</svg>",
            ]
        )

    def html(self) -> str:
        """Return the chart with its title, legend and note."""
        keys = "".join(
            f'<span class="key"><i class="c{line.colour}{" dashed" if line.dashed else ""}"></i>'
            f"{escape(line.label)}</span>"
            for line in self.series
            if not line.faint
        )
        return (
            f'<figure><figcaption><h2>{escape(self.title)}</h2><span class="legend">{keys}</span></figcaption>\n'
            f'{self.svg()}\n<p class="note">{escape(self.note)}</p></figure>'
        )

    def _limits(self) -> tuple[float, float]:
        if self.y_range is not None:
            return self.y_range
        finite = [value for line in self.series for value in line.y if math.isfinite(value)]
        usable = [value for value in finite if value > 0] if self.log else finite
        low, high = min(usable, default=1.0), max(usable, default=10.0)
        if self.log:
            # Whole decades would waste half the picture when the data ends just above one.
            return low / 1.25, max(high * 1.25, low * 10)
        margin = 0.06 * (high - low) or 0.5
        return low - margin, high + margin

    def _x_axis(self, to_x: Callable[[float], float]) -> Iterator[str]:
        base = HEIGHT - BOTTOM
        yield _line("axis", LEFT, base, WIDTH - RIGHT, base)
        for tick in linear_ticks(*self.x_range, 8):
            yield _line("axis", to_x(tick), base, to_x(tick), base + 4)
            yield _text("tick", to_x(tick), base + 17, _number(tick), "middle")
        yield _text("label", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, self.x_label, "middle")

    def _drawn(self, to_x: Callable[[float], float], to_y: Callable[[float], float], low: float) -> Iterator[str]:
        # Faint lines first: they lie below the ones that matter.
        for line in sorted(self.series, key=lambda line: not line.faint):
            # A logarithm cannot show zero, and a gap says so where a value is not finite.
            points = [
                (to_x(x), to_y(max(y, low / 10) if self.log else y)) if math.isfinite(y) else None
                for x, y in zip(line.x, line.y, strict=True)
            ]
            path = " ".join(_path(piece, self.steps) for piece in _pieces(points))
            kind = f"c{line.colour}" + " faint" * line.faint + " dashed" * line.dashed
            yield f'<path class="line {kind}" d="{path}"><title>{escape(line.label)}</title></path>'


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the moving average over the last `window` values; shorter at the start, and free of what is not finite."""
    result = []
    for end in range(1, len(values) + 1):
        recent = [value for value in values[max(end - window, 0) : end] if math.isfinite(value)]
        result.append(sum(recent) / len(recent) if recent else math.nan)
    return result


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Return at most some `count` round numbers in a range."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten in a range, or 1-2-5 steps where there would be fewer than two."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**power for power in decades if low <= 10.0**power <= high]
    if len(powers) > 1:
        return powers
    return [value for power in decades for factor in (1, 2, 5) if low <= (value := factor * 10.0**power) <= high]


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table whose first column names the row, with the colour of its line."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f'<tr><th><i class="c{index}"></i>{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for index, row in enumerate(rows, start=1)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def picture(svg: str, alt: str) -> str:
    """Embed a foreign SVG as an image, so that its styles and the page's cannot meet."""
    data = b64encode(svg.encode()).decode()
    return f'<div class="scroll graph"><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}"></div>'


def page(title: str, lead: str, sections: Sequence[str], foot: str) -> str:
    """Return a complete page. `sections` is HTML; the other arguments are text."""
    return PAGE.format(
        title=escape(title), lead=escape(lead), style=STYLE, sections="\n".join(sections), foot=escape(foot)
    )


def _scale(domain: tuple[float, float], target: tuple[float, float], log: bool) -> Callable[[float], float]:
    (low, high), (start, end) = domain, target
    if log:
        low, high = math.log10(low), math.log10(high)
    span = high - low or 1.0
    return lambda value: round(start + ((math.log10(value) if log else value) - low) / span * (end - start), 2)


def _pieces(points: Sequence[tuple[float, float] | None]) -> Iterator[list[tuple[float, float]]]:
    piece: list[tuple[float, float]] = []
    for point in [*points, None]:
        if point is not None:
            piece.append(point)
        elif piece:
            yield piece
            piece = []


def _path(points: Sequence[tuple[float, float]], steps: bool) -> str:
    (x, y), *rest = points
    parts = [f"M{x:g} {y:g}"]
    parts.extend(f"H{x:g}V{y:g}" if steps else f"L{x:g} {y:g}" for x, y in rest)
    return "".join(parts)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\N{THIN SPACE}") if abs(value) >= 1000 else f"{value:g}"


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
<main>
<header><h1>{title}</h1><p>{lead}</p></header>
{sections}
<footer>{foot}</footer>
</main>
</html>
"""

STYLE = """
:root { --page: #fff; --ink: #16191d; --soft: #5b636e; --rule: #e4e7eb; --mark: #b4bcc8; --c1: #1f5fd0; --c2: #c8500a; }
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e8eaed; --soft: #9aa3ae; --rule: #2c3138; --mark: #566070; --c1: #7fb0ff; --c2: #ffa35c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
main { max-width: 944px; margin: 0 auto; padding: 40px 32px 56px; }
h1 { font-size: 26px; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 8px; }
h2 { font-size: 16px; margin: 0; }
header p { color: var(--soft); margin: 0 0 28px; max-width: 68ch; }
figure, section { margin: 36px 0 0; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; gap: 4px 24px; }
figcaption { margin-bottom: 8px; }
.legend, .key { display: inline-flex; align-items: center; gap: 18px; font-size: 13px; color: var(--soft); }
.key { gap: 7px; }
i { display: inline-block; width: 18px; height: 0; border-top: 2.5px solid; vertical-align: middle; }
th i { margin-right: 10px; }
i.dashed { border-top-style: dashed; }
i.c1 { border-color: var(--c1); } i.c2 { border-color: var(--c2); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.tick, .label { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); } .mark { stroke: var(--mark); stroke-width: 1.5; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.faint { stroke-width: 1; opacity: .28; } .line.dashed { stroke-dasharray: 6 4; }
.note { margin: 6px 0 0; font-size: 13px; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 9px 0 9px 20px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { font-size: 13px; font-weight: 500; color: var(--soft); padding-top: 0; }
tbody th { font-weight: 600; }
/* Wider than the text: a drawing of a graph needs the room. */
.graph { width: min(1560px, 100vw - 64px); margin: 10px 0 0 50%; transform: translateX(-50%); }
.graph { border: 1px solid var(--rule); border-radius: 6px; }
.graph img { display: block; width: 100%; min-width: 1000px; height: auto; }
a { color: var(--c1); }
footer { margin-top: 44px; padding-top: 14px; border-top: 1px solid var(--rule); font-size: 13px; color: var(--soft); }
@media (max-width: 640px) { .tick, .label { font-size: 16px; } main { padding: 28px 20px; } }
@media print { main { max-width: none; padding: 0; } figure { break-inside: avoid; } }
"""
