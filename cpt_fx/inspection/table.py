"""An inspection as tables in a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from cpt_fx import native
from cpt_fx.formats import most_levels
from cpt_fx.inspection.views import HEADS, QuantizerView
from cpt_fx.integer.counts import DIRECTIONS

if TYPE_CHECKING:
    from cpt_fx.inspection.model import Inspection

COLOURS = {"weight": "blue", "activation": "yellow", "bias": "green", "gradient": "magenta"}
ROLES = tuple(COLOURS)


def quantizer_table(views: Iterable[QuantizerView]) -> Table:
    """Return a table with one row per quantizer; the first rows of a layer name it and its operator."""
    table = _table()
    table.add_column("layer", overflow="fold", min_width=8, max_width=30)
    table.add_column("quantized", no_wrap=True)
    table.add_column("format", overflow="fold", min_width=14, max_width=34)
    for name in ("bits", "runs", "levels", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for _, rows in groupby(views, key=lambda view: (view.graph, view.layer, view.op)):
        members = list(rows)
        for position, view in enumerate(members):
            heading = Text(f"  {view.op}" if position == 1 else "", "dim")
            if position == 0:
                heading = Text(view.layer or "(root)", "bold")
            if len(members) == 1:
                heading.append(f"\n  {view.op}", "not bold dim")
            name, kind, bits, runs, *seen = cells(view, 1)
            style = "" if view.times_run else "bold red"
            table.add_row(heading, Text(name, COLOURS.get(view.role, "")), kind, bits, Text(runs, style), *seen)
        table.add_section()
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1))


def as_text(renderable: object, width: int) -> str:
    """Return what a terminal would show, as plain text."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def what(view: QuantizerView) -> str:
    """Return what is quantized, in a word or two."""
    if view.operand == view.role or (view.role, view.operand) == ("activation", "input"):
        return view.role
    return f"{view.role} {view.operand}"


def cells(view: QuantizerView, digits: int) -> tuple[str, ...]:
    """Return the table cells of a quantizer: what, format, bits, runs, levels of those allowed, and error."""
    runs, seen, levels, error = str(view.times_run) if view.times_run else "never", view.seen, "–", "–"
    if seen is not None:
        levels = f"{view.levels[seen]}/{most_levels(view.format.scheme, seen)}"
        error = f"{view.error[seen]:.{digits}%}"
    return what(view), str(view.format).replace("/", " "), str(view.bits), runs, levels, error


def widths_by_role(views: Iterable[QuantizerView]) -> dict[str, str]:
    """Return the widths in use now, for each role: `8`, or `3–8` where several are."""
    found: dict[str, set[int]] = {}
    for view in views:
        found.setdefault(view.role, set()).add(view.bits)
    spans = {role: sorted({min(bits), max(bits)}) for role, bits in found.items()}
    return {role: "–".join(map(str, spans[role])) for role in ROLES if role in spans}


def counts(inspection: Inspection) -> list[tuple[str, str, str]]:
    """Return the summary of a drawing: label, number, and the role or warning that colours it."""
    views = inspection.quantizers
    left = len([item for item in inspection.uncovered if not item.by_choice])
    silent = sum(not view.times_run for view in views)
    return [
        ("quantizers", str(len(views)), ""),
        *((f"{role} bits", bits, role) for role, bits in widths_by_role(views).items()),
        ("uncovered", str(left), "warn" if left else ""),
        ("excluded", str(len(inspection.uncovered) - left), ""),
        ("never ran", str(silent), "warn" if silent else ""),
    ]


def integer_part(inspection: Inspection) -> list[ConsoleRenderable]:
    """Return the section on integer products; empty if no product is lowered."""
    products = inspection.products
    if not any(product.lowered for product in products):
        return []
    count = sum(product.on_integers for product in products)
    table = _table()
    for name in HEADS:
        style: dict[str, Any] = {"justify": "right", "no_wrap": True} if name in DIRECTIONS else {"overflow": "fold"}
        table.add_column(name, **style, max_width=30 if name in HEADS[:2] else None)
    for product in products:
        table.add_row(*product.cells())
    title = Text(f"on integers whenever they ran: {count} of {len(products)} products", "bold")
    return [title, Text(f"kernels: {native.kernels()}", "dim"), table, Text("")]


def overview(inspection: Inspection) -> ConsoleRenderable:
    """Return a whole inspection for a terminal."""
    views = inspection.quantizers
    widths = ", ".join(f"{role} {bits}" for role, bits in widths_by_role(views).items())
    left = [item for item in inspection.uncovered if not item.by_choice]
    parts: list[ConsoleRenderable] = [
        Text.assemble((inspection.name, "bold"), f", captured by {inspection.capture.frontend}"),
        Text(inspection.state, "" if inspection.state.startswith("proven:") else "yellow"),
        Text(f"{len(views)} quantizers, bits now: {widths}"),
        *(Text(f"  {note}", "dim") for note in inspection.capture.notes),
        Text(""),
        quantizer_table(views),
        *integer_part(inspection),
        Text(f"in full precision: {len(left)}, excluded by choice: {len(inspection.uncovered) - len(left)}", "bold"),
        *(Text(f"  {item}", "yellow" if item in left else "dim") for item in inspection.uncovered),
        Text(""),
        Text("passes", "bold"),
        *(Text(f"  {report}") for report in inspection.passes),
    ]
    return Group(*parts)
