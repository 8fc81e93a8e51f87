"""What the published graph layers quantize besides products: how it is recognised, however it is written."""

from __future__ import annotations

from typing import Any

from torch import fx

from cpt_fx.optable import ADDS, DIVIDES, FILLED, MULTIPLIES, SUMS, OpSpec
from cpt_fx.recipes import Recipe

_TWO_INPUTS = (("input", "other"), ((0, "input"), (1, "input")))
BIAS_ADD = OpSpec("bias_add", "add", *_TWO_INPUTS)
SCALE = OpSpec("scale", "mul", *_TWO_INPUTS)
WEIGHTED_MESSAGES = OpSpec("aggregation", "mul", *_TWO_INPUTS)
NEIGHBOURHOOD_SUM = OpSpec("aggregation", "sum", ("input", "dim"), ((0, "input"),))


def elementwise_spec(node: fx.Node, recipe: Recipe, weights: set[fx.Node]) -> OpSpec | None:
    """Return what an addition, product or sum is to a recipe that quantizes such: None for all others."""
    if node.op not in ("call_function", "call_method"):
        return None
    aggregates = recipe.aggregation is not None
    if aggregates and _is_weighted_sum(node, weights):
        return NEIGHBOURHOOD_SUM
    tensors = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    if len(tensors) != 2:
        return None
    parameters = sum(tensor in weights for tensor in tensors)
    if _is(node, ADDS) and recipe.bias_add is not None and parameters == 1:
        return BIAS_ADD
    if _is(node, MULTIPLIES) and parameters == 0:
        if aggregates and any(_is_weighted_sum(user, weights) for user in node.users):
            return WEIGHTED_MESSAGES
        if recipe.scale is not None:
            return SCALE
    return None


def counts_degrees(node: fx.Node, spec: OpSpec) -> bool:
    """Whether an aggregation adds up a constant: there is no message in it, and no gradient."""
    index, _ = spec.operands[0]
    value = node.args[index] if index < len(node.args) else None
    return isinstance(value, fx.Node) and value.target in FILLED


def mean_after(node: fx.Node) -> fx.Node:
    """Return the division that makes a sum over neighbours their mean, if that is its only use, else the sum."""
    users = list(node.users)
    if len(users) == 1 and _is(users[0], DIVIDES) and users[0].args and users[0].args[0] is node:
        return users[0]
    return node


def _is_weighted_sum(node: fx.Node, weights: set[fx.Node]) -> bool:
    """Whether a node sums products of two activations over the neighbours of a (node, neighbour, feature) tensor."""
    if node.target not in SUMS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dim not in (1, -2, (1,), [1], (-2,), [-2]):
        return False
    product = node.args[0]
    factors = [arg for arg in product.args[:2] if isinstance(arg, fx.Node)]
    return _is(product, MULTIPLIES) and len(factors) == 2 and not any(factor in weights for factor in factors)


def _is(node: fx.Node, table: frozenset[Any]) -> bool:
    """Whether a node calls one of these; `x += y` is recorded as a function of our own, under the operator's name."""
    ours = getattr(node.target, "__module__", "") == "cpt_fx.capture.in_place"
    return node.target in table or (ours and getattr(node.target, "__name__", "") in table)
