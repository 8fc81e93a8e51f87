"""What an export took for granted about its inputs, checked when the graph runs: a graph of another case is wrong."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._sympy.numbers import int_oo

from cpt_fx.capture.base import CaptureError

Expression = Any
"""A number; `("size", input, dim)`; or `(name of an operator, operand, ...)`: plain data that compilers can read."""

Fact = tuple[str, Expression]
"""A condition as people read it, and as an expression."""

Input = tuple[str, str, tuple[tuple[int, int] | int, ...]]
"""A tensor as it was exported: its name, its dtype, and for each dim its size or the bounds of its size."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "FloorDiv": operator.floordiv,
    "Div": operator.truediv, "Mod": operator.mod, "Pow": operator.pow, "USub": operator.neg, "Not": operator.not_,
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "max": max, "min": min, "And": lambda *all_of: all(all_of), "Or": lambda *one_of: any(one_of),
}  # fmt: skip


_ADVICE = "Transform the model with such example inputs, or with capture='dynamo'"


def check_inputs(
    tensors: tuple[Any, ...], inputs: tuple[Input, ...], facts: tuple[Fact, ...],
    made: str = "this model was exported", advice: str = _ADVICE,
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


def fixed_size(size: Any) -> int | None:
    """Return a size that an export holds for alone, or None for one that is open."""
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_number else None


def inputs_of(program: torch.export.ExportedProgram, names: dict[str, Any]) -> tuple[Input, ...]:
    """Return the tensors of a program, by the names given to them, with the sizes it holds for."""
    found = []
    for name, value in names.items():
        sizes: list[tuple[int, int] | int] = []
        for size in value.shape:
            fixed = fixed_size(size)
            bounds = None if fixed is not None else program.range_constraints.get(size.node.expr)
            if fixed is not None:
                sizes.append(fixed)
            elif bounds is None:
                sizes.append((0, -1))
            else:
                sizes.append((int(bounds.lower), -1 if bounds.upper is int_oo else int(bounds.upper)))
        found.append((name, str(value.dtype), tuple(sizes)))
    return tuple(found)


def facts_of(program: torch.export.ExportedProgram, places: dict[str, int]) -> tuple[Fact, ...]:
    """Return the conditions under which a program holds; `places` maps `x`, or `x['key']`, to the input it is."""
    found = []
    for text in dict.fromkeys(program._guards_code):
        try:
            expression = expression_of(text, places)
        except (KeyError, ValueError) as error:
            raise CaptureError(f"the export holds only where {text}, which cannot be checked: {error}") from None
        if not _says_one_size(expression):
            found.append((_readable(text), expression))
    return tuple(found)


def expression_of(text: str, places: dict[str, int]) -> Expression:
    """Turn a condition in Python into plain data."""
    return _parse(ast.parse(text, mode="eval").body, places)


def _says_one_size(expression: Expression) -> bool:
    """Whether a condition is that one dim has one size: the check of the input itself says so."""
    kind, *sides = expression
    return bool(kind == "Eq" and any(isinstance(side, int) for side in sides)
                and any(isinstance(side, tuple) and side[0] == "size" for side in sides))  # fmt: skip


def _readable(text: str) -> str:
    return text.replace("L['", "").replace("'].size()", ".size()", 1) if text.count("L[") == 1 else text


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
