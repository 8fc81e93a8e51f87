"""Graphs of a transformed model in training or evaluation mode; the model itself is not changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from cpt_fx.api import single_graph
from cpt_fx.capture.dry_run import trial
from cpt_fx.errors import ExportError
from cpt_fx.export.program import Call

_OLD_HOOKS = ("torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm")


def call_of(example_inputs: Any) -> Call:
    """Return the call for `example_inputs`: a tuple of the model's arguments, or a dict of them by name."""
    given = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    if not isinstance(given, (tuple, list, dict)):
        raise ExportError(
            "example_inputs must be a tuple of the model's arguments, or a dict of them by name, got "
            f"{type(given).__name__}"
        )
    seen: set[int] = set()

    def own(value: Any) -> Any:
        """Clone a tensor that is passed twice (as inputs and labels, say): the graph has two inputs for it."""
        again = isinstance(value, torch.Tensor) and id(value) in seen
        seen.add(id(value))
        return value.clone() if again else value

    values = pytree.tree_map(own, dict(given) if isinstance(given, dict) else tuple(given))
    return Call((), values) if isinstance(values, dict) else Call(values, {})


@contextmanager
def in_mode(result: nn.Module, training: bool, call: Call) -> Iterator[fx.GraphModule]:
    """Yield the graph of a model in training or evaluation mode; restore the mode of every module afterwards.

    A model that is in training mode already keeps the modes of its parts: a frozen batch norm stays frozen.
    """
    _check_hooks(result)
    modes = {module: module.training for module in result.modules()}
    if not training or not result.training:
        result.train(training)
    try:
        graph = single_graph(result, call.args, call.kwargs or None)
        # The graph may be newly captured, and not among the modules above.
        modes.setdefault(graph, graph.training)
        graph.training = training
        yield graph
    finally:
        for module, mode in modes.items():
            module.training = mode


def run(module: fx.GraphModule, call: Call) -> Any:
    """Return what a model returns on the examples, without side effects on the model."""
    try:
        with torch.no_grad(), trial(module):
            # Not by `__call__`, which prints the generated code when the model raises an error.
            return module.forward(*call.args, **call.kwargs)
    except Exception as error:
        raise ExportError(f"the model does not run on example_inputs: {type(error).__name__}: {error}") from error


def accepts(module: fx.GraphModule, call: Call) -> bool:
    """Return whether a model, and its loss if there is one, accept a call."""
    try:
        outputs = run(module, call)
        if call.loss is not None:
            call.loss(outputs, *call.targets)
    except Exception:  # of any type: the model's own code raises it
        return False
    return True


def _check_hooks(result: nn.Module) -> None:
    """Refuse torch's old hooks that set a layer's weight in each call: no graph contains them."""
    for name, module in result.named_modules():
        for hook in module._forward_pre_hooks.values():
            old = type(hook).__module__
            if old in _OLD_HOOKS:
                raise ExportError(
                    f"{name} has the hook {old}, which sets its weight in each call: use torch.nn.utils."
                    f"parametrizations.{old.rpartition('.')[2]} instead"
                )
