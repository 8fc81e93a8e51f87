"""`export.report`: what an export would keep exactly, what it would change, what it would refuse, and why.

Nothing is promised that was not tried: models are traced as the exports trace them, and where the packages are there,
exported to a folder that is gone afterwards, with the comparisons that every export makes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
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
from cpt_fx.export.program import Graph, states_of, trace
from cpt_fx.export.refusals import check_schedules
from cpt_fx.export.training import ort_training
from cpt_fx.inspection import inspect
from cpt_fx.inspection.table import as_text
from cpt_fx.layer_state import PREFIX, is_range
from cpt_fx.trial import tensors_in

TARGETS = ("ort_training", "onnx", "qdq")
EXACT, APPROXIMATED, REFUSED = "exact", "approximated", "refused"
_COLOURS = {EXACT: "green", APPROXIMATED: "yellow", REFUSED: "bold red"}
_NAMES = {"quantizer": "quantizers", "operator": "operators", "state": "running state"}
_NOISE = "with the noise of PyTorch for equal seeds"
_DRAWN = "drawn from the seeds of a step: distributed as in PyTorch, other numbers than its generator's"
_STATISTICS = "is the average that PyTorch keeps, and goes on from it"
_Key = tuple[str, str, str, str]
"""What a verdict is about: kind, layer, what it is, and of a quantizer the name of its node."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of something, and why or how."""

    status: str
    why: str = ""
    error: float | None = None
    """Relative to what PyTorch makes of the examples, where that was measured."""


@dataclass(frozen=True)
class Row:
    """A quantizer, operators or a running state, and what becomes of it for each target that has it."""

    kind: str
    """`"quantizer"`, `"operator"` (only what is not exact) or `"state"`."""
    layer: str
    what: str
    """The operand and its format, what operators do, or the buffer."""
    verdicts: dict[str, Verdict]


@dataclass(frozen=True)
class Outcome:
    """What became of an export as a whole: a problem where there would be none, or notes on it."""

    problem: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Report:
    """What exports of a model would be like. Printed, it is a table and the reasons."""

    model: str
    targets: dict[str, Outcome]
    rows: tuple[Row, ...] = ()

    def status(self, target: str) -> str:
        """Return `"exact"`, `"approximated"` or `"refused"`: the worst of what a target has."""
        outcome = self.targets[check_choice("target", target, self.targets)]
        found = {row.verdicts[target].status for row in self.rows if target in row.verdicts}
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
            "targets": {name: {"status": self.status(name)} | asdict(self.targets[name]) for name in self.targets},
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
        found: dict[tuple[str, str], dict[str, None]] = {}
        for row in self.rows:
            verdict = row.verdicts.get(target)
            if verdict is not None and verdict.why:
                word = row.what.partition(" ")[0]
                place = f"{row.layer} {word}" if row.layer else word
                found.setdefault((verdict.status, verdict.why), {})[place] = None
        ordered = sorted(found.items(), key=lambda item: [REFUSED, APPROXIMATED, EXACT].index(item[0][0]))
        return [f"{status}: {_listed([*places])}: {why}" for (status, why), places in ordered]


def _cell(verdict: Verdict | None) -> Text:
    if verdict is None:
        return Text("–", "dim")
    error = "" if verdict.error is None else f" {verdict.error:.1%}"
    return Text(f"{verdict.status}{error}", _COLOURS[verdict.status])


def _listed(places: list[str]) -> str:
    return ", ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")


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
    rows = [Row(*key[:3], verdicts) for key, verdicts in trial.found.items()]
    ordered = sorted(rows, key=lambda row: [*_NAMES].index(row.kind))
    return Report(trial.inspection.name, outcomes, tuple(ordered))


class _Trial:
    """Finds out what each export makes of a model by doing it: traced, checked, and compared where it can be run."""

    def __init__(self, result: nn.Module, example_inputs: Any) -> None:
        self.inspection = inspect(result)
        self.result = result
        self.example_inputs = example_inputs
        self.call = call_of(example_inputs)
        self.target = ""
        self.found: dict[_Key, dict[str, Verdict]] = {_quantizer(view): {} for view in self.inspection.quantizers}
        """What verdicts are about -> the verdict of each target."""

    def outcome(self, target: str) -> Outcome:
        """Try an export; what it says of parts goes to `found`."""
        self.target = target
        try:
            return Outcome(notes=getattr(self, f"_{target}")())
        except Exception as error:
            # Ours are sentences, others need their type.
            text = str(error).strip().partition("\n")[0]
            said = text if isinstance(error, ExportError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
            return Outcome(said)

    def _say(self, key: _Key, verdict: Verdict) -> None:
        self.found.setdefault(key, {})[self.target] = verdict

    def _ort_training(self) -> tuple[str, ...]:
        """Do it with a loss that depends on every output."""
        call = replace(self.call, loss=_every_output)
        with in_mode(self.result, True, call) as module:
            run(module, call)
            graph = trace(module, call, gradients=True)
            buffers = states_of(module)
        self._quantizers(graph)
        self._drawn(graph)
        for name in (name for name, after in graph.states.items() if after):
            verdict = Verdict(EXACT, _STATISTICS if buffers[name].is_floating_point() else "is counted on")
            self._say(_state(name), verdict)
        check_schedules(graph.dials.values())
        missing = check_runtime()
        if not missing.works:
            return (f"not tried here: {missing.problem}",)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder, "made")
            ort_training(
                self.result, self.example_inputs, made, loss=_every_output, optimizer="sgd", example_targets=()
            )
        return ("tried: three steps were compared with PyTorch's",)

    def _onnx(self) -> tuple[str, ...]:
        with in_mode(self.result, False, self.call) as module:
            graph = evaluation_of(module, self.call)
        self._quantizers(graph)
        self._drawn(graph)
        finish(graph)
        add_functions(graph)
        onnx.checker.check_model(ir.to_proto(graph.model), full_check=True)
        return ("tried: the graph was made, and passed the checker of ONNX",)

    def _qdq(self) -> tuple[str, ...]:
        with tempfile.TemporaryDirectory() as folder:
            made = qdq(self.result, self.example_inputs, Path(folder, "made.onnx"), verbose=False)
        rows = {(row.layer, row.operand): row for row in made.quantizers}
        for view in self.inspection.quantizers:
            row = rows.get((", ".join(view.layers), view.operand))
            if row is not None:
                exact = row.status == EXACT
                why = row.note if exact or row.note else row.status
                verdict = Verdict(EXACT, why) if exact else Verdict(APPROXIMATED, why, row.error)
                self._say(_quantizer(view), verdict)
        warning = (f"WARNING: {made.untrained}",) if made.untrained else ()
        return (*warning, "tried, at 8 bits", *(str(item) for item in made.outputs), made.runtime)

    def _quantizers(self, graph: Graph) -> None:
        """Say of the quantizers that were traced that each is a function of the same arithmetic."""
        placed = {item.name: item.kind for item in graph.placed}
        for view in self.inspection.quantizers:
            if view.node in placed:
                self._say(_quantizer(view), Verdict(EXACT, _NOISE if placed[view.node].draws else ""))

    def _drawn(self, graph: Graph) -> None:
        """Say whether the model itself draws at random."""
        own = graph.draws - sum(one.kind.draws for one in graph.placed)
        if own > 0:
            self._say(("operator", "", f"random numbers, drawn {own} times", ""), Verdict(APPROXIMATED, _DRAWN))


def _quantizer(view: Any) -> _Key:
    return "quantizer", view.layer, f"{view.operand} {str(view.format).replace('/', ' ')}", view.node


def _state(name: str) -> _Key:
    """Name a buffer by its layer. The numbers that make up one running range are one."""
    layer, _, buffer = name.rpartition(".")
    if is_range(buffer):
        buffer = f"range of {buffer.removeprefix(PREFIX).rpartition('_range_')[0]}"
    return "state", layer, buffer, ""


def _every_output(outputs: Any) -> Tensor:
    """Return a number that depends on every output: what stands for a loss that is not known yet."""
    leaves = [leaf for leaf in tensors_in(outputs) if leaf.is_floating_point()]
    if not leaves:
        raise ExportError("the model returns no floating point tensor: there is nothing to train")
    first, *others = [leaf.square().mean() for leaf in leaves]
    return sum(others, first)
