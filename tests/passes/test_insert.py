"""Insert: a quantizer for every decided operand and output, and nothing that goes around one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.formats import Format, Range
from cpt_fx.ir.meta import QUANTIZER
from cpt_fx.passes.annotate import Annotate
from cpt_fx.passes.insert import Insert
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.verify import Verify
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT
from cpt_fx.recipes import Recipe, Rule, default, paper
from tests.graph_text import graph_text
from tests.paper_models import LSTM, GraphConv, SageConv, SelfAttention
from tests.passes import NEAREST, Apply, assert_same, at_stage, captured, node, numbers, only, quantizers, set_bits


def inserted(model: nn.Module, **options: Any) -> fx.GraphModule:
    return at_stage(model, "insert", **options)


def test_every_role_gets_its_quantizer() -> None:
    module = inserted(nn.Sequential(nn.Linear(3, 2)))
    found = [(q.operand, q.role, q.op, q.layers, q.width_source.name) for q in quantizers(module)]
    assert found == [
        ("input", "activation", "linear", ("0",), "activation"),
        ("weight", "weight", "linear", ("0",), "weight"),
        ("bias", "bias", "linear", ("0",), "weight"),
        ("gradient", "gradient", "linear", ("0",), "gradient"),
    ]
    linear = node(module, "linear")
    assert [str(argument) for argument in linear.args] == ["_0_input_q", "_0_weight_q", "_0_bias_q"]
    assert [user.target for user in linear.users] == [QUANTIZE_GRADIENT]
    assert [argument.target for argument in linear.all_input_nodes] == [
        FAKE_QUANTIZE_OBSERVED, FAKE_QUANTIZE, FAKE_QUANTIZE,
    ]  # fmt: skip


def test_an_observer_reads_its_own_range_and_the_mode_of_its_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    module = inserted(model)
    made = node(module, "_1_0_input_q")
    reads = [argument.target for argument in made.args[1:] if isinstance(argument, fx.Node)]
    assert reads == [
        "_cpt_fx.bits.activation",
        "1.0.cpt_fx_input_range_min",
        "1.0.cpt_fx_input_range_size",
        "1.0.cpt_fx_input_range_weight",
        "1.0.training",
    ]
    assert made.meta[QUANTIZER].ranges == "1.0.cpt_fx_input_range"
    assert made.kwargs["momentum"] == 0.9
    module.get_submodule("1").eval()
    set_bits(module, 4)
    module(torch.randn(2, 3))
    # The part that is in evaluation mode uses its range, the other one learns.
    assert module.get_buffer("0.cpt_fx_input_range_weight") > 0
    assert module.get_buffer("1.0.cpt_fx_input_range_weight") == 0


MODELS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "conv, in-place relu": (
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(2, 1, 1)),
        (torch.randn(2, 1, 4, 4),),
    ),
    "attention": (SelfAttention(8, 2), (torch.randn(2, 3, 8),)),
    "lstm": (LSTM(3, 2, 2), (torch.randn(2, 4, 3), torch.zeros(4, 2), torch.zeros(4, 2))),
    "tied": (
        Apply(lambda self, x: F.linear(torch.tanh(self.w @ x), self.w.t()), w=torch.randn(3, 3)),
        (torch.randn(3, 3),),
    ),
    "graph": (GraphConv(3, 2, 4), (torch.randn(4, 3), torch.tensor([0, 1, 2]), torch.tensor([3, 3, 1]))),
}


@pytest.mark.parametrize("recipe", [default(), NEAREST, paper(family="graph", aggregation="q")], ids=lambda r: r.name)
@pytest.mark.parametrize("name", MODELS)
def test_at_32_bits_nothing_changes(name: str, recipe: Recipe) -> None:
    model, inputs = MODELS[name]
    expected = numbers(model, *inputs)
    if name == "attention":
        recipe = default() if recipe is NEAREST else recipe  # published attention returns what it quantized
    module = inserted(model, recipe=recipe)
    assert_same(numbers(module, *inputs), expected)
    assert_same(numbers(module.eval(), *inputs), numbers(model.eval(), *inputs))
    model.train()


def test_low_bits_change_the_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    x = torch.randn(5, 8)
    plain = numbers(model, x)
    module = inserted(model, recipe=NEAREST)
    set_bits(module, 2)
    rough = numbers(module, x)
    assert all(not torch.equal(mine, other) for mine, other in zip(rough, plain, strict=True))
    assert node(module, "_0_weight_q").meta[QUANTIZER].counters == "_cpt_fx.counters._0_weight_q"
    assert all(counters[0] == 1 for counters in module.get_submodule("_cpt_fx.counters").buffers())


def test_nothing_bypasses_a_gradient_quantizer() -> None:
    def function(self: Any, x: Tensor) -> Any:
        y = self.layer(x)
        return torch.relu(y), y.sum(), y

    module = inserted(Apply(function, layer=nn.Linear(3, 3)))
    linear = node(module, "linear")
    (made,) = linear.users
    assert made.target is QUANTIZE_GRADIENT
    assert len(made.users) == 3
    assert module.graph.output_node().args[0][2] is made  # type: ignore[index]


def test_an_in_place_op_behind_a_layer_keeps_the_quantized_gradient() -> None:
    """The gradient that arrives at the convolution is quantized behind the relu, not in front of it."""
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU(inplace=True))
    kept = nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU())
    kept.load_state_dict(model.state_dict())
    x = torch.randn(4, 1, 3, 3)
    results = []
    for plain in (model, kept):
        module = inserted(plain, recipe=only("conv", gradient=Format()))
        set_bits(module, 2)
        results.append(numbers(module, x))
    assert_same(*results)
    assert results[0][-1].unique().numel() > 1


ADDED: dict[str, Callable[..., Tensor]] = {
    "addmm_": lambda h, a: h.addmm_(a, a, beta=0.5),
    "addbmm_": lambda h, a: h.addbmm_(a[None], a[None]),
    "baddbmm_": lambda h, a: h[None].baddbmm_(a[None], a[None])[0],
    "addr_": lambda h, a: h.addr_(a[0], a[1]),
    "addmv_": lambda h, a: h[0].addmv_(a, a[1]),
}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("bits", [2, 32])
def test_what_is_added_to_a_view_has_a_quantized_gradient(name: str, bits: int) -> None:
    """Others read what it is a view of: the gradient that comes back there is quantized, too."""

    def in_place(self: Any, x: Tensor) -> Tensor:
        h = x * 2
        ADDED[name](h[1], self.a)
        return h

    def aside(self: Any, x: Tensor) -> Tensor:
        h = x * 2
        new = ADDED[name](h[1].clone(), self.a)
        return torch.stack([h[0], torch.cat([new[None], h[1, 1:]]) if name == "addmv_" else new])

    x, a = torch.randn(2, 3, 3), torch.randn(3, 3)
    results = []
    for function in (in_place, aside):
        module = inserted(Apply(function, a=a.clone()), recipe=only("linear", gradient=Format()))
        set_bits(module, bits)
        results.append(numbers(module, x))
        if bits == 32:
            results.append(numbers(Apply(function, a=a.clone()), x))
    for result in results[1:]:
        assert_same(results[0], result)


@pytest.mark.parametrize("name", [name for name in ADDED if name not in ("baddbmm_", "addmv_")])
def test_the_gradient_of_what_is_added_in_place_keeps_its_layout(name: str) -> None:
    """A product further back has other last bits where its gradient lies otherwise in memory."""

    def transposed(self: Any, x: Tensor) -> Tensor:
        h = x * 2
        ADDED[name](h, self.a)
        return h.t() * 1

    x, plain = torch.randn(3, 3, requires_grad=True), Apply(transposed, a=torch.randn(3, 3))
    module = inserted(plain, recipe=only("linear", gradient=Format()))
    set_bits(module, 32)
    found, expected = (torch.autograd.grad(model(x), x, torch.ones(3, 3))[0] for model in (module, plain))
    assert_same([found], [expected])
    assert found.stride() == expected.stride() == (1, 3)


@pytest.mark.parametrize("gradient", [Format(), None])
def test_an_operand_that_is_overwritten_is_the_tensor_itself(gradient: Format | None) -> None:
    """What it is added to is quantized, and what others read afterwards is the sum."""

    def in_place(self: Any, x: Tensor) -> Tensor:
        w: Tensor = self.w * 1
        w.addmm_(x, x)
        return w * 2

    rule = Rule(input=Format(), weight=Format(), bias=Format(), gradient=gradient)

    def aside(self: Any, x: Tensor) -> Tensor:
        return torch.addmm(self.w * 1, x, x) * 2

    x, w = torch.randn(3, 3), torch.randn(3, 3)
    models = [Apply(function, w=w.clone()) for function in (in_place, aside)]
    modules = [inserted(model, recipe=Recipe(name="added", linear=rule)) for model in models]
    for bits in (2, 32):
        for module in modules:
            set_bits(module, bits)
        assert_same(*(numbers(module, x) for module in modules))


def test_returned_probabilities_are_the_quantized_ones_where_published() -> None:
    returned = {}
    for recipe in (paper(), default()):
        output = inserted(SelfAttention(8, 2), recipe=recipe).graph.output_node()
        returned[recipe.name] = str(output.args[0][1])  # type: ignore[index]
    assert returned == {"paper/dense": "matmul_1_input_q", "default": "dropout"}


def test_an_undecided_operator_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    module = inserted(model, exclude=("0",))
    assert {layer for quantizer in quantizers(module) for layer in quantizer.layers} == {"2"}
    assert [str(argument) for argument in node(module, "linear").args] == ["input_1", "_0_weight", "_0_bias"]


def test_one_value_at_two_places_of_one_operator() -> None:
    model = Apply(lambda self, x: torch.matmul(x, x) + F.bilinear(x, x, self.w), w=torch.randn(3, 3, 3))
    module = inserted(model)
    assert [str(argument) for argument in node(module, "matmul").args] == ["matmul_input_q", "matmul_other_q"]
    assert_same(numbers(module, torch.eye(3)), numbers(model, torch.eye(3)))


def test_operands_inside_a_list() -> None:
    model = Apply(lambda self, x: torch.linalg.multi_dot([x, self.w, x]), w=torch.randn(3, 3))
    x = torch.randn(3, 3)
    expected = numbers(model, x)
    module = inserted(model)
    assert len(quantizers(module, "activation")) == 2
    assert_same(numbers(module, x), expected)


def test_the_gradient_of_a_mean_is_quantized_behind_the_division() -> None:
    module = inserted(SageConv(3, 2, 4), recipe=paper(family="graph", aggregation="q"))
    (at,) = [
        found.args[0] for found in module.graph.nodes
        if QUANTIZER in found.meta and found.meta[QUANTIZER].role == "gradient"
        and found.meta[QUANTIZER].op == "index_add"
    ]  # fmt: skip
    assert str(at) == "truediv"


def test_new_nodes_know_where_they_come_from() -> None:
    module = captured(nn.Sequential(nn.Linear(3, 3)))
    Normalize()(module)
    for found in module.graph.nodes:
        found.meta["val"] = f"value of {found.name}"
    Annotate()(module)
    before = set(module.graph.nodes)
    Insert()(module)
    new = [found for found in module.graph.nodes if found not in before]
    assert {found.meta["cpt_fx_pass"] for found in new} == {"insert"}
    assert node(module, "_0_weight_q").meta["val"] == "value of _0_weight"
    assert "0" in node(module, "_0_weight_q").meta["nn_module_stack"]


def test_alone_on_a_plain_trace() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    with pytest.raises(ValueError, match="'insert' needs a graph that is annotated"):
        Insert()(module)
    for step in (Normalize(), Annotate(recipe=NEAREST), Insert(), Verify()):
        step(module)
    set_bits(module, 2)
    x = torch.randn(4, 3)
    assert not torch.equal(module(x), nn.Sequential(nn.Linear(3, 3), nn.Tanh())(x))
    assert module.get_buffer("_cpt_fx.counters._0_input_q")[0] == 1


@pytest.mark.parametrize(
    "recipe", [default(), only("linear", gradient=Format()), only("linear", weight=Format())], ids=["all", "g", "w"]
)
def test_twice_inserts_nothing_more(recipe: Recipe) -> None:
    module = inserted(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), recipe=recipe)
    before = graph_text(module)
    assert Insert()(module).changed == 0
    Verify()(module)
    assert graph_text(module) == before


def test_a_layer_that_came_later_is_served_by_a_second_run() -> None:
    """One that reads another layer's output, which is a quantizer's output already."""
    module = inserted(nn.Sequential(nn.Linear(3, 3)))
    made = node(module, "_0_gradient_q")
    with module.graph.inserting_after(made):
        product = module.graph.call_function(torch.matmul, (made, made))
    module.graph.output_node().args = (product,)
    Annotate()(module)
    assert Insert()(module).changed == 3
    Verify()(module)


def test_the_report_counts_roles() -> None:
    module = captured(SelfAttention(8, 2))
    Normalize()(module)
    Annotate()(module)
    report = Insert()(module)
    assert (report.changed, report.notes) == (18, ("7 activation, 3 weight, 3 bias, 5 gradient",))
    nothing = captured(nn.Sequential(nn.Tanh()))
    for step in (Normalize(), Annotate()):
        step(nothing)
    assert Insert()(nothing).notes == ("nothing to insert",)


def test_a_module_called_twice_keeps_one_range() -> None:
    module = inserted(Apply(lambda self, x: self.layer(self.layer(x)), layer=nn.Linear(3, 3)))
    observed = [found for found in module.graph.nodes if found.target is FAKE_QUANTIZE_OBSERVED]
    assert len(observed) == 2
    assert observed[0].args[2:5] == observed[1].args[2:5]
    assert [name for name in module.state_dict() if "_range_" in name] == [
        f"layer.cpt_fx_input_range_{name}" for name in ("min", "size", "weight")
    ]


def test_formats_reach_the_op() -> None:
    chosen = Format(scheme="float", exponent=4, specials="fn", group="vector", block=2)  # type: ignore[arg-type]
    module = inserted(nn.Sequential(nn.Linear(4, 3)), recipe=only("linear", input=chosen))
    options = dict(node(module, "_0_input_q").kwargs)
    options.pop("counters")
    assert options == {
        "over": [-1], "scheme": "float", "rounding": "nearest", "exponent": 4, "specials": "fn", "block": 2,
    }  # fmt: skip
    assert chosen.range is Range.DYNAMIC
