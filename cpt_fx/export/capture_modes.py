"""The graph of a transformed model in each mode, with the model left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from cpt_fx.api import single_graph
from cpt_fx.errors import ExportError
from cpt_fx.export.program import Call
from cpt_fx.trial import trial

_OLD_HOOKS = ("torch.nn.utils.spectral_norm", "torch.nn.utils.weight_norm")


def call_of(example_inputs: Any) -> Call:
    """Return how a model is called: a tuple of its arguments, or a dict of them by name."""
    given = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    if not isinstance(given, (tuple, list, dict)):
        raise ExportError(
            "example_inputs must be a tuple of the model's arguments, or a dict of them by name, got "
            f"{type(given).__name__}"
        )
    seen: set[int] = set()

    def own(value: Any) -> Any:
        """Let a tensor that is passed twice be two: inputs and labels, say, which are fed one by one later."""
        again = isinstance(value, torch.Tensor) and id(value) in seen
        seen.add(id(value))
        return value.clone() if again else value

    values = pytree.tree_map(own, dict(given) if isinstance(given, dict) else tuple(given))
    return Call((), values) if isinstance(values, dict) else Call(values, {})


@contextmanager
def in_mode(result: nn.Module, training: bool, call: Call) -> Iterator[fx.GraphModule]:
    """Give the graph of a model in a mode; afterwards every part of the model is in the mode it was in.

    Into training go the parts that the model itself has in training now, if any are: a frozen batch norm stays so.
    """
    _check_hooks(result)
    modes = {module: module.training for module in result.modules()}
    if not training or not result.training:
        result.train(training)
    try:
        graph = single_graph(result, call.args, call.kwargs or None)
        # One that was captured anew knows only the mode it was captured in.
        modes.setdefault(graph, graph.training)
        graph.training = training
        yield graph
    finally:
        for module, mode in modes.items():
            module.training = mode


def run(module: fx.GraphModule, call: Call) -> Any:
    """Return what a model returns on the examples; leave no trace in it."""
    try:
        with torch.no_grad(), trial(module):
            # Not by its call, which prints the code of the graph where the model refuses an input.
            return module.forward(*call.args, **call.kwargs)
    except Exception as error:
        raise ExportError(f"the model does not run on example_inputs: {type(error).__name__}: {error}") from error


def accepts(module: fx.GraphModule, call: Call) -> bool:
    """Whether a model and its loss, if it has one, take a call."""
    try:
        outputs = run(module, call)
        if call.loss is not None:
            call.loss(outputs, *call.targets)
    except Exception:  # of whatever kind: it is the model's own answer
        return False
    return True


def _check_hooks(result: nn.Module) -> None:
    """Refuse torch's old hooks that put another weight into a layer in each call: no graph holds them."""
    for name, module in result.named_modules():
        for hook in module._forward_pre_hooks.values():
            old = type(hook).__module__
            if old in _OLD_HOOKS:
                raise ExportError(
                    f"{name} has the hook {old}, which sets its weight in each call: use torch.nn.utils."
                    f"parametrizations.{old.rpartition('.')[2]} instead"
                )
