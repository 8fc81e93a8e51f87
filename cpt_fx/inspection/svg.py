"""The drawing as a file: modules folded or opened to one depth."""

from __future__ import annotations

import itertools
from html import escape
from typing import TYPE_CHECKING

from cpt_fx.errors import check_int
from cpt_fx.inspection.boxes import (
    TITLE_BAR,
    Box,
    box_of,
    classes,
    frame_of,
    label_of,
    number,
    plain,
    rectangle,
    text,
    title_width,
)  # fmt: skip
from cpt_fx.inspection.columns import around, in_columns
from cpt_fx.inspection.layout import Placed, Sizes, place, plan
from cpt_fx.inspection.table import width_text, widths_by_role
from cpt_fx.inspection.theme import standalone_style
from cpt_fx.inspection.tree import IN, OUT, Item, build

if TYPE_CHECKING:
    from cpt_fx.inspection.model import Inspection

READABLE = 120
HIGH = 3000.0
PAD = 14.0
BACK = 26.0


def drawing(inspection: Inspection, depth: int | None) -> str:
    """Return the SVG of a model, with a heading and a legend."""
    if depth is not None:
        check_int("depth", depth, 0)
    views = inspection.quantizers
    root = build(inspection.graphs, views, inspection.name)
    body, placed = _painted(root, depth)
    widths = [f"{role} {width_text(bits)} bits" for role, bits in widths_by_role(views).items()]
    left = len([item for item in inspection.uncovered if not item.by_choice])
    subtitle = " · ".join(
        [f"{len(views)} quantizers", *widths, f"{left} uncovered, {len(inspection.uncovered) - left} excluded"]
    )
    label = escape(f"{inspection.name}: {subtitle}")
    legend, legend_width = _legend([*widths_by_role(views)])
    width = max(placed.width + 48, len(subtitle) * 6.6 + 48, legend_width + 48)
    height = placed.height + 150
    return (
        f'<svg class="graph" xmlns="http://www.w3.org/2000/svg" width="{number(width)}" height="{number(height)}" '
        f'viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label="{label}">'
        f"<style>{standalone_style()}</style>"
        f'<rect class="bg" width="{number(width)}" height="{number(height)}"/>'
        f"{text('heading', 24, 28, inspection.name)}{text('s', 24, 50, subtitle)}"
        f'<g transform="translate(24 74)">{legend}</g>'
        f'<g transform="translate({number((width - placed.width) / 2)} 120)">{body}</g></svg>\n'
    )


def levels_of(root: Item, limit: int | None = None) -> list[set[str]]:
    """Return which modules are open with 0, 1, 2, ... levels opened, while at most `limit` boxes show."""
    found, level, shown = [{root.id}], [root], len(root.children)
    while level := [child for item in level for child in item.children if child.children]:
        shown += sum(len(item.children) for item in level) - len(level)
        if limit is not None and shown > limit:
            break
        found.append(found[-1] | {item.id for item in level})
    return found


def _painted(root: Item, depth: int | None) -> tuple[str, Placed]:
    """Draw to a depth, by default the largest one that is neither too full nor too high for a page."""
    if depth is not None:
        levels = levels_of(root)
        return _Painter(levels[min(depth, len(levels) - 1)]).inside(root)
    for opened in reversed(levels_of(root, READABLE)):
        body, placed = _Painter(opened).inside(root)
        if placed.height <= HIGH:
            break
    return body, placed


class _Painter:
    """Draws modules from the inside out."""

    def __init__(self, opened: set[str]) -> None:
        self.opened = opened
        self.ports: dict[str, tuple[float, float]] = {}
        """How far from its middle edges enter and leave an opened module."""

    def inside(self, item: Item) -> tuple[str, Placed]:
        """Return the content of an opened module and its coordinates."""
        boxes = {child.id: self.box(child) for child in item.children}
        arranged = plan(item)
        sizes = {key: (box.width, box.height) for key, box in boxes.items()}
        placed = place(arranged, sizes, self.ports)
        if item.parent is None:
            placed = in_columns(arranged, placed, sizes)
        drawn: set[tuple[str, str]] = set()
        parts = [self.edge(chain, placed, sizes, arranged.chains, drawn) for chain in arranged.chains]
        parts += [_back(a, b, placed, sizes) for a, b in arranged.back if a in sizes and b in sizes]
        for child in item.children:
            box = boxes[child.id]
            x, y = placed.x[child.id] - box.width / 2, placed.top[child.id]
            kind = "frame" if child.id in self.opened else classes(child)
            parts.append(
                f'<g class="{kind}" transform="translate({number(x)} {number(y)})">'
                f"<title>{escape(label_of(child))}</title>{box.markup}</g>"
            )
        if arranged.back:
            placed.width += BACK
        return "".join(parts), placed

    def box(self, item: Item) -> Box:
        """Return a box, with its content where it is opened."""
        if item.id not in self.opened:
            return box_of(item)
        body, placed = self.inside(item)
        enter, leave = (placed.x.get(port, placed.width / 2) for port in (IN, OUT))
        # The title stands left of where values enter: no line runs through it.
        shift = max(PAD, title_width(item) - enter) if IN in placed.x else PAD
        width = max(2 * shift + placed.width, title_width(item) + PAD)
        first = TITLE_BAR if IN in placed.x else TITLE_BAR + PAD / 2
        height = first + placed.height + (0 if OUT in placed.x else PAD)
        self.ports[item.id] = (shift + enter - width / 2, shift + leave - width / 2)
        lead = f'<path class="edge" d="M{number(shift + enter)} 0V{number(first)}"/>' if IN in placed.x else ""
        content = f'<g transform="translate({number(shift)} {number(first)})">{body}</g>'
        return Box(width, height, frame_of(item, width, height) + lead + content)

    def edge(
        self, chain: list[str], placed: Placed, sizes: Sizes, chains: list[list[str]], drawn: set[tuple[str, str]]
    ) -> str:
        """Return one edge: straight through the rows, bent only between them. A lane that is shared is drawn once."""
        first, last = chain[0], chain[-1]
        x = placed.x[first] + self.ports.get(first, (0.0, 0.0))[1]
        y = placed.top[first] + sizes.get(first, (0.0, 0.0))[1]
        start = 1
        while (chain[start - 1], chain[start]) in drawn:
            row = placed.row_of[chain[start]]
            x, y = placed.x[chain[start]], placed.row_top[row] + placed.row_height[row]
            start += 1
        drawn.update(itertools.pairwise(chain))
        path = [f"M{number(x)} {number(y)}"]
        for node in chain[start:]:
            row = placed.row_of[node]
            bottom, top = placed.row_top[row - 1] + placed.row_height[row - 1], placed.row_top[row]
            target = placed.x[node] + (self.ports.get(node, (0.0, 0.0))[0] if node == last else 0.0)
            if node == last and node in sizes and node not in self.opened:
                target += _spread(chain, placed, sizes, chains)
            if row in placed.cuts:
                path.append(around(x, bottom, placed.cuts[row], target, top))
            elif abs(target - x) < 0.05:
                path.append(f"V{number(top)}")
            else:
                middle = number((bottom + top) / 2)
                path.append(
                    f"V{number(bottom)}C{number(x)} {middle} {number(target)} {middle} {number(target)} {number(top)}"
                )
            x = target
        end = placed.top[last] if last in sizes else placed.row_top[placed.row_of[last]]
        tip = ""
        if last in sizes:
            end -= 1
            tip = f'<path class="tip" d="M{number(x)} {number(end)}l-3.5 -6h7z"/>'
        path.append(f"V{number(end)}")
        return f'<path class="edge" d="{"".join(path)}"/>{tip}'


def _spread(chain: list[str], placed: Placed, sizes: Sizes, chains: list[list[str]]) -> float:
    """Return how far from the middle of its box an edge arrives: several edges arrive side by side."""
    last = chain[-1]
    arriving = sorted((other for other in chains if other[-1] == last), key=lambda other: placed.x[other[-2]])
    step = min(16.0, sizes[last][0] * 0.7 / len(arriving))
    return (arriving.index(chain) - (len(arriving) - 1) / 2) * step


def _back(a: str, b: str, placed: Placed, sizes: Sizes) -> str:
    x, y = number(placed.x[a] + sizes[a][0] / 2), number(placed.top[a] + sizes[a][1] / 2)
    to_x, to_y = number(placed.x[b] + sizes[b][0] / 2 + 1), number(placed.top[b] + sizes[b][1] / 2)
    far = number(placed.width + BACK)
    path = f"M{x} {y}C{far} {y} {far} {to_y} {to_x} {to_y}"
    return f'<path class="edge back" d="{path}"/><path class="tip" d="M{to_x} {to_y}l6 -3.5v7z"/>'


def _legend(roles: list[str]) -> tuple[str, float]:
    entries = [(f"box quantizer {role}", role) for role in roles]
    entries += [("box op", "operator"), ("box value", "parameter")]
    entries += [("box end", "input, output"), ("box module", "module")]
    parts, x = [], 0.0
    for kind, label in entries:
        swatch = rectangle("body", x, 0, 22, 14, 7 if kind in ("box value", "box end") else 4)
        if "quantizer" in kind:
            swatch += rectangle("badge", x + 2, 2, 9, 10, 2)
        parts.append(f'<g class="{kind}">{swatch}</g>{text("s", x + 28, 7, label)}')
        x += 28 + plain(label) + 14
    note = "coloured boxes quantize, numbers are bits"
    parts.append(text("s", x, 7, note))
    return "".join(parts), x + plain(note)
