"""Critical learning periods, read from records: where a run had low precision, and what it is compared with."""

from __future__ import annotations

import ast

from cpt_fx.study.analysis import FULL, Panel, Row
from cpt_fx.study.records import parsed


def low_steps(row: Row, panel: Panel) -> tuple[int, int] | None:
    """Return the first step at low precision and the one after the last, (0, 0) for none; None for other schedules."""
    name, arguments = call(row.schedule)
    if name == "Deficit":
        start, end = arguments.get("start"), arguments.get("end")
        if isinstance(start, int) and isinstance(end, int):
            end = min(end + bool(arguments.get("inclusive")), row.total_steps)
            return (start, end) if end > start else (0, 0)
    if row.label == f"static {panel.q_max}":
        return (0, 0)
    if row.label == f"static {panel.q_min}":
        return (0, row.total_steps)
    return None


def undisturbed(panel: Panel) -> Row | None:
    """Return the row that never had low precision."""
    return next((row for row in panel.rows if low_steps(row, panel) == (0, 0)), None)


def first_cycles(panel: Panel) -> tuple[Row, Row] | None:
    """Return the rows of RTV and ETV: they cost the same, and begin with a cycle of high and of low precision."""
    high, low = panel.row("RTV"), panel.row("ETV")
    return (high, low) if high is not None and low is not None else None


def reference(row: Row, panel: Panel) -> Row | None:
    """Return what a row is compared with, or None where there is nothing.

    In the deficit and window experiments it is the run that never had low precision. ETV is compared with RTV where the
    first cycle is the subject, a delayed schedule with the same one not delayed, everything else with static q_max.
    """
    found = panel.static
    if panel.experiment in ("deficit", "window"):
        found = undisturbed(panel)
    elif panel.experiment == "first-cycle" and row.label == "ETV":
        found = panel.row("RTV")
    elif panel.experiment == "delayed" and not row.label.startswith("static "):
        # "RR delayed 100" and "RR after deficit 100" belong to "RR".
        plain = panel.row(row.label.partition(" ")[0])
        found = panel.static if plain is row else plain
    return None if found is row else found


def beside(row: Row) -> tuple[str, bool, int]:
    """Return a key to sort by: schedules that begin late beside the same one that does not, baselines at the end."""
    if row.group in ("static", FULL):
        return ("~", False, 0)
    first, *rest = row.label.split()
    return (first, "after" in rest, int(rest[-1][:18]) if rest and rest[-1].isdecimal() else 0)


def call(text: str) -> tuple[str, dict[str, object]]:
    """Return the name and the plain arguments of a schedule's repr, without running it.

    A schedule as argument stays text. Positional arguments are named "0", "1" and so on.
    """
    try:
        node = parsed(text)
    except ValueError:
        return "", {}
    if not isinstance(node, ast.Call):
        return "", {}
    given = [(str(index), value) for index, value in enumerate(node.args)]
    given += [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg is not None]
    return ast.unparse(node.func), {name: _plain(value) for name, value in given}


def _plain(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return ast.unparse(node)
