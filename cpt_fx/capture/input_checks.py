"""What a graph takes for granted about its inputs, checked when it runs: a graph of another case is wrong."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import torch

Expression = Any
"""A number; `("size", input, dim)`; or `(name of an operator, operand, ...)`: plain data that compilers can read."""

Fact = tuple[str, Expression]
"""A condition as people read it, and as an expression."""

Input = tuple[str, str, tuple[tuple[int, int] | int, ...]]
"""A tensor as the graph was made for it: its name, its dtype, and for each dim its size or the bounds of its size."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "FloorDiv": operator.floordiv,
    "Div": operator.truediv, "Mod": operator.mod, "Pow": operator.pow, "USub": operator.neg, "Not": operator.not_,
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "max": max, "min": min, "And": lambda *all_of: all(all_of), "Or": lambda *one_of: any(one_of),
}  # fmt: skip

_MADE = "this model was exported"
_ADVICE = "Export the model for such inputs, or transform the model itself"


def check_inputs(
    tensors: tuple[Any, ...], inputs: tuple[Input, ...], facts: tuple[Fact, ...],
    made: str = _MADE, advice: str = _ADVICE,
) -> None:  # fmt: skip
    """Refuse inputs that the graph was not made for: another dtype or rank, a size that took another path."""
    for tensor, (name, dtype, sizes) in zip(tensors, inputs, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{made} for a tensor {name}, got {type(tensor).__name__}")
        if str(tensor.dtype) != dtype or tensor.ndim != len(sizes):
            raise ValueError(
                f"{made} for {name} of {dtype} with {len(sizes)} dims, got {tensor.dtype} with {tensor.ndim}. {advice}"
            )
        for dim, allowed in enumerate(sizes):
            size = tensor.shape[dim]
            low, high = (allowed, allowed) if isinstance(allowed, int) else allowed
            if size < low or size > high >= 0:
                wanted = str(low) if low == high else f"{low} or more" if high < 0 else f"{low} to {high}"
                raise ValueError(f"{made} for {name} of size {wanted} in dim {dim}, got {size}. {advice}")
    for text, expression in facts:
        if not _value(expression, tensors):
            raise ValueError(f"{made} for inputs where {text}, which does not hold here. {advice}")


def _value(expression: Expression, tensors: tuple[Any, ...]) -> Any:
    if not isinstance(expression, tuple):
        return expression
    kind, *operands = expression
    if kind == "size":
        return tensors[operands[0]].shape[operands[1]]
    return _OPERATORS[kind](*[_value(operand, tensors) for operand in operands])


def check_form(
    given: object, form: Any, name: str, made: str = _MADE, advice: str = _ADVICE, ordered: bool = False
) -> None:
    """Refuse an argument of other keys, or of another length, than the graph was made for."""
    found = form_of(given, ordered=ordered)
    if found != form:
        raise ValueError(f"{made} for {name} in the form {_form(form)}, got {_form(found)}. {advice}")


def form_of(value: Any, *, ordered: bool = False) -> Any:
    """Return types, lengths and keys of nested containers as plain data; None for what is in them."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(form_of(item, ordered=ordered) for item in value))
    if isinstance(value, dict):
        keys = list(value) if ordered else sorted(value, key=repr)
        return ("dict", *((key, form_of(value[key], ordered=ordered)) for key in keys))
    return None


def _form(form: Any) -> str:
    if form is None:
        return "_"
    kind, *items = form
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_form(item)}" for key, item in items) + "}"
    return f"{kind}({', '.join(map(_form, items))})"


def expression_of(text: str, places: dict[str, int]) -> Expression:
    """Turn a condition in Python into plain data."""
    return _parse(ast.parse(text, mode="eval").body, places)


def _parse(tree: ast.expr, places: dict[str, int]) -> Expression:
    match tree:
        case ast.Constant(value=value):
            return value
        case ast.Subscript(value=ast.Call(func=ast.Attribute(value=source, attr="size"))):
            dim = ast.literal_eval(tree.slice)
            return ("size", places[ast.unparse(source)], dim)
        case ast.BinOp():
            return (type(tree.op).__name__, _parse(tree.left, places), _parse(tree.right, places))
        case ast.UnaryOp():
            return (type(tree.op).__name__, _parse(tree.operand, places))
        case ast.BoolOp():
            return (type(tree.op).__name__, *(_parse(value, places) for value in tree.values))
        case ast.Call(func=ast.Name(id=name)) if name in _OPERATORS:
            return (name, *(_parse(value, places) for value in tree.args))
        case ast.Compare():
            sides = [_parse(side, places) for side in (tree.left, *tree.comparators)]
            pairs = [(type(sign).__name__, *sides[place : place + 2]) for place, sign in enumerate(tree.ops)]
            return pairs[0] if len(pairs) == 1 else ("And", *pairs)
    raise ValueError(f"not understood: {ast.unparse(tree)}")
