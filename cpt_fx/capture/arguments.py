"""The way into and out of one graph: arguments as the model's forward takes them, outputs as it returns them."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from cpt_fx.capture.guards import PLAIN
from cpt_fx.capture.tracer import expect

_ABSENT = inspect.Parameter.empty
CONSTANTS = (*PLAIN, torch.dtype, torch.device)
"""Values that a graph has one of, and that can be compared when it runs."""
OUTPUT_FORM = "_cpt_fx_output_form"
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
    """Builds the first nodes of a graph: from arguments to the values in them."""

    def __init__(self, graph: fx.Graph, made: dict[str, fx.Node]) -> None:
        self.graph = graph
        self.made = made
        self.used: dict[str, Any] = {}

    def value(self, value: Any, way: tuple[str, tuple[Any, ...]]) -> fx.Node:
        """Return the node for a value inside an argument; a plain one is checked to be what it was."""
        name, keys = way
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

    def fix_defaults(self, arguments: list[Argument]) -> None:
        """Give arguments their defaults; what the export did not get is the default, and nothing else."""
        optional = False
        for item in arguments:
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

    def name(self, arguments: list[Argument]) -> None:
        """Call the inputs what the model calls them, now that the flat inputs are gone."""
        taken = {node.name for node in self.graph.nodes}
        for item in arguments:
            if item.name not in taken:
                self.made[item.name].name = item.name


def written(key: Any) -> str:
    """Write one step of a way as Python does."""
    if isinstance(key, pytree.GetAttrKey):
        return f".{key.name}"
    return f"[{key.idx if isinstance(key, pytree.SequenceKey) else repr(key.key)}]"


def is_plain(spec: pytree.TreeSpec) -> bool:
    """Whether a form is made of tuples, lists and dicts only."""
    known = spec.is_leaf() or spec.type in (tuple, list, dict)
    return known and all(map(is_plain, spec.children()))


def assembled(spec: pytree.TreeSpec, values: Iterator[Any]) -> Any:
    """Put values into a form made of tuples, lists and dicts."""
    if spec.is_leaf():
        return next(values)
    items = [assembled(child, values) for child in spec.children()]
    return dict(zip(spec.context, items, strict=True)) if spec.type is dict else spec.type(items)
