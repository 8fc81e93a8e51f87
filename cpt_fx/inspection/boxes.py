"""The boxes of a drawing: their sizes, and their SVG with the upper left corner at the origin."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from cpt_fx.inspection.table import ROLES, widths_by_role
from cpt_fx.inspection.tree import Item

CODE = 7.3
"""Width of a letter in a title, estimated generously: a wide font must not clip a label."""
LONGEST = 34
BADGE = 32.0
TITLE_BAR = 28.0


@dataclass(frozen=True)
class Box:
    """The markup of a box and its size."""

    width: float
    height: float
    markup: str = ""
    port: tuple[float, float] | None = None
    """How far from its centre edges enter and leave an expanded module."""


def number(value: float) -> str:
    """Format a coordinate, with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def shortened(text: str, length: int = LONGEST) -> str:
    """Shorten a long text in the middle: the ends of a name say most."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[-(length - 1 - head) :]}"


def plain(label: str) -> float:
    """Return the width of a subtitle, also estimated generously."""
    return sum(9.2 if letter in "×…–WMm@%" else 6.1 for letter in label)


def text(kind: str, x: float, y: float, value: str) -> str:
    """Return a text element, centred vertically on y; an empty string for an empty text."""
    if not value:
        return ""
    return f'<text class="{kind}" x="{number(x)}" y="{number(y)}">{escape(value)}</text>'


def rectangle(kind: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    """Return a rounded rectangle."""
    return (
        f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
        f'rx="{number(radius)}"/>'
    )


def box_of(item: Item) -> Box:
    """Return the box of a node, or of a collapsed module."""
    if item.kind == "module":
        return _module(item)
    title, subtitle = shortened(item.title), shortened(item.subtitle, 40)
    wide = len(title) * CODE
    if item.kind == "quantizer" and item.view is not None:
        badge = rectangle("badge", 4, 4, BADGE - 4, 32, 5) + text("n", 4 + (BADGE - 4) / 2, 20, str(item.view.bits))
        lines = text("t", BADGE + 9, 14, title) + text("s", BADGE + 9, 28, subtitle)
        return _card(max(wide, plain(subtitle)) + BADGE + 22, 40, 7, badge + lines)
    if item.kind == "operator":
        width = max(wide, plain(subtitle), 44) + 24
        lines = text("t c", width / 2, 14 if subtitle else 15, title) + text("s c", width / 2, 28, subtitle)
        return _card(width, 40 if subtitle else 30, 7, lines)
    if item.kind in ("input", "output"):
        width = max(wide, 40) + 28
        return _card(width, 28, 14, text("t c", width / 2, 14, title))
    lines = text("t", 13, 13, title) + text("s", 13 + wide + 8, 13, subtitle)
    return _card(wide + (plain(subtitle) + 8 if subtitle else 0) + 26, 26, 13, lines)


def _card(width: float, height: float, radius: float, content: str) -> Box:
    return Box(width, height, rectangle("body", 0, 0, width, height, radius) + content)


def _module(item: Item) -> Box:
    title, subtitle = shortened(item.title), shortened(module_note(item), 44)
    chips, x = "", 12.0
    for role, bits in widths_by_role(item.views()).items():
        label = f"{role[0].upper()} {bits}"
        size = len(label) * CODE + 14
        chip = rectangle("badge", x, 44, size, 19, 5) + text("n", x + size / 2, 53.5, label)
        chips += f'<g class="{role}">{chip}</g>'
        x += size + 5
    width = max(len(title) * CODE + 18, plain(subtitle), x - 17) + 24
    height = 72.0 if chips else 46.0
    parts = (
        rectangle("under", 3, 4, width, height, 9),
        rectangle("body", 0, 0, width, height, 9),
        text("t", 12, 16, title),
        text("s", 12, 32, subtitle),
        fold_sign(width - 15, 16, opened=False),
        chips,
    )
    return Box(width + 3, height + 4, "".join(parts))


def frame_of(item: Item, width: float, height: float) -> str:
    """Return the frame of an expanded module."""
    title, note = shortened(item.title), shortened(item.subtitle, 30)
    label = text("t", 30, 15, title) + text("s", 38 + len(title) * CODE, 15, note)
    return rectangle("body", 0, 0, width, height, 10) + fold_sign(17, 15, opened=True) + label


def title_width(item: Item) -> float:
    """Return the width that the title line of an expanded module takes."""
    return 54 + len(shortened(item.title)) * CODE + plain(shortened(item.subtitle, 30))


def fold_sign(x: float, y: float, *, opened: bool) -> str:
    """Return a plus sign, or a minus sign if the module is expanded."""
    upright = "" if opened else f"M{number(x)} {number(y - 4)}v8"
    return f'<path class="fold" d="M{number(x - 4)} {number(y)}h8{upright}"/>'


def module_note(item: Item) -> str:
    """Describe in a few words what a collapsed module holds."""
    count = len(item.views())
    inside = f"{count} quantizer{'s' * (count != 1)}"
    if not count:
        inside = f"{sum(inner.kind == 'operator' for inner in item.walk())} operators"
    return f"{item.subtitle} · {inside}" if item.subtitle else inside


def classes(item: Item) -> str:
    """Return the CSS classes of a box."""
    if item.kind == "quantizer" and item.view is not None:
        return f"box quantizer {item.view.role if item.view.role in ROLES else ''}".strip()
    kind = {"module": "module", "operator": "op", "input": "end", "output": "end"}.get(item.kind, "value")
    return f"box {kind}"


def label_of(item: Item) -> str:
    """Return the accessible name of a box."""
    if item.kind == "quantizer" and item.view is not None:
        return f"{item.view}, {item.view.bits} bits"
    if item.kind == "module":
        return f"module {item.path or item.title}: {module_note(item)}"
    return f"{item.kind} {item.facts.get('node', item.title)}"


def keys(roles: list[str]) -> tuple[str, float]:
    """Return the legend of colours and shapes, in one line, and its width."""
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
