"""`export.report`: what an export would keep exactly, what it would change, what it would refuse, and why.

Every export is tried: the model is exported to a temporary directory, with the usual comparisons.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx_ir as ir
from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text
from torch import nn

from cpt_fx.errors import ExportError, check_choice
from cpt_fx.export import TARGETS
from cpt_fx.export.examples import call_of
from cpt_fx.export.functions import DOMAIN, UNIFORM
from cpt_fx.inspection import inspect
from cpt_fx.inspection.table import as_text

EXACT, APPROXIMATED, REFUSED = "exact", "approximated", "refused"
_COLOURS = {EXACT: "green", APPROXIMATED: "yellow", REFUSED: "bold red"}
_DRAWN = (
    "random numbers are drawn from the seeds of a step: distributed as in PyTorch, other numbers than its generator's"
)


@dataclass(frozen=True)
class QuantizerRow:
    """A quantizer, and how each target exports it."""

    layer: str
    what: str
    """The operand and its format."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Target -> `"exact"`, or `"approximated"` with the error on the examples, relative to PyTorch's values."""


@dataclass(frozen=True)
class ExportOutcome:
    """The result of an export: the problem if it was refused, else notes."""

    status: str
    """`"exact"`, `"approximated"` or `"refused"`."""
    problem: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class ExportReport:
    """How a model would be exported. `print` shows a table and the reasons."""

    model: str
    targets: dict[str, ExportOutcome]
    rows: tuple[QuantizerRow, ...]

    def status(self, target: str) -> str:
        """Return `"exact"`, `"approximated"` or `"refused"`."""
        return self.targets[check_choice("target", target, self.targets)].status

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def __rich__(self) -> ConsoleRenderable:
        """Render the quantizers as a table, then the reasons, target by target."""
        table = Table("layer", "quantizer", *self.targets, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for row in self.rows:
            found = [row.verdicts.get(target, "–") for target in self.targets]
            table.add_row(row.layer or "–", row.what, *(Text(one, _COLOURS.get(one.split()[0], "")) for one in found))
        parts: list[ConsoleRenderable] = [Text(f"{self.model}, exported\n", "bold"), table]
        for target, outcome in self.targets.items():
            colour = _COLOURS[outcome.status]
            parts.append(Text.assemble(("\n" + target, "bold"), ": ", (outcome.status, colour)))
            parts += [Text(f"  {outcome.problem}", colour)] if outcome.problem else []
            parts += [Text(f"  {note}") for note in outcome.notes]
        return Group(*parts)

    def __str__(self) -> str:
        """Return the same as plain text."""
        return as_text(self, 120)

    def __repr__(self) -> str:
        """Return a one-line summary."""
        return f"<ExportReport on {self.model}: {', '.join(f'{name} {self.status(name)}' for name in self.targets)}>"


def report(result: nn.Module, example_inputs: Any, targets: Iterable[str] = TARGETS) -> ExportReport:
    """Report what exports of a transformed model would keep exactly, change or refuse, layer by layer.

    The model is not modified, and no file is left behind. A refusal is no error: the report says why.

    Args:
        result: a model that `transform` returned.
        example_inputs: a tuple of the model's arguments, or a dict of them by name.
        targets: which of `"ort_training"`, `"onnx"` and `"qdq"`.
    """
    names = [check_choice("target", name, TARGETS) for name in ((targets,) if isinstance(targets, str) else targets)]
    attempts = Attempts(result, example_inputs)
    outcomes = {name: attempts.outcome(name) for name in dict.fromkeys(names)}
    return ExportReport(attempts.inspection.name, outcomes, tuple(attempts.rows))


class Attempts:
    """Runs each export of a model in full: the function `attempt` of its module calls `look`, or fills `rows`."""

    def __init__(self, result: nn.Module, example_inputs: Any) -> None:
        self.result, self.example_inputs = result, example_inputs
        self.inspection = inspect(result)
        call_of(example_inputs)  # refuses invalid inputs
        self.views = self.inspection.quantizers
        self.rows = [
            QuantizerRow(view.layer, f"{view.operand} {str(view.format).replace('/', ' ')}") for view in self.views
        ]

    def outcome(self, target: str) -> ExportOutcome:
        """Run an export; add its verdicts on quantizers to `rows`."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                notes: tuple[str, ...] = import_module(TARGETS[target]).attempt(self, Path(folder))
        except Exception as error:
            # Our messages are sentences; others need the type of the error.
            text = str(error).strip().partition("\n")[0]
            said = text if isinstance(error, ExportError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
            return ExportOutcome(REFUSED, said)
        exact = _DRAWN not in notes and all(row.verdicts.get(target, EXACT) == EXACT for row in self.rows)
        return ExportOutcome(EXACT if exact else APPROXIMATED, notes=notes)

    def look(self, target: str, path: Path) -> tuple[str, ...]:
        """Mark the quantizers that are in a file as exact; return a note if other random numbers are drawn."""
        nodes = {node.name: node.op_type for node in ir.load(path).graph if node.domain == DOMAIN}
        for row, view in zip(self.rows, self.views, strict=True):
            if view.node in nodes:
                row.verdicts[target] = EXACT
        return (_DRAWN,) if UNIFORM in nodes.values() else ()
