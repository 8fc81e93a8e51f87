"""Control flow as nodes of a graph, run as the Python that it stands for: a choice, loops, a map.

PyTorch's own operators trace their bodies once more for the backward pass, with tensors that hold no numbers. Widths
and ranges do hold numbers, and gradient quantizers are hooks of the gradients that really come. So bodies run under
ordinary autograd, and what is found there is what the operator promises: the same values, and zeros, not None, as the
gradient of an operand that had no part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

COND: Any = torch.ops.higher_order.cond
WHILE: Any = while_loop_op
MAP: Any = map_impl
SCAN: Any = scan_op


def chosen(which: Any, if_true: Body, if_false: Body, operands: Values) -> Results:
    """Run one of two bodies: `torch.cond`."""
    if _is_traced():
        traced: Results = COND(which, if_true, if_false, operands)
        return traced
    return _from((if_true if which else if_false)(*operands), operands)


def repeated(condition: Body, body: Body, carried: Values, given: Values) -> Results:
    """Run a body on what it returned as long as a condition holds: `while_loop`."""
    if _is_traced():
        traced: Results = WHILE(condition, body, carried, given)
        return traced
    values: Values = tuple(value.clone() if isinstance(value, Tensor) else value for value in carried)
    while condition(*values, *given):
        values = body(*values, *given)
    return _from(values, (*carried, *given))


def mapped(body: Body, rows: Values, given: Values) -> Results:
    """Run a body on each row of some tensors, and stack the results: `map`."""
    if _is_traced():
        traced: Results = MAP(body, rows, given)
        return traced
    results = [body(*row, *given) for row in zip(*rows, strict=True)]
    return _from(_stacked(results), (*rows, *given))


def scanned(body: Body, first: Values, rows: Values, given: Values) -> Results:
    """Run a body on each row and a state that it hands on; return the last state and all results: `scan`."""
    if _is_traced():
        traced: Results = SCAN(body, first, rows, given)
        return traced
    state, results = tuple(first), []
    for row in zip(*rows, strict=True):
        found = body(*state, *row, *given)
        state = tuple(found[: len(first)])
        results.append(found[len(first) :])
    return _from((*state, *_stacked(results)), (*first, *rows, *given))


RUN_AS: dict[Any, Callable[..., Results]] = {
    COND: chosen,
    WHILE: repeated,
    MAP: mapped,
    SCAN: scanned,
}
"""What a rewritten graph calls in the place of an operator that Dynamo puts in."""


def controls(module: fx.GraphModule) -> bool:
    """Whether a graph, or one inside it, decides by its values what runs: no compiler takes that with its state."""
    ours = set(RUN_AS.values())
    return any(node.target in ours for graph in graphs_of(module) for node in graph.graph.nodes)


def _is_traced() -> bool:
    """Whether somebody traces, or transforms, what runs here: only PyTorch's operator knows how that is done."""
    return torch.compiler.is_compiling() or is_transformed()


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
