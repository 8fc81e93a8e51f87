"""The graphs of a result: listed, readable, editable; `result.graph` where one graph holds the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import cpt_fx
from tests.ir.result.models import QUIET, Chain, Net, batch, close, equal, far, made, ways

pytestmark = QUIET


class Own(nn.Module):
    """One module whose own forward multiplies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * self.scale


class Graphed(Chain):
    """A model with attributes called as ours might be."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = {"nodes": 3}
        self.code = "mine"
        self.history = [1]

    def recompile(self) -> str:
        return "mine too"


def quantize_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if node.op == "call_function" and "cpt_fx" in str(node.target) and "quantize" in str(node.target):
            yield node


@ways
def test_graphs_hold_the_quantizers(way: str) -> None:
    result = made(Chain(), way)
    result(batch())
    graphs = cpt_fx.graphs(result)
    assert graphs and all(isinstance(graph, fx.GraphModule) for graph in graphs)
    assert sum(len(list(quantize_nodes(graph.graph))) for graph in graphs) >= 6
    for graph in graphs:
        graph.graph.lint()
    views = cpt_fx.inspect(result).quantizers
    nodes = [{node.name for node in graph.graph.nodes} for graph in graphs]
    assert all(view.node in nodes[view.graph] for view in views)


@ways
def test_the_graph_of_the_whole_model(way: str) -> None:
    """Where one graph can hold it; what other frontends give is named, not guessed."""
    result = made(Own(), way, example_inputs=(batch(),))
    result(batch())
    graph = result.graph
    assert isinstance(graph, fx.Graph)
    assert len(list(quantize_nodes(graph))) >= 2
    chain = made(Chain(), way, example_inputs=(batch(),))
    products = [n for n in chain.graph.nodes if any(w in str(n.target) for w in ("linear", "matmul", "mm"))]
    assert len(products) >= 5 and len(list(quantize_nodes(chain.graph))) >= 6


@ways
def test_a_models_own_graph_wins(way: str) -> None:
    result = made(Graphed(), way)
    assert result.graph == {"nodes": 3} and result.code == "mine" and result.recompile() == "mine too"
    assert result.history == [1]
    result.graph = {"nodes": 4}
    assert result.graph == {"nodes": 4} and far(result(batch()), Graphed()(batch()))
    assert cpt_fx.graphs(result)
    assert cpt_fx.revert(result).graph == {"nodes": 4}


def sigmoid_for_tanh(result: nn.Module) -> int:
    edited = 0
    for module in cpt_fx.graphs(result):
        for node in module.graph.nodes:
            if node.op == "call_function" and "tanh" in str(node.target):
                node.target = torch.sigmoid
                edited += 1
            elif node.op == "call_method" and node.target == "tanh":
                node.target = "sigmoid"
                edited += 1
        module.recompile()
    return edited


@ways
def test_edits_count_after_recompile(way: str) -> None:
    model = Own()
    result = made(model, way, 32)
    result(batch())
    assert sigmoid_for_tanh(result) >= 1
    assert close(result(batch()), torch.sigmoid(batch() @ model.weight))
    with torch.no_grad():
        model.weight.mul_(2)
    assert close(result(batch()), torch.sigmoid(batch() @ model.weight))


@ways
def test_an_edit_is_never_dropped_silently(way: str) -> None:
    """A change that asks for a new capture raises, or the edit is in what runs."""
    model = Own()
    result = made(model, way, 32)
    result(batch())
    sigmoid_for_tanh(result)
    result.scale = 3.0
    try:
        output = result(batch())
    except cpt_fx.TransformError as error:
        assert "edit" in str(error) or "graph" in str(error)
        return
    assert close(output, 3 * torch.sigmoid(batch() @ model.weight))


@ways
def test_a_quantizer_that_is_cut_out(way: str) -> None:
    """An edit of a pass's kind: every quantizer of a graph replaced by what it reads."""
    model = Own()
    result = made(model, way)
    result(batch())
    assert far(result(batch()), model(batch()))
    for module in cpt_fx.graphs(result):
        for node in list(quantize_nodes(module.graph)):
            value: Any = node.args[0]
            if isinstance(value, fx.Node):
                node.replace_all_uses_with(value)
        module.recompile()
    assert equal(result(batch()), model(batch()))


@ways
def test_graphs_read_the_live_tree(way: str) -> None:
    result = made(Net(), way, 32)
    result(batch())
    replaced = nn.Parameter(torch.randn(4, 8))
    result.fc.weight = replaced
    result(batch())[0].sum().backward()
    assert replaced.grad is not None
    model = cpt_fx.revert(result)
    assert equal(result(batch()), model(batch()))


def test_a_plain_model_has_no_graphs() -> None:
    with pytest.raises(cpt_fx.TransformError, match="not transformed"):
        cpt_fx.graphs(Chain())
