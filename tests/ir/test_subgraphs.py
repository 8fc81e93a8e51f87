"""Graphs inside graphs: passes go into them, promises hold in them, their state is the model's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.capture.standalone import precision_of
from cpt_fx.ir.meta import DECISION, QUANTIZER, WEIGHT
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.ir.pass_base import stage_of
from cpt_fx.ir.subgraphs import OUTER, add_subgraph, calls_of, graphs_of, new_subgraph, nodes_of, state_of, subgraphs
from cpt_fx.ir.verifier import SpecError
from cpt_fx.passes import Annotate, Bind, Insert, Normalize, Share, Verify
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import paper
from cpt_fx.schedules import Bits, Static
from tests.decompose.fused_graphs import GraphMaker, recurrent, results
from tests.passes import assert_same

STEPS = (Normalize(), Annotate(paper(gradient_rounding="nearest")), Insert(), Share(), Bind(Static(Bits(4, 4, 4))))


def run(subgraph: Any, *args: Any) -> Any:
    """Stands for an operator that takes a body, as activation checkpointing does."""
    return subgraph(*args)


def choose(which: bool, one: Any, other: Any, operands: tuple[Any, ...]) -> Any:
    """Stands for `torch.cond`."""
    return (one if which else other)(*operands)


def product_body(*, alias: bool = True) -> QuantizedGraphModule:
    """`x @ w + b`, spelled in a way that is not normal."""
    graph = fx.Graph()
    x, w, b = (graph.placeholder(name) for name in "xwb")
    y = graph.call_method("matmul", (x, w)) if alias else graph.call_function(torch.matmul, (x, w))
    y = graph.call_function(torch.add, (y, b))
    for node in graph.nodes:
        if node.op.startswith("call"):
            node.meta["nn_module_stack"] = {"layer": ("layer", nn.Module)}
    graph.output(y)
    return new_subgraph(graph)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 3, generator=generator))
        self.b = nn.Parameter(torch.randn(3, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


def with_body(depth: int = 1) -> QuantizedGraphModule:
    """`layer(layer(x))`, the first of them inside as many bodies as `depth` says."""
    make = GraphMaker(layer=Layer())
    (x,) = make.inputs("x")
    weights = [make.read("layer.w"), make.read("layer.b")]
    subgraph = product_body()
    for _ in range(depth - 1):
        graph = fx.Graph()
        given = [graph.placeholder(name) for name in "xwb"]
        read = graph.create_node("get_attr", "inner")
        graph.output(graph.call_function(run, (read, *given)))
        outer = new_subgraph(graph)
        add_subgraph(outer, "inner", subgraph)
        subgraph = outer
    read = make.read(add_subgraph(make.module, "body", subgraph))
    y = make.call(run, read, x, *weights)
    y = make.call(torch.matmul, y, weights[0], at="layer")
    return make.finish(make.call(torch.add, y, weights[1], at="layer"))


def quantized(module: QuantizedGraphModule) -> QuantizedGraphModule:
    for step in STEPS:
        step(module)
        Verify(step.name)(module)
    return module


@pytest.mark.parametrize("depth", [1, 3])
def test_the_numbers_are_those_of_the_flat_graph(depth: int) -> None:
    flat = quantized(fx.symbolic_trace(Twice()))  # type: ignore[arg-type]
    nested = quantized(with_body(depth))
    x = torch.randn(4, 3)
    for bits in (32, 4, 2):
        for module in (flat, nested):
            held: Any = precision_of(module).bits
            for width in held.buffers():
                width.fill_(bits)
        ours, theirs = results(nested, x), results(flat, x)
        assert_same(ours, theirs)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.layer(x))
        return y


@pytest.mark.parametrize("depth", [1, 3])
def test_every_pass_goes_inside(depth: int) -> None:
    module = quantized(with_body(depth))
    graphs = graphs_of(module)
    assert len(graphs) == depth + 1
    assert {stage_of(graph) for graph in graphs} == {"bound"}
    inner = graphs[-1]
    found = {(node.meta[QUANTIZER].operand, node.meta[QUANTIZER].role) for node in inner.graph.nodes
             if QUANTIZER in node.meta}  # fmt: skip
    assert found == {("input", "activation"), ("other", "weight"), ("bias", "bias"), ("gradient", "gradient")}
    assert all(state_of(graph) is module._cpt_fx for graph in graphs)


def test_inputs_that_are_parameters_are_weights() -> None:
    module = quantized(with_body(2))
    inner = graphs_of(module)[-1]
    assert [bool(node.meta.get(WEIGHT)) for node in inner.graph.nodes if node.op == "placeholder"] == [
        False, True, True,
    ]  # fmt: skip
    (decision,) = [node.meta[DECISION] for node in inner.graph.nodes if DECISION in node.meta]
    assert (decision.layer, decision.family) == ("layer.matmul", "linear")


def test_a_frontend_may_say_that_an_input_is_a_parameter() -> None:
    make = GraphMaker()
    x, w = make.inputs("x", "w")
    w.meta[WEIGHT] = True
    module = make.finish(make.call(torch.matmul, x, w))
    Normalize()(module)
    Annotate()(module)
    (decision,) = [node.meta[DECISION] for node in module.graph.nodes if DECISION in node.meta]
    assert [operand.role for operand in decision.operands] == ["activation", "weight"]


def test_records_are_told_apart() -> None:
    module = quantized(with_body())
    counters = [node.meta[QUANTIZER].counters for node in nodes_of(module) if QUANTIZER in node.meta]
    assert len(counters) == len(set(counters)) == 8
    results(module, torch.randn(4, 3))
    assert {name: int(value[0]) for name, value in precision_of(module).counters.named_buffers()} == {
        counters.rpartition(".")[2]: 1 for counters in counters
    }


def test_passes_run_twice_do_nothing_more() -> None:
    for module in (with_body(2), recurrent(nn.LSTM(3, 4))):
        pipeline = Pipeline.standard(recipe=paper())
        pipeline.run(module)
        before = [str(graph.graph) for graph in graphs_of(module)]
        assert [report.changed for report in pipeline.run(module)] == [0] * 6
        assert [str(graph.graph) for graph in graphs_of(module)] == before


def test_a_promise_broken_inside_is_seen() -> None:
    module = quantized(with_body())
    ((_, subgraph),) = subgraphs(module)
    (product,) = [node for node in subgraph.graph.nodes if DECISION in node.meta]
    product.update_arg(1, product.args[1].args[0])
    with pytest.raises(SpecError, match="operand other of matmul is not quantized"):
        Verify()(module)


def test_a_body_that_two_nodes_run() -> None:
    make = GraphMaker(layer=Layer())
    (x,) = make.inputs("x")
    weights = [make.read("layer.w"), make.read("layer.b")]
    read = make.read(add_subgraph(make.module, "body", product_body()))
    y = make.call(run, read, x, *weights)
    module = quantized(make.finish(make.call(run, read, y, *weights)))
    assert len(graphs_of(module)) == 2
    x_value = torch.randn(4, 3)
    module(x_value)
    assert {
        int(value[0]) for name, value in precision_of(module).counters.named_buffers() if "gradient" not in name
    } == {2}


def test_operands_in_a_tuple() -> None:
    make = GraphMaker(layer=Layer())
    (x,) = make.inputs("x")
    weights = [make.read("layer.w"), make.read("layer.b")]
    reads = [make.read(add_subgraph(make.module, f"body_{index}", product_body())) for index in range(2)]
    module = quantized(make.finish(make.call(choose, True, *reads, (x, *weights))))
    calls = [call for node in module.graph.nodes for call in calls_of(module, node)]
    assert [len(call.given) for call in calls] == [3, 3]
    layers = [node.meta[DECISION].layer for node in nodes_of(module) if DECISION in node.meta]
    assert layers == ["layer.matmul", "layer.matmul_1"]
    assert module(torch.randn(2, 3)).shape == (2, 3)


def test_copies_and_pickles_keep_bodies() -> None:
    module = quantized(with_body(2))
    x = torch.randn(4, 3)
    expected = results(module, x)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        graphs = graphs_of(again)
        assert len(graphs) == 3
        assert graphs[0] is again
        assert all(state_of(graph) is again._cpt_fx for graph in graphs)
        assert again._cpt_fx is not module._cpt_fx
        assert [subgraph.__dict__[OUTER] for subgraph in graphs[1:]] == graphs[:-1]
        Verify()(again)
        assert_same(results(again, x), expected)


def test_bodies_add_nothing_to_the_state() -> None:
    module = quantized(with_body(2))
    assert not any("body" in name or "inner" in name for name in module.state_dict())
    assert not any(module.get_submodule(name) in graphs_of(module)[1:] for name, _ in module.named_modules())
    assert state_of(graphs_of(module)[-1]) is module._cpt_fx


def test_a_body_follows_the_mode_of_its_layer() -> None:
    module = recurrent(nn.LSTM(3, 4))
    Pipeline.standard(schedule=Static(4)).run(module)
    inputs = torch.randn(5, 2, 3), torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    learned = module.get_buffer("rnn.cpt_fx_hh_l0_input_range_weight")
    module(*inputs)
    after = float(learned)
    module.eval()
    module(*inputs)
    assert float(learned) == after > 0
    module.train()
    module(*inputs)
    assert float(learned) > after


def test_the_authors_own_backward_is_left_alone() -> None:
    make = GraphMaker(layer=Layer())
    (x,) = make.inputs("x")
    w = make.read("layer.w")
    forward_body = product_body()
    forward = make.read(add_subgraph(make.module, "fwd", forward_body))
    backward = make.read(add_subgraph(make.module, "bwd", product_body()))
    y = make.call(torch.ops.higher_order.autograd_function_apply, forward, backward, x, w, at="layer")
    y.meta["stack_trace"] = '  File "net.py", line 7, in forward\n    return Product.apply(x, w)\n'
    module = make.finish(make.call(F.linear, y, w, at="layer"))
    assert subgraphs(module) == []
    Normalize()(module)
    report = Annotate()(module)
    assert [(item.layer, item.op, item.reason) for item in report.uncovered] == [
        ("layer", "autograd.Function",
         "the backward of a custom autograd.Function is its author's own (net.py:7): both passes stay as they are")
    ]  # fmt: skip
    assert [node.target for node in forward_body.graph.nodes if node.op.startswith("call")] == ["matmul", torch.add]


def test_a_layer_inside_and_outside_keeps_its_own_range() -> None:
    """Outside, both layers read `x`; what the second one reads inside, the graph outside does not see."""
    make = GraphMaker(layer=Layer(), other=Layer())
    (x,) = make.inputs("x")
    subgraph = product_body()
    for node in subgraph.graph.nodes:
        if "nn_module_stack" in node.meta:
            node.meta["nn_module_stack"] = {"other@1": ("other", Layer)}
    weights = [make.read(f"other.{name}") for name in "wb"]
    outside = [make.call(torch.matmul, x, make.read("layer.w"), at="layer"),
               make.call(torch.matmul, x, weights[0], at="other")]  # fmt: skip
    y = make.call(torch.add, *outside)
    module = make.finish(make.call(run, make.read(add_subgraph(make.module, "body", subgraph)), y, *weights))
    quantized(module)
    ranges = [node.meta[QUANTIZER].ranges for node in nodes_of(module) if QUANTIZER in node.meta]
    assert [path for path in ranges if path] == [
        "layer.cpt_fx_matmul_input_range", "other.cpt_fx_matmul_input_range", "other.cpt_fx_matmul_input_range",
    ]  # fmt: skip


def test_records_of_nodes_with_one_name() -> None:
    """Outside `other_matmul_input_q`; inside two of them, of which fx calls the second `other_matmul_input_q_1`."""
    make = GraphMaker(other=Layer())
    (x,) = make.inputs("x")
    weight = make.read("other.w")
    graph = fx.Graph()
    y, w = graph.placeholder("y"), graph.placeholder("w")
    for call in ("other@1", "other@2"):
        y = graph.call_function(torch.matmul, (y, w))
        y.meta["nn_module_stack"] = {call: ("other", Layer)}
    graph.output(y)
    outside = make.call(torch.matmul, x, weight, at="other")
    module = make.finish(
        make.call(run, make.read(add_subgraph(make.module, "body", new_subgraph(graph))), outside, weight)
    )
    quantized(module)
    counters = [node.meta[QUANTIZER].counters for node in nodes_of(module) if QUANTIZER in node.meta]
    assert len(set(counters)) == len(counters) == 8
