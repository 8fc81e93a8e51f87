"""The drawing as an SVG file: modules expanded to one depth, in colours for light and dark."""

from __future__ import annotations

import re
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from cpt_fx.errors import check_int
from cpt_fx.inspection.boxes import TITLE_BAR, Box, box_of, classes, frame_of, keys, label_of, number, text, title_width
from cpt_fx.inspection.layout import Boxes, Placed, arrivals, in_columns, place, plan
from cpt_fx.inspection.table import ROLES, counts, widths_by_role
from cpt_fx.inspection.tree import IN, OUT, Item, build

if TYPE_CHECKING:
    from cpt_fx.inspection.model import Inspection

PALETTE = {
    "bg": ("#ffffff", "#12161d"), "ink": ("#1b2230", "#e6eaf0"), "muted": ("#5f6b7c", "#96a3b5"),
    "card": ("#ffffff", "#1c222c"), "under": ("#f1f4f8", "#171c24"), "rim": ("#c9d1dc", "#3a4454"),
    "rim-strong": ("#93a0b2", "#5b6a80"), "value": ("#f1f4f8", "#222a35"), "end": ("#2b3442", "#d5dce6"),
    "end-ink": ("#ffffff", "#12161d"), "frame": ("#f8fafc", "#161b23"), "edge": ("#8a97a8", "#6d7b8f"),
    "on-role": ("#ffffff", "#12161d"), "weight": ("#2563c9", "#7fb0ff"), "weight-soft": ("#eaf1fd", "#18263f"),
    "activation": ("#a35203", "#f2b366"), "activation-soft": ("#fdf1e2", "#33260f"), "bias": ("#0f766e", "#5fd0c2"),
    "bias-soft": ("#e3f5f2", "#11302d"), "gradient": ("#a6338f", "#e59ad6"), "gradient-soft": ("#fbeaf7", "#371a32"),
}  # fmt: skip
"""The colours for light and for dark."""
LIGHT, DARK = ({name: pair[theme] for name, pair in PALETTE.items()} for theme in (0, 1))

READABLE = 120
HIGH = 3000.0
PAD = 14.0
BACK = 26.0
TURN = 16.0


def drawing(inspection: Inspection, depth: int | None) -> str:
    """Return the SVG of a model, with a heading and a legend."""
    if depth is not None:
        check_int("depth", depth, 0)
    root = build(inspection.graphs, inspection.quantizers, inspection.name)
    body, placed = _painted(root, depth)
    subtitle = " · ".join(f"{value} {label}" for label, value, _ in counts(inspection))
    state = inspection.state
    label = escape(f"{inspection.name}: {subtitle}; {state}")
    legend, legend_width = keys([*widths_by_role(inspection.quantizers)])
    width = max(placed.width + 48, max(len(subtitle), len(state)) * 6.6 + 48, legend_width + 48)
    height = placed.height + 168
    return (
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" width="{number(width)}" height="{number(height)}" '
        f'viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label="{label}">'
        f"<style>{_standalone_style()}</style>"
        f'<rect class="bg" width="{number(width)}" height="{number(height)}"/>'
        f"{text('heading', 24, 28, inspection.name)}{text('s', 24, 50, subtitle)}{text('s', 24, 68, state)}"
        f'<g transform="translate(24 92)">{legend}</g>'
        f'<g transform="translate({number((width - placed.width) / 2)} 138)">{body}</g></svg>\n'
    )


def levels_of(root: Item, limit: int | None = None) -> list[set[str]]:
    """Return the expanded modules for 0, 1, 2, ... expanded levels, as long as at most `limit` boxes show."""
    found, level, shown = [{root.id}], [root], len(root.children)
    while level := [child for item in level for child in item.children if child.children]:
        shown += sum(len(item.children) for item in level) - len(level)
        if limit is not None and shown > limit:
            break
        found.append(found[-1] | {item.id for item in level})
    return found


def _painted(root: Item, depth: int | None) -> tuple[str, Placed]:
    """Draw to a depth, by default the largest that is neither too crowded nor too tall for a page."""
    if depth is not None:
        levels = levels_of(root)
        return _inside(root, levels[min(depth, len(levels) - 1)])
    for opened in reversed(levels_of(root, READABLE)):
        body, placed = _inside(root, opened)
        if placed.height <= HIGH:
            break
    return body, placed


def _inside(item: Item, opened: set[str]) -> tuple[str, Placed]:
    """Return the content of an expanded module and its coordinates; modules are drawn from the inside out."""
    boxes = {child.id: _box(child, opened) for child in item.children}
    arranged = plan(item)
    placed = place(arranged, boxes)
    if item.parent is None:
        placed = in_columns(arranged, placed, boxes)
    asides = arrivals(arranged, placed, boxes)
    parts = [_edge(chain, aside, placed, boxes) for chain, aside in zip(arranged.chains, asides, strict=True)]
    parts += [_back(a, b, placed, boxes) for a, b in arranged.back]
    for child in item.children:
        box = boxes[child.id]
        x, y = placed.x[child.id] - box.width / 2, placed.top[child.id]
        kind = "frame" if child.id in opened else classes(child)
        parts.append(
            f'<g class="{kind}" transform="translate({number(x)} {number(y)})">'
            f"<title>{escape(label_of(child))}</title>{box.markup}</g>"
        )
    if arranged.back:
        placed.width += BACK
    return "".join(parts), placed


def _box(item: Item, opened: set[str]) -> Box:
    """Return a box, with its content if it is expanded."""
    if item.id not in opened:
        return box_of(item)
    body, placed = _inside(item, opened)
    enter, leave = (placed.x.get(port, placed.width / 2) for port in (IN, OUT))
    # The title is left of the incoming edge: no line runs through it.
    shift = max(PAD, title_width(item) - enter) if IN in placed.x else PAD
    width = max(2 * shift + placed.width, title_width(item) + PAD)
    first = TITLE_BAR if IN in placed.x else TITLE_BAR + PAD / 2
    height = first + placed.height + (0 if OUT in placed.x else PAD)
    lead = f'<path class="edge" d="M{number(shift + enter)} 0V{number(first)}"/>' if IN in placed.x else ""
    content = f'<g transform="translate({number(shift)} {number(first)})">{body}</g>'
    markup = frame_of(item, width, height) + lead + content
    return Box(width, height, markup, (shift + enter - width / 2, shift + leave - width / 2))


def _edge(chain: list[str], aside: float, placed: Placed, boxes: Boxes) -> str:
    """Return one edge: straight through the rows, bent only between them."""
    first, last = chain[0], chain[-1]
    source, end = boxes.get(first), boxes.get(last)
    x, y, row = placed.x[first], placed.top[first], placed.row_of[first]
    if source is not None:
        x, y = x + (source.port[1] if source.port else 0.0), y + source.height
    elif ".." in first:
        y += placed.row_height[row]
    path = [f"M{number(x)} {number(y)}"]
    for node in chain[1:]:
        bottom = placed.row_top[row] + placed.row_height[row]
        row += 1
        top, target = placed.row_top[row], placed.x[node]
        if node == last:
            target += end.port[0] if end and end.port else aside
        if row in placed.cuts:
            # From the foot of a column to the head of the next one.
            path.append(f"V{number(bottom + TURN)}H{number(placed.cuts[row])}V{number(top - TURN)}H{number(target)}")
            path.append(f"V{number(top)}")
        elif abs(target - x) < 0.05:
            path.append(f"V{number(top)}")
        else:
            middle = number((bottom + top) / 2)
            path.append(
                f"V{number(bottom)}C{number(x)} {middle} {number(target)} {middle} {number(target)} {number(top)}"
            )
        x = target
    if end is None:
        return f'<path class="edge" d="{"".join(path)}V{number(top)}"/>'
    low = number(placed.top[last] - 1)
    tip = f'<path class="tip" d="M{number(x)} {low}l-3.5 -6h7z"/>'
    return f'<path class="edge" d="{"".join(path)}V{low}"/>{tip}'


def _back(a: str, b: str, placed: Placed, boxes: Boxes) -> str:
    x, y = number(placed.x[a] + boxes[a].width / 2), number(placed.top[a] + boxes[a].height / 2)
    to_x, to_y = number(placed.x[b] + boxes[b].width / 2 + 1), number(placed.top[b] + boxes[b].height / 2)
    far = number(placed.width + BACK)
    path = f"M{x} {y}C{far} {y} {far} {to_y} {to_x} {to_y}"
    return f'<path class="edge back" d="{path}"/><path class="tip" d="M{to_x} {to_y}l6 -3.5v7z"/>'


def resource(name: str) -> str:
    """Return the text of a file of this package, with every line that contains `ROLE` repeated for each role."""
    lines = files("cpt_fx.inspection").joinpath(name).read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line.replace("ROLE", role) for line in lines for role in (ROLES if "ROLE" in line else ("",)))


def variables(palette: dict[str, str]) -> str:
    """Return a palette as CSS custom properties."""
    return " ".join(f"--{name}: {value};" for name, value in palette.items())


def _standalone_style() -> str:
    """Return the style of a standalone drawing: literal colours, since many viewers support no custom properties."""
    sheet = resource("graph.css")
    return f"{_filled(sheet, LIGHT)}@media (prefers-color-scheme: dark) {{\n{_filled(sheet, DARK)}}}\n"


def _filled(sheet: str, palette: dict[str, str]) -> str:
    return re.sub(r"var\(--([a-z-]+)\)", lambda match: palette[match[1]], sheet)
