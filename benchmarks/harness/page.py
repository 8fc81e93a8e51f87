"""A comparison as one HTML page: bars with whiskers, targets, the table. Self-contained, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from cpt_fx.study.page import page
from harness.catalog import OURS, PEERS
from harness.results import Result, Row
from harness.table import HEADINGS, LEGEND, cells, scale

WIDTH, LEFT, RIGHT, TOP = 880, 206, 74, 8
LINE, THICK = 27, 15
AXIS = 42
REACH = 1.5
"""How far whiskers may extend, in lengths of the longest bar."""
REASON = 88
"""Characters of a reason that fit beside a name."""

STYLE = """
.legend, .key { display: inline-flex; align-items: center; gap: 18px; font-size: 13px; color: var(--soft); }
.key { gap: 7px; }
.tick, .label { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
@media (max-width: 640px) { .tick, .label { font-size: 16px; } }
.grid { stroke: var(--rule); }
.bar.ours { fill: var(--c1); } .bar.peer { fill: var(--c2); } .bar.plain { fill: var(--mark); }
.bar.compiled { fill-opacity: .38; stroke-width: 1.5; }
.bar.compiled.ours { stroke: var(--c1); } .bar.compiled.peer { stroke: var(--c2); }
.bar.compiled.plain { stroke: var(--mark); }
.whisker { stroke: var(--ink); stroke-width: 1.4; fill: none; }
.one { stroke: var(--ink); stroke-dasharray: 3 3; opacity: .6; }
.name, .value { font-size: 12.5px; fill: var(--ink); font-variant-numeric: tabular-nums; }
.value, .absent { paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round; }
.absent { font-size: 12px; fill: var(--soft); font-style: italic; }
.key b { display: inline-block; width: 14px; height: 11px; }
.key b.ours { background: var(--c1); } .key b.peer { background: var(--c2); } .key b.plain { background: var(--mark); }
.key b.compiled { background: none; border: 1.5px solid var(--soft); }
ul.targets { list-style: none; margin: 8px 0 0; padding: 0; }
ul.targets li { padding: 6px 0; border-bottom: 1px solid var(--rule); display: flex; gap: 16px; }
ul.targets b { flex: 0 0 112px; } ul.targets li > span { flex: 1; }
ul.targets li > span + span { flex: 0 0 220px; text-align: right; color: var(--soft); }
ul.targets .met { color: var(--c1); } ul.targets .missed { color: var(--c2); } ul.targets .none { color: var(--soft); }
.wide { width: min(1240px, 100vw - 64px); margin: 10px 0 0 50%; transform: translateX(-50%); }
.wide td.reason { text-align: left; color: var(--soft); font-style: italic; white-space: normal; }
.wide th, .wide td { padding-left: 12px; white-space: nowrap; }
.wide thead th { white-space: normal; vertical-align: bottom; }
"""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a chart: a value with its range of variation, or the reason why there is none."""

    label: str
    kind: str
    compiled: bool
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""


def html(result: Result) -> str:
    """Return the page of a comparison."""
    # The table also compares with compiled FP32; the chart has a single scale, that of FP32 eager.
    steps = [_bar(row, result) for row in result.rows]
    peaks = [
        Bar(label=bar.label, kind=bar.kind, compiled=bar.compiled, value=result.memory_ratio(row), reason=bar.reason)
        for bar, row in zip(steps, result.rows, strict=True)
    ]
    sections = [
        f"<style>{STYLE}</style>",
        _figure("Step time", f"Relative to FP32 eager; less is faster. {scale(result)} Whiskers: where eight in ten "
                "rounds lie; very long ones are cut.", bars(steps, "step time relative to FP32 eager")),
        _figure("Peak memory", "The most that tensors hold in a step, weights and batch included, relative to FP32 "
                "eager.", bars(peaks, "peak memory relative to FP32 eager")),
        _targets(result),
        _table(result),
    ]  # fmt: skip
    lead = f"{result.about}. A training step under every way to run it, taking turns in one process."
    return page(f"Step time and memory of {result.model}", lead, sections, str(result.machine))


def bars(rows: Sequence[Bar], label: str) -> str:
    """Draw horizontal bars from zero, with a line at 1."""
    longest = max([1.0, *(bar.value for bar in rows if bar.value is not None)])
    # A whisker that is far longer than any bar is cut: otherwise the bars would be too small to compare.
    top = 1.06 * min(max([longest, *(bar.high for bar in rows if bar.high is not None)]), REACH * longest)
    base = TOP + LINE * len(rows)

    def to_x(value: float) -> float:
        return round(LEFT + min(value / top, 1.0) * (WIDTH - LEFT - RIGHT), 2)

    drawn = [f'<svg viewBox="0 0 {WIDTH} {base + AXIS}" role="img" aria-label="{escape(label)}">']
    for tick in linear_ticks(0, top, 8):
        x = to_x(tick)
        drawn.append(f'<line class="grid" x1="{x}" y1="{TOP}" x2="{x}" y2="{base}"/>')
        drawn.append(f'<text class="tick" x="{x}" y="{base + 17}" text-anchor="middle">{tick:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    drawn.append(f'<text class="label" x="{middle:g}" y="{base + 36}" text-anchor="middle">{escape(label)}</text>')
    shapes: list[str] = []
    texts: list[str] = []
    for index, bar in enumerate(rows):
        y = TOP + LINE * index + LINE / 2
        shapes.extend(_shapes(bar, y, to_x))
        texts.extend(_texts(bar, y, to_x))
    one = to_x(1)
    line = f'<line class="one" x1="{one}" y1="{TOP}" x2="{one}" y2="{base}"/>'
    return "\n".join([*drawn, *shapes, line, *texts, "</svg>"])


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Return at most some `count` round numbers in a range."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _shapes(bar: Bar, y: float, to_x: Callable[[float], float]) -> Iterator[str]:
    if bar.value is None:
        return
    kind = f"bar {bar.kind}" + " compiled" * bar.compiled
    length = to_x(bar.value) - LEFT
    yield f'<rect class="{kind}" x="{LEFT}" y="{y - THICK / 2:g}" width="{length:g}" height="{THICK}"/>'
    if bar.low is not None and bar.high is not None:
        low, high = to_x(bar.low), to_x(bar.high)
        ends = f"M{low:g} {y - 4:g}V{y + 4:g}M{low:g} {y:g}H{high:g}M{high:g} {y - 4:g}V{y + 4:g}"
        yield f'<path class="whisker" d="{ends}"/>'


def _texts(bar: Bar, y: float, to_x: Callable[[float], float]) -> Iterator[str]:
    yield f'<text class="name" x="{LEFT - 10}" y="{y + 4:g}" text-anchor="end">{escape(bar.label)}</text>'
    if bar.value is None:
        short = bar.reason if len(bar.reason) <= REASON else f"{bar.reason[: REASON - 1]}…"
        yield f'<text class="absent" x="{LEFT + 6}" y="{y + 4:g}">{escape(short)}</text>'
    else:
        end = to_x(bar.value if bar.high is None else max(bar.value, bar.high))
        yield f'<text class="value" x="{end + 7:g}" y="{y + 4:g}">{bar.value:.2f}</text>'


def _bar(row: Row, result: Result) -> Bar:
    contender, ratio = row.contender, result.ratio(row)
    kind = "ours" if contender.kind in OURS else "peer" if contender.kind in PEERS else "plain"
    known = {} if ratio is None else {"value": ratio.median, "low": ratio.low, "high": ratio.high}
    reason = f"not available: {row.reason}" if row.reason else ""
    return Bar(label=contender.label, kind=kind, compiled=contender.compiled, reason=reason, **known)


def _figure(title: str, note: str, svg: str) -> str:
    keys = "".join(
        f'<span class="key"><b class="{kind}"></b>{text}</span>'
        for kind, text in (("plain", "torch"), ("ours", "cpt_fx"), ("peer", "other packages"), ("compiled", "compiled"))
    )
    return (
        f'<figure><figcaption><h2>{escape(title)}</h2><span class="legend">{keys}</span></figcaption>\n'
        f'{svg}\n<p class="note">{escape(note)}</p></figure>'
    )


def _targets(result: Result) -> str:
    if not result.verdicts:
        return ""
    items = "".join(
        f'<li><b class="{({True: "met", False: "missed", None: "none"})[verdict.met]}">{verdict.word}</b>'
        f"<span>{escape(str(verdict.target))}</span><span>{escape(verdict.measured)}</span></li>"
        for verdict in result.verdicts
    )
    return f'<section><h2>Targets</h2><ul class="targets">{items}</ul></section>'


def _table(result: Result) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    body = []
    for row in result.rows:
        name, *rest = cells(result, row)
        if row.available:
            filled = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        else:
            filled = f'<td class="reason" colspan="{len(HEADINGS) - 1}">{escape(rest[0])}</td>'
        body.append(f"<tr><th>{escape(name)}</th>{filled}</tr>")
    return (
        f'<section><h2>All of it</h2><div class="scroll wide"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(body)}</tbody></table></div><p class="note">{"<br>".join(map(escape, LEGEND))}</p></section>'
    )
