"""`export.report`: what an export would keep exactly, what it would change, what it would refuse, and why.

Nothing is promised that was not tried: models are exported to a folder that is gone afterwards, with the comparisons
that every export makes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from cpt_fx.errors import ExportError, check_choice
from cpt_fx.export import plain
from cpt_fx.export.capture_modes import call_of
from cpt_fx.export.deployment import qdq
from cpt_fx.export.functions import UNIFORM
from cpt_fx.export.local_functions import DOMAIN
from cpt_fx.export.manifest import GRADIENTS
from cpt_fx.export.training import ort_training
from cpt_fx.inspection import inspect
from cpt_fx.inspection.table import as_text
from cpt_fx.layer_state import is_range
from cpt_fx.trial import tensors_in

TARGETS = ("ort_training", "onnx", "qdq")
EXACT, APPROXIMATED, REFUSED = "exact", "approximated", "refused"
_COLOURS = {EXACT: "green", APPROXIMATED: "yellow", REFUSED: "bold red"}
_DRAWN = (
    "random numbers are drawn from the seeds of a step: distributed as in PyTorch, other numbers than its generator's"
)


@dataclass(frozen=True)
class Row:
    """A quantizer, and what becomes of it for each target that has it."""

    layer: str
    what: str
    """The operand and its format."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Target -> `"exact"`, or `"approximated"` with the error, relative to what PyTorch makes of the examples."""


@dataclass(frozen=True)
class Outcome:
    """What became of an export as a whole: a problem where there would be none, or notes on it."""

    status: str
    """`"exact"`, `"approximated"` or `"refused"`: the worst of what there is."""
    problem: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Report:
    """What exports of a model would be like. Printed, it is a table and the reasons."""

    model: str
    targets: dict[str, Outcome]
    rows: tuple[Row, ...]

    def status(self, target: str) -> str:
        """Return `"exact"`, `"approximated"` or `"refused"`."""
        return self.targets[check_choice("target", target, self.targets)].status

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return asdict(self)

    def __rich__(self) -> ConsoleRenderable:
        """Show the quantizers as a table, then the reasons, target by target."""
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
        """Show the same as plain text."""
        return as_text(self, 120)

    def __repr__(self) -> str:
        """Say what there is."""
        return f"<Report on {self.model}: {', '.join(f'{name} {self.status(name)}' for name in self.targets)}>"


def report(result: nn.Module, example_inputs: Any, targets: Iterable[str] = TARGETS) -> Report:
    """Say what exports of a transformed model would keep exactly, change or refuse, layer by layer.

    The model is left as it is, and no file stays behind. A model that is refused is no error: the report says why.

    Args:
        result: what `transform` returned.
        example_inputs: a tuple of the model's arguments, or a dict of them by name.
        targets: which of `"ort_training"`, `"onnx"` and `"qdq"`.
    """
    names = [check_choice("target", name, TARGETS) for name in ((targets,) if isinstance(targets, str) else targets)]
    trial = _Trial(result, example_inputs)
    outcomes = {name: trial.outcome(name) for name in dict.fromkeys(names)}
    return Report(trial.inspection.name, outcomes, tuple(trial.rows))


class _Trial:
    """Finds out what each export makes of a model by doing it: traced, checked, and compared where it can be run."""

    def __init__(self, result: nn.Module, example_inputs: Any) -> None:
        self.result, self.example_inputs = result, example_inputs
        self.inspection = inspect(result)
        call_of(example_inputs)  # Refuses what is none.
        self.views = self.inspection.quantizers
        self.rows = [Row(view.layer, f"{view.operand} {str(view.format).replace('/', ' ')}") for view in self.views]

    def outcome(self, target: str) -> Outcome:
        """Try an export; what it says of quantizers goes to `rows`."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                notes: tuple[str, ...] = getattr(self, f"_{target}")(Path(folder))
        except Exception as error:
            # Ours are sentences, others need their type.
            text = str(error).strip().partition("\n")[0]
            said = text if isinstance(error, ExportError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
            return Outcome(REFUSED, said)
        exact = _DRAWN not in notes and all(row.verdicts.get(target, EXACT) == EXACT for row in self.rows)
        return Outcome(EXACT if exact else APPROXIMATED, notes=notes)

    def _ort_training(self, folder: Path) -> tuple[str, ...]:
        """Do it with a loss that depends on every output."""
        made = ort_training(
            self.result, self.example_inputs, folder / "made", loss=_every_output, optimizer="sgd", example_targets=()
        )
        notes = self._look("ort_training", folder / "made" / GRADIENTS)
        states = [state.name for state in made.states if state.swaps and not is_range(state.name.rpartition(".")[2])]
        kept = (f"exact: {', '.join(states)}: running state, written by each step",) if states else ()
        return (*notes, *kept, "tried: three steps were compared with PyTorch's")

    def _onnx(self, folder: Path) -> tuple[str, ...]:
        made = plain.onnx(self.result, self.example_inputs, folder / "made.onnx")
        return (*self._look("onnx", made), "tried: the graph was made, and passed the checker of ONNX")

    def _qdq(self, folder: Path) -> tuple[str, ...]:
        made = qdq(self.result, self.example_inputs, folder / "made.onnx", verbose=False)
        found = {(item.layer, item.operand): item for item in made.quantizers}
        for row, view in zip(self.rows, self.views, strict=True):
            item = found.get((", ".join(view.layers), view.operand))
            if item is not None:
                row.verdicts["qdq"] = EXACT if item.status == EXACT else f"{APPROXIMATED} {item.error:.1%}"
        # All but the first line, which counts them.
        return ("tried, at 8 bits", *(line.strip() for line in str(made).splitlines()[1:]))

    def _look(self, target: str, path: Path) -> tuple[str, ...]:
        """Say that each quantizer in a file is a function of the same arithmetic, and whether more draws."""
        nodes = {node.name: node.op_type for node in ir.load(path).graph if node.domain == DOMAIN}
        for row, view in zip(self.rows, self.views, strict=True):
            if view.node in nodes:
                row.verdicts[target] = EXACT
        return (_DRAWN,) if UNIFORM in nodes.values() else ()


def _every_output(outputs: Any) -> Tensor:
    """Return a number that depends on every output: what stands for a loss that is not known yet."""
    return sum((leaf.square().mean() for leaf in tensors_in(outputs) if leaf.is_floating_point()), torch.zeros(()))
