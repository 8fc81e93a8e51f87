"""An inspection as plain data: for logs, for programs, for a diff of two runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
            {
                "layer": view.layer,
                "layers": list(view.layers),
                "role": view.role,
                "op": view.op,
                "operand": view.operand,
                "format": str(view.format),
                "group": view.group,
                "bits": view.bits,
                "times_run": view.times_run,
                "levels": {str(bits): count for bits, count in view.levels.items()},
                "error": {str(bits): error for bits, error in view.error.items()},
                "range": None if view.range is None else list(view.range),
                "node": view.node,
                "graph": view.graph,
            }
            for view in inspection.quantizers
        ],
        "products": [
            {
                "layer": view.layer,
                "op": view.op,
                "lowered": view.lowered,
                "integer": list(view.integer),
                "floating": list(view.floating),
                "reasons": list(view.reasons),
            }
            for view in inspection.products
        ],
        "uncovered": [
            {
                "layer": item.layer,
                "op": item.op,
                "operand": item.operand,
                "reason": item.reason,
                "by_choice": item.by_choice,
            }
            for item in inspection.uncovered
        ],
        "passes": [
            {"name": report.name, "changed": report.changed, "notes": list(report.notes)}
            for report in inspection.passes
        ],
    }
