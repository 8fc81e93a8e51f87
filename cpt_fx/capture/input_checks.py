"""The interface of a single graph: arguments as the model's forward takes them, outputs as it returns them.

What the graph assumes about its inputs is checked at run time: for other inputs its results would be wrong.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.symbolic.guards import PLAIN
from cpt_fx.capture.symbolic.tracer import expect
from cpt_fx.capture.torch_private import int_oo
from cpt_fx.common.torch_private import pytree
from cpt_fx.ir.subgraphs import free_name

Expression = Any
"""A number; `("size", input, dim)`; or `(name of an operator, operand, ...)`: plain data that compilers can read."""

Fact = tuple[str, Expression]
"""A condition as readable text, and as an expression."""

Required = tuple[str, str, tuple[tuple[int, int] | int, ...]]
"""A tensor that the graph was made for: its name, its dtype, and for each dim its size or the bounds of its size."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "FloorDiv": operator.floordiv,
    "Div": operator.truediv, "Mod": operator.mod, "Pow": operator.pow, "USub": operator.neg, "Not": operator.not_,
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge, "max": max, "min": min, "And": lambda *all_of: all(all_of), "Or": lambda *one_of: any(one_of),
}  # fmt: skip

_MADE = "this model was exported"
_ADVICE = "Export the model for such inputs, or transform the model itself"
SINGLE_MADE = "this graph was captured"
SINGLE_ADVICE = "Call cpt_fx.single_graph with such example inputs, or the transformed model itself"


def check_inputs(
    tensors: tuple[Any, ...], inputs: tuple[Required, ...], facts: tuple[Fact, ...],
    made: str = _MADE, advice: str = _ADVICE,
) -> None:  # fmt: skip
    """Raise for inputs that the graph was not made for: another dtype or rank, or sizes that it does not support."""
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
    """Raise if an argument has other types, lengths or keys than the graph was made for."""
    found = form_of(given, ordered=ordered)
    if found != form:
        raise ValueError(f"{made} for {name} in the form {_form(form)}, got {_form(found)}. {advice}")


def form_of(value: Any, *, ordered: bool = False) -> Any:
    """Return types, lengths and keys of nested containers as plain data, with None for leaves."""
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


def check_same(given: object, other: object, name: str, other_name: str) -> None:
    """Raise if two arguments that were one tensor at capture are two tensors."""
    if given is not other:
        raise ValueError(f"{SINGLE_MADE} for one tensor as both {name} and {other_name}, got two. {SINGLE_ADVICE}")


def check_modes(modes: tuple[bool, ...], expected: tuple[bool, ...], names: tuple[str, ...]) -> None:
    """Raise if a module is in another mode than the graph was captured for."""
    for mode, wanted, name in zip(modes, expected, names, strict=True):
        if mode != wanted:
            ours, others = ("train", "evaluation") if wanted else ("eval", "training")
            raise RuntimeError(
                f"this graph was captured with {name} in {'training' if wanted else 'evaluation'} mode, and does what "
                f"{name} does there; it is in {others} mode now. Call {ours}() on {name}, or take another graph: "
                f"cpt_fx.single_graph of the transformed model after {'eval' if wanted else 'train'}()"
            )


def expression_of(text: str, places: dict[str, int], what: str) -> Expression:
    """Parse a condition in Python into an expression; `what` begins the error message if that fails."""
    try:
        return _parse(ast.parse(text, mode="eval").body, places)
    except (KeyError, ValueError, SyntaxError) as error:
        raise CaptureError(f"{what}, which cannot be checked: {error}") from None


def bounds_of(bounds: Any) -> tuple[int, int]:
    """Return the smallest and the largest size of a dim, -1 if there is no largest."""
    if bounds is None:
        return 0, -1
    return int(bounds.lower), -1 if bounds.upper is int_oo else int(bounds.upper)


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


_ABSENT = inspect.Parameter.empty
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
"""How torch.fx marks variadic arguments."""
_EMPTY: dict[Any, Any] = {inspect.Parameter.VAR_POSITIONAL: (), inspect.Parameter.VAR_KEYWORD: {}}
CONSTANTS = (*PLAIN, torch.dtype, torch.device)
"""Types of values that become constants of a graph, which compares them at run time."""
_OUTPUT_FORM = "_cpt_fx_output_form"
"""Attribute that holds the pytree spec of outputs that are neither tuples, lists nor dicts."""


Way = tuple[Any, ...]
"""The pytree keys that lead from the arguments by name to a value in one of them."""


class EntryBuilder:
    """Builds the first nodes of a graph, which unpack its arguments and check them.

    `words` are the parts of the error messages that name the graph, and say how to get another one.
    """

    def __init__(self, graph: fx.Graph, arguments: Iterable[inspect.Parameter], *words: str) -> None:
        self.graph = graph
        self.arguments = {item.name: item for item in arguments}
        self.words = words
        self.start = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(next(iter(graph.nodes))):
            self.made = {
                name: graph.placeholder(f"{_STARS.get(item.kind, '')}{name}") for name, item in self.arguments.items()
            }
        self.used: dict[str, Any] = {}

    def check_forms(self, given: Mapping[str, Any], *, ordered: bool = False) -> None:
        """Add checks that arguments have the types, lengths and keys of those given."""
        with self.graph.inserting_before(self.start):
            for name, item in self.arguments.items():
                form = form_of(given.get(name, _EMPTY.get(item.kind)), ordered=ordered)
                if form is not None:
                    last: tuple[Any, ...] = (*self.words, True) if ordered else self.words
                    self.graph.call_function(check_form, (self.made[name], form, name, *last))

    def check_tensors(self, nodes: Sequence[fx.Node], inputs: Sequence[Required], facts: Sequence[Fact]) -> None:
        """Add checks of what the graph assumes about tensors, before anything else runs."""
        if nodes:
            with self.graph.inserting_before(self.start):
                self.graph.call_function(check_inputs, (tuple(nodes), tuple(inputs), tuple(facts), *self.words))

    def value(self, value: Any, way: Way) -> fx.Node:
        """Return the node for a value inside an argument; add a check that a plain value is as at capture."""
        name, keys = way[0].key, way[1:]
        with self.graph.inserting_before(self.start):
            node: fx.Node = pytree.key_get(fx.Proxy(self.made[name]), keys).node
            if isinstance(value, CONSTANTS):
                self.graph.call_function(expect, (node, value, name))
                if not keys:
                    self.used[name] = value
        self.used.setdefault(name, _ABSENT)
        return node

    def finish(self) -> None:
        """Give arguments their defaults; one that was not given at capture must keep its default at run time.

        Called after the flat inputs are erased, so that arguments can have the names that the model gives them.
        """
        optional = False
        for name, item in self.arguments.items():
            node = self.made[name]
            if item.kind in _STARS:
                continue
            if name not in self.used and item.default is not _ABSENT:
                node.args = (item.default,)
                with self.graph.inserting_after(list(self.made.values())[-1]):
                    self.graph.call_function(expect, (node, item.default, name))
            elif self.used.get(name, _ABSENT) is not _ABSENT:
                node.args = (self.used[name],)
            elif isinstance(item.default, PLAIN):
                node.args = (item.default,)
            elif optional:
                # Python needs a default after the first one; the check reports a missing tensor.
                node.args = (None,)
            optional = optional or bool(node.args)
        taken = {node.name for node in self.graph.nodes}
        for name, node in self.made.items():
            if name not in taken:
                node.name = name


def said(way: Way) -> str:
    """Return a key path as Python code."""
    return f"{way[0].key}{pytree.keystr(way[1:])}"


def formed(spec: pytree.TreeSpec, values: Sequence[Any], module: nn.Module, graph: fx.Graph) -> Any:
    """Arrange outputs of a graph as `spec` says; with containers other than tuple, list, dict, keep it in `module`."""
    if _is_plain(spec):
        return pytree.tree_unflatten(values, spec)
    name = free_name(_OUTPUT_FORM, module)
    module.__dict__[name] = spec
    # Not by Graph.get_attr, which warns about attributes that are not tensors.
    return graph.call_function(pytree.tree_unflatten, (tuple(values), graph.create_node("get_attr", name)))


def _is_plain(spec: pytree.TreeSpec) -> bool:
    """Return whether a spec is made of tuples, lists and dicts only."""
    known = spec.is_leaf() or spec.type in (tuple, list, dict)
    return known and all(map(_is_plain, spec.children()))
