"""The proof that an export is right: three steps in ONNX Runtime beside three in PyTorch, at full precision.

Every loss, gradient, running state, parameter and memory of the optimizer that a step writes is compared, with several
batch sizes, and with other sizes of whatever else was left open. After each comparison both go on from the same
numbers, so that a difference is of one step. What quantizers do below 32 bits is the same in every export, and tested.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_fx.errors import ExportError
from cpt_fx.export.manifest import Manifest
from cpt_fx.export.program import Call, states_of
from cpt_fx.export.randomness import drawing
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.noise import uniform
from cpt_fx.ops import QUANTIZE_GRADIENT, QUANTIZERS
from cpt_fx.ort.trainer import Trainer, draw
from cpt_fx.schedules import Static
from cpt_fx.standalone import precision_of
from cpt_fx.trial import trial

Array = NDArray[Any]
Values = dict[str, Array]
TOLERANCE = 1e-3
"""Largest difference of a gradient or a state, relative to its largest element. Sums of float32 in another order differ
by 1e-6 to 1e-5, in deep nets with batch norm by 1e-4; what is wrong is wrong by more than 1e-2."""
UPDATE_TOLERANCE = 1e-5
"""The same for what an update makes of equal numbers: it works element by element."""
_NEGLIGIBLE = 1e-2
"""Gradients this far below the largest of all are compared to that: those that should be zero are rounding only."""
_ATTEMPTS = 3
"""A wrong gradient is wrong every time. Where a value lies on an edge, of a ReLU say, rounding may put it to either
side of it; with other values that does not happen again and again."""
_ROUNDING, _ECHO, _MOST = 1e-6, 5.0, 0.05
"""In a deep net with thousands of values on such edges some always change sides, in PyTorch itself as soon as
parameters change by a rounding. A difference of a few times what that does is no error, up to a twentieth."""


def verify(
    folder: Path, manifest: Manifest, training: fx.GraphModule, optimizer: torch.optim.Optimizer, calls: Iterable[Call]
) -> None:
    """Refuse an export that computes something else than PyTorch, naming what differs.

    `calls` are batches of several sizes; the optimizer is the one that was exported, and stays as it is.
    """
    trainer = Trainer(folder, Static(FULL_PRECISION), seed=0)
    reference = _Reference(training, manifest, optimizer)
    state = precision_of(training)
    generator = torch.Generator().manual_seed(1)
    for call in calls:
        for attempt in range(_ATTEMPTS):
            seeds = torch.from_numpy(draw(max(manifest.seeds, 1), trainer.generator.clone_state()))
            with trial(training), state.at(FULL_PRECISION):
                loss, gradients, states = reference.step(call, seeds)
            pending = trainer.generator.get_state()
            theirs = trainer.backward(*_leaves(call))
            found = {name: np.array(block.read()) for name, block in trainer.memory.gradients.items()}
            new = {name: np.array(block.read()) for name, block in trainer.memory.states.items()}
            try:
                _check_loss(loss, theirs)
                _check_gradients(gradients, found, partial(_moved_gradients, reference, training, call, seeds))
                _check("state", states, new, TOLERANCE)
                break
            except ExportError:
                if attempt == _ATTEMPTS - 1:
                    raise
            trainer.memory.swap_states()
            trainer.pending = 0
            trainer.generator.set_state(pending)
            call = _moved(call, generator)
        reference.keep(states)
        _write(trainer.memory.states, states)
        _write(trainer.memory.gradients, gradients)
        reference.update(gradients)
        trainer.update()
        _check("parameter", reference.values(), _read(trainer.memory.parameters), UPDATE_TOLERANCE)
        remembered = reference.remembered()
        _check("optimizer state", remembered, _read(trainer.memory.moments), UPDATE_TOLERANCE)
        _write(trainer.memory.parameters, reference.values())
        _write(trainer.memory.moments, remembered)


class _Reference:
    """A training in PyTorch, on copies of all that it changes."""

    def __init__(self, graph: fx.GraphModule, manifest: Manifest, optimizer: torch.optim.Optimizer) -> None:
        self.graph, self.manifest = graph, manifest
        named = dict(graph.named_parameters(remove_duplicate=False))
        self.parameters = {
            item.tensor.name: nn.Parameter(named[item.tensor.name].detach().clone()) for item in manifest.parameters
        }
        self.trained = [item.tensor.name for item in manifest.parameters if item.trainable]
        self.states = {name: value.detach().clone() for name, value in states_of(graph).items()}
        own = {id(named[name]): value for name, value in self.parameters.items()}
        for item in manifest.parameters:
            for name in item.also:
                own[id(named[name])] = self.parameters[item.tensor.name]
        self.optimizer = copy.copy(optimizer)
        self.optimizer.param_groups = [
            {**group, "params": [own[id(p)] for p in group["params"] if id(p) in own]}
            for group in optimizer.param_groups
        ]
        self.optimizer.state = defaultdict(
            dict, {own[id(p)]: copy.deepcopy(held) for p, held in optimizer.state.items() if id(p) in own}
        )

    def step(
        self, call: Call, seeds: Tensor, parameters: Mapping[str, Tensor] | None = None
    ) -> tuple[float, Values, Values]:
        """Return loss, gradients and the new state of one step."""
        used = dict(self.parameters if parameters is None else parameters)
        states = {name: value.clone() for name, value in self.states.items()}
        with torch.enable_grad(), _Counted(seeds):
            outputs = functional_call(self.graph, {**used, **states}, call.args, call.kwargs)
            assert call.loss is not None
            loss = call.loss(outputs, *call.targets)
            found = torch.autograd.grad(loss, [used[name] for name in self.trained], allow_unused=True)
        gradients = {
            name: (torch.zeros_like(used[name]) if gradient is None else gradient).detach().cpu().numpy()
            for name, gradient in zip(self.trained, found, strict=True)
        }
        changed = {state.tensor.name for state in self.manifest.states}
        return float(loss.detach()), gradients, {k: v.detach().cpu().numpy() for k, v in states.items() if k in changed}

    def keep(self, states: Values) -> None:
        """Go on from a new state."""
        self.states |= {name: torch.from_numpy(value.copy()) for name, value in states.items()}

    def update(self, gradients: Values) -> None:
        """Do an update by given gradients."""
        for name, gradient in gradients.items():
            self.parameters[name].grad = torch.from_numpy(gradient.copy())
        type(self.optimizer).step(self.optimizer)

    def values(self) -> Values:
        """Return the parameters."""
        return {name: value.detach().numpy().copy() for name, value in self.parameters.items()}

    def remembered(self) -> Values:
        """Return what the optimizer remembers, by the names of the manifest."""
        found = {}
        for state in self.manifest.optimizer.remembered:
            name, _, key = state.tensor.name.rpartition(".")
            value = self.optimizer.state[self.parameters[name]][key]
            found[state.tensor.name] = value.detach().numpy().astype(state.tensor.dtype)
        return found


class _Counted(TorchFunctionMode):
    """Lets a model in PyTorch draw what its exported graph draws: quantizers that round at random count, too."""

    def __init__(self, seeds: Tensor) -> None:
        super().__init__()
        self.seeds = iter(seeds)
        self.dispatch = Drawn(drawing(lambda like: uniform(next(self.seeds), like)))

    def __enter__(self) -> Any:
        """Stand between the model and both of torch's dispatchers."""
        self.dispatch.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Leave."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.dispatch.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Skip the seed of a quantizer, which passes everything on at 32 bits."""
        kwargs = kwargs or {}
        if func in QUANTIZERS and func is not QUANTIZE_GRADIENT and kwargs.get("rounding") == "stochastic":
            next(self.seeds)
        return func(*args, **kwargs)


class Drawn(TorchDispatchMode):
    """Replaces operators that draw."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        return self.table.get(func, func)(*args, **(kwargs or {}))


def _leaves(call: Call) -> list[Tensor]:
    found = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    return [*found, *call.targets]


def _check_loss(ours: float, theirs: float) -> None:
    if not np.isclose(theirs, ours, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        raise ExportError(
            f"the exported model does not compute what the model does: loss {theirs}, and {ours} in PyTorch"
        )


def _check_gradients(ours: Values, theirs: Values, moved: Any) -> None:
    differences = _differences(ours, theirs)
    suspects = [name for name, difference in differences.items() if not difference <= TOLERANCE]
    if not suspects:
        return
    sensitive = _differences(ours, moved())
    for name in suspects:
        if np.isfinite(ours[name]).all() and not differences[name] <= min(_ECHO * sensitive[name], _MOST):
            raise ExportError(
                f"ONNX Runtime computes another gradient for {name!r} than PyTorch (they differ by "
                f"{differences[name]:.1%} of its largest element)"
            )


def _check(kind: str, ours: Values, theirs: Values, tolerance: float) -> None:
    for name, value in ours.items():
        if value.dtype.kind != "f":
            same = np.array_equal(value, theirs[name])
        else:
            scale = max(float(np.abs(value).max(initial=0.0)), 1e-6)
            same = np.allclose(theirs[name], value, rtol=0, atol=tolerance * scale, equal_nan=True)
        if not same:
            raise ExportError(f"ONNX Runtime computes another {kind} {name!r} than PyTorch")


def _differences(ours: Values, theirs: Values) -> dict[str, float]:
    """Return how far gradients are apart, relative to the largest element of each."""
    scales = {name: float(np.abs(value).max(initial=0.0)) for name, value in ours.items()}
    least = _NEGLIGIBLE * max(scales.values(), default=0.0)
    return {
        name: float(np.abs(theirs[name] - value).max(initial=0.0)) / max(scales[name], least, 1e-30)
        for name, value in ours.items()
    }


def _moved_gradients(reference: _Reference, graph: fx.GraphModule, call: Call, seeds: Tensor) -> Values:
    """Return gradients with every parameter changed by about a rounding."""
    generator = torch.Generator()
    moved = {
        name: nn.Parameter(p.detach() * (1 + _ROUNDING * torch.randn(p.shape, generator=generator)))
        for name, p in reference.parameters.items()
    }
    with trial(graph), precision_of(graph).at(FULL_PRECISION):
        return reference.step(call, seeds, moved)[1]


def _moved(call: Call, generator: torch.Generator) -> Call:
    """Return a call with inputs that are a little different."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator).to(value)
        return value + noise * (value.abs().max() if value.numel() else 1) / 100

    args, kwargs = pytree.tree_map(moved, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _read(blocks: Mapping[str, Any]) -> Values:
    return {name: np.array(block.read()) for name, block in blocks.items()}


def _write(blocks: Mapping[str, Any], values: Values) -> None:
    for name, value in values.items():
        if name in blocks:
            blocks[name].write(value)
