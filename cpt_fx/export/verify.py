"""The proof that an export is right: one step in ONNX Runtime against one in PyTorch, at full precision.

What ONNX Runtime gets wrong in silence is refused by name, as far as it is known. This finds the rest: every export is
run once, with a batch of another size than it was traced with, and every gradient is compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cpt_fx.errors import ExportError
from cpt_fx.export.manifest import TRAINING, Manifest
from cpt_fx.export.optimizers import GRADIENT
from cpt_fx.export.program import BITS, LOSS, SEEDS, Call, Graph, states_of
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.noise import uniform
from cpt_fx.ort.engine import CPU, Engine
from cpt_fx.ort.loops import draw
from cpt_fx.ort.memory import Block
from cpt_fx.standalone import precision_of
from cpt_fx.trial import trial

TOLERANCE = 1e-3
"""Largest difference of a gradient, relative to its largest element. Sums of float32 in another order differ by 1e-6 to
1e-5, in deep nets with batch norm by 1e-4; what is wrong is wrong by more than 1e-2."""
_NEGLIGIBLE = 1e-2
"""Gradients this far below the largest of all are compared to that: those that should be zero are rounding only."""
_ATTEMPTS = 3
"""A wrong gradient is wrong every time. Where a value lies on an edge, of a ReLU say, rounding may put it to either
side of it; with other values that does not happen again and again."""
_ROUNDING, _ECHO, _MOST = 1e-6, 5.0, 0.05
"""In a deep net with thousands of values on such edges some always change sides, in PyTorch itself as soon as
parameters change by a rounding. A difference of a few times what that does is no error, up to a twentieth."""


def verify(folder: Path, manifest: Manifest, graph: fx.GraphModule, exported: Graph, call: Call) -> float:
    """Return the largest relative difference of a gradient; refuse the export where one is wrong."""
    call = _larger(call) if manifest.dynamic_batch else call
    generator = torch.Generator()
    for attempt in range(_ATTEMPTS):
        seeds = torch.from_numpy(draw(max(exported.draws, 1), generator))
        try:
            return _compare(folder, manifest, graph, exported, call, seeds)
        except ExportError:
            if attempt == _ATTEMPTS - 1:
                raise
        call = _moved(call, generator)
    raise AssertionError


def _compare(
    folder: Path, manifest: Manifest, graph: fx.GraphModule, exported: Graph, call: Call, seeds: Tensor
) -> float:
    dropout = seeds[exported.quantizer_draws :]
    state = precision_of(graph)
    with trial(graph), state.at(FULL_PRECISION):
        before = {name: value.detach().cpu().numpy().copy() for name, value in states_of(graph).items()}
        loss, ours = _in_torch(graph, call, dropout, manifest)
    theirs_loss, theirs = _in_onnx_runtime(folder, manifest, call, seeds, graph, before)
    if not np.isclose(theirs_loss, loss, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        raise ExportError(
            f"the exported model does not compute what the model does: loss {theirs_loss}, and {loss} in PyTorch"
        )
    differences = _differences(ours, theirs)
    suspects = [name for name, difference in differences.items() if not difference <= TOLERANCE]
    if suspects:
        with trial(graph), state.at(FULL_PRECISION):
            _, echo = _in_torch(graph, call, dropout, manifest, moved=_ROUNDING)
        sensitive = _differences(ours, echo)
        for name in suspects:
            if np.isfinite(ours[name]).all() and not differences[name] <= min(_ECHO * sensitive[name], _MOST):
                raise ExportError(
                    f"ONNX Runtime computes another gradient for {name!r} than PyTorch (they differ by "
                    f"{differences[name]:.1%} of its largest element): the model uses an operator whose gradient is "
                    "wrong there"
                )
    return max(differences.values(), default=0.0)


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Return how far gradients are apart, relative to the largest element of each."""
    largest = max((float(np.abs(value).max()) for value in ours.values() if value.size), default=0.0)
    scales = {name: float(np.abs(value).max(initial=0.0)) for name, value in ours.items()}
    return {
        name: float(np.abs(theirs[name] - value).max(initial=0.0)) / max(scales[name], _NEGLIGIBLE * largest, 1e-30)
        for name, value in ours.items()
    }


def _moved(call: Call, generator: torch.Generator) -> Call:
    """Return a call with inputs that are a little different."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator).to(value)
        return value + noise * (value.abs().max() if value.numel() else 1) / 100

    args, kwargs = pytree.tree_map(moved, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _larger(call: Call) -> Call:
    """Return a call with a batch that is larger by one."""

    def grown(value: Any) -> Any:
        return torch.cat((value, value[:1])) if isinstance(value, Tensor) and value.ndim else value

    args, kwargs, targets = pytree.tree_map(grown, (call.args, call.kwargs, call.targets))
    return replace(call, args=args, kwargs=kwargs, targets=targets)


class _DropoutBySeed(TorchFunctionMode):
    """Lets dropout in PyTorch drop what the exported graph drops."""

    def __init__(self, seeds: Tensor) -> None:
        super().__init__()
        self.seeds = iter(seeds)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace dropout, leave everything else."""
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        return self._dropped(_DROPOUTS[func], *args, **kwargs)

    def _dropped(
        self, by_channel: bool, x: Tensor, p: float = 0.5, train: bool = True, *others: Any, **named: Any
    ) -> Tensor:
        if not named.get("training", train) or not p:
            return x
        shape = x[tuple(slice(None) if dim < 2 else slice(0, 1) for dim in range(x.ndim))] if by_channel else x
        kept = uniform(next(self.seeds), shape.contiguous()) >= p
        return x * (kept.to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p)))


_DROPOUTS = {
    F.dropout: False, torch.dropout: False, torch.dropout_: False, torch.ops.aten.dropout.default: False,
    F.dropout1d: True, F.dropout2d: True, F.dropout3d: True, torch.feature_dropout: True,
    torch.ops.aten.feature_dropout.default: True,
}  # fmt: skip


def _in_torch(
    graph: fx.GraphModule, call: Call, seeds: Tensor, manifest: Manifest, moved: float = 0.0
) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients; `moved`: with every parameter changed by about that part of itself."""
    assert call.loss is not None
    named = dict(graph.named_parameters(remove_duplicate=False))
    names = [parameter.tensor.name for parameter in manifest.parameters if parameter.trainable]
    if moved:
        generator = torch.Generator()
        for name in names:
            noise = torch.randn(named[name].shape, generator=generator).to(named[name])
            named[name] = nn.Parameter(named[name].detach() * (1 + moved * noise))
    with torch.enable_grad(), _DropoutBySeed(seeds):
        used: dict[str, Tensor] = {name: named[name] for name in names}
        loss = call.loss(functional_call(graph, used, call.args, call.kwargs), *call.targets)
    found = torch.autograd.grad(loss, [named[name] for name in names], allow_unused=True)
    gradients = {
        name: (torch.zeros_like(named[name]) if gradient is None else gradient).detach().cpu().numpy()
        for name, gradient in zip(names, found, strict=True)
    }
    return float(loss.detach()), gradients


def _in_onnx_runtime(
    folder: Path, manifest: Manifest, call: Call, seeds: Tensor, graph: fx.GraphModule, states: dict[str, Any]
) -> tuple[float, dict[str, Any]]:
    engine = Engine(folder / TRAINING, CPU, None)
    named = graph.named_parameters(remove_duplicate=False)
    values: dict[str, Any] = {name: value.detach().cpu().numpy() for name, value in named}
    values |= states | {SEEDS: seeds.numpy(), "lazy_reset_grad": np.array([True])}
    given = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    for tensor, value in zip((*manifest.inputs, *manifest.targets), (*given, *call.targets), strict=True):
        values[tensor.name] = value.detach().cpu().numpy()
    bindings = engine.bindings()
    held = {}
    for name in engine.inputs:
        if name.startswith(BITS):
            array = np.array(FULL_PRECISION, np.int64)
        elif name.endswith(GRADIENT):
            array = np.zeros_like(values[name.removesuffix(GRADIENT)])
        else:
            array = values[name]
        held[name] = Block(np.array(array, order="C"), CPU)
        bindings.bind_ortvalue_input(name, held[name].ort)
    for name in engine.outputs:
        bindings.bind_output(name)
    engine.run(bindings)
    results = dict(zip(engine.outputs, bindings.copy_outputs_to_cpu(), strict=True))
    gradients = {name.removesuffix(GRADIENT): block.read() for name, block in held.items() if name.endswith(GRADIENT)}
    return float(results[LOSS]), gradients
