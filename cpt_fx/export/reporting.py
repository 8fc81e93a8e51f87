"""`export.report`: what an export would keep exactly, what it would change, what it would refuse, and why.

Nothing is promised that was not tried: models are traced as the exports trace them, and where the packages are there,
exported to a folder that is gone afterwards, with the comparisons that every export makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text
from torch import nn

from cpt_fx.errors import check_choice
from cpt_fx.export.capture_modes import call_of
from cpt_fx.export.reporting_targets import (
    APPROXIMATED,
    EXACT,
    PROBES,
    REFUSED,
    Key,
    Outcome,
    Trial,
    Verdict,
)
from cpt_fx.inspection import inspect
from cpt_fx.inspection.table import as_text

TARGETS = ("ort_training", "onnx", "qdq")
_COLOURS = {EXACT: "green", APPROXIMATED: "yellow", REFUSED: "bold red"}
_NAMES = {"quantizer": "quantizers", "operator": "operators", "state": "running state"}


@dataclass(frozen=True)
class Row:
    """A quantizer, an operator or a running state, and what becomes of it for each target that has it."""

    kind: str
    """`"quantizer"`, `"operator"` or `"state"`."""
    layer: str
    what: str
    """The operand and its format, the operator as ATen calls it, or the buffer."""
    verdicts: dict[str, Verdict]


@dataclass(frozen=True, repr=False)
class Report:
    """What exports of a model would be like. Printed, it is a table and the reasons."""

    model: str
    targets: dict[str, Outcome]
    rows: tuple[Row, ...] = field(default=())

    def status(self, target: str) -> str:
        """Return `"exact"`, `"approximated"` or `"refused"`: the worst of what a target has."""
        outcome = self.targets[check_choice("target", target, self.targets)]
        found = {verdict.status for row in self.rows for name, verdict in row.verdicts.items() if name == target}
        if outcome.problem or REFUSED in found:
            return REFUSED
        return APPROXIMATED if APPROXIMATED in found else EXACT

    def table(self) -> Table:
        """Return everything as a rich table, one column for each target."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("layer", overflow="fold", max_width=30)
        table.add_column("", overflow="fold", max_width=48)
        for target in self.targets:
            table.add_column(target, no_wrap=True)
        for kind, title in _NAMES.items():
            rows = [row for row in self.rows if row.kind == kind]
            if rows:
                table.add_row(Text(title, "bold"))
            for row in rows:
                table.add_row(row.layer or "–", row.what, *(_cell(row.verdicts.get(name)) for name in self.targets))
            table.add_section()
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "model": self.model,
            "targets": {
                name: {"status": self.status(name), "problem": outcome.problem, "notes": list(outcome.notes)}
                for name, outcome in self.targets.items()
            },
            "rows": [asdict(row) for row in self.rows],
        }

    def __rich__(self) -> ConsoleRenderable:
        """Show the table, then the reasons, target by target."""
        parts: list[ConsoleRenderable] = [Text(f"{self.model}, exported", "bold"), Text(""), self.table()]
        for target, outcome in self.targets.items():
            status = self.status(target)
            parts += [Text(""), Text.assemble((target, "bold"), ": ", (status, _COLOURS[status]))]
            if outcome.problem:
                parts.append(Text(f"  {outcome.problem}", _COLOURS[REFUSED]))
            parts += [Text(f"  {reason}") for reason in self._reasons(target)]
            parts += [Text(f"  {note}", "dim") for note in outcome.notes]
        return Group(*parts)

    def __str__(self) -> str:
        """Show the same as plain text."""
        return as_text(self, 120)

    def __repr__(self) -> str:
        """Say what there is."""
        return f"<Report on {self.model}: {', '.join(f'{name} {self.status(name)}' for name in self.targets)}>"

    def _reasons(self, target: str) -> list[str]:
        """Return what is to be said of a target, each thing once, with the layers that it is said of."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for row in self.rows:
            verdict = row.verdicts.get(target)
            if verdict is not None and verdict.why:
                what = row.what if row.kind == "operator" else ""
                found.setdefault((verdict.status, what, verdict.why), []).append(_place(row))
        ordered = sorted(found.items(), key=lambda item: [REFUSED, APPROXIMATED, EXACT].index(item[0][0]))
        return [f"{status}: {_listed(places)}: {why}" for (status, _, why), places in ordered]


def report(result: nn.Module, example_inputs: Any, targets: Iterable[str] = TARGETS) -> Report:
    """Say what exports of a transformed model would keep exactly, change or refuse, layer by layer.

    The model is left as it is, and no file stays behind. A model that is refused is no error: the report says why.

    Args:
        result: what `transform` returned.
        example_inputs: a tuple of the model's arguments, or a dict of them by name.
        targets: which of `"ort_training"`, `"onnx"` and `"qdq"`.
    """
    names = [check_choice("target", name, TARGETS) for name in ((targets,) if isinstance(targets, str) else targets)]
    inspection = inspect(result)
    call_of(example_inputs)
    trial = Trial(result, example_inputs)
    outcomes = {name: PROBES[name](trial) for name in dict.fromkeys(names)}
    rows: dict[Key, dict[str, Verdict]] = {}
    for view in inspection.quantizers:
        rows[Key("quantizer", view.layer, f"{view.operand} {str(view.format).replace('/', ' ')}", view.node)] = {}
    for kind in _NAMES:
        for name, outcome in outcomes.items():
            for key, verdict in outcome.verdicts.items():
                if key.kind == kind:
                    rows.setdefault(key, {})[name] = verdict
    ordered = [(key, verdicts) for kind in _NAMES for key, verdicts in rows.items() if key.kind == kind]
    return Report(
        inspection.name, outcomes, tuple(Row(key.kind, key.layer, key.what, verdicts) for key, verdicts in ordered)
    )


def _cell(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("–", "dim")
    error = "" if verdict.error is None else f" {verdict.error:.1%}"
    return Text(f"{verdict.status}{error}", _COLOURS[verdict.status])


def _place(row: Row) -> str:
    word = row.what.partition(" ")[0]
    return f"{row.layer} {word}" if row.layer else word


def _listed(places: list[str]) -> str:
    shown = list(dict.fromkeys(places))
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")
