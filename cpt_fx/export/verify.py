"""Comparison of exported files with PyTorch on the same examples: the steps of a training run, the outputs of a model.

For training, at least three steps run in ONNX Runtime and in PyTorch, at full precision. Every loss, gradient, running
state, parameter and optimizer state is compared, for several batch sizes and for other values of every dynamic size.
After each comparison both continue from the same numbers, so that a difference comes from one step. Quantization below
32 bits is the same in every export, and covered by tests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from cpt_fx.capture.dry_run import dry_run, tensors_in
from cpt_fx.capture.standalone import precision_of
from cpt_fx.common.arrays import Array, array_of
from cpt_fx.common.torch_private import TorchDispatchMode, pytree
from cpt_fx.errors import ExportError
from cpt_fx.export.examples import tensors_of
from cpt_fx.export.lowering import Calls
from cpt_fx.export.operators import drawing
from cpt_fx.export.program import Call, Graph, states_of
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.ort.environment import CPU
from cpt_fx.ort.manifest import Manifest
from cpt_fx.ort.trainer import Trainer, draw
from cpt_fx.quantizers.noise import uniform
from cpt_fx.quantizers.ops import QUANTIZE_GRADIENT, QUANTIZERS
from cpt_fx.schedules import Static

Values = dict[str, Array]
_WITHOUT = "session.disable_quant_qdq"
TOLERANCE = 1e-3
"""Largest difference of a gradient or a state, relative to its largest element. Float32 sums in another order differ
by 1e-6 to 1e-5, in deep nets with batch norm by 1e-4; real errors exceed 1e-2."""
UPDATE_TOLERANCE = 1e-5
"""The same for an update from equal numbers, which is elementwise."""
_NEGLIGIBLE = 1e-2
"""Share of the largest gradient below which others are compared to it: those that should be zero are only rounding."""
_ATTEMPTS = 3
"""A wrong gradient is wrong every time. A value at a kink (of a ReLU, say) may end up on either side of it by rounding;
with slightly different inputs that does not happen every time."""
_ROUNDING, _ECHO, _MOST = 1e-6, 5.0, 0.05
"""In a deep net with thousands of values at kinks, some always change sides, even in PyTorch itself when parameters
change by a rounding error. A difference of a few times that effect, up to a twentieth, is not an error."""


def verify(
    folder: Path, manifest: Manifest, training: fx.GraphModule, optimizer: torch.optim.Optimizer, calls: Iterable[Call]
) -> None:
    """Refuse an export that does not compute what PyTorch does, naming what differs.

    `calls` are batches of several sizes; the optimizer is the exported one, and is not modified.
    """
    trainer = Trainer(folder, Static(FULL_PRECISION), seed=0)
    memory, reference = trainer.memory, _Reference(training, manifest, optimizer)
    generator = torch.Generator().manual_seed(1)
    for call in calls:
        for attempt in range(1, _ATTEMPTS + 1):
            before = trainer.generator.get_state()
            seeds = torch.from_numpy(draw(max(manifest.seeds, 1), trainer.generator.clone_state()))
            loss, gradients, states = reference.step(call, seeds)
            theirs = trainer.backward(*tensors_of(call))
            try:
                check("output", {"loss": np.array(loss)}, {"loss": np.array(theirs)}, TOLERANCE, 1.0)
                largest = max((float(np.abs(value).max(initial=0)) for value in gradients.values()), default=0.0)
                echo = partial(reference.echo, call, seeds)
                check("gradient", gradients, _read(memory.gradients), TOLERANCE, _NEGLIGIBLE * largest, echo)
                check("state", states, _read(memory.states), TOLERANCE)
                break
            except ExportError:
                if attempt == _ATTEMPTS:
                    raise
            memory.swap_states()
            trainer.pending = 0
            trainer.generator.set_state(before)
            call = _moved(call, generator)
        reference.states = {name: torch.from_numpy(value.copy()) for name, value in states.items()}
        parameters, remembered = reference.update(gradients)
        _write(memory.states, states)
        _write(memory.gradients, gradients)
        trainer.update()
        check("parameter", parameters, _read(memory.parameters), UPDATE_TOLERANCE)
        check("optimizer state", remembered, _read(memory.moments), UPDATE_TOLERANCE)
        _write(memory.parameters, parameters)
        _write(memory.moments, remembered)


class _Reference:
    """A training run in PyTorch, on copies of everything that it changes."""

    def __init__(self, graph: fx.GraphModule, manifest: Manifest, optimizer: torch.optim.Optimizer) -> None:
        self.graph, self.manifest = graph, manifest
        named, buffers = dict(graph.named_parameters(remove_duplicate=False)), states_of(graph)
        held = [item.name for item in manifest.parameters]
        self.parameters = {name: nn.Parameter(named[name].detach().clone()) for name in held}
        self.states = {item.name: buffers[item.name].detach().clone() for item in manifest.states}
        # The copy holds these parameters instead of the model's.
        self.optimizer = copy.deepcopy(optimizer, {id(named[name]): self.parameters[name] for name in held})

    def step(
        self, call: Call, seeds: Tensor, others: Mapping[str, nn.Parameter] | None = None
    ) -> tuple[float, Values, Values]:
        """Return loss, gradients and the new state of one step, with these parameters or with others."""
        parameters = self.parameters if others is None else others
        assert call.loss is not None
        trained = [item.name for item in self.manifest.parameters if item.trainable]
        states = {name: value.clone() for name, value in self.states.items()}
        left = iter(seeds)

        def skipping(func: Any, /, *args: Any, **options: Any) -> Any:
            # At 32 bits a stochastic quantizer draws nothing, but the graph has a seed for it.
            if func in QUANTIZERS and func is not QUANTIZE_GRADIENT and options.get("rounding") == "stochastic":
                next(left)
            return func(*args, **options)

        # The model draws the random numbers of its exported graph.
        drawn, calls = Drawn(drawing(lambda like: uniform(next(left), like))), Calls(skipping)
        with dry_run(self.graph), precision_of(self.graph).at(FULL_PRECISION), torch.enable_grad(), drawn, calls:
            outputs = functional_call(self.graph, {**parameters, **states}, call.args, call.kwargs)
            loss = call.loss(outputs, *call.targets)
            leaves = [parameters[name] for name in trained]
            found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return float(loss.detach()), _arrays(dict(zip(trained, found, strict=True))), _arrays(states)

    def echo(self, call: Call, seeds: Tensor) -> Values:
        """Return the gradients after changing every parameter by about a rounding error."""
        generator = torch.Generator()
        moved = {
            name: nn.Parameter(p.detach() * (1 + _ROUNDING * torch.randn(p.shape, generator=generator)))
            for name, p in self.parameters.items()
        }
        return self.step(call, seeds, moved)[1]

    def update(self, gradients: Values) -> tuple[Values, Values]:
        """Update the parameters by given gradients; return them, and the optimizer state."""
        for name, gradient in gradients.items():
            self.parameters[name].grad = torch.from_numpy(gradient.copy())
        type(self.optimizer).step(self.optimizer)
        remembered = {}
        for tensor in self.manifest.optimizer.remembered:
            name, _, key = tensor.name.rpartition(".")
            value = self.optimizer.state[self.parameters[name]][key]
            remembered[tensor.name] = value.detach().numpy().astype(tensor.dtype)
        return _arrays(self.parameters), remembered


class Drawn(TorchDispatchMode):
    """Mode that replaces random operators."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        return self.table.get(func, func)(*args, **(kwargs or {}))


def check(
    kind: str, ours: Values, theirs: Values, tolerance: float, least: float = 1e-6,
    echo: Callable[[], Values] | None = None,
) -> None:  # fmt: skip
    """Refuse values that differ by more than a tolerance of the largest element, or of `least`.

    `echo` computes the same in PyTorch, with parameters that are changed by a rounding error.
    """
    differences = _differences(ours, theirs, least)
    wrong = [name for name, difference in differences.items() if not difference <= tolerance]
    if wrong and echo is not None:
        sensitive = _differences(ours, echo(), least)
        wrong = [name for name in wrong if not differences[name] <= min(_ECHO * sensitive[name], _MOST)]
    if wrong:
        raise ExportError(
            f"ONNX Runtime computes another {kind} {wrong[0]!r} than PyTorch (they differ by "
            f"{differences[wrong[0]]:.2%} of its largest element)"
        )


def _differences(ours: Values, theirs: Values, least: float) -> dict[str, float]:
    """Return the distance between values, relative to the largest element of each.

    Integers have to be equal; NaN and infinities have to be in the same places.
    """
    found = {}
    for name, value in ours.items():
        numbers = np.isfinite(value)
        mine, other = value[numbers].astype(np.float64), theirs[name][numbers].astype(np.float64)
        scale = max(float(np.abs(mine).max(initial=0)), least, 1e-30) if value.dtype.kind == "f" else 1.0
        alike = np.array_equal(theirs[name][~numbers], value[~numbers], equal_nan=True)
        found[name] = float(np.abs(other - mine).max(initial=0)) / scale if alike else float("inf")
    return found


def _moved(call: Call, generator: torch.Generator) -> Call:
    """Return a call with slightly different inputs."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator).to(value)
        return value + noise * (value.abs().max() if value.numel() else 1) / 100

    args, kwargs = pytree.tree_map(moved, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _arrays(tensors: Mapping[str, Tensor]) -> Values:
    return {name: array_of(tensor).copy() for name, tensor in tensors.items()}


def _read(blocks: Mapping[str, Any]) -> Values:
    return {name: np.array(block.read()) for name, block in blocks.items()}


def _write(blocks: Mapping[str, Any], values: Values) -> None:
    for name, value in values.items():
        blocks[name].write(value)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far an output of a file in one runtime is from PyTorch at the same bit-widths, on the examples."""

    output: str
    runtime: str
    maximum: float
    mean: float
    largest: float
    """Largest magnitude of the output itself."""
    agreement: float | None = None
    """Share of rows with the same argmax, for outputs of two dims."""

    def __str__(self) -> str:
        """Return a one-line summary."""
        same = "" if self.agreement is None else f", the same class for {self.agreement:.1%} of the rows"
        off = f"differs by {self.maximum:.3g} at most, {self.mean:.3g} on average"
        return f"{self.output} in {self.runtime}: {off}, of {self.largest:.3g}{same}"


def compared(path: Path, graph: Graph, call: Call, outputs: Any) -> dict[str, Any]:
    """Run a file in every installed runtime; return the differences of the outputs, and remarks on the runtimes."""
    feed = _feed(graph, call)
    differences: list[Difference] = []
    remarks = []
    for run in (_in_onnxruntime, _in_openvino):
        try:
            runtime, remark, found = run(path, feed, graph.outputs)
        except ImportError:
            continue
        remarks.append(f"{'' if found else 'not '}compared in {runtime}{remark}")
        differences += [
            _difference(name, runtime, np.asarray(theirs), ours.detach().double().cpu().numpy())
            for name, theirs, ours in zip(graph.outputs, found, tensors_in(outputs), strict=bool(found))
            if ours.is_floating_point() and ours.numel()
        ]
    nowhere = "outputs were not compared: install onnxruntime for that"
    return {"outputs": tuple(differences), "runtime": "; ".join(remarks) or nowhere}


def at_full_precision(path: Path, graph: Graph, call: Call) -> dict[str, Array]:
    """Return the outputs by name of a file with bit-width inputs, on the examples at full precision."""
    widths = dict.fromkeys(graph.width_sources, np.array(FULL_PRECISION))
    return dict(zip(graph.outputs, _in_onnxruntime(path, _feed(graph, call) | widths, graph.outputs)[2], strict=True))


def _feed(graph: Graph, call: Call) -> Values:
    return {name: array_of(tensor) for name, tensor in zip(graph.inputs, tensors_of(call), strict=True)}


def _in_onnxruntime(path: Path, feed: Values, names: tuple[str, ...]) -> tuple[str, str, list[Any]]:
    """Run a file in ONNX Runtime; some versions fuse integer products of opset 21 that they have no kernel for."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    remark = ""
    try:
        made = onnxruntime.InferenceSession(str(path), options, providers=[CPU])
    except Exception as error:
        if "QLinear" not in str(error):
            raise
        options.add_session_config_entry(_WITHOUT, "1")
        made = onnxruntime.InferenceSession(str(path), options, providers=[CPU])
        remark = f' with {_WITHOUT} = "1": this version lacks an integer kernel of opset 21'
    read = {value.name for value in made.get_inputs()}
    found = made.run(list(names), {name: value for name, value in feed.items() if name in read})
    return f"onnxruntime {onnxruntime.__version__}", remark, found


def _in_openvino(path: Path, feed: Values, names: tuple[str, ...]) -> tuple[str, str, list[Any]]:
    """Run a file in OpenVINO with float32 arithmetic: on some processors the default is 16 bits."""
    import openvino

    runtime = f"OpenVINO {openvino.__version__.partition('-')[0]}"
    try:
        made = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        read = {name for value in made.inputs for name in value.names}
        found = made({name: value for name, value in feed.items() if name in read})
    except RuntimeError as error:
        # An operator that OpenVINO lacks is not the file's fault.
        return runtime, f": {str(error).strip().splitlines()[-1]}", []
    return runtime, "", [found[name] for name in names]


def _difference(name: str, runtime: str, theirs: Any, ours: Any) -> Difference:
    # Equal infinities (a mask that is returned, say) are no difference.
    far = np.abs(np.where(theirs == ours, 0.0, theirs - ours))
    same = float((theirs.argmax(1) == ours.argmax(1)).mean()) if ours.ndim == 2 and ours.shape[1] > 1 else None
    maximum, mean, largest = float(far.max()), float(far.mean()), float(np.abs(ours).max())
    return Difference(output=name, runtime=runtime, maximum=maximum, mean=mean, largest=largest, agreement=same)
