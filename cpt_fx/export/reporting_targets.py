"""What each export makes of a model, found out by doing it: traced, checked, and compared where it can be run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from cpt_fx.errors import ExportError
from cpt_fx.export import refusals
from cpt_fx.export.capture_modes import call_of, in_mode
from cpt_fx.export.environment import check_training
from cpt_fx.export.evaluation import embed, finish
from cpt_fx.export.plain import add_functions
from cpt_fx.export.program import Graph, states_of, trace
from cpt_fx.export.rewrites import REWRITES
from cpt_fx.formats import Rounding
from cpt_fx.inspection import inspect
from cpt_fx.layer_state import PREFIX, is_range

EXACT, APPROXIMATED, REFUSED = "exact", "approximated", "refused"
_NOISE = "with the noise of PyTorch for equal seeds"
_DRAWN = "draws of the seeds of a step: distributed as in PyTorch, other numbers than its generator's"
_UNPROVEN = (
    "its gradient in ONNX Runtime is not known to be PyTorch's: write it in terms of others, or without a gradient"
)
_STATISTICS = "is the average that PyTorch keeps, and goes on from it"

_BOOKKEEPING = {"clone", "copy_", "sym_size"}
"""Operators of the tracing, where they belong to no layer: running state goes in and out as a value."""


class Key(NamedTuple):
    """What a verdict is about."""

    kind: str
    layer: str
    what: str
    node: str = ""
    """Of a quantizer: what its node is called."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of something, and why or how."""

    status: str
    why: str = ""
    error: float | None = None
    """Relative to what PyTorch makes of the examples, where that was measured."""


@dataclass(frozen=True)
class Outcome:
    """What became of an export: a problem, where there would be none, and verdicts on parts."""

    verdicts: dict[Key, Verdict] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problem: str = ""


class Trial:
    """A model with its examples, traced once for whoever evaluates it."""

    def __init__(self, result: nn.Module, example_inputs: Any) -> None:
        self.result = result
        self.example_inputs = example_inputs

    @cached_property
    def evaluated(self) -> tuple[Graph, dict[str, Any]]:
        """The graph in evaluation, and the running state that it reads."""
        call = call_of(self.example_inputs)
        with in_mode(self.result, False, call) as module:
            state = {name: buffer.detach().cpu().numpy() for name, buffer in states_of(module).items()}
            return trace(module, call), state


def training(trial: Trial) -> Outcome:
    """Find out for `export.ort_training`, with a loss that depends on every output."""
    found: dict[Key, Verdict] = {}
    result, example_inputs = trial.result, trial.example_inputs
    try:
        loss = EveryOutput()
        call = replace(call_of(example_inputs), loss=loss)
        with in_mode(result, True, call) as module:
            graph = trace(module, call)
            buffers = states_of(module)
        found |= _quantizers(result, graph)
        found |= _operators(graph, after=loss.operators, in_training=True)
        found |= {_state_key(name): _state(buffers[name]) for name, after in graph.states.items() if after}
        refusals.check_schedules(graph.dials.values())
        missing = check_training()
        if not missing.works:
            refusals.check(graph.model, graph.parameters)
            return Outcome(found, (f"not tried here: {missing.problem}",))
        from cpt_fx.export import ort_training

        with tempfile.TemporaryDirectory() as folder:
            ort_training(result, example_inputs, Path(folder, "made"), loss=loss, optimizer="sgd", example_targets=())
    except ExportError as error:
        # The error is about the first one; there may be more.
        return Outcome(found | (_unproven(graph) if found else {}), (), str(error))
    except Exception as error:
        return Outcome(found, (), _said(error))
    return Outcome(found, ("tried: the loss of one step and every gradient were compared with PyTorch's",))


def plain(trial: Trial) -> Outcome:
    """Find out for `export.onnx`."""
    found: dict[Key, Verdict] = {}
    try:
        graph, state = trial.evaluated
        found |= _quantizers(trial.result, graph) | _operators(graph)
        embed(graph, state)
        finish(graph)
        add_functions(graph)
        onnx.checker.check_model(ir.to_proto(graph.model), full_check=True)
    except Exception as error:
        return Outcome(found, (), _said(error))
    return Outcome(found, ("tried: the graph was made, and passed the checker of ONNX",))


def deployed(trial: Trial) -> Outcome:
    """Find out for `export.qdq`, at 8 bits."""
    found: dict[Key, Verdict] = {}
    result = trial.result
    try:
        found |= _operators(trial.evaluated[0])
        from cpt_fx.export import qdq

        with tempfile.TemporaryDirectory() as folder:
            made = qdq(result, trial.example_inputs, Path(folder, "made.onnx"), verbose=False)
    except Exception as error:
        return Outcome(found, (), _said(error))
    rows = {(row.layer, row.operand): row for row in made.quantizers}
    for view in inspect(result).quantizers:
        row = rows.get((", ".join(view.layers), view.operand))
        if row is not None:
            exact = row.status == "exact"
            why = row.note if exact or row.note else row.status
            found[_key(view)] = Verdict(EXACT if exact else APPROXIMATED, why, None if exact else row.error)
    return Outcome(found, ("tried, at 8 bits", *(str(item) for item in made.outputs)))


PROBES: dict[str, Callable[[Trial], Outcome]] = {"ort_training": training, "onnx": plain, "qdq": deployed}


def _quantizers(result: nn.Module, graph: Graph) -> dict[Key, Verdict]:
    """Return the quantizers that were traced: each is a function of the same arithmetic."""
    placed = {item.name: item.kind for item in graph.placed}
    found = {}
    for view in inspect(result).quantizers:
        kind = placed.get(view.node)
        if kind is not None:
            found[_key(view)] = Verdict(EXACT, _NOISE if kind.rounding is Rounding.STOCHASTIC else "")
    return found


def _operators(graph: Graph, *, after: int = 0, in_training: bool = False) -> dict[Key, Verdict]:
    """Return the operators that were traced, and which are written in another form; `after` came after the model."""
    found = {}
    parameters = {
        spec.arg.name: str(spec.target)
        for spec in graph.program.graph_signature.input_specs
        if spec.kind is InputKind.PARAMETER
    }
    calls = list(_calls(graph.program.graph_module))
    for node in calls[: len(calls) - after]:
        target = node.target
        name = str(target).removeprefix("aten.").rpartition(".")[0]
        layer = _layer(node) or _owner(node, parameters)
        if not layer and name in _BOOKKEEPING:
            continue
        if _draws(node):
            verdict = Verdict(APPROXIMATED, _DRAWN)
        elif in_training and target in REWRITES:
            said = (REWRITES[target].__doc__ or "").strip().partition("\n")[0]
            verdict = Verdict(EXACT, f"in another form. {said}" if said else "in another form")
        else:
            verdict = Verdict(EXACT)
        found[Key("operator", layer, name)] = verdict
    return found


def _unproven(graph: Graph) -> dict[Key, Verdict]:
    """Return the operators between parameters and the outputs whose gradient ONNX Runtime is not known to get right."""
    found = {}
    for node, index in refusals.on_the_way(graph.model, graph.parameters):
        if not refusals.ours(node, index) and refusals.key(node, index) not in refusals.PROVEN:
            layer, _, operator = refusals.place(node).rpartition(": ")
            found[Key("operator", layer, operator)] = Verdict(REFUSED, _UNPROVEN)
    return found


def _calls(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Walk over the ATen operators of a program, those under `no_grad` included."""
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function" and str(node.target).startswith("aten."):
                    yield node


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operator draws at random. Dropout in evaluation does not: its third argument says so."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and False not in node.args[2:3]


def _layer(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    layers = [path.removeprefix("model").strip(".") for path, _ in stack.values() if path.startswith("model")]
    return layers[-1] if layers else ""


def _owner(node: torch.fx.Node, parameters: dict[str, str]) -> str:
    """Return the layer whose parameter an operator takes, quantized or not."""
    for taken in node.all_input_nodes:
        while "onnx_symbolic" in str(taken.target) and taken.all_input_nodes:
            taken = taken.all_input_nodes[0]
        if taken.name in parameters:
            return parameters[taken.name].removeprefix("model.").rpartition(".")[0]
    return ""


def _state(value: Tensor) -> Verdict:
    if value.is_floating_point():
        return Verdict(EXACT, _STATISTICS)
    if value.dtype in (torch.int32, torch.int64) and not value.ndim:
        return Verdict(EXACT, "is counted on")
    kind = str(value.dtype).removeprefix("torch.")
    return Verdict(REFUSED, f"it is {kind} of shape {tuple(value.shape)}: only floats and single integers can change")


def _key(view: Any) -> Key:
    return Key("quantizer", view.layer, f"{view.operand} {str(view.format).replace('/', ' ')}", view.node)


def _state_key(name: str) -> Key:
    """Name a buffer by its layer. The numbers that make up one running range are one."""
    layer, _, buffer = name.rpartition(".")
    if not is_range(buffer):
        return Key("state", layer, buffer)
    return Key("state", layer, f"range of {buffer.removeprefix(PREFIX).rpartition('_range_')[0]}")


class EveryOutput:
    """A number that depends on every output: what stands for a loss that is not known yet."""

    operators = 0
    """How many operators it took."""

    def __call__(self, outputs: Any) -> Tensor:
        """Add up the mean squares of all outputs."""
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not leaves:
            raise ExportError("the model returns no floating point tensor: there is nothing to train")
        self.operators = 3 * len(leaves) - 1
        total = leaves[0].square().mean()
        for leaf in leaves[1:]:
            total = total + leaf.square().mean()
        return total


def _said(error: Exception) -> str:
    """Return an error as a sentence: ours are some, others need their type."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, ExportError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
