"""Activation checkpointing, inside a captured graph and in eager code between graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint as home

from cpt_fx.capture.base import patched
from cpt_fx.capture.dynamo.callers import caller_of
from cpt_fx.capture.dynamo.torch_private import CheckpointHigherOrderVariable, capture_checkpoint, unimplemented

if TYPE_CHECKING:
    from cpt_fx.capture.dynamo.engine import DynamoEngine

_REENTRANT = home.CheckpointFunction
_OTHER = "_checkpoint_without_reentrant_generator"


def checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run a subgraph whose activations are recomputed in the backward pass, with the same random numbers.

    Replaces Dynamo's `tag_activation_checkpoint`, which is made for compilers: run eagerly, it would not restore the
    random state. For a compiler, it becomes that operator again.
    """
    if get_proxy_mode() is not None:
        return body(*args)  # traced for an export, whose graph keeps activations
    keep = {key: kwargs[key] for key in ("determinism_check", "preserve_rng_state") if key in kwargs}
    # Dynamo also passes tensors that the code closes over. A subgraph may write to buffers among them: those must not
    # become arguments of the checkpoint.
    given = [index for index, value in enumerate(args) if isinstance(value, Tensor) and not value.is_leaf]

    def run(*activations: Tensor) -> Any:
        every = list(args)
        for index, value in zip(given, activations, strict=True):
            every[index] = value
        return body(*every)

    return home.checkpoint(run, *(args[index] for index in given), use_reentrant=False, **keep)


@contextmanager
def quantized_again(engine: DynamoEngine) -> Iterator[None]:
    """Make checkpoints between the graphs enter the engine again when the backward pass runs their code.

    What they recompute there must be what the forward pass computed, quantizers included.
    """

    def again(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda function, *rest, **options: plain(_remembering(engine, function), *rest, **options)

    apply = staticmethod(again(_REENTRANT.apply))
    with patched({(home, _OTHER): again(getattr(home, _OTHER)), (_REENTRANT, "apply"): apply}):
        yield


def _call(self: CheckpointHigherOrderVariable, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Capture a checkpoint as part of a graph; break the graph at a reentrant one if gradients are enabled.

    A reentrant checkpoint first runs its code without gradients, which the code can detect, and has none if no
    argument requires them. A graph would run the code with gradients.
    """
    reentrant = kwargs.get("use_reentrant")
    if torch.is_grad_enabled() and (reentrant is None or reentrant.as_python_constant() is not False):
        unimplemented(
            gb_type="a reentrant checkpoint",
            context="use_reentrant=True",
            explanation="torch.utils.checkpoint with use_reentrant=True runs its code without gradients first",
            hints=["Use use_reentrant=False."],
        )
    return capture_checkpoint(self, tx, args, kwargs)


def reentrant_apart() -> AbstractContextManager[None]:
    """Make reentrant checkpoints run between the graphs, as torch runs them."""
    return patched({(CheckpointHigherOrderVariable, "_call_function"): _call})


def _remembering(engine: DynamoEngine, function: Callable[..., Any]) -> Callable[..., Any]:
    if not engine.runs_here() or engine.net.resting:
        return function  # not the model's own code, or part of a rewritten graph: its products have their quantizers

    called_by = caller_of(engine.places)

    def run(*args: Any, **kwargs: Any) -> Any:
        _ = called_by  # read by `caller_of`: in the backward pass, no module is on the stack
        if engine.runs_here():
            return function(*args, **kwargs)
        # As in the forward pass: modules inside run their own code, and each product goes through the net.
        with engine.entered(), engine.net, quantized_again(engine):
            return function(*args, **kwargs)

    return run
