"""`export.report`: what an export would keep exactly, what it would change, what it would refuse, and why.

Nothing is promised that was not tried: models are traced as the exports trace them, and where the packages are there,
exported to a folder that is gone afterwards, with the comparisons that every export makes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from cpt_fx.errors import ExportError, check_choice
from cpt_fx.export import refusals
from cpt_fx.export.capture_modes import call_of, in_mode
from cpt_fx.export.deployment import qdq
from cpt_fx.export.environment import check_training
from cpt_fx.export.plain import add_functions, embed, finish
from cpt_fx.export.program import Graph, states_of, trace
from cpt_fx.export.rewrites import REWRITES
from cpt_fx.export.training import ort_training
from cpt_fx.formats import Rounding
from cpt_fx.inspection import inspect
from cpt_fx.inspection.table import as_text
from cpt_fx.layer_state import PREFIX, is_range
from cpt_fx.trial import tensors_in

TARGETS = ("ort_training", "onnx", "qdq")
EXACT, APPROXIMATED, REFUSED = "exact", "approximated", "refused"
_COLOURS = {EXACT: "green", APPROXIMATED: "yellow", REFUSED: "bold red"}
_NAMES = {"quantizer": "quantizers", "operator": "operators", "state": "running state"}
_NOISE = "with the noise of PyTorch for equal seeds"
_DRAWN = "draws of the seeds of a step: distributed as in PyTorch, other numbers than its generator's"
_UNPROVEN = (
    "its gradient in ONNX Runtime is not known to be PyTorch's: write it in terms of others, or without a gradient"
)
_STATISTICS = "is the average that PyTorch keeps, and goes on from it"
_BOOKKEEPING = {"clone", "copy_", "sym_size"}
"""Operators of the tracing, where they belong to no layer: running state goes in and out as a value."""
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
    """A quantizer, an operator or a running state, and what becomes of it for each target that has it."""

    kind: str
    """`"quantizer"`, `"operator"` or `"state"`."""
    layer: str
    what: str
    """The operand and its format, the operator as ATen calls it, or the buffer."""
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
        found: dict[tuple[str, str, str], dict[str, None]] = {}
        for row in self.rows:
            verdict = row.verdicts.get(target)
            if verdict is not None and verdict.why:
                word = row.what.partition(" ")[0]
                what = row.what if row.kind == "operator" else ""
                place = f"{row.layer} {word}" if row.layer else word
                found.setdefault((verdict.status, what, verdict.why), {})[place] = None
        ordered = sorted(found.items(), key=lambda item: [REFUSED, APPROXIMATED, EXACT].index(item[0][0]))
        return [f"{status}: {_listed([*places])}: {why}" for (status, _, why), places in ordered]


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

    @cached_property
    def _evaluated(self) -> tuple[Graph, dict[str, Any]]:
        """The graph in evaluation, traced once, and the running state that it reads."""
        with in_mode(self.result, False, self.call) as module:
            state = {name: buffer.detach().cpu().numpy() for name, buffer in states_of(module).items()}
            return trace(module, self.call), state

    def _ort_training(self) -> tuple[str, ...]:
        """Try it with a loss that depends on every output."""
        loss = _EveryOutput()
        call = replace(self.call, loss=loss)
        with in_mode(self.result, True, call) as module:
            graph = trace(module, call)
            buffers = states_of(module)
        self._quantizers(graph)
        self._operators(graph, after=loss.operators, in_training=True)
        for name in (name for name, after in graph.states.items() if after):
            self._say(_state(name), _kept(buffers[name]))
        try:
            refusals.check_schedules(graph.dials.values())
            missing = check_training()
            if not missing.works:
                refusals.check(graph.model, graph.parameters)
                return (f"not tried here: {missing.problem}",)
            with tempfile.TemporaryDirectory() as folder:
                made = Path(folder, "made")
                ort_training(self.result, self.example_inputs, made, loss=loss, optimizer="sgd", example_targets=())
        except ExportError:
            # The error is about the first one; there may be more.
            self._unproven(graph)
            raise
        return ("tried: the loss of one step and every gradient were compared with PyTorch's",)

    def _onnx(self) -> tuple[str, ...]:
        graph, state = self._evaluated
        self._quantizers(graph)
        self._operators(graph)
        embed(graph, state)
        finish(graph)
        add_functions(graph)
        onnx.checker.check_model(ir.to_proto(graph.model), full_check=True)
        return ("tried: the graph was made, and passed the checker of ONNX",)

    def _qdq(self) -> tuple[str, ...]:
        self._operators(self._evaluated[0])
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
        return ("tried, at 8 bits", *(str(item) for item in made.outputs))

    def _quantizers(self, graph: Graph) -> None:
        """Say of the quantizers that were traced that each is a function of the same arithmetic."""
        placed = {item.name: item.kind for item in graph.placed}
        for view in self.inspection.quantizers:
            if view.node in placed:
                draws = placed[view.node].rounding is Rounding.STOCHASTIC
                self._say(_quantizer(view), Verdict(EXACT, _NOISE if draws else ""))

    def _operators(self, graph: Graph, *, after: int = 0, in_training: bool = False) -> None:
        """Say which operators were traced, and which are written in another form; `after` came after the model."""
        parameters = {
            spec.arg.name: str(spec.target)
            for spec in graph.program.graph_signature.input_specs
            if spec.kind is InputKind.PARAMETER
        }
        calls = list(_calls(graph.program.graph_module))
        for node in calls[: len(calls) - after]:
            name = str(node.target).removeprefix("aten.").rpartition(".")[0]
            layer = _layer(node) or _owner(node, parameters)
            if not layer and name in _BOOKKEEPING:
                continue
            if _draws(node):
                verdict = Verdict(APPROXIMATED, _DRAWN)
            elif in_training and node.target in REWRITES:
                said = (REWRITES[node.target].__doc__ or "").strip().partition("\n")[0]
                verdict = Verdict(EXACT, f"in another form. {said}" if said else "in another form")
            else:
                verdict = Verdict(EXACT)
            self._say(("operator", layer, name, ""), verdict)

    def _unproven(self, graph: Graph) -> None:
        """Refuse operators between parameters and outputs whose gradient ONNX Runtime is not known to get right."""
        for node, index in refusals.on_the_way(graph.model, graph.parameters):
            if not refusals.ours(node, index) and refusals.key(node, index) not in refusals.PROVEN:
                layer, _, operator = refusals.place(node).rpartition(": ")
                self._say(("operator", layer, operator, ""), Verdict(REFUSED, _UNPROVEN))


def _quantizer(view: Any) -> _Key:
    return "quantizer", view.layer, f"{view.operand} {str(view.format).replace('/', ' ')}", view.node


def _state(name: str) -> _Key:
    """Name a buffer by its layer. The numbers that make up one running range are one."""
    layer, _, buffer = name.rpartition(".")
    if is_range(buffer):
        buffer = f"range of {buffer.removeprefix(PREFIX).rpartition('_range_')[0]}"
    return "state", layer, buffer, ""


def _kept(value: Tensor) -> Verdict:
    """Say what becomes of a running state."""
    if value.is_floating_point():
        return Verdict(EXACT, _STATISTICS)
    if value.dtype in (torch.int32, torch.int64) and not value.ndim:
        return Verdict(EXACT, "is counted on")
    kind = str(value.dtype).removeprefix("torch.")
    return Verdict(REFUSED, f"it is {kind} of shape {tuple(value.shape)}: only floats and single integers can change")


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Walk over the ATen operators of a program, those under `no_grad` included."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function" and str(node.target).startswith("aten."):
                    yield node


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws at random. Dropout in evaluation does not: its third argument says so."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and False not in node.args[2:3]


def _layer(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    layers = [path.removeprefix("model").strip(".") for path, _ in stack.values() if path.startswith("model")]
    return layers[-1] if layers else ""


def _owner(node: fx.Node, parameters: dict[str, str]) -> str:
    """Return the layer whose parameter an operator takes, quantized or not."""
    for taken in node.all_input_nodes:
        while "onnx_symbolic" in str(taken.target) and taken.all_input_nodes:
            taken = taken.all_input_nodes[0]
        if taken.name in parameters:
            return parameters[taken.name].removeprefix("model.").rpartition(".")[0]
    return ""


class _EveryOutput:
    """A number that depends on every output: what stands for a loss that is not known yet."""

    operators = 0
    """How many operators it took."""

    def __call__(self, outputs: Any) -> Tensor:
        """Add up the mean squares of all outputs."""
        leaves = [leaf for leaf in tensors_in(outputs) if leaf.is_floating_point()]
        if not leaves:
            raise ExportError("the model returns no floating point tensor: there is nothing to train")
        self.operators = 3 * len(leaves) - 1
        first, *others = [leaf.square().mean() for leaf in leaves]
        return sum(others, first)
