"""The names of layers: the same in every capture."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.ir.layer_names import NAMES, Names, NamesOfOneGraph, frames_of
from cpt_fx.ir.meta import NAME
from cpt_fx.passes import Annotate, Normalize
from tests.passes import decisions


class Block(nn.Module):
    """Its class is what counts."""


def node(graph: fx.Graph, call: str = "block", *, trace: str = "", name: str = "") -> fx.Node:
    made = graph.call_function(torch.matmul, ())
    if call:
        made.meta["nn_module_stack"] = {call: (call.partition("@")[0], Block)}
    if trace:
        made.meta["stack_trace"] = trace
    if name:
        made.meta[NAME] = name
    return made


def line(number: int, *, function: str = "forward", file: str = "model.py", inner: str = "") -> str:
    return f'  File "{file}", line {number}, in {function}\n    y = x @ z\n{inner}'


def named(names: Names, *nodes: fx.Node, kind: type[nn.Module] | None = Block, op: str = "matmul") -> list[str]:
    walk = NamesOfOneGraph(names)
    return [walk.name(made, op, kind) for made in nodes]


def test_without_places_operators_are_counted_within_a_call() -> None:
    graph = fx.Graph()
    nodes = [node(graph), node(graph), node(graph, "block@1"), node(graph, ""), node(graph, "block@1"), node(graph, "")]
    expected = ["block.matmul", "block.matmul_1", "block.matmul", "matmul", "block.matmul_1", "matmul_1"]
    names = Names()
    assert named(names, *nodes) == expected
    assert named(names, *nodes) == expected  # the next capture


def test_the_first_operator_of_a_layer_of_torch_is_the_layer() -> None:
    graph = fx.Graph()
    nodes = [node(graph), node(graph), node(graph, "block@1")]
    names = Names()
    assert named(names, *nodes, kind=nn.Linear) == ["block", "block.matmul_1", "block"]
    assert named(names, nodes[0], kind=nn.Linear, op="linear") == ["block.linear"]


def test_a_name_that_opening_gave_is_used() -> None:
    graph = fx.Graph()
    nodes = [node(graph, name="scores"), node(graph, name="scores"), node(graph)]
    assert named(Names(), *nodes, kind=nn.MultiheadAttention) == ["block.scores", "block.scores_1", "block"]


def test_a_place_keeps_its_number() -> None:
    """Evaluation takes another branch, and a branch that was never seen comes last."""
    graph = fx.Graph()
    names = Names()
    training = [node(graph, trace=line(10)), node(graph, trace=line(20))]
    evaluation = [node(graph, trace=line(15)), node(graph, trace=line(20))]
    assert named(names, *training) == ["block.matmul", "block.matmul_1"]
    assert named(names, *evaluation) == ["block.matmul_2", "block.matmul_1"]
    assert named(names, *training) == ["block.matmul", "block.matmul_1"]


def test_a_graph_that_goes_on_after_a_break_counts_on() -> None:
    graph = fx.Graph()
    names = Names()
    resumed = "torch_dynamo_resume_in_forward_at_11"
    assert named(names, node(graph, trace=line(10))) == ["block.matmul"]
    assert named(names, node(graph, trace=line(12, function=resumed))) == ["block.matmul_1"]
    assert named(names, node(graph, trace=line(10)), node(graph, trace=line(12))) == ["block.matmul", "block.matmul_1"]


def test_a_loop_passes_a_place_several_times() -> None:
    graph = fx.Graph()
    names = Names()
    nodes = [node(graph, trace=line(10)) for _ in range(3)]
    assert named(names, *nodes) == ["block.matmul", "block.matmul_1", "block.matmul_2"]
    assert named(names, node(graph, "block@1", trace=line(10))) == ["block.matmul"]


def test_the_place_is_within_the_module() -> None:
    outer = line(3, function="main", file="train.py")
    inner = line(10, inner=line(5, function="helper"))
    assert frames_of(outer + inner) == (("model.py", 10, "forward"), ("model.py", 5, "helper"))
    assert frames_of(line(1, inner=inner)) == frames_of(inner)
    assert frames_of(outer) == (("train.py", 3, "main"),)
    assert frames_of(None) == ()
    graph = fx.Graph()
    other_helper = line(11, inner=line(5, function="helper"))
    found = named(Names(), node(graph, trace=outer + inner), node(graph, trace=line(1, inner=other_helper)))
    assert found == ["block.matmul", "block.matmul_1"]


def test_layers_of_torch_do_not_look_at_their_code() -> None:
    """Torch's inference kernels are called from other lines than its training code."""
    graph = fx.Graph()
    names = Names()
    assert named(names, node(graph, trace=line(1), name="in_proj"), kind=nn.MultiheadAttention) == ["block.in_proj"]
    assert named(names, node(graph, trace=line(2), name="in_proj"), kind=nn.MultiheadAttention) == ["block.in_proj"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda names: pickle.loads(pickle.dumps(names))])
def test_copies_remember(copied: object) -> None:
    graph = fx.Graph()
    names = Names()
    named(names, node(graph, trace=line(10)), node(graph, trace=line(20)))
    again = copied(names)  # type: ignore[operator]
    nodes = node(graph, trace=line(20)), node(graph, trace=line(30))
    assert named(again, *nodes) == ["block.matmul_1", "block.matmul_2"]
    assert named(names, node(graph, trace=line(40))) == ["block.matmul_2"]


class Two(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, x) @ (x @ x)


@pytest.mark.parametrize("shared", [True, False])
def test_annotate_takes_the_registry_of_the_model(shared: bool) -> None:
    names = Names()
    named(names, node(fx.Graph(), "", trace=line(99)), kind=None)
    found = []
    for _ in range(2):
        module = fx.symbolic_trace(Two())
        if shared:
            module.meta[NAMES] = names
        for item in module.graph.nodes:
            item.meta["stack_trace"] = line(sum(map(ord, item.name)))
        Normalize()(module)
        Annotate()(module)
        found.append(list(decisions(module)))
    expected = ["matmul_1", "matmul_2"] if shared else ["matmul", "matmul_1"]
    assert found == [["linear", *expected]] * 2
