"""Shared by the frontends: copies of module trees, and graph modules over the model's own tensors."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.errors import TransformError
from cpt_fx.ir.layer_names import NAMES, Names
from cpt_fx.ir.layer_state import own
from cpt_fx.ir.meta import STATE, VIEW, attribute_or_none, get_attribute
from cpt_fx.ir.module import ROOT, QuantizedGraphModule, blank, take_tensors
from cpt_fx.ir.result import CALL_HOOKS, PART, plain_class
from cpt_fx.ir.state import Precision
from cpt_fx.ir.subgraphs import add_subgraph


class CaptureError(TransformError):
    """A model's code cannot be turned into an equivalent graph."""


ABSENT = object()
"""Stands for an attribute, an item or a value that is not there."""


@contextmanager
def patched(values: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Replace attributes of classes and modules for the duration of the block."""
    before = {(owner, name): vars(owner).get(name, ABSENT) for owner, name in values}
    try:
        for (owner, name), value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in before.items():
            delattr(owner, name) if value is ABSENT else setattr(owner, name, value)


MODULE_OWN = frozenset(key for key, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))
"""Attributes in which nn.Module itself keeps parameters, buffers, children and hooks."""


EVERY = object()
"""Passed as `session` to `clone_tree`: stands for every session."""


def clone_tree(module: nn.Module, clones: dict[int, nn.Module], session: object = None) -> nn.Module:
    """Copy a module tree; tensors are shared. Modules of `session` become plain, those of others are not copied."""
    if id(module) in clones:
        return clones[id(module)]
    part = module.__dict__.get(PART)
    if part is not None and session is not EVERY and part.session is not session:
        clones[id(module)] = module
        return module
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(module).__name__} is TorchScript: its code is compiled and cannot be rewritten. "
            "Transform the Python module it was scripted from"
        )
    held = (*module._parameters.values(), *module._buffers.values())
    if any(nn.parameter.is_lazy(tensor) for tensor in held if tensor is not None):
        raise CaptureError(
            f"{type(module).__name__} does not know the shapes of its parameters yet: run the model once, then "
            "transform it"
        )
    # Bypass the class's own __new__: that of GraphModule creates a new class.
    new = object.__new__(plain_class(type(module)))
    clones[id(module)] = new
    new.__dict__ = {key: value.copy() if key in MODULE_OWN else value for key, value in module.__dict__.items()}
    new.__dict__.pop(PART, None)
    if session is EVERY:
        for name in own(module):
            new._parameters.pop(name, None)
            new._buffers.pop(name, None)
    if part is not None and part.forward is not None:
        new.__dict__["forward"] = part.forward
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else clone_tree(child, clones, session)
    return new


def assemble(
    root: nn.Module, graph: fx.Graph, inside: Iterable[tuple[str, fx.GraphModule]] = ()
) -> QuantizedGraphModule:
    """Return a standalone module for a graph over a tree: called modules are kept, all others only hold tensors.

    Parameters and buffers keep their names and order, so that checkpoints and optimizer states fit; what only the graph
    needs stays out of the state_dict. `inside` are the subgraphs by name.
    """
    inner = dict(inside)
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    constants = {
        str(node.target): get_attribute(root, str(node.target))
        for node in graph.nodes
        if node.op == "get_attr" and node.target not in inner and not str(node.target).startswith(f"{STATE}.")
    }
    refuse_taken_names(root, constants)
    result = blank()
    take_tensors(result, root)
    _graft(result, root, "", called, {id(root): result})
    for path, value in constants.items():
        _ensure(result, path, value)
    # The graph is that of the root's forward, not of its call: hooks on the root move to the result.
    for hooks in CALL_HOOKS:
        getattr(result, hooks).update(getattr(root, hooks))
    result._is_full_backward_hook = root._is_full_backward_hook
    for name, subgraph in inner.items():
        add_subgraph(result, name, subgraph)
    result.graph = graph
    return result


def refuse_taken_names(root: nn.Module, constants: Iterable[str] = ()) -> None:
    """Raise if a part of a model has a name that GraphModule needs, or that is a Python keyword."""
    for name in {path.partition(".")[0] for path in (*root._modules, *root._parameters, *root._buffers, *constants)}:
        if name in ("meta", "_graph", "_code") or (hasattr(fx.GraphModule, name) and not hasattr(nn.Module, name)):
            raise CaptureError(
                f"{type(root).__name__} has a part called {name!r}, a name that torch.fx.GraphModule uses for its own: "
                "rename it, or wrap the model in another module"
            )
    for path in (*dict(root.named_modules()), *dict(root.named_parameters()), *dict(root.named_buffers())):
        word = next(filter(keyword.iskeyword, path.split(".")), None)
        if word is not None:
            raise CaptureError(
                f"{type(root).__name__} has a part {path!r}: {word!r} is a word of Python's, which the code of a graph "
                "cannot read as a name: rename it"
            )


def _graft(target: nn.Module, source: nn.Module, prefix: str, called: set[str], made: dict[int, nn.Module]) -> None:
    for name, child in source._modules.items():
        path = f"{prefix}.{name}" if prefix else name
        if child is None:
            target.add_module(name, None)
        elif path in called:
            made[id(child)] = child
            target.add_module(name, child)
        elif id(child) in made:
            target.add_module(name, made[id(child)])
        else:
            holder = nn.Module()
            made[id(child)] = holder
            take_tensors(holder, child)
            target.add_module(name, holder)
            _graft(holder, child, path, called, made)


def _ensure(root: nn.Module, path: str, value: object) -> None:
    """Set the attribute at `path` unless it exists: a constant of the traced code, or a tensor in a plain attribute."""
    path, _, name = path.rpartition(".")
    holder = holder_at(root, path)
    if hasattr(holder, name):
        return
    if isinstance(value, torch.Tensor):
        # A buffer, so that it follows .to(); not persistent, so that plain checkpoints still fit.
        holder.register_buffer(name, value, persistent=False)
    else:
        setattr(holder, name, value)


def holder_at(root: nn.Module, path: str) -> nn.Module:
    """Return the module at a path, creating empty modules where there are none."""
    for part in filter(None, path.split(".")):
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph with its own meta dictionaries."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = new.node_copy(node, lambda used: mapping[used])
    return new


def over(root: nn.Module, state: Precision, names: Names, graph: fx.Graph) -> QuantizedGraphModule:
    """Return a module for a graph that shares the model's containers, so that the passes see changes in them."""
    view = blank()
    view.meta = {NAMES: names, VIEW: True}
    for containers in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        view.__dict__[containers] = getattr(root, containers)
    view.__dict__.update({ROOT: root, STATE: state})
    put_graph(view, graph)
    return view


def put_graph(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Set the graph of a module without the recompilation that its `graph` property does: passes change it first."""
    module._graph = graph
    graph.owning_module = module


def drop_unread(graph: fx.Graph) -> None:
    """Remove attribute reads that no operator uses, such as those left by a shape test or an `is None`."""
    for node in graph.find_nodes(op="get_attr"):
        if not node.users:
            graph.erase_node(node)


def called_by(view: fx.GraphModule) -> set[int]:
    """Return the ids of the modules that a graph calls."""
    return {id(view.get_submodule(str(node.target))) for node in view.graph.nodes if node.op == "call_module"}


def resolves(view: fx.GraphModule) -> bool:
    """Return whether everything that a graph reads or calls still exists."""
    found = (node for node in view.graph.nodes if node.op in ("get_attr", "call_module"))
    return all(attribute_or_none(view, str(node.target)) is not None for node in found)
