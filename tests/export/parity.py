"""One step of a case in ONNX Runtime beside the same step in PyTorch: loss, gradients, running statistics."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.errors import ExportError
from cpt_fx.export import program
from cpt_fx.export.functions import add_functions
from cpt_fx.export.operators import drawing
from cpt_fx.export.verify import Drawn
from cpt_fx.ort import manifest
from cpt_fx.quantizers.noise import uniform
from tests.export.operator_case import Case

TOLERANCE = 1e-5
EXAMPLE, BATCH = 4, 6
"""Samples in the example that is exported, and in the step that is compared."""


@dataclass
class Outcome:
    """What became of a case: right, refused, wrong, failed or crashed."""

    verdict: str
    remark: str = ""
    difference: float = 0.0
    """The largest, of loss, gradients and statistics, relative to the largest element."""


def outcome_of(case: Case) -> Outcome:
    """Export a case, run one step of it, and compare."""
    try:
        differences = _differences(case)
    except ExportError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= TOLERANCE:
        said = ", ".join(f"{name}: {value:.1e}" for name, value in differences.items() if not value <= TOLERANCE)
        return Outcome("wrong", said, differences[worst])
    return Outcome("right", "", differences[worst])


def run_apart(cases: Iterable[Case], seconds: float = 300.0) -> Iterator[tuple[Case, Outcome]]:
    """Run each case in a process of its own, which may crash: a copy of this one, where everything is imported."""
    _warm_up()
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "outcome.json")
            child = os.fork()
            if not child:
                _run_in_child(case, path, seconds)
            _, status = os.waitpid(child, 0)
            if path.exists():
                outcome = Outcome(**json.loads(path.read_text()))
            else:
                outcome = Outcome(
                    "crashed", f"signal {os.WTERMSIG(status)}, exit code {os.waitstatus_to_exitcode(status)}"
                )
        yield case, outcome


def _warm_up() -> None:
    """Import what an export imports, and trace the usual functions, once for all copies.

    No session is made, whose threads a copy would lack.
    """
    model = cpt_fx.transform(nn.Linear(1, 1), cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=80)).train()
    x = torch.zeros(4, 1)
    call = program.Call((x,), {}, (x,), F.mse_loss)
    add_functions(program.trace(cpt_fx.single_graph(model, (x,)), call, gradients=True))


def _run_in_child(case: Case, path: Path, seconds: float) -> None:
    import signal

    signal.alarm(int(seconds))
    # What C++ says on its way down is no part of the table.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    try:
        path.write_text(json.dumps(asdict(outcome_of(case))))
    finally:
        os._exit(0)


def _differences(case: Case) -> dict[str, float]:
    torch.manual_seed(0)
    plain = case.build()
    case.prepare(plain)
    example, inputs, targets = case.inputs(EXAMPLE), case.inputs(BATCH), case.targets(BATCH)
    schedule = cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=80)
    transformed = cpt_fx.transform(copy.deepcopy(plain), schedule)
    case.prepare(transformed)
    module = cpt_fx.single_graph(transformed, example)
    graph = program.trace(module, program.Call(example, {}, case.targets(EXAMPLE), case.loss), gradients=True)
    shape = next(value.shape for value in graph.model.graph.inputs if value.name == graph.inputs[0])
    if shape is None or not isinstance(shape[0], ir.SymbolicDim):
        raise ExportError("the graph is for batches of one size only")
    add_functions(graph)
    parameters = dict(module.named_parameters())
    seeds = torch.randint(-(2**31), 2**31, (max(graph.draws, 1), 2), dtype=torch.int32)
    feed = {
        **dict(zip((*graph.inputs, *graph.targets), (*inputs, *targets), strict=True)),
        **{name: torch.tensor(32) for name in graph.width_sources},
        **parameters,
        **program.states_of(module),
        **{name + manifest.GRADIENT: torch.zeros_like(value) for name, value in parameters.items()},
        manifest.SEEDS: seeds,
        manifest.MORE: torch.tensor(False),
    }
    found = _ort_step(graph, feed)
    expected = _torch_step(case, plain, inputs, targets, seeds)
    differences = {"loss": _difference(found["loss"], expected.pop("loss"))}
    # Some gradients are 0 but for rounding, as that of a bias before batch norm: they are compared with the others.
    # With a hundredth of the largest instead of a tenth, a single rounding of it (1.2e-7) would be too much.
    largest = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    for name, gradient in expected.items():
        made = found.get(name + manifest.GRADIENT + manifest.NEXT)
        if made is not None:
            differences[name] = _difference(made, gradient, largest / 10)
        elif gradient is not None and bool(gradient.any()):
            differences[f"{name} (no gradient)"] = float("inf")
    buffers = dict(plain.named_buffers())
    for name, out in graph.states.items():
        if name in buffers:
            differences[name] = _difference(found[out] if out else feed[name], buffers[name])
    return differences


def _torch_step(
    case: Case, model: nn.Module, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], seeds: Tensor
) -> dict[str, Any]:
    assert case.loss is not None
    drawn = iter(seeds)
    with Drawn(drawing(lambda like: uniform(next(drawn), like))):
        loss = case.loss(model(*inputs), *targets)
    loss.backward()
    return {"loss": loss.detach()} | {name: value.grad for name, value in model.named_parameters()}


def _ort_step(graph: program.Graph, feed: dict[str, Tensor]) -> dict[str, Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    proto = ir.to_proto(graph.model)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {value.name: feed[value.name].detach().numpy() for value in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(torch.as_tensor, session.run(names, given)), strict=True))


def _difference(found: Tensor, expected: Tensor | None, least: float = 1e-6) -> float:
    """Return the largest difference, relative to the largest element."""
    if expected is None:
        expected = torch.zeros_like(found)
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    found, expected = found.double(), expected.detach().double()
    return float((found - expected).abs().max() / max(float(expected.abs().max()), least))
