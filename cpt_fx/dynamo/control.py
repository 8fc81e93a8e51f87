"""Control flow as nodes of a graph, run as the Python that it stands for: a choice, loops, a map.

PyTorch's own operators trace their bodies once more for the backward pass, with tensors that hold no numbers. Widths
and ranges do hold numbers, and gradient quantizers are hooks of the gradients that really come. So bodies run under
ordinary autograd, and what is found there is what the operator promises: the same values, and zeros, not None, as the
gradient of an operand that had no part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op

from cpt_fx.bodies import graphs_of
from cpt_fx.transformed import is_transformed

Body = Callable[..., Any]
Values = Sequence[Any]
Results = tuple[Any, ...]

RUN_AS: dict[Any, Callable[..., Results]] = {}
"""What a rewritten graph calls in the place of an operator that Dynamo puts in."""


def _stands_for(operator: Any) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Let a function run in the place of an operator, which still runs where somebody traces or transforms it.

    Only PyTorch's operator knows how that is done.
    """

    def decorate(run: Callable[..., Results]) -> Callable[..., Results]:
        @wraps(run)
        def call(*args: Any) -> Results:
            function: Callable[..., Results] = operator if torch.compiler.is_compiling() or is_transformed() else run
            return function(*args)

        RUN_AS[operator] = call
        return call

    return decorate


@_stands_for(torch.ops.higher_order.cond)
def chosen(which: Any, if_true: Body, if_false: Body, operands: Values) -> Results:
    """Run one of two bodies: `torch.cond`."""
    return _from((if_true if which else if_false)(*operands), operands)


@_stands_for(while_loop_op)
def repeated(condition: Body, body: Body, carried: Values, given: Values) -> Results:
    """Run a body on what it returned as long as a condition holds: `while_loop`."""
    values: Values = tuple(value.clone() if isinstance(value, Tensor) else value for value in carried)
    while condition(*values, *given):
        values = body(*values, *given)
    return _from(values, (*carried, *given))


@_stands_for(map_impl)
def mapped(body: Body, rows: Values, given: Values) -> Results:
    """Run a body on each row of some tensors, and stack the results: `map`."""
    results = [body(*row, *given) for row in zip(*rows, strict=True)]
    return _from(_stacked(results), (*rows, *given))


@_stands_for(scan_op)
def scanned(body: Body, first: Values, rows: Values, given: Values) -> Results:
    """Run a body on each row and a state that it hands on; return the last state and all results: `scan`."""
    state, results = tuple(first), []
    for row in zip(*rows, strict=True):
        found = body(*state, *row, *given)
        state = tuple(found[: len(first)])
        results.append(found[len(first) :])
    return _from((*state, *_stacked(results)), (*first, *rows, *given))


def controls(module: fx.GraphModule) -> bool:
    """Whether a graph, or one inside it, decides by its values what runs: no compiler takes that with its state."""
    ours = set(RUN_AS.values())
    return any(node.target in ours for graph in graphs_of(module) for node in graph.graph.nodes)


def _stacked(results: Sequence[Values]) -> list[Any]:
    return [None if column[0] is None else torch.stack(column) for column in zip(*results, strict=True)]


def _from(results: Values, operands: Values) -> Results:
    """Return the results of a body so that a gradient that reaches them reaches every operand."""
    reached = [value for value in operands if isinstance(value, Tensor) and value.requires_grad]
    if not reached or not torch.is_grad_enabled():
        return tuple(results)
    places = [
        place
        for place, value in enumerate(results)
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    ]
    joined = list(results)
    if places:
        found = _Joined.apply(len(places), *(results[place] for place in places), *reached)  # type: ignore[no-untyped-call]
        for place, value in zip(places, found, strict=True):
            joined[place] = value
    return tuple(joined)


class _Joined(torch.autograd.Function):
    """Copies of some tensors, whose backward pass has a gradient for others, too: zeros, which change no sum."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copy the first `count` tensors: as views they could not be changed in place."""
        ctx.others = [(other.shape, other.dtype, other.device) for other in tensors[count:]]
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradients on, and zeros to the others."""
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return (None, *gradients, *zeros)
