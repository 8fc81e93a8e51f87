"""`export.report`: what an export would keep exactly, what it would change, what it would refuse, and why.

Nothing is promised that was not tried: models are traced as the exports trace them, and where the packages are there,
exported to a folder that is gone afterwards, with the comparisons that every export makes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from cpt_fx.errors import ExportError, check_choice
from cpt_fx.export.capture_modes import call_of, in_mode
from cpt_fx.export.deployment import qdq
from cpt_fx.export.environment import check_runtime
from cpt_fx.export.functions import add_functions
from cpt_fx.export.plain import evaluation_of, finish, run
from cpt_fx.export.program import Graph, trace
from cpt_fx.export.refusals import check_schedules
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
        self.inspection, self.call = inspect(result), call_of(example_inputs)
        self.views = self.inspection.quantizers
        self.rows = [Row(view.layer, f"{view.operand} {str(view.format).replace('/', ' ')}") for view in self.views]

    def outcome(self, target: str) -> Outcome:
        """Try an export; what it says of quantizers goes to `rows`."""
        try:
            notes: tuple[str, ...] = getattr(self, f"_{target}")()
        except Exception as error:
            # Ours are sentences, others need their type.
            text = str(error).strip().partition("\n")[0]
            said = text if isinstance(error, ExportError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
            return Outcome(REFUSED, said)
        exact = _DRAWN not in notes and all(row.verdicts.get(target, EXACT) == EXACT for row in self.rows)
        return Outcome(EXACT if exact else APPROXIMATED, notes=notes)

    def _ort_training(self) -> tuple[str, ...]:
        """Do it with a loss that depends on every output."""
        call = replace(self.call, loss=_every_output)
        with in_mode(self.result, True, call) as module:
            run(module, call)
            graph = trace(module, call, gradients=True)
        notes = self._look("ort_training", graph)
        states = [name for name, after in graph.states.items() if after and not is_range(name.rpartition(".")[2])]
        if states:
            notes = (*notes, f"exact: {_listed(states)}: running state, written by each step")
        check_schedules(graph.dials.values())
        missing = check_runtime()
        if not missing.works:
            return (*notes, f"not tried here: {missing.problem}")
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "made")
            ort_training(
                self.result, self.example_inputs, made, loss=_every_output, optimizer="sgd", example_targets=()
            )
        return (*notes, "tried: three steps were compared with PyTorch's")

    def _onnx(self) -> tuple[str, ...]:
        with in_mode(self.result, False, self.call) as module:
            graph = evaluation_of(module, self.call)
        finish(graph)
        add_functions(graph)
        onnx.checker.check_model(ir.to_proto(graph.model), full_check=True)
        return (*self._look("onnx", graph), "tried: the graph was made, and passed the checker of ONNX")

    def _qdq(self) -> tuple[str, ...]:
        with tempfile.TemporaryDirectory() as folder:
            made = qdq(self.result, self.example_inputs, Path(folder, "made.onnx"), verbose=False)
        found = {(item.layer, item.operand): item for item in made.quantizers}
        reasons: dict[str, list[str]] = {}
        for row, view in zip(self.rows, self.views, strict=True):
            item = found.get((", ".join(view.layers), view.operand))
            if item is not None:
                exact = item.status == EXACT
                row.verdicts["qdq"] = EXACT if exact else f"{APPROXIMATED} {item.error:.1%}"
                if item.note:
                    why = f"{EXACT if exact else APPROXIMATED}, {item.note}"
                    reasons.setdefault(why, []).append(f"{row.layer} {view.operand}".strip())
        said = [f"{why}: {_listed(places)}" for why, places in reasons.items()]
        warning = (f"WARNING: {made.untrained}",) if made.untrained else ()
        return (*warning, *said, "tried, at 8 bits", *(str(item) for item in made.outputs), made.runtime)

    def _look(self, target: str, graph: Graph) -> tuple[str, ...]:
        """Say of quantizers that were traced that each is a function of the same arithmetic, and whether more draws."""
        placed = {item.name for item in graph.placed}
        for row, view in zip(self.rows, self.views, strict=True):
            if view.node in placed:
                row.verdicts[target] = EXACT
        return (_DRAWN,) if graph.draws > sum(one.kind.draws for one in graph.placed) else ()


def _every_output(outputs: Any) -> Tensor:
    """Return a number that depends on every output: what stands for a loss that is not known yet."""
    return sum((leaf.square().mean() for leaf in tensors_in(outputs) if leaf.is_floating_point()), torch.zeros(()))


def _listed(places: list[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
