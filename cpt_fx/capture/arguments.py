"""The way into and out of one graph: arguments as the model's forward takes them, outputs as it returns them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from cpt_fx.bodies import free_name
from cpt_fx.capture.guards import PLAIN
from cpt_fx.capture.input_checks import Fact, Input, check_form, check_inputs, form_of
from cpt_fx.capture.tracer import expect

_ABSENT = inspect.Parameter.empty
CONSTANTS = (*PLAIN, torch.dtype, torch.device)
"""Values that a graph has one of, and that can be compared when it runs."""
_OUTPUT_FORM = "_cpt_fx_output_form"
"""Attribute that holds the form of outputs that are neither tuples, lists nor dicts."""


@dataclass(frozen=True)
class Argument:
    """One argument of forward: how it is written in a signature, and the value it has when it is left out."""

    name: str
    kind: inspect._ParameterKind
    default: Any = _ABSENT

    @property
    def target(self) -> str:
        """Its name as torch.fx writes it: with stars where it takes whatever is left."""
        if self.kind is inspect.Parameter.VAR_POSITIONAL:
            return f"*{self.name}"
        return f"**{self.name}" if self.kind is inspect.Parameter.VAR_KEYWORD else self.name


def way_to(path: Any, arguments: list[Argument]) -> tuple[str, tuple[Any, ...]]:
    """Turn `(args or kwargs, place, ...)` into the name of an argument and the way from it to the value."""
    positional = [item for item in arguments if item.kind in (inspect.Parameter.POSITIONAL_ONLY,
                                                              inspect.Parameter.POSITIONAL_OR_KEYWORD)]  # fmt: skip
    group, first, *rest = path
    keys = tuple(rest)
    names = {item.kind: item.name for item in arguments}
    if group.idx == 0:
        if first.idx < len(positional):
            return positional[first.idx].name, keys
        return names[inspect.Parameter.VAR_POSITIONAL], (pytree.SequenceKey(first.idx - len(positional)), *keys)
    if any(item.name == first.key for item in arguments):
        return first.key, keys
    return names[inspect.Parameter.VAR_KEYWORD], (first, *keys)


class Entry:
    """Builds the first nodes of a graph: from arguments to the values in them, and checks of both.

    `words` is what the checks say of the graph and how to get another one.
    """

    def __init__(self, graph: fx.Graph, arguments: list[Argument], *words: str) -> None:
        self.graph = graph
        self.arguments = arguments
        self.words = words
        self.start = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(next(iter(graph.nodes))):
            self.made = {item.name: graph.placeholder(item.target) for item in arguments}
        self.used: dict[str, Any] = {}

    def check_forms(self, given: Iterable[Any], *, ordered: bool = False) -> None:
        """Check that arguments have the types, lengths and keys that those given have."""
        with self.graph.inserting_before(self.start):
            for item, value in zip(self.arguments, given, strict=True):
                form = form_of(value, ordered=ordered)
                if form is not None:
                    last = (*self.words, True) if ordered else self.words
                    self.graph.call_function(check_form, (self.made[item.name], form, item.name, *last))

    def check_tensors(self, nodes: Sequence[fx.Node], inputs: Sequence[Input], facts: Sequence[Fact]) -> None:
        """Check what the graph takes for granted about tensors, before anything else runs."""
        if nodes:
            with self.graph.inserting_before(self.start):
                self.graph.call_function(check_inputs, (tuple(nodes), tuple(inputs), tuple(facts), *self.words))

    def value(self, value: Any, way: tuple[str, tuple[Any, ...]]) -> fx.Node:
        """Return the node for a value inside an argument; a plain one is checked to be what it was."""
        name, keys = way
        with self.graph.inserting_before(self.start):
            node = self.follow(self.made[name], keys)
            if isinstance(value, CONSTANTS):
                self.graph.call_function(expect, (node, value, name))
                if not keys:
                    self.used[name] = value
        self.used.setdefault(name, _ABSENT)
        return node

    def follow(self, node: fx.Node, keys: tuple[Any, ...]) -> fx.Node:
        """Go from an argument to a value inside it."""
        for place, key in enumerate(keys):
            if isinstance(key, pytree.SequenceKey):
                node = self.graph.call_function(operator.getitem, (node, key.idx))
            elif isinstance(key, pytree.MappingKey):
                node = self.graph.call_function(operator.getitem, (node, key.key))
            elif isinstance(key, pytree.GetAttrKey):
                node = self.graph.call_function(getattr, (node, key.name))
            else:
                raise AssertionError(f"no way to {keys[: place + 1]}")
        return node

    def finish(self) -> None:
        """Give arguments their defaults; what the capture did not get is the default, and nothing else.

        The flat inputs are gone by now: inputs are called what the model calls them.
        """
        optional = False
        for item in self.arguments:
            node = self.made[item.name]
            if item.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
                continue
            if item.name not in self.used and item.default is not _ABSENT:
                node.args = (item.default,)
                with self.graph.inserting_after(list(self.made.values())[-1]):
                    self.graph.call_function(expect, (node, item.default, item.name))
            elif self.used.get(item.name, _ABSENT) is not _ABSENT:
                node.args = (self.used[item.name],)
            elif item.default is not _ABSENT and isinstance(item.default, PLAIN):
                node.args = (item.default,)
            elif optional:
                # Python wants one after the first default; the check says that a tensor is missing.
                node.args = (None,)
            optional = optional or bool(node.args)
        taken = {node.name for node in self.graph.nodes}
        for item in self.arguments:
            if item.name not in taken:
                self.made[item.name].name = item.name


def written(key: Any) -> str:
    """Write one step of a way as Python does."""
    if isinstance(key, pytree.GetAttrKey):
        return f".{key.name}"
    return f"[{key.idx if isinstance(key, pytree.SequenceKey) else repr(key.key)}]"


def formed(spec: pytree.TreeSpec, values: Sequence[Any], module: nn.Module, graph: fx.Graph) -> Any:
    """Put values into a form as outputs of a graph; one not made of tuples, lists and dicts is kept in the module."""
    if _is_plain(spec):
        return _assembled(spec, iter(values))
    name = free_name(_OUTPUT_FORM, partial(hasattr, module))
    module.__dict__[name] = spec
    # create_node, not get_attr: the latter warns about attributes that are no tensors.
    form = graph.create_node("get_attr", name)
    return graph.call_function(pytree.tree_unflatten, (tuple(values), form))


def _is_plain(spec: pytree.TreeSpec) -> bool:
    """Whether a form is made of tuples, lists and dicts only."""
    known = spec.is_leaf() or spec.type in (tuple, list, dict)
    return known and all(map(_is_plain, spec.children()))


def _assembled(spec: pytree.TreeSpec, values: Iterator[Any]) -> Any:
    """Put values into a form made of tuples, lists and dicts."""
    if spec.is_leaf():
        return next(values)
    items = [_assembled(child, values) for child in spec.children()]
    return dict(zip(spec.context, items, strict=True)) if spec.type is dict else spec.type(items)
