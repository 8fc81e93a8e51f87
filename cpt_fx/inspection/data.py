"""An inspection as plain data: for logs, for programs, for a diff of two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpt_fx.formats import Format

if TYPE_CHECKING:
    from cpt_fx.inspection.model import Inspection


def as_data(inspection: Inspection) -> dict[str, Any]:
    """Return dicts, lists, text and numbers only."""
    capture = inspection.capture
    return {
        "model": inspection.name,
        "capture": {"frontend": capture.frontend, "notes": list(capture.notes), "breaks": list(capture.breaks)},
        "graphs": len(inspection.graphs),
        "quantizers": [
            fields(view, "layer", "layers", "role", "op", "operand", "format", "group", "bits", "times_run", "skipped",
                   "levels", "error", "range", "node", "graph")
            for view in inspection.quantizers
        ],
        "products": [
            fields(view, "layer", "op", "lowered", "integer", "floating", "reasons") for view in inspection.products
        ],
        "uncovered": [
            fields(item, "layer", "op", "operand", "reason", "by_choice") for item in inspection.uncovered
        ],
        "passes": [fields(report, "name", "changed", "notes") for report in inspection.passes],
    }  # fmt: skip


def fields(item: object, *names: str) -> dict[str, Any]:
    """Return some of what an object holds."""
    return {name: _plain(getattr(item, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return {str(key): part for key, part in value.items()}
    return str(value) if isinstance(value, Format) else value
