"""The drawing as one self-contained HTML page that fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from cpt_fx.formats import most_levels
from cpt_fx.inspection import boxes
from cpt_fx.inspection.layout import GAP_X, GAP_Y, LANE, PORT_Y, TIGHT, arrivals, place, plan
from cpt_fx.inspection.svg import BACK, DARK, LIGHT, PAD, drawing, levels_of, resource, variables
from cpt_fx.inspection.table import cells, counts, what, widths_by_role
from cpt_fx.inspection.tree import Item, build
from cpt_fx.inspection.views import HEADS, QuantizerView

if TYPE_CHECKING:
    from cpt_fx.inspection.model import Inspection

START = 48
"""A page starts with about this many boxes at most; the rest are expanded on demand."""


def page(inspection: Inspection) -> str:
    """Return the whole page."""
    views = inspection.quantizers
    root = build(inspection.graphs, views, inspection.name)
    data = {
        "root": root.id,
        "open": sorted(levels_of(root, START)[-1]),
        "sizes": {"gapX": GAP_X, "gapY": GAP_Y, "portY": PORT_Y, "lane": LANE, "tight": TIGHT, "pad": PAD,
                  "bar": boxes.TITLE_BAR, "back": BACK},
        "items": {item.id: _item(item) for item in root.walk()},
    }  # fmt: skip
    legend, legend_width = boxes.keys(list(widths_by_role(views)))
    parts = {
        "title": escape(inspection.name),
        "state": escape(inspection.state),
        "light": variables(LIGHT),
        "dark": variables(DARK),
        "style": resource("page.css") + resource("graph.css"),
        "script": resource("page.js"),
        "stats": "".join(
            f'<div class="stat {kind}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
            for label, value, kind in counts(inspection)
        ),
        "legend": legend,
        "legend_width": boxes.number(legend_width),
        "uncovered": _uncovered(inspection),
        "products": _products(inspection),
        "passes": _passes(inspection),
        "quantizers": _quantizers(views),
        # Escaped, "<" cannot end the script element that holds the data.
        "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        "drawing": drawing(inspection, None if len(data["items"]) < 400 else 0),
    }
    template = resource("page.html")
    # One pass over the template: values that are filled in are not searched for placeholders.
    pieces = template.split("@@")
    return "".join(piece if place % 2 == 0 else parts[piece] for place, piece in enumerate(pieces))


def _item(item: Item) -> dict[str, Any]:
    box = boxes.box_of(item)
    entry: dict[str, Any] = {
        "w": box.width, "h": box.height, "m": box.markup, "c": boxes.classes(item), "l": boxes.label_of(item),
        "p": item.parent.id if item.parent else None, "t": _heading(item), "f": _facts(item),
    }  # fmt: skip
    if item.children:
        arranged = plan(item)
        folded = {child.id: boxes.box_of(child) for child in item.children}
        placed = place(arranged, folded)
        entry |= {
            "kids": [*folded], "rows": arranged.rows, "chains": arranged.chains, "back": arranged.back,
            "x": {key: round(x, 1) for key, x in placed.x.items()},
            "asides": [round(aside, 1) for aside in arrivals(arranged, placed, folded)],
            "tw": boxes.title_width(item), "frame": boxes.frame_of(item, 0, 0),
        }  # fmt: skip
    return entry


def _heading(item: Item) -> str:
    if item.kind == "quantizer" and item.view is not None:
        return f"{item.view.layer} · {what(item.view)}"
    if item.kind == "module":
        return item.path if item.path and " … " not in item.title else f"{item.path} {item.title}".strip()
    return item.facts.get("reads") or item.facts.get("node") or item.title


def _facts(item: Item) -> list[tuple[str, str]]:
    """Return what the side panel shows about a box."""
    view = item.view if item.kind == "quantizer" else None
    if view is None:
        if item.kind != "module":
            return [("kind", item.kind), *((key, value) for key, value in item.facts.items() if value)]
        inside = [(role, f"{bits} bits") for role, bits in widths_by_role(item.views()).items()]
        return [("kind", item.subtitle or "group"), ("quantizers", str(len(item.views()))), *inside]
    facts = [
        ("bits now", str(view.bits)), ("follows", follows(view)), ("role", view.role), ("operator", view.op),
        ("operand", view.operand), ("format", str(view.format).replace("/", " · ")),
        ("range of", f"one per {view.group}"),
        ("times run", str(view.times_run) if view.times_run else "never"),
    ]  # fmt: skip
    if view.format.range.value == "observer":
        seen = "nothing observed yet" if view.range is None else f"{view.range[0]:.4g} to {view.range[1]:.4g}"
        facts.append(("running range", seen))
    for bits, count in view.levels.items():
        allowed = most_levels(view.format.scheme, bits)
        facts.append((f"at {bits} bits", f"{count} of {allowed} levels, error {view.error[bits]:.2%}"))
    facts += [("layers" if len(view.layers) > 1 else "layer", ", ".join(view.layers)), ("node", view.node)]
    return [*facts, *((key, value) for key, value in item.facts.items() if key == "made by")]


def follows(view: QuantizerView) -> str:
    """Say which width of the schedule a quantizer follows."""
    width_source = view.width_source
    if width_source.fixed is not None:
        return f"fixed at {width_source.fixed}"
    source = "" if width_source.schedule is None else f" of {width_source.schedule!r}"
    return f"{width_source.role} bits{source}{f' {width_source.offset:+d}' if width_source.offset else ''}"


def _uncovered(inspection: Inspection) -> str:
    if not inspection.uncovered:
        return "<p>Everything that multiplies is quantized.</p>"
    rows = [
        (item.layer or "(root)", f"{item.op} {item.operand}".strip(), item.reason, "yes" if item.by_choice else "")
        for item in inspection.uncovered
    ]
    return _table(("layer", "operator", "reason", "by choice"), rows)


def _passes(inspection: Inspection) -> str:
    notes = [("capture", inspection.capture.frontend, "; ".join(inspection.capture.notes))]
    rows = [(report.name, f"{report.changed} changed", "; ".join(report.notes)) for report in inspection.passes]
    return _table(("pass", "result", "notes"), notes + rows)


def _products(inspection: Inspection) -> str:
    """Return the section on integer products; empty if no product is lowered."""
    products = inspection.products
    if not any(product.lowered for product in products):
        return ""
    return f"<section><h2>On integers</h2>{_table(HEADS, [product.cells() for product in products])}</section>"


def _quantizers(views: tuple[QuantizerView, ...]) -> str:
    rows = [(view.layer, view.op, *cells(view, 2)) for view in views]
    return _table(("layer", "operator", "quantized", "format", "bits", "runs", "levels", "error"), rows)


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
