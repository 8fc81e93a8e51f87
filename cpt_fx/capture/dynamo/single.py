"""One graph of a model that Dynamo captured, with the model's own signature: for export and for tools of torch.fx."""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx, nn

from cpt_fx.capture import input_checks as checks
from cpt_fx.capture.base import CaptureError, assemble
from cpt_fx.capture.dry_run import dry_run
from cpt_fx.capture.dynamo.recording import Input, Recording, WholeFloat, WholeInt, record
from cpt_fx.capture.dynamo.torch_private import PythonPrinter
from cpt_fx.capture.session import Session
from cpt_fx.capture.standalone import finish, hold_state
from cpt_fx.common.torch_private import pytree, set_grad_enabled
from cpt_fx.ir.history import History, check_coverage
from cpt_fx.ir.layer_names import NAMES
from cpt_fx.ir.layer_state import is_range
from cpt_fx.ir.meta import read_before
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.ir.result import PART, plain_class, signature_of
from cpt_fx.ir.subgraphs import free_name, graphs_of
from cpt_fx.overrides import SELECTED


def single_graph_of(
    session: Session, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic: bool
) -> QuantizedGraphModule:
    """Capture a model in one graph and rewrite it; the graph shares the model's learned state, which is not changed."""
    with dry_run(session.root):
        recording = record(session.engine, args, kwargs, dynamic)
    # Only after the dry run, during which copies replace the buffers.
    module, interface = _assembled(session, recording)
    hold_state(module, session.state)
    module.meta[SELECTED] = session.selected
    with session.engine.net.asleep():
        reports = session.pipeline.run(module)
    _share_ranges(module, session.root)
    # Only after the passes, which expect outputs as in any Dynamo graph.
    interface.restore_outputs(module)
    for graph in graphs_of(module):
        _keep_gradient_mode(graph)
    _check_modes(module, recording.modes)
    modes = sorted(set(recording.modes.values()), reverse=True)
    named = " and ".join("training" if mode else "evaluation" for mode in modes or (True, False))
    notes = (*session.notes, f"one graph, for {named}")
    history = History("dynamo", notes, reports, repr(session.pipeline), session.kind)
    check_coverage(history, graphs_of(module), strict=session.strict)
    return finish(module, history, session.state)


def _assembled(session: Session, recording: Recording) -> tuple[QuantizedGraphModule, Interface]:
    """Return a standalone module for a recorded graph, with the model's tensors under their names."""
    root, view = session.root, recording.view
    graph = view.graph
    tree: nn.Module = object.__new__(plain_class(type(root)))
    tree.__dict__ = {key: value for key, value in root.__dict__.items() if not key.startswith(PART)}
    inner: dict[str, fx.GraphModule] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name in view.__dict__:
            value = view.__dict__[name]
            (inner if isinstance(value, fx.GraphModule) else tree.__dict__)[name] = value
    interface = Interface(graph, tree, recording)
    interface.restore_inputs(session.engine.forward_of(root))
    module = assemble(tree, graph, inner.items())
    module.meta[NAMES] = session.names
    return module, interface


def _share_ranges(module: nn.Module, root: nn.Module) -> None:
    """Add to the model the ranges that this capture was the first to need."""
    for path, layer in module.named_modules():
        for held in ("_parameters", "_buffers"):
            for name in filter(is_range, getattr(layer, held)):
                getattr(root.get_submodule(path), held).setdefault(name, getattr(layer, held)[name])


def _keep_gradient_mode(module: fx.GraphModule) -> None:
    """Make a graph restore the caller's gradient mode where it would switch gradients on after a no_grad region.

    Dynamo writes down the mode at capture, which would switch gradients on in a call under `no_grad`. In a graph that
    was captured under `no_grad`, such a region is like the rest, and its switches are removed.
    """
    graph = module.graph
    switches = graph.find_nodes(op="call_function", target=set_grad_enabled)
    if not switches:
        return
    if torch.is_grad_enabled():
        with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
            outer = graph.call_function(torch.is_grad_enabled)
        for node in switches:
            node.args = (outer,) if node.args == (True,) else node.args
    elif any(node.args == (True,) for node in switches):
        raise CaptureError(
            "forward switches gradients on, and single_graph was called under torch.no_grad(): call it outside"
        )
    else:
        for node in switches:
            graph.erase_node(node)
    module.recompile()


def _check_modes(module: fx.GraphModule, modes: dict[str, bool]) -> None:
    if not modes:
        return
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    flags = tuple(read_before(first, f"{path}.training" if path else "training") for path in modes)
    names = tuple(path or "the model" for path in modes)
    with module.graph.inserting_before(first):
        module.graph.call_function(checks.check_modes, (flags, tuple(modes.values()), names))


class _Known(NamedTuple):
    """A tensor, its node, and its name."""

    value: Tensor
    node: fx.Node
    name: str


class Interface:
    """Rebuilds a graph's inputs and outputs; `tree` is the module that the graph reads tensors from."""

    def __init__(self, graph: fx.Graph, tree: nn.Module, recording: Recording) -> None:
        self.graph = graph
        self.tree = tree
        self.recording = recording
        self.start = next(node for node in graph.nodes if node.op != "placeholder")
        self.known: dict[int, _Known] = {}
        """Every tensor that has a node, by its id."""
        self.fakes = {id(value): fake for value, fake in recording.tensors}
        self.reads: dict[str, fx.Node] = {}

    def restore_inputs(self, forward: Any) -> None:
        """Give the graph the signature of `forward`."""
        record, graph = self.recording, self.graph
        flat = graph.find_nodes(op="placeholder")
        signature = signature_of(forward)
        entry = checks.EntryBuilder(graph, signature.parameters.values(), checks.SINGLE_MADE, checks.SINGLE_ADVICE)
        given = signature.bind(*record.args, **record.kwargs).arguments
        entry.check_forms(given, ordered=True)
        opaque = {}
        for way, value in pytree.tree_flatten_with_path(given)[0]:
            text = checks.said(way)
            if not isinstance(value, (Tensor, *checks.CONSTANTS)):
                opaque[text] = type(value).__name__
                continue
            node = entry.value(value, way)
            if id(value) in self.known:
                other = self.known[id(value)]
                with graph.inserting_before(self.start):
                    graph.call_function(checks.check_same, (node, other.node, text, other.name))
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
        """Replace one of Dynamo's inputs by the argument, tensor of the model, or tensor property that it is."""
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
        node = read_before(self.start, name)
        self.known[id(value)] = _Known(value, node, name)
        return node

    def _check_sizes(self, entry: checks.EntryBuilder) -> None:
        """Add checks of what the graph assumes about its inputs."""
        environment = self.recording.environment
        # Only arguments: tensors that the module holds do not vary.
        known = [each for key, each in self.known.items() if key in self.fakes and each.node.op != "get_attr"]
        numbers = {id(each.value): number for number, each in enumerate(known)}
        spell = _Sizes({
            symbol: f"t{numbers[id(tensor)]}.size()[{dim}]" if id(tensor) in numbers else str(tensor.shape[dim])
            for symbol, (tensor, dim) in self.recording.sizes.items()
        })  # fmt: skip
        checked: list[checks.Required] = []
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
                sizes.append(checks.bounds_of(environment.var_to_range.get(expression)))
            checked.append((each.name, str(fake.dtype), tuple(sizes)))
        for guard in environment.guards:
            condition = environment.simplify(guard.expr)
            if condition.free_symbols and spell.can(condition):
                conditions.append(spell.doprint(condition))
        names = [each.name for each in known]
        facts = tuple(_fact(text, names) for text in dict.fromkeys(conditions))
        entry.check_tensors([each.node for each in known], checked, facts)

    def restore_outputs(self, module: nn.Module) -> None:
        """Make the graph, which is that of `module` by now, return what the model returned."""
        record = self.recording
        self.tree = module
        self.reads = {str(node.target): node for node in self.graph.find_nodes(op="get_attr")}
        output = self.graph.output_node()
        nodes: Any = output.args[0]
        exits = {id(value): node for value, node in zip(record.returned, nodes, strict=True)}
        used: set[int] = set()

        def build(value: Any) -> Any:
            leaves, spec = pytree.tree_flatten(value)
            return checks.formed(spec, [leaf(item) for item in leaves], self.tree, self.graph)

        def leaf(value: Any) -> Any:
            if id(value) in exits:
                used.add(id(value))
                return exits[id(value)]
            if isinstance(value, Tensor):
                return self._returned(value)
            if isinstance(value, torch.Size):
                return self.graph.call_function(torch.Size, (tuple(map(leaf, value)),))
            if isinstance(value, checks.CONSTANTS) and not isinstance(value, (WholeInt, WholeFloat)):
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
        # One node for each name, looked up after the passes, which may have replaced it.
        return self.reads.get(name) or self.graph.create_node("get_attr", name)


def _is_its_items(value: dict[Any, Any]) -> bool:
    """Return whether a dict subclass can be rebuilt from its items, and holds nothing else."""
    try:
        again = type(value)(list(value.items()))
    except Exception:  # whatever its constructor raises when given pairs
        return False
    return [*map(id, again.values())] == [*map(id, value.values())] and list(again) == list(value)


class _Sizes(PythonPrinter):
    """Writes conditions on sizes as Python code, with each size as that of an input."""

    def __init__(self, names: dict[Any, str]) -> None:
        super().__init__()
        self.names = names

    def can(self, expression: Any) -> bool:
        """Return whether all symbols in an expression are known sizes; operators check strides themselves."""
        return all(symbol in self.names for symbol in expression.free_symbols)

    def _print_Symbol(self, expr: Any) -> str:  # noqa: N802  (sympy calls it so)
        return self.names[expr]


def _fact(text: str, names: list[str]) -> checks.Fact:
    """Return a condition as readable text and as an expression."""
    places = {f"t{number}": number for number in range(len(names))}
    expression = checks.expression_of(text, places, f"the graph holds only where {_readable(text, names)}")
    return _readable(ast.unparse(ast.parse(text)), names), expression


def _readable(text: str, names: list[str]) -> str:
    return re.sub(r"\bt(\d+)\.", lambda found: f"{names[int(found[1])]}.", text)


def _opaque(opaque: dict[str, str]) -> CaptureError:
    name, kind = next(iter(opaque.items()))
    return CaptureError(
        f"the argument {name} is a {kind}, which one graph cannot take apart: pass tensors, plain values, and tuples, "
        "lists or dicts of them"
    )
