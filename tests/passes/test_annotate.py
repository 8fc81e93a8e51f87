"""Annotate: decisions on nodes, reasons for what stays as it is, and nothing else changed."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.formats import Format, Group
from cpt_fx.ir.meta import DECISION, QUANTIZER, Decision
from cpt_fx.passes.annotate import Annotate
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.verify import Verify
from cpt_fx.recipes import default, integer, mx, paper
from tests.graph_text import graph_text
from tests.paper_models import LSTM, GATLayer, GraphConv, SageConv, SelfAttention
from tests.passes import Apply, assert_same, at_stage, captured, decisions, node, numbers, only

ROWS = Format(group=Group.ROW)
CHANNELS = Format(group=Group.CHANNEL)
GRAPH = paper(family="graph", aggregation="q", quantize_norm=True)


def annotated(model: nn.Module, **options: Any) -> fx.GraphModule:
    return at_stage(model, "annotate", **options)


def uncovered(model: nn.Module, **options: Any) -> list[str]:
    """What the report says stays in full precision."""
    module = captured(model)
    Normalize()(module)
    return [str(item) for item in Annotate(**options)(module).uncovered]


def roles(decision: Decision) -> list[tuple[str, str]]:
    return [(operand.name, operand.role) for operand in decision.operands]


def test_every_layer_that_multiplies_is_decided() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 3, bias=False))
    found = decisions(annotated(model))
    assert list(found) == ["0", "4"]
    assert found["0"].family == "conv"
    assert roles(found["0"]) == [("input", "activation"), ("weight", "weight"), ("bias", "bias")]
    assert roles(found["4"]) == [("input", "activation"), ("weight", "weight")]
    assert found["4"].gradient == default().linear.gradient  # type: ignore[union-attr]


def test_nothing_in_the_graph_changes() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2, 3))
    x = torch.randn(2, 1, 3, 3)
    expected = numbers(model, x)
    module = captured(model)
    Normalize()(module)
    before, state = str(module.graph), list(module.state_dict())
    assert Annotate()(module).changed == 2
    assert (str(module.graph), list(module.state_dict())) == (before, state)
    assert_same(numbers(module, x), expected)


def test_alone_on_a_plain_trace() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    with pytest.raises(ValueError, match="'annotate' needs a graph that is normalized, this one is captured"):
        Annotate()(module)
    Normalize()(module)
    Annotate()(module)
    Verify("annotate")(module)
    assert list(decisions(module)) == ["0"]


def test_twice_decides_the_same() -> None:
    module = annotated(SelfAttention(8, 2))
    before = graph_text(module)
    Annotate()(module)
    assert graph_text(module) == before


def test_a_second_run_decides_anew_what_is_not_carried_out() -> None:
    module = annotated(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    Annotate(exclude=("0",))(module)
    assert list(decisions(module)) == ["1"]
    done = at_stage(Apply(lambda self, x: x @ self.w + torch.mv(x, self.v), w=torch.randn(3, 3), v=torch.randn(3)),
                    "bind", recipe=only("linear", weight=ROWS))  # fmt: skip
    before = graph_text(done)
    assert Annotate()(done).changed == 0
    Verify()(done)
    assert graph_text(done) == before


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, x.transpose(0, 1))
        return torch.matmul(y, self.inner(x))


def test_layers_have_the_name_of_their_module() -> None:
    model = Apply(lambda self, x: self.block(self.block(x)) @ x.t(), block=Block())
    module = annotated(model)
    assert list(decisions(module)) == ["block.matmul", "block.inner", "block.matmul_1", "matmul"]
    # A module that is called twice is one layer: one name, and with it one running range.
    names = [found.meta[DECISION].layer for found in module.graph.nodes if DECISION in found.meta]
    assert names == [*["block.matmul", "block.inner", "block.matmul_1"] * 2, "matmul"]


def test_an_operator_in_a_layer_of_its_own_gets_a_number() -> None:
    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(F.linear(input, self.weight), self.weight)

    assert list(decisions(annotated(nn.Sequential(Twice(3, 3))))) == ["0", "0.linear_1"]


def test_a_product_with_a_parameter_is_a_linear_layer() -> None:
    model = Apply(lambda self, x: torch.einsum("ij,jk->ik", x @ self.w, torch.addmm(self.b, x, self.w)),
                  w=torch.randn(3, 3), b=torch.randn(3))  # fmt: skip
    found = decisions(annotated(model, recipe=integer()))
    assert {name: decision.family for name, decision in found.items()} == {
        "matmul": "linear", "addmm": "linear", "einsum": "matmul",
    }  # fmt: skip
    assert roles(found["matmul"]) == [("input", "activation"), ("other", "weight")]
    assert roles(found["addmm"]) == [("mat1", "activation"), ("mat2", "weight")]
    assert roles(found["einsum"]) == [("operand0", "activation"), ("operand1", "activation")]


def test_channels_of_a_weight_are_what_a_product_sums_over() -> None:
    model = Apply(lambda self, x: (x @ self.w, self.w @ x, F.linear(x, self.w)), w=torch.randn(3, 3))
    first, second, third = (
        {operand.role: operand for operand in found.meta[DECISION].operands}["weight"]
        for found in annotated(model).graph.nodes
        if DECISION in found.meta
    )
    assert (first.keep, first.over) == ((), (-2,))
    assert (second.keep, second.over) == ((), (-1,))
    assert (third.keep, third.over) == ((0,), None)


@pytest.mark.parametrize(
    ("layer", "keep"),
    [(nn.Conv2d(1, 2, 3), (0,)), (nn.ConvTranspose2d(1, 2, 3), (1,)), (nn.Linear(1, 2), (0,))],
    ids=lambda value: type(value).__name__,
)
def test_channels_of_a_layer_are_its_output_axis(layer: nn.Module, keep: tuple[int, ...]) -> None:
    (decision,) = decisions(annotated(nn.Sequential(layer))).values()
    assert {operand.role: operand.keep for operand in decision.operands} == {
        "activation": (),
        "weight": keep,
        "bias": (),
    }


@pytest.mark.parametrize("chosen", [ROWS, CHANNELS], ids=str)
def test_a_vector_has_one_range(chosen: Format) -> None:
    model = Apply(lambda self, x: (torch.mv(x, self.v), F.linear(x, self.w, self.v)),
                  v=torch.randn(3), w=torch.randn(3, 3))  # fmt: skip
    found = decisions(annotated(model, recipe=only("linear", weight=chosen, bias=chosen)))
    assert [(o.role, o.keep, o.over) for o in found["mv"].operands] == [("weight", (), None)]
    assert [(o.role, o.keep, o.over) for o in found["linear"].operands] == [
        ("weight", (0,), None),
        ("bias", (), None),
    ]


def test_a_weight_computed_from_parameters_is_a_weight() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, torch.tanh(self.w) * self.scale.exp()) + F.linear(x, self.w * x.mean())

    model = Apply(function, w=torch.randn(3, 3), scale=torch.randn(3, 1))
    found = decisions(annotated(model))
    assert roles(found["linear"]) == [("input", "activation"), ("weight", "weight")]
    # The second argument of F.linear is its weight, wherever it comes from.
    assert roles(found["linear_1"]) == [("input", "activation"), ("weight", "weight")]
    model = Apply(lambda self, x: (x @ (self.w * 2), x @ (self.w * x.mean())), w=torch.randn(3, 3))
    assert [decision.family for decision in decisions(annotated(model)).values()] == ["linear", "matmul"]


def test_a_buffer_is_no_weight() -> None:
    model = Apply(lambda self, x: x @ self.adjacency)
    model.register_buffer("adjacency", torch.eye(3))
    (decision,) = decisions(annotated(model)).values()
    assert (decision.family, [operand.role for operand in decision.operands]) == (
        "matmul",
        ["activation", "activation"],
    )


def test_several_users_of_a_value_are_decided_one_by_one() -> None:
    model = Apply(lambda self, x: (F.linear(x, self.w), x @ self.w, x + self.w), w=torch.randn(3, 3))
    found = decisions(annotated(model))
    assert [name for name in found if found[name].operands[1].role == "weight"] == ["linear", "matmul"]


class Hidden(nn.Module):
    """A module of torch.nn's kind: called as a whole, with a product inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inside(x)
        return y


def test_what_stays_in_full_precision_has_a_reason() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(x, x, x)
        return torch.cdist(self.rnn(attended)[0], x)

    model = Apply(function, rnn=nn.LSTM(3, 3))
    fused = "fused attention: its two products are not separate operators in this graph"
    assert uncovered(model) == [
        f"(root): scaled_dot_product_attention: {fused}",
        "rnn: LSTM: LSTM is called as a whole; inside it: LSTM",
        "(root): cdist: distances are not quantized",
    ]
    model = Apply(lambda self, x: x @ self.layer(x), layer=nn.Linear(3, 3))
    assert uncovered(model, recipe=GRAPH) == [
        "matmul: matmul operand input: the left operand is the adjacency, not a message"
    ]
    assert uncovered(model, recipe=only("linear", weight=ROWS)) == [
        "layer: linear operand input: the recipe has no format for the activation of this family",
        "matmul: matmul: recipe 'only' leaves matmul in full precision",
    ]


def test_a_leaf_module_with_a_product_inside_is_reported() -> None:
    graph = fx.Graph()
    graph.output(graph.call_module("0", (graph.placeholder("x"),)))
    module = fx.GraphModule(nn.Sequential(Hidden()), graph)
    Normalize()(module)
    (item,) = Annotate()(module).uncovered
    assert str(item) == "0: Hidden: Hidden is called as a whole; inside it: Linear"


def _user_function(x: Tensor) -> Tensor:
    return x @ x


def test_a_wrapped_function_is_reported() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(_user_function, (x,)))
    module = fx.GraphModule(nn.Module(), graph)
    Normalize()(module)
    (item,) = Annotate()(module).uncovered
    assert (item.op, item.by_choice) == ("_user_function", False)
    assert "calls as a whole" in item.reason


def test_layers_without_a_product_are_left_alone() -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.GELU(), nn.Dropout(), nn.Softmax(-1))
    module = captured(model)
    Normalize()(module)
    report = Annotate()(module)
    assert (report.changed, report.uncovered, decisions(module)) == (0, (), {})


def test_excluded_layers_are_reported_as_chosen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    module = captured(model)
    Normalize()(module)
    report = Annotate(exclude=("0", "2.*"))(module)
    assert list(decisions(module)) == ["1"]
    assert [(item.layer, item.reason, item.by_choice) for item in report.uncovered] == [
        ("0", "excluded by '0'", True), ("2.0", "excluded by '2.*'", True),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"'3' matches no module"):
        Annotate(exclude=("3",))(module)


def test_overrides_set_dials_and_formats() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    overrides = {"0": 8, "1": "+2", "2": {"input": None, "bits": 4}}
    found = decisions(annotated(model, overrides=overrides))
    assert [found[name].width_source("weight").name for name in "012"] == [
        "weight_fixed_8",
        "weight_plus_2",
        "weight_fixed_4",
    ]
    assert roles(found["2"]) == [("weight", "weight"), ("bias", "bias")]
    assert found["0"].width_source("bias") == found["0"].width_source("weight")


def test_einsum_and_multi_dot_operands() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        return torch.einsum("ij,jk,kl->il", x, self.w, x) + torch.linalg.multi_dot([x, self.w, x])  # type: ignore[no-any-return]

    found = decisions(annotated(Apply(function, w=torch.randn(3, 3))))
    expected = [("operand0", "activation"), ("operand1", "weight"), ("operand2", "activation")]
    assert [roles(decision) for decision in found.values()] == [expected, expected]
    assert [operand.index for operand in found["multi_dot"].operands] == [(0, 0), (0, 1), (0, 2)]


def test_an_added_activation_is_no_bias() -> None:
    model = Apply(lambda self, x: torch.addmm(x, x, self.w), w=torch.randn(3, 3))
    (decision,) = decisions(annotated(model)).values()
    assert roles(decision) == [("mat1", "activation"), ("mat2", "weight")]


def test_the_sites_of_a_recurrent_layer_are_named_once() -> None:
    module = annotated(LSTM(3, 2, 2))
    names = [found.meta[DECISION].layer for found in module.graph.nodes if DECISION in found.meta]
    assert names == ["W", "U", "W", "U"]


def test_published_graph_convolution() -> None:
    found = decisions(annotated(GraphConv(2, 3, 4), recipe=GRAPH))
    # The other two index_add count degrees: they sum a constant, there is no message to quantize.
    assert {name: decision.family for name, decision in found.items()} == {
        "mul": "scale", "index_add": "aggregation", "matmul": "linear", "mul_1": "scale", "add": "bias_add",
    }  # fmt: skip
    assert roles(found["add"]) == [("input", "activation"), ("other", "bias")]
    assert roles(found["index_add"]) == [("source", "activation")]
    full = decisions(annotated(GraphConv(2, 3, 4), recipe=paper(family="graph")))
    assert list(full) == ["matmul", "add"]


def test_a_bias_added_in_place_is_a_bias() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = x @ self.w
        y += self.b
        return y  # type: ignore[no-any-return]

    model = Apply(function, w=torch.randn(3, 3), b=torch.randn(3))
    (decision,) = [
        decision for decision in decisions(annotated(model, recipe=GRAPH)).values() if decision.family == "bias_add"
    ]
    assert roles(decision) == [("input", "activation"), ("other", "bias")]
    (decision,) = decisions(annotated(model)).values()
    assert roles(decision) == [("input", "activation"), ("other", "weight"), ("bias", "bias")]


def test_the_gradient_of_a_mean_is_quantized_behind_the_division() -> None:
    module = annotated(SageConv(3, 2, 4), recipe=GRAPH)
    (aggregation,) = [decision for decision in decisions(module).values() if decision.family == "aggregation"]
    assert node(module, aggregation.gradient_name).target is operator.truediv
    summed = annotated(GraphConv(2, 3, 4), recipe=GRAPH)
    (aggregation,) = [decision for decision in decisions(summed).values() if decision.family == "aggregation"]
    assert node(summed, aggregation.gradient_name).target is torch.index_add


def test_a_weighted_sum_over_neighbours_is_an_aggregation() -> None:
    found = decisions(annotated(GATLayer(3, 2, 2), recipe=paper(family="graph", aggregation="q")))
    families = [decision.family for decision in found.values()]
    assert families.count("aggregation") == 2
    dense = decisions(annotated(GATLayer(3, 2, 2)))
    assert {decision.family for decision in dense.values()} == {"linear"}


def test_blocks_keep_their_layout() -> None:
    (decision,) = decisions(annotated(nn.Sequential(nn.Linear(32, 4)), recipe=mx())).values()
    assert {operand.role: (operand.keep, operand.over) for operand in decision.operands} == {
        "activation": ((), (-1,)), "weight": ((), (-1,)),
    }  # fmt: skip


def test_the_report_counts_sites_and_lists_patterns_without_effect() -> None:
    module = captured(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    Normalize()(module)
    report = Annotate(exclude=("1",))(module)
    assert report.changed == 1
    assert report.notes == ("exclude '1' selects modules in which nothing is quantized: no effect",)
    assert not any(QUANTIZER in found.meta for found in module.graph.nodes)
