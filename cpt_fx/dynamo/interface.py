"""The way in and out of one graph that Dynamo found: arguments as the model takes them, outputs as it returns them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

from cpt_fx.bodies import free_name
from cpt_fx.capture.arguments import CONSTANTS, Entry, formed, said
from cpt_fx.capture.base import CaptureError
from cpt_fx.capture.input_checks import Expression, Fact, expression_of
from cpt_fx.capture.input_checks import Input as Checked
from cpt_fx.dynamo.checks import ADVICE, MADE, check_same
from cpt_fx.dynamo.recording import Input, Recording, WholeFloat, WholeInt


class _Known(NamedTuple):
    """A tensor, the node that stands for it, and what it is called."""

    value: Tensor
    node: fx.Node
    name: str


class Interface:
    """Rebuilds a graph's inputs and outputs. `tree` is the module that the graph reads tensors from."""

    def __init__(self, graph: fx.Graph, tree: nn.Module, recording: Recording) -> None:
        self.graph = graph
        self.tree = tree
        self.recording = recording
        self.start = next(node for node in graph.nodes if node.op != "placeholder")
        self.known: dict[int, _Known] = {}
        """Every tensor that has a node, by its identity."""
        self.fakes = {id(value): fake for value, fake in recording.tensors}
        self.reads: dict[str, fx.Node] = {}

    def restore_inputs(self, forward: Any) -> None:
        """Give the graph the signature of `forward`."""
        record, graph = self.recording, self.graph
        flat = graph.find_nodes(op="placeholder")
        signature = inspect.signature(forward)
        entry = Entry(graph, signature.parameters.values(), MADE, ADVICE)
        given = signature.bind(*record.args, **record.kwargs).arguments
        entry.check_forms(given, ordered=True)
        opaque = {}
        for way, value in pytree.tree_flatten_with_path(given)[0]:
            text = said(way)
            if not isinstance(value, (Tensor, *CONSTANTS)):
                opaque[text] = type(value).__name__
                continue
            node = entry.value(value, way)
            if id(value) in self.known:
                other = self.known[id(value)]
                with graph.inserting_before(self.start):
                    graph.call_function(check_same, (node, other.node, text, other.name))
            elif isinstance(value, Tensor):
                self.known[id(value)] = _Known(value, node, text)
        for used, value in zip(record.inputs, record.given, strict=True):
            self._connect(used, value, opaque)
        if opaque:
            raise _opaque(opaque)
        self._check_sizes(entry)
        for node in flat:
            graph.erase_node(node)
        entry.finish()

    def _connect(self, used: Input, value: Any, opaque: dict[str, str]) -> None:
        """Replace one of Dynamo's inputs by what it is in the model."""
        if not used.node.users:
            return
        if used.random:
            raise CaptureError("forward draws a random number in Python, which one graph would not do on every call")
        if isinstance(value, Tensor):
            node = self._tensor(used, value, opaque)
            node.meta = {**used.node.meta, **node.meta}
        elif used.of is not None:
            tensor, read, dim = used.of
            node = self._tensor(used, tensor, opaque)
            with self.graph.inserting_before(self.start):
                node = self.graph.call_method(read, (node,) if read == "storage_offset" else (node, dim))
            node.meta = dict(used.node.meta)
        else:
            raise CaptureError(
                f"the graph takes a {type(value).__name__} from {used.name}, which a single graph cannot hold"
            )
        used.node.replace_all_uses_with(node)

    def _tensor(self, used: Input, value: Tensor, opaque: dict[str, str]) -> fx.Node:
        """Return the node of a tensor: an argument, a parameter or buffer, or else a constant of the graph."""
        if id(value) in self.known:
            return self.known[id(value)].node
        if used.argument:
            raise _opaque(opaque or {used.name: "object"})
        name = self.recording.places.tensor(value)
        if name is None:
            name = free_name("constant", self.tree)
            self.tree.__dict__[name] = value
        with self.graph.inserting_before(self.start):
            node = self.graph.create_node("get_attr", name)
        self.known[id(value)] = _Known(value, node, name)
        return node

    def _check_sizes(self, entry: Entry) -> None:
        """Check what the graph takes for granted about its inputs."""
        environment = self.recording.environment
        # Arguments alone: tensors that the module holds are what they are.
        known = [each for key, each in self.known.items() if key in self.fakes and each.node.op != "get_attr"]
        numbers = {id(each.value): number for number, each in enumerate(known)}
        spell = _Sizes({
            symbol: f"t{numbers[id(tensor)]}.size()[{dim}]" if id(tensor) in numbers else str(tensor.shape[dim])
            for symbol, (tensor, dim) in self.recording.sizes.items()
        })  # fmt: skip
        checked: list[Checked] = []
        conditions = []
        seen: set[Any] = set()
        for number, each in enumerate(known):
            fake: Any = self.fakes[id(each.value)]
            sizes: list[tuple[int, int] | int] = []
            for dim, size in enumerate(fake.shape):
                expression: Any = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
                if expression.is_number or not spell.can(expression):
                    sizes.append(int(each.value.shape[dim]))
                    continue
                place = f"t{number}.size()[{dim}]"
                if not expression.is_symbol or expression in seen or spell.names.get(expression) != place:
                    conditions.append(f"{place} == {spell.doprint(expression)}")
                seen.add(expression)
                bounds = environment.var_to_range.get(expression)
                high = -1 if bounds is None or bounds.upper is int_oo else int(bounds.upper)
                sizes.append((int(bounds.lower) if bounds is not None else 0, high))
            checked.append((each.name, str(fake.dtype), tuple(sizes)))
        for guard in environment.guards:
            condition = environment.simplify(guard.expr)
            if condition.free_symbols and spell.can(condition):
                conditions.append(spell.doprint(condition))
        names = [each.name for each in known]
        facts = tuple(_fact(text, names) for text in dict.fromkeys(conditions))
        entry.check_tensors([each.node for each in known], checked, facts)

    def restore_outputs(self, module: nn.Module) -> None:
        """Let the graph, which is that of `module` by now, return what the model returned."""
        record = self.recording
        self.tree = module
        self.reads = {str(node.target): node for node in self.graph.find_nodes(op="get_attr")}
        output = self.graph.output_node()
        nodes: Any = output.args[0]
        exits = {id(value): node for value, node in zip(record.returned, nodes, strict=True)}
        used: set[int] = set()

        def build(value: Any) -> Any:
            leaves, spec = pytree.tree_flatten(value)
            return formed(spec, [leaf(item) for item in leaves], self.tree, self.graph)

        def leaf(value: Any) -> Any:
            if id(value) in exits:
                used.add(id(value))
                return exits[id(value)]
            if isinstance(value, Tensor):
                return self._returned(value)
            if isinstance(value, torch.Size):
                return self.graph.call_function(torch.Size, (tuple(map(leaf, value)),))
            if isinstance(value, CONSTANTS) and not isinstance(value, (WholeInt, WholeFloat)):
                return value
            if isinstance(value, dict) and _is_its_items(value):
                pairs = [(key, build(item)) for key, item in value.items()]
                return self.graph.call_function(type(value), (pairs,))
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {
                    item.name: build(getattr(value, item.name)) for item in dataclasses.fields(value) if item.init
                }
                return self.graph.call_function(type(value), (), fields)
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CaptureError(
                f"the model returns a {kind}, which one graph cannot make. Let it return tensors in tuples, lists, "
                "dicts, dataclasses, or classes registered with torch.utils._pytree.register_pytree_node"
            )

        with self.graph.inserting_before(output):
            output.args = (build(record.output),)
        if any(id(value) not in used for value in record.returned if isinstance(value, Tensor)):
            raise CaptureError(
                "forward keeps a tensor in an object that it does not return, or wraps one in a class of its own: one "
                "graph would do neither on every call"
            )

    def _returned(self, value: Tensor) -> fx.Node:
        """Return the node of a tensor that the graph does not compute: an argument, or one that the module holds."""
        known = self.known.get(id(value))
        if known is not None and known.node.op != "get_attr":
            return known.node
        name = self.recording.places.tensor(value) if known is None else known.name
        if name is None:
            name = free_name("constant", self.tree)
            self.tree.register_buffer(name, value, persistent=False)
        # One node for each: passes may have replaced it.
        return self.reads.get(name) or self.graph.create_node("get_attr", name)


def _is_its_items(value: dict[Any, Any]) -> bool:
    """Whether a class of dicts can be made of pairs, and holds nothing else."""
    try:
        again = type(value)(list(value.items()))
    except Exception:  # whatever its constructor thinks of pairs
        return False
    return [*map(id, again.values())] == [*map(id, value.values())] and list(again) == list(value)


class _Sizes(PythonPrinter):
    """Writes conditions on sizes as Python does, with each size as that of an input."""

    def __init__(self, names: dict[Any, str]) -> None:
        super().__init__()
        self.names = names

    def can(self, expression: Any) -> bool:
        """Whether everything in it is the size of a tensor; strides are looked at by the operators themselves."""
        return all(symbol in self.names for symbol in expression.free_symbols)

    def _print_Symbol(self, expr: Any) -> str:  # noqa: N802  (sympy calls it so)
        return self.names[expr]


def _fact(text: str, names: list[str]) -> Fact:
    """Return a condition for people and as plain data."""
    try:
        expression: Expression = expression_of(text, {f"t{number}": number for number in range(len(names))})
    except (KeyError, ValueError, SyntaxError) as error:
        raise CaptureError(
            f"the graph holds only where {_readable(text, names)}, which cannot be checked: {error}"
        ) from None
    return _readable(ast.unparse(ast.parse(text)), names), expression


def _readable(text: str, names: list[str]) -> str:
    return re.sub(r"\bt(\d+)\.", lambda found: f"{names[int(found[1])]}.", text)


def _opaque(opaque: dict[str, str]) -> CaptureError:
    name, kind = next(iter(opaque.items()))
    return CaptureError(
        f"the argument {name} is a {kind}, which one graph cannot take apart: pass tensors, plain values, and tuples, "
        "lists or dicts of them"
    )
