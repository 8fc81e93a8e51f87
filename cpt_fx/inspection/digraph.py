"""The rewritten graph as a networkx DiGraph."""

from __future__ import annotations

import operator
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from cpt_fx.inspection.views import QuantizerView
from cpt_fx.layer_state import is_range
from cpt_fx.meta import PASS, SITE, STATE, get_attribute, module_path

Modules = dict[str, nn.Module]


def digraph(modules: list[fx.GraphModule], views: tuple[QuantizerView, ...]) -> Any:
    """Return every node and every use of a value as an edge. With several graphs, names start with `<index>/`."""
    graph = nx.DiGraph()
    by_node = {(view.graph, view.node): view for view in views}
    for index, module in enumerate(modules):
        prefix = f"{index}/" if len(modules) > 1 else ""
        known = dict(module.named_modules(remove_duplicate=False))
        for node in module.graph.nodes:
            view, site = by_node.get((index, node.name)), node.meta.get(SITE)
            graph.add_node(
                prefix + node.name,
                op=node.op,
                target=target_name(node),
                kind=kind_of(module, node, view),
                role=view.role if view else "",
                layer=view.layer if view else site.layer if site else "",
                bits=view.bits if view else None,
                module=module_of(node, known),
                made_by=node.meta.get(PASS, ""),
            )
            graph.add_edges_from((prefix + used.name, prefix + node.name) for used in node.all_input_nodes)
    return graph


def target_name(node: fx.Node) -> str:
    """Return what a node calls, without addresses."""
    if isinstance(node.target, str):
        return node.target
    name = str(getattr(node.target, "__name__", node.target))
    return name.removesuffix(".default")


def kind_of(module: fx.GraphModule, node: fx.Node, view: QuantizerView | None) -> str:
    """Return `quantizer`, `operator`, `parameter`, `buffer`, `constant`, `input`, `output`, or `state` (our own)."""
    if view is not None and SITE not in node.meta:
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
    """Whether a node reads a width, a record or a running range."""
    path = str(node.target)
    return path.startswith(f"{STATE}.") or is_range(path.rpartition(".")[2])


def module_of(node: fx.Node, known: Modules) -> str:
    """Return the path of the module a node came from; where the trace is lost (a pickle), the best guess."""
    path, _ = module_path(node)
    if path:
        return path
    if node.op == "call_module":
        return str(node.target)
    if node.op == "get_attr" and not _is_ours(node):
        return str(node.target).rpartition(".")[0]
    site, quantizer = node.meta.get(SITE), node.meta.get("cpt_fx_quantizer")
    layer = site.layer if site else quantizer.layers[0] if quantizer else ""
    while layer and layer not in known:
        layer = layer.rpartition(".")[0]
    return str(layer)
