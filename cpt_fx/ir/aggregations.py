"""Recognize the operators that the published graph layers quantize besides products, however they are written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import ParametrizationList

from cpt_fx.common.torch_private import OpOverload
from cpt_fx.ir.meta import asks_for_size, example_of, module_path
from cpt_fx.operators import Row, row_of
from cpt_fx.operators.around import ADDS, DIVIDES, FILLED, MULTIPLIES, PASSED_ON, SUBTRACTS, SUMS
from cpt_fx.recipes import Recipe

_TWO_INPUTS = (("input", "other"), ((0, "input"), (1, "input")))
BIAS_ADD = Row("bias_add", "add", *_TWO_INPUTS)
SCALE = Row("scale", "mul", *_TWO_INPUTS)
WEIGHTED_MESSAGES = Row("aggregation", "mul", *_TWO_INPUTS)
EDGE_SCORE = Row("linear", "mul", ("input", "other"), ((0, "either"), (1, "either")))
"""A product with a parameter vector, summed over the features: a linear layer, as in the edge scores of GAT."""
NEIGHBOUR_BAG = Row("aggregation", "embedding_bag", ("indices", "table"), ((1, "input"),))
NEIGHBOURHOOD_SUM = Row("aggregation", "sum", ("input", "dim"), ((0, "input"),))


MAKERS = ("_SpectralNorm", "_Orthogonal", "SpectralNorm")
"""Torch's own parametrizations that multiply; torch.fx does not trace into them."""


def parametrization_of(node: fx.Node, kinds: Mapping[str, type[nn.Module] | None]) -> tuple[str, str] | None:
    """Return the parametrization that a node is part of, as (path, class), or None."""
    if node.op not in ("call_module", "call_function", "call_method"):
        return None
    path = str(node.target) if node.op == "call_module" else module_path(node)[0]
    parts = path.split(".")
    for place in range(1, len(parts)):
        if issubclass(kinds.get(".".join(parts[:place])) or nn.Module, ParametrizationList):
            made_by = ".".join(parts[: place + 1])
            return made_by, getattr(kinds.get(made_by), "__name__", "parametrization")
    if os.path.join("nn", "utils", "spectral_norm.py") in (node.meta.get("stack_trace") or ""):
        return path, "SpectralNorm"  # the older version, a hook
    return None


def row_in_graph(node: fx.Node, recipe: Recipe, weights: set[fx.Node], trained: set[fx.Node]) -> Row | None:
    """Return the row of an operator of the table, or of an addition, product or sum that the recipe quantizes."""
    row = row_of(node)
    if row is None:
        return _elementwise(node, recipe, weights, trained)
    # An embedding_bag whose table is not a parameter sums messages.
    is_bag = row.name == "embedding_bag" and len(node.args) > 1 and node.args[1] not in weights
    return NEIGHBOUR_BAG if is_bag else row


def _elementwise(node: fx.Node, recipe: Recipe, weights: set[fx.Node], trained: set[fx.Node]) -> Row | None:
    if node.op not in ("call_function", "call_method"):
        return None
    aggregates = recipe.aggregation is not None
    if aggregates and _is_weighted_sum(node, weights):
        return NEIGHBOURHOOD_SUM
    tensors = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
    if len(tensors) != 2:
        return None
    parameters = sum(tensor in weights for tensor in tensors)
    if is_one_of(node, MULTIPLIES) and recipe.bias_add is not None and parameters == 1 and _summed(node) is not None:
        return EDGE_SCORE
    if is_one_of(node, ADDS) and recipe.bias_add is not None and parameters == 1:
        return BIAS_ADD
    if is_one_of(node, MULTIPLIES) and parameters == 0:
        if aggregates and any(_is_weighted_sum(user, weights) for user in node.users):
            return WEIGHTED_MESSAGES
        if aggregates and _is_weighted_message(node, trained):
            kinds = ("coefficients" if _is_column(tensor) else "input" for tensor in tensors)
            return Row("aggregation", "mul", _TWO_INPUTS[0], tuple(enumerate(kinds)))
        if recipe.scale is not None:
            return SCALE
    return None


def carries_no_message(node: fx.Node, spec: Row, trained: set[fx.Node]) -> bool:
    """Return whether an aggregation sums no messages: it computes degrees, or sums nothing.

    Degrees are sums of a constant, or of one number per edge that is not trained: the edge weights.
    """
    value = message_of(node, spec)
    if spec.name in ("scatter", "scatter_"):
        return value is None or "reduce" not in node.kwargs
    if spec.name in ("index_put", "index_put_"):
        accumulate = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
        return value is None or not accumulate
    if value is None or value.target in FILLED:
        return value is not None
    example = example_of(value)
    if not isinstance(example, Tensor) or example.layout is not torch.strided:
        return False
    return example.ndim == 1 and value not in trained and not example.requires_grad


def message_of(node: fx.Node, spec: Row) -> fx.Node | None:
    """Return the value that an aggregation sums, or None if it is not a node."""
    index = next(index for index, kind in spec.operands if kind == "input")
    value = node.args[index] if index < len(node.args) else None
    return value if isinstance(value, fx.Node) else None


def normalizes_softmax(node: fx.Node, spec: Row) -> bool:
    """Return whether an aggregation is part of a softmax over neighbours: the maximum of scores, or the denominator."""
    value = message_of(node, spec)
    if value is None:
        return False
    readers = _readers(node)
    if _called(value, "exp"):
        return any(is_one_of(reader, DIVIDES) and reader.args[0] is value for reader in readers)
    scores = _source(value)
    lowered = [reader for reader in readers if is_one_of(reader, SUBTRACTS) and _source(reader.args[0]) is scores]
    return any(_called(user, "exp") for reader in lowered for user in reader.users)


def result_of(node: fx.Node, spec: Row, *, aggregates: bool) -> fx.Node:
    """Return the node whose output gradient is quantized as that of the operator."""
    if spec is EDGE_SCORE:
        return _summed(node) or node
    return mean_after(node) if aggregates else node


def _summed(node: fx.Node) -> fx.Node | None:
    """Return the sum over the last dim that is the only use of a product, or None."""
    users = [user for user in node.users if not _reads_size(user, node)]
    if len(users) != 1 or users[0].target not in SUMS or users[0].args[:1] != (node,):
        return None
    dim = users[0].args[1] if len(users[0].args) > 1 else users[0].kwargs.get("dim")
    return users[0] if dim in (-1, (-1,), [-1]) else None


def mean_after(node: fx.Node) -> fx.Node:
    """Return the division that turns a sum over neighbours into a mean, if that is its only use, else the sum."""
    users = [user for user in node.users if not _reads_size(user, node)]
    if len(users) == 1 and is_one_of(users[0], DIVIDES) and users[0].args and users[0].args[0] is node:
        return users[0]
    return node


def _reads_size(user: fx.Node, node: fx.Node) -> bool:
    """Return whether a node reads only the shape, dtype or device of another, not its values."""
    if asks_for_size(user) or user.target in FILLED:
        return True
    return user.target in ("expand_as", "view_as", "reshape_as") and user.args[0] is not node


def _called(node: fx.Node, name: str) -> bool:
    """Return whether a node calls a torch function or method of this name, in place or not."""
    return _plain_name(node) in (name, f"{name}_")


def _plain_name(node: fx.Node) -> str:
    """Return the name of what a node calls, the same for functions, methods and ATen operators."""
    if isinstance(node.target, OpOverload):
        return str(node.target._schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the users of a value, direct or through operators that pass it on (`PASSED_ON`)."""
    found: dict[fx.Node, None] = {}
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user not in found:
            found[user] = None
            if _plain_name(user) in PASSED_ON:
                waiting += user.users
    return list(found)


def _source(value: Any) -> Any:
    """Return a value without any `detach` around it."""
    while isinstance(value, fx.Node) and _called(value, "detach"):
        value = value.args[0]
    return value


def _is_column(node: fx.Node) -> bool:
    """Return whether the last dim of a value has size 1: one number where the other factor has features."""
    shape = getattr(example_of(node), "shape", None)
    if shape:
        return bool(shape[-1] == 1)
    if _called(node, "unsqueeze"):
        return bool(node.args[1:] == (-1,) or node.kwargs.get("dim") == -1)
    last = node.args[-1] if _called(node, "view") or _called(node, "reshape") else None
    return (isinstance(last, int) and last == 1) or (isinstance(last, (tuple, list)) and last[-1:] in ((1,), [1]))


def _is_weighted_message(node: fx.Node, trained: set[fx.Node]) -> bool:
    """Return whether a node is a product of learned coefficients and learned features that an aggregation sums."""
    if not all(arg in trained for arg in node.args[:2]):
        return False
    users = [user for user in node.users if not _reads_size(user, node)]
    spec = row_of(users[0]) if len(users) == 1 else None
    return spec is not None and spec.family == "aggregation" and message_of(users[0], spec) is node


def _is_weighted_sum(node: fx.Node, weights: set[fx.Node]) -> bool:
    """Return whether a node sums products of two activations over dim 1 of a (node, neighbour, feature) tensor."""
    if node.target not in SUMS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if dim not in (1, -2, (1,), [1], (-2,), [-2]):
        return False
    product = node.args[0]
    factors = [arg for arg in product.args[:2] if isinstance(arg, fx.Node)]
    return is_one_of(product, MULTIPLIES) and len(factors) == 2 and not any(factor in weights for factor in factors)


def is_one_of(node: fx.Node, table: frozenset[Any]) -> bool:
    """Return whether a node calls one of these; `x += y` is traced as our own function with the operator's name."""
    ours = getattr(node.target, "__module__", "") == "cpt_fx.capture.symbolic.traced"
    return node.target in table or (ours and getattr(node.target, "__name__", "") in table)
