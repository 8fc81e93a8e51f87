"""The rewritten graph as a tree of modules, with edges between siblings, for drawings; and as a graph of networkx."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from cpt_fx.inspection.views import QuantizerView
from cpt_fx.ir.layer_state import is_range
from cpt_fx.ir.meta import DECISION, PASS, STATE, get_attribute, module_path

Modules = dict[str, nn.Module]

CROWD = 60
"""A module with more children than this has them grouped into runs of neighbours."""

IN, OUT = "in", "out"
"""Where values enter and leave an expanded module."""


@dataclass(eq=False)
class Item:
    """A box: a module with items inside, or one node of the graph."""

    id: str
    kind: str
    title: str
    subtitle: str = ""
    path: str = ""
    """The module's path; for a node, the path of the module it belongs to."""
    view: QuantizerView | None = None
    facts: dict[str, str] = field(default_factory=dict)
    parent: Item | None = None
    children: list[Item] = field(default_factory=list)
    edges: dict[tuple[str, str], None] = field(default_factory=dict)
    """Between children, by id, in order; `IN` and `OUT` stand for the module's own border."""
    order: int = 0
    """Position in the graph of the first node inside."""

    def walk(self) -> Iterator[Item]:
        """Yield this item and everything below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def views(self) -> list[QuantizerView]:
        """Return the quantizers inside."""
        return [item.view for item in self.walk() if item.view is not None]


def build(modules: list[fx.GraphModule], views: tuple[QuantizerView, ...], name: str) -> Item:
    """Return the tree of a model, without reads of our own state and of the training mode."""
    root = Item("m", "module", name, "model")
    uses: list[tuple[Item, Item]] = []
    for index, module in enumerate(modules):
        top = root if len(modules) == 1 else _child(root, f"m/g{index}", f"graph {index}", "")
        mine = {view.node: view for view in views if view.graph == index}
        uses += _plant(module, mine, top, f"{index}.")
    _simplify(root)
    _gather(root)
    _connect(uses)
    return root


def _plant(module: fx.GraphModule, views: dict[str, QuantizerView], top: Item, prefix: str) -> list[tuple[Item, Item]]:
    """Fill `top` with the nodes of a graph; return (used, user) pairs of its items."""
    known: Modules = dict(module.named_modules(remove_duplicate=False))
    groups: dict[str, Item] = {top.id: top}
    leaves: dict[fx.Node, Item] = {}
    for order, node in enumerate(module.graph.nodes):
        kind = kind_of(module, node, views.get(node.name))
        if kind == "state":
            continue
        parent = _group(node, top, groups, known)
        leaf = _leaf(module, node, kind, views.get(node.name), known, prefix)
        leaf.order, leaf.parent = order, parent
        parent.children.append(leaf)
        leaves[node] = leaf
    for item in reversed(list(top.walk())):
        if item.children:
            item.order = min(child.order for child in _movers(item.children))
    return [(leaves[used], leaf) for node, leaf in leaves.items() for used in node.all_input_nodes if used in leaves]


def _movers(children: list[Item]) -> list[Item]:
    """Return the children in the data flow; parameters may be read long before they are used."""
    return [child for child in children if child.kind not in ("parameter", "buffer", "constant")] or children


def _group(node: fx.Node, top: Item, groups: dict[str, Item], known: Modules) -> Item:
    """Return the box of the module a node belongs to; every call of a module has its own box.

    A module that is never called itself (a ModuleList) has none: its members may alternate with nodes outside of it.
    """
    stack = [(str(call), str(path)) for call, (path, _) in (node.meta.get("nn_module_stack") or {}).items() if path]
    path = module_of(node, known)
    if path and (not stack or stack[-1][1] != path):
        stack = [*((call, outer) for call, outer in stack if f"{path}.".startswith(f"{outer}.")), (path, path)]
    current, here = top, ""
    for call, outer in stack:
        name = outer.removeprefix(f"{here}.")
        number = call.rpartition("@")[2] if "@" in call else ""
        key = f"{current.id}/{name}" + (f"@{number}" if number else "")
        if key not in groups:
            title = f"{name} (call {int(number) + 1})" if number.isdigit() else name
            groups[key] = _child(current, key, title, outer)
            groups[key].subtitle = _class_name(known, outer)
        current, here = groups[key], outer
    return current


def _child(parent: Item, key: str, title: str, path: str) -> Item:
    item = Item(key, "module", title, path=path, parent=parent)
    parent.children.append(item)
    return item


def _class_name(known: Modules, path: str) -> str:
    module = known.get(path)
    return str(getattr(module, "kind", type(module).__name__)).rpartition(".")[2] if module is not None else ""


def _leaf(
    module: fx.GraphModule, node: fx.Node, kind: str, view: QuantizerView | None, known: Modules, prefix: str
) -> Item:
    name, path = target_name(node), module_of(node, known)
    facts = {"node": node.name, "module": path or "(root)"}
    if node.meta.get(PASS):
        facts["made by"] = f"pass {node.meta[PASS]}"
    title, subtitle = name, ""
    if kind == "quantizer" and view is not None:
        title = "output gradient" if view.role == "gradient" else view.operand
        subtitle = f"{view.format.scheme.value} · {view.group}"
    elif kind in ("parameter", "buffer", "constant"):
        title = str(node.target).rpartition(".")[2]
        value = get_attribute(module, str(node.target))
        subtitle = "×".join(map(str, value.shape)) or "scalar" if hasattr(value, "shape") else ""
        facts |= {"reads": str(node.target), "shape": subtitle}
    elif kind == "operator":
        if node.op == "call_module":
            title, subtitle = path.rpartition(".")[2], _class_name(known, str(node.target))
        facts["calls"] = name
        decision: Any = node.meta.get(DECISION)
        if decision is not None:
            facts["layer"] = decision.layer
        if view is not None:
            # An integer product, which quantizes the gradient of its result itself.
            subtitle = facts["gradient"] = f"gradient {view.bits} bits"
    return Item(prefix + node.name, kind, title, subtitle, path, view, facts)


def _connect(uses: list[tuple[Item, Item]]) -> None:
    """Add an edge where the paths of two nodes diverge, and edges from there to the borders of the modules between."""
    for source, target in uses:
        ups, downs = _ancestors(source), _ancestors(target)
        shared = [up for up, down in zip(ups, downs, strict=False) if up is down]
        ups, downs = ups[len(shared) :], downs[len(shared) :]
        shared[-1].edges[ups[0].id, downs[0].id] = None
        for outer, inner in pairwise(ups):
            outer.edges[inner.id, OUT] = None
        for outer, inner in pairwise(downs):
            outer.edges[IN, inner.id] = None


def _ancestors(item: Item) -> list[Item]:
    return [*(_ancestors(item.parent) if item.parent else ()), item]


def _simplify(item: Item) -> None:
    """Replace every module that holds a single item by that item."""
    for child in item.children:
        _simplify(child)
    for place, child in enumerate(item.children):
        if child.kind != "module" or len(child.children) != 1:
            continue
        only = child.children[0]
        if only.kind == "module":
            only.title = f"{child.title}.{only.title}"
        elif only.kind == "operator" and only.subtitle == "":
            only.subtitle = child.path
        only.parent = item
        item.children[place] = only


def _gather(item: Item) -> None:
    """Give a module with very many children an extra level: runs of neighbours, which never form a cycle."""
    for child in item.children:
        _gather(child)
    while len(item.children) > CROWD:
        ordered = sorted(item.children, key=lambda child: child.order)
        size = -(-len(ordered) // -(-len(ordered) // 24))
        item.children = []
        for start in range(0, len(ordered), size):
            members = ordered[start : start + size]
            run = _child(item, f"{item.id}/#{start}-{len(ordered)}", _span(members), item.path)
            run.order, run.children = members[0].order, members
            for member in members:
                member.parent = run


def _span(members: list[Item]) -> str:
    modules = [member for member in members if member.kind == "module"]
    named = [member for member in modules if member.views()] or modules or _movers(members)
    first, last = named[0].title.partition(" … ")[0], named[-1].title.rpartition(" … ")[2]
    return first if first == last else f"{first} … {last}"


def digraph(modules: list[fx.GraphModule], views: tuple[QuantizerView, ...]) -> Any:
    """Return a DiGraph with all nodes, and an edge for every use; with several graphs, names start with `<index>/`."""
    graph = nx.DiGraph()
    by_node = {(view.graph, view.node): view for view in views}
    for index, module in enumerate(modules):
        prefix = f"{index}/" if len(modules) > 1 else ""
        known = dict(module.named_modules(remove_duplicate=False))
        for node in module.graph.nodes:
            view, decision = by_node.get((index, node.name)), node.meta.get(DECISION)
            graph.add_node(
                prefix + node.name,
                op=node.op,
                target=target_name(node),
                kind=kind_of(module, node, view),
                role=view.role if view else "",
                layer=view.layer if view else decision.layer if decision else "",
                bits=view.bits if view else None,
                module=module_of(node, known),
                made_by=node.meta.get(PASS, ""),
            )
            graph.add_edges_from((prefix + used.name, prefix + node.name) for used in node.all_input_nodes)
    return graph


def target_name(node: fx.Node) -> str:
    """Return the name of what a node calls, without memory addresses."""
    if isinstance(node.target, str):
        return node.target
    name = str(getattr(node.target, "__name__", node.target))
    return name.removesuffix(".default")


def kind_of(module: fx.GraphModule, node: fx.Node, view: QuantizerView | None) -> str:
    """Return `quantizer`, `operator`, `parameter`, `buffer`, `constant`, `input`, `output`, or `state` (our own)."""
    if view is not None and DECISION not in node.meta:
        return "quantizer"
    if node.op == "placeholder":
        return "input"
    if node.op == "output":
        return "output"
    if node.op != "get_attr":
        negated = node.all_input_nodes if node.target is operator.not_ else []
        flag = negated and all(kind_of(module, used, None) == "state" for used in negated)
        return "state" if flag else "operator"
    if _is_ours(node):
        return "state"
    value = get_attribute(module, str(node.target))
    if isinstance(value, nn.Parameter):
        return "parameter"
    if isinstance(value, torch.Tensor):
        return "buffer"
    return "state" if isinstance(value, bool) else "constant"


def _is_ours(node: fx.Node) -> bool:
    """Whether a node reads a width, a counter or a running range."""
    path = str(node.target)
    return path.startswith(f"{STATE}.") or is_range(path)


def module_of(node: fx.Node, known: Modules) -> str:
    """Return the path of the module a node came from; where its module stack is lost (a pickle), the best guess."""
    path, _ = module_path(node)
    if path:
        return path
    if node.op == "call_module":
        return str(node.target)
    if node.op == "get_attr" and not _is_ours(node):
        return str(node.target).rpartition(".")[0]
    decision, quantizer = node.meta.get(DECISION), node.meta.get("cpt_fx_quantizer")
    layer = decision.layer if decision else quantizer.layers[0] if quantizer else ""
    while layer and layer not in known:
        layer = layer.rpartition(".")[0]
    return str(layer)
