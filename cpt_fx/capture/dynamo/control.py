"""Control flow operators of a graph, run as the Python that they stand for: a choice, loops, a map.

PyTorch's own operators trace their subgraphs again for the backward pass, with tensors that hold no values. But
bit-widths and ranges have values to read, and gradient quantizers are hooks on actual gradients. So subgraphs run
under ordinary autograd, with the results that the operators promise: the same values, and zeros, not None, as the
gradient of an operand that did not contribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx

from cpt_fx.capture.dynamo.torch_private import map_impl, scan_op, while_loop_op
from cpt_fx.common.functorch import is_transformed
from cpt_fx.ir.subgraphs import graphs_of

Body = Callable[..., Any]
Values = Sequence[Any]
Results = tuple[Any, ...]

RUN_AS: dict[Any, Callable[..., Results]] = {}
"""For each operator in Dynamo's graphs, the function that a rewritten graph calls instead."""


def _replaces(operator: Any) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Run a function in place of an operator, except under compilers and torch.func, which support only operators."""

    def decorate(run: Callable[..., Results]) -> Callable[..., Results]:
        @wraps(run)
        def call(*args: Any) -> Results:
            function: Callable[..., Results] = operator if torch.compiler.is_compiling() or is_transformed() else run
            return function(*args)

        RUN_AS[operator] = call
        return call

    return decorate


@_replaces(torch.ops.higher_order.cond)
def chosen(which: Any, if_true: Body, if_false: Body, operands: Values) -> Results:
    """Run one of two subgraphs, as `torch.cond` does."""
    return _from((if_true if which else if_false)(*operands), operands)


@_replaces(while_loop_op)
def repeated(condition: Body, body: Body, carried: Values, given: Values) -> Results:
    """Run a subgraph on its own results as long as a condition holds, as `while_loop` does."""
    values: Values = tuple(value.clone() if isinstance(value, Tensor) else value for value in carried)
    while condition(*values, *given):
        values = body(*values, *given)
    return _from(values, (*carried, *given))


@_replaces(map_impl)
def mapped(body: Body, rows: Values, given: Values) -> Results:
    """Run a subgraph on each row of some tensors, and stack the results, as `map` does."""
    return scanned(body, (), rows, given)


@_replaces(scan_op)
def scanned(body: Body, first: Values, rows: Values, given: Values) -> Results:
    """Run a subgraph on each row and a carried state; return the last state and all results, as `scan` does."""
    state, results = tuple(first), []
    for row in zip(*rows, strict=True):
        found = body(*state, *row, *given)
        state = tuple(found[: len(first)])
        results.append(found[len(first) :])
    return _from((*state, *_stacked(results)), (*first, *rows, *given))


def controls(module: fx.GraphModule) -> bool:
    """Return whether a graph or a subgraph has control flow operators, which no compiler takes with their state."""
    ours = set(RUN_AS.values())
    return any(node.target in ours for graph in graphs_of(module) for node in graph.graph.nodes)


def _stacked(results: Sequence[Values]) -> list[Any]:
    return [None if column[0] is None else torch.stack(column) for column in zip(*results, strict=True)]


def _from(results: Values, operands: Values) -> Results:
    """Return the results of a subgraph, connected so that a gradient that reaches them reaches every operand."""
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
    """Copies some tensors; its backward pass also gives other tensors a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Copy the first `count` tensors: views could not be changed in place."""
        ctx.others = [(other.shape, other.dtype, other.device) for other in tensors[count:]]
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradients on, and zeros to the others."""
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return (None, *gradients, *zeros)
