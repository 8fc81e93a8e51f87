"""One step of a case in ONNX Runtime training beside the same step in PyTorch: loss, gradients, running statistics."""

from __future__ import annotations

import copy
import importlib
import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

import cpt_fx
from cpt_fx import noise
from cpt_fx.errors import ExportError
from cpt_fx.export import artifacts, program, refusals, rewrites
from tests.export.operator_case import Case

TOLERANCE = 1e-5
EXAMPLE, BATCH = 4, 6
"""Samples in the example that is exported, and in the step that is compared."""


@dataclass
class Outcome:
    """What became of a case: right, rewritten, refused, wrong, failed or crashed."""

    verdict: str
    remark: str = ""
    rewritten: tuple[str, ...] = ()
    difference: float = 0.0
    """The largest, of loss, gradients and statistics, relative to the largest element."""
    passed: tuple[str, ...] = ()
    """Operators of the graph that gradients passed through, as `refusals.PROVEN` calls them."""


def outcome_of(case: Case) -> Outcome:
    """Export a case, run one step of it, and compare."""
    used: set[str] = set()
    with mock.patch.dict(rewrites.REWRITES, _noted(used)):
        try:
            differences, passed = _differences(case)
        except ExportError as error:
            return Outcome("refused", str(error))
        except Exception as error:
            return Outcome("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= TOLERANCE:
        said = ", ".join(f"{name}: {value:.1e}" for name, value in differences.items() if not value <= TOLERANCE)
        return Outcome("wrong", said, tuple(sorted(used)), differences[worst])
    return Outcome("rewritten" if used else "right", "", tuple(sorted(used)), differences[worst], passed)


def run_apart(cases: Iterable[Case], seconds: float = 60.0) -> Iterator[tuple[Case, Outcome]]:
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
    """Import what an export imports, once for all copies; no session, whose threads a copy would lack."""
    model = cpt_fx.transform(nn.Linear(1, 1), cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=80)).train()
    x = torch.zeros(4, 1)
    program.trace(cpt_fx.single_graph(model, (x,)), program.Call((x,), {}, (x,), F.mse_loss))
    importlib.import_module("onnxruntime.training.artifacts")


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


def _noted(used: set[str]) -> dict[Any, Callable[..., Any]]:
    """Return the table of rewrites, each of which leaves a note where it applies."""

    def noting(target: Any, rewrite: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = rewrite(*args, **kwargs)
            if result is not NotImplemented:
                used.add(str(target).removeprefix("aten.").removesuffix(".default"))
            return result

        return call

    return {target: noting(target, rewrite) for target, rewrite in rewrites.REWRITES.items()}


def _differences(case: Case) -> tuple[dict[str, float], tuple[str, ...]]:
    torch.manual_seed(0)
    plain = case.build()
    case.prepare(plain)
    example, inputs, targets = case.inputs(EXAMPLE), case.inputs(BATCH), case.targets(BATCH)
    schedule = cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=80)
    transformed = cpt_fx.transform(copy.deepcopy(plain), schedule)
    case.prepare(transformed)
    graph_module: fx.GraphModule = cpt_fx.single_graph(transformed, example)
    call = program.Call(example, {}, case.targets(EXAMPLE), case.loss)
    graph = program.trace(graph_module, call)
    proto = artifacts.with_functions(graph)
    states = program.states_of(graph_module)
    artifacts.keep_state(proto, {name: states[name].numpy() for name, after in graph.states.items() if not after})
    names = _names(plain, set(graph.model.graph.initializers))
    trainable = refusals.trainable(graph.model, list(names.values()))
    seeds = torch.randint(-(2**31), 2**31, (max(graph.draws, 1), 2), dtype=torch.int32)
    feed = {
        **dict(zip(graph.inputs, inputs, strict=True)),
        **dict(zip(graph.targets, targets, strict=True)),
        **{program.BITS + name: torch.tensor(32) for name in program.widths_of(graph_module)},
        **{name: value.clone() for name, value in states.items()},
        program.SEEDS: seeds,
    }
    with tempfile.TemporaryDirectory() as directory:
        artifacts.training_model(proto, graph, tuple(trainable), (), {}, Path(directory))
        found = _ort_step(
            str(Path(directory, "training_model.onnx")),
            feed,
            dict(graph_module.named_parameters(remove_duplicate=False)),
        )
    drawn = iter(seeds[graph.quantizer_draws :])
    expected = {
        names.get(name, name): value for name, value in _torch_step(case, plain, inputs, targets, drawn).items()
    }
    differences = {"loss": _difference(found["loss"], expected.pop("loss"))}
    # Some gradients are 0 but for rounding, as that of a bias before batch norm: they are compared with the others.
    largest = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    for name, gradient in expected.items():
        if name in trainable:
            differences[name] = _difference(found[name], gradient, largest / 100)
        elif gradient is not None and bool(gradient.any()):
            differences[f"{name} (no gradient)"] = float("inf")
    for name in trainable:
        if expected[name] is None:
            differences[f"{name} (a gradient, torch has none)"] = float("inf")
    buffers = dict(plain.named_buffers())
    for name, out in graph.states.items():
        if name in buffers and out:
            differences[name] = _difference(found[out], buffers[name])
        elif name in buffers:
            differences[name] = _difference(states[name], buffers[name])
    return differences, tuple(sorted(_passed(graph.model, trainable)))


def _passed(model: ir.Model, trainable: list[str]) -> set[str]:
    places = refusals.on_the_way(model, trainable)
    return {refusals.key(node, index) for node, index in places if not node.domain}


def _names(model: nn.Module, used: set[str]) -> dict[str, str]:
    """Return, for the first name of each parameter, the one that a graph uses: tied parameters have several."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {first: next((name for name in (first, *more) if name in used), first) for first, *more in names.values()}


def _torch_step(
    case: Case, model: nn.Module, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...], seeds: Iterator[Tensor]
) -> dict[str, Any]:
    assert case.loss is not None
    with _Drawing(seeds):
        loss = case.loss(model(*inputs), *targets)
    loss.backward()
    return {"loss": loss.detach()} | {name: value.grad for name, value in model.named_parameters()}


class _Drawing(TorchFunctionMode):
    """Lets dropout draw as the exported graph does: from seeds."""

    def __init__(self, seeds: Iterator[Tensor]) -> None:
        super().__init__()
        self.seeds = seeds

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and (kwargs or {}).get("dropout_p"):
            query, key, value = args
            assert kwargs is not None
            shares = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1)
            return self.__torch_function__(torch.dropout, (), (shares, kwargs["dropout_p"], True)) @ value
        if func is torch.rand_like:
            return noise.uniform(next(self.seeds), args[0].detach())
        if func is torch.bernoulli:
            return (noise.uniform(next(self.seeds), args[0].detach()) < args[0].detach()).to(args[0].dtype)
        if func not in _DROPOUTS:
            return func(*args, **kwargs or {})
        x, p, training, *_ = (*args, *(kwargs or {}).values())
        if not training or not p:
            return x
        shape = x.shape if _DROPOUTS[func] else (*x.shape[:2], *(1,) * (x.ndim - 2))
        kept = noise.uniform(next(self.seeds), torch.empty(shape)) >= p
        if func in (F.alpha_dropout, F.feature_alpha_dropout):
            alpha = 1.7580993408473766
            scale = 1 / ((alpha**2 * p + 1) * (1 - p)) ** 0.5
            return torch.where(kept, x, torch.full_like(x, -alpha)) * scale + alpha * p * scale
        return x * kept / (1 - p) if p < 1 else x * 0


_DROPOUTS = {
    torch.dropout: True, F.dropout: True, F.dropout1d: False, F.dropout2d: False, F.dropout3d: False,
    F.alpha_dropout: True, F.feature_alpha_dropout: False,
}  # fmt: skip
"""Whether each element is drawn for, or each channel."""


def _ort_step(path: str, feed: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    buffers: dict[str, Any] = {}
    values: dict[str, Any] = {}
    held: list[Any] = []
    for item in session.get_inputs():
        name = item.name
        if name in feed:
            given = feed[name].numpy()
        elif name == "lazy_reset_grad":
            given = np.array([True])
        elif name.endswith(_BUFFER):
            given = np.zeros(parameters[name.removesuffix(_BUFFER)].shape, np.float32)
        else:
            given = parameters[name].detach().numpy()
        # ONNX Runtime works on the array's own memory, and does not keep it alive.
        held.append(np.array(given, order="C"))
        values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(held[-1])
        if name.endswith(_BUFFER):
            buffers[name.removesuffix(_BUFFER)] = values[name]
        binding.bind_ortvalue_input(name, values[name])
    names = [output.name for output in session.get_outputs()]
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    found = dict(zip(names, map(torch.from_numpy, binding.copy_outputs_to_cpu()), strict=True))
    return found | {name: torch.from_numpy(value.numpy().copy()) for name, value in buffers.items()}


_BUFFER = "_grad.accumulation.buffer"


def _difference(found: Tensor, expected: Tensor | None, least: float = 1e-6) -> float:
    """Return the largest difference, relative to the largest element."""
    if expected is None:
        expected = torch.zeros_like(found)
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    found, expected = found.double(), expected.detach().double()
    return float((found - expected).abs().max() / max(float(expected.abs().max()), least))
