"""Activation checkpointing: inside a captured graph, and around code that breaks into several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint as home

from cpt_fx.capture.base import patched
from cpt_fx.dynamo.callers import caller_of

if TYPE_CHECKING:
    from cpt_fx.dynamo.engine import Engine

_REENTRANT = home.CheckpointFunction
_OTHER = "_checkpoint_without_reentrant_generator"


def checkpointed(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Run a part of a graph whose activations are computed anew in the backward pass, random numbers included.

    Stands where Dynamo put `tag_activation_checkpoint`, a mark for its compilers: run eagerly, the mark does nothing
    but drop the random state. Compiled, it becomes that mark again.
    """
    if get_proxy_mode() is not None:
        return body(*args)  # traced for an export, whose graph keeps activations
    keep = {key: kwargs[key] for key in ("determinism_check", "preserve_rng_state") if key in kwargs}
    # Dynamo also passes what the code only refers to. Of that a body may change buffers, which arguments must not be.
    given = [index for index, value in enumerate(args) if isinstance(value, Tensor) and not value.is_leaf]

    def run(*activations: Tensor) -> Any:
        every = list(args)
        for index, value in zip(given, activations, strict=True):
            every[index] = value
        return body(*every)

    return home.checkpoint(run, *(args[index] for index in given), use_reentrant=False, **keep)


@contextmanager
def quantized_again(engine: Engine) -> Iterator[None]:
    """Let checkpoints between the graphs remember the engine: the backward pass runs their code without it.

    What they compute there must be what the forward pass computed, quantizers included.
    """
    plain_generator, plain_apply = getattr(home, _OTHER), _REENTRANT.apply

    def generator(function: Callable[..., Any], *rest: Any, **options: Any) -> Any:
        return plain_generator(_remembering(engine, function), *rest, **options)

    def apply(function: Callable[..., Any], *rest: Any) -> Any:
        return plain_apply(_remembering(engine, function), *rest)  # type: ignore[no-untyped-call]

    with patched({(home, _OTHER): generator, (_REENTRANT, "apply"): staticmethod(apply)}):
        yield


def _call(self: CheckpointHigherOrderVariable, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Put a checkpoint into a graph, unless it is a reentrant one that is to have gradients.

    Its code runs without gradients first, which it may ask about, and has none where no argument does. A graph would
    run it with gradients.
    """
    reentrant = kwargs.get("use_reentrant")
    if torch.is_grad_enabled() and (reentrant is None or reentrant.as_python_constant() is not False):
        unimplemented(
            gb_type="a reentrant checkpoint",
            context="use_reentrant=True",
            explanation="torch.utils.checkpoint with use_reentrant=True runs its code without gradients first",
            hints=["Use use_reentrant=False."],
        )
    return _IN_A_GRAPH(self, tx, args, kwargs)


_IN_A_GRAPH = CheckpointHigherOrderVariable._call_function


def reentrant_apart() -> AbstractContextManager[None]:
    """Let reentrant checkpoints run between the graphs, as torch runs them."""
    return patched({(CheckpointHigherOrderVariable, "_call_function"): _call})


def _remembering(engine: Engine, function: Callable[..., Any]) -> Callable[..., Any]:
    if not engine.runs_here() or engine.net.resting:
        return function  # not the model's own code, or part of a rewritten graph: its products have their quantizers

    called_by = caller_of(engine.places)

    def run(*args: Any, **kwargs: Any) -> Any:
        _ = called_by  # where the walk up from a product ends (`callers`): the backward pass is called by no module
        if engine.runs_here():
            return function(*args, **kwargs)
        # As in the forward pass: modules inside run their own code, and each product goes through the net.
        with engine.entered(), engine.net, quantized_again(engine):
            return function(*args, **kwargs)

    return run
