"""Share: fewer quantizers, the same numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.capture.standalone import precision_of
from cpt_fx.formats import Format, Range, Rounding
from cpt_fx.ir.layer_names import NAMES, Names
from cpt_fx.passes.annotate import Annotate
from cpt_fx.passes.insert import Insert
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.share import Share
from cpt_fx.passes.verify import Verify
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import Recipe, default, integer, paper
from tests.decompose.fused_graphs import GraphMaker
from tests.graph_text import graph_text
from tests.paper_models import LSTM, SelfAttention
from tests.passes import NEAREST, Apply, assert_same, at_stage, captured, numbers, only, quantizers, set_bits

DYNAMIC = only("linear", input=Format(), weight=Format(), gradient=Format())
OBSERVED = only("linear", input=Format(range=Range.OBSERVER))


def three_layers() -> nn.Module:
    return Apply(
        lambda self, x: self.q(x) + self.k(x) + self.v(x), q=nn.Linear(3, 3), k=nn.Linear(3, 3), v=nn.Linear(3, 3)
    )


def pair(model: nn.Module, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graph with and without sharing."""
    return at_stage(model, "share", **options), at_stage(model, "insert", **options)


def inputs_of(module: fx.GraphModule) -> list[tuple[str, ...]]:
    return [quantizer.layers for quantizer in quantizers(module, "activation")]


@pytest.mark.parametrize("recipe", [DYNAMIC, OBSERVED, default()], ids=["dynamic", "observed", "default"])
def test_a_tensor_read_by_several_layers_is_quantized_once(recipe: Recipe) -> None:
    module = at_stage(three_layers(), "insert", recipe=recipe)
    before = len(quantizers(module))
    report = Share()(module)
    Verify("share")(module)
    assert report.changed == before - len(quantizers(module)) == 2
    assert inputs_of(module) == [("q", "k", "v")]


def test_redundant_records_go_and_redundant_ranges_stay_unread() -> None:
    module = at_stage(three_layers(), "share", recipe=OBSERVED)
    read = [str(node.target) for node in module.graph.nodes if node.op == "get_attr" and "_range_" in str(node.target)]
    assert read == [f"q.cpt_fx_input_range_{name}" for name in ("min", "size", "weight")]
    # Whoever counts on a model's buffers, an average of models for one, finds them again.
    assert [name for name in module.state_dict() if "_range_" in name] == [
        f"{layer}.cpt_fx_input_range_{name}" for layer in "qkv" for name in ("min", "size", "weight")
    ]
    assert list(module.get_submodule("_cpt_fx.counters")._buffers) == ["q_input_q"]
    assert [node.name for node in module.graph.nodes if node.op == "get_attr" and not node.users] == []


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 3, 1])
@pytest.mark.parametrize("recipe", [NEAREST, DYNAMIC, integer()], ids=["paper", "dynamic", "integer"])
def test_the_numbers_are_the_same(recipe: Recipe, bits: int) -> None:
    for model, inputs in (
        (three_layers(), (torch.randn(4, 3),)),
        (SelfAttention(8, 2), (torch.randn(2, 3, 8),)),
        (LSTM(3, 2, 2), (torch.randn(2, 4, 3), torch.zeros(4, 2), torch.zeros(4, 2))),
    ):
        if recipe.name == "integer":
            recipe = only("linear", input=Format(group="vector"), weight=Format(group="channel"))  # type: ignore[arg-type]
        for training in (True, False):
            found = []
            for module in pair(model.train(training), recipe=recipe):
                set_bits(module, bits)
                found.append(numbers(module, *inputs) + numbers(module, *inputs))
            assert_same(*found)


def test_different_formats_are_not_merged() -> None:
    rough = {"input": Format(range=Range.OBSERVER, momentum=0.5)}
    module = at_stage(three_layers(), "share", recipe=OBSERVED, overrides={"k": rough})
    assert inputs_of(module) == [("q", "v"), ("k",)]


def test_different_dials_are_not_merged() -> None:
    module = at_stage(three_layers(), "share", recipe=DYNAMIC, overrides={"k": 8})
    assert inputs_of(module) == [("q", "v"), ("k",)]


def test_different_tensors_are_not_merged() -> None:
    model = Apply(lambda self, x: self.q(x) + self.k(x + 1), q=nn.Linear(3, 3), k=nn.Linear(3, 3))
    assert inputs_of(at_stage(model, "share", recipe=OBSERVED)) == [("q",), ("k",)]


def test_different_groups_of_one_weight_are_not_merged() -> None:
    rows = only("linear", weight=Format(group="channel"))  # type: ignore[arg-type]
    model = Apply(lambda self, x: (F.linear(x, self.w), x @ self.w, F.linear(x, self.w)), w=torch.randn(3, 3))
    module = at_stage(model, "share", recipe=rows)
    assert [quantizer.layers for quantizer in quantizers(module, "weight")] == [("linear", "linear_1"), ("matmul",)]


def test_a_weight_read_at_every_step_is_quantized_once() -> None:
    module = at_stage(LSTM(3, 2, 3), "share", recipe=NEAREST)
    assert [quantizer.layers for quantizer in quantizers(module, "weight")] == [("W",), ("U",)]
    assert [quantizer.layers for quantizer in quantizers(module, "bias")] == [("W",)]


def test_a_module_called_twice_on_one_tensor_keeps_both_updates() -> None:
    model = Apply(lambda self, x: self.layer(x) + self.layer(x) * 2, layer=nn.Linear(3, 3))
    found = []
    for module in pair(model, recipe=OBSERVED):
        assert inputs_of(module) == [("layer",), ("layer",)]
        set_bits(module, 4)
        module(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
        found.append(module.get_buffer("layer.cpt_fx_input_range_size"))
    assert torch.equal(*found)
    assert len(inputs_of(at_stage(model, "share", recipe=DYNAMIC))) == 1


def test_two_modules_that_read_the_same_sequence_merge() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = x + 1
        return self.a(x) + self.a(y) + self.b(x) + self.b(y)  # type: ignore[no-any-return]

    model = Apply(function, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    merged, apart = pair(model, recipe=OBSERVED)
    assert inputs_of(merged) == [("a", "b"), ("a", "b")]
    assert {str(node.target).partition(".")[0] for node in merged.graph.nodes if "_range_" in str(node.target)} == {"a"}
    for module in (merged, apart):
        set_bits(module, 3)
    x = torch.randn(4, 3)
    assert_same(numbers(merged, x), numbers(apart, x))
    assert_same(numbers(merged.eval(), x), numbers(apart.eval(), x))


def test_two_modules_that_read_different_sequences_do_not_merge() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = x + 1
        return self.a(x) + self.a(y) + self.b(x)  # type: ignore[no-any-return]

    model = Apply(function, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    assert inputs_of(at_stage(model, "share", recipe=OBSERVED)) == [("a",), ("a",), ("b",)]
    reverse = Apply(
        lambda self, x: self.a(x) + self.a(x + 1) + self.b(x + 2) + self.b(x), a=nn.Linear(3, 3), b=nn.Linear(3, 3)
    )
    assert len(inputs_of(at_stage(reverse, "share", recipe=OBSERVED))) == 4


def _set(x: Tensor) -> None:
    x[0] = 0


def _first(x: Tensor) -> None:
    x[0].zero_()


def _part(x: Tensor) -> None:
    x.chunk(2)[1].mul_(3)


def _add(x: Tensor) -> None:
    x += 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: x.add_(1),
    "function": lambda x: torch.relu_(x),
    "view": lambda x: x.view(-1).add_(1),
    "chunk": _part,
    "getitem": _first,
    "setitem": _set,
    "operator": _add,
    "inplace=True": lambda x: F.relu(x, inplace=True),
    "inplace by position": lambda x: F.relu(x, True),
    "out=": lambda x: torch.mul(x, 2, out=x),
    "copy_": lambda x: x.t().copy_(x + 1),
    "unsqueeze, squeeze": lambda x: torch.squeeze(x.unsqueeze(0)).neg_(),
    "ravel": lambda x: x.ravel().add_(1),
    "diagonal": lambda x: x.diagonal().zero_(),
    "swapdims": lambda x: torch.swapdims(x, 0, 1).zero_(),
    "unfold": lambda x: x.unfold(0, 2, 1).zero_(),
    "tensor_split": lambda x: torch.tensor_split(x, 2)[0].zero_(),
    "transposed property": lambda x: x.mT.add_(1),
    "data": lambda x: x.data.add_(1),
    "dropout": lambda x: F.dropout(x, 0.5, False).add_(1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False).add_(1),
    "hardtanh_": lambda x: F.hardtanh_(x),
    "broadcast": lambda x: torch.broadcast_tensors(x, x)[0].unbind()[0].add_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_tensor_written_between_two_reads_is_not_merged(name: str) -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        x = x * 1
        y = self.q(x)
        WRITES[name](x)
        return y + self.k(x)  # type: ignore[no-any-return]

    model = Apply(function, q=nn.Linear(3, 3), k=nn.Linear(3, 3))
    merged, apart = pair(model, recipe=DYNAMIC)
    assert inputs_of(merged) == [("q",), ("k",)]
    for module in (merged, apart):
        set_bits(module, 3)
    x = torch.randn(3, 3)
    assert_same([merged(x).detach()], [apart(x).detach()])


def test_an_in_place_module_between_two_reads() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        x = x * 1
        y = self.q(x)
        self.act(self.same(x))
        return y + self.k(x)  # type: ignore[no-any-return]

    model = Apply(function, q=nn.Linear(3, 3), k=nn.Linear(3, 3), same=nn.Identity(), act=nn.ReLU(inplace=True))
    assert inputs_of(at_stage(model, "share", recipe=DYNAMIC)) == [("q",), ("k",)]


def test_a_write_to_another_tensor_does_not_matter() -> None:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.q(x)
        y += x
        y = torch.relu_(y)
        return y + self.k(x)  # type: ignore[no-any-return]

    model = Apply(function, q=nn.Linear(3, 3), k=nn.Linear(3, 3))
    assert inputs_of(at_stage(model, "share", recipe=DYNAMIC)) == [("q", "k")]


def test_stochastic_quantizers_are_not_merged() -> None:
    """Each of them draws its own noise: two layers with the same noise are not what the recipe says."""
    noisy = only("linear", input=Format(rounding=Rounding.STOCHASTIC))
    assert inputs_of(at_stage(three_layers(), "share", recipe=noisy)) == [("q",), ("k",), ("v",)]


def test_gradient_quantizers_are_not_merged() -> None:
    module = at_stage(three_layers(), "share", recipe=DYNAMIC)
    assert [quantizer.layers for quantizer in quantizers(module, "gradient")] == [("q",), ("k",), ("v",)]


def test_alone_on_a_plain_trace() -> None:
    module = fx.symbolic_trace(three_layers())
    with pytest.raises(ValueError, match="'share' needs a graph that is inserted"):
        Share()(module)
    for step in (Normalize(), Annotate(), Insert(), Share(), Verify("share")):
        step(module)
    assert inputs_of(module) == [("q", "k", "v")]
    set_bits(module, 3)
    assert module(torch.randn(2, 3)).shape == (2, 3)


def test_twice_merges_nothing_more() -> None:
    module = at_stage(SelfAttention(8, 2), "share")
    before = graph_text(module)
    report = Share()(module)
    assert (report.changed, graph_text(module)) == (0, before)
    assert report.notes == ("0 of 11 quantizers merged into others",)


def test_the_report_counts() -> None:
    module = at_stage(three_layers(), "insert", recipe=DYNAMIC)
    report = Share()(module)
    assert (report.changed, report.notes) == (2, ("2 of 6 quantizers merged into others",))


def test_one_tensor_multiplied_with_itself() -> None:
    model = Apply(lambda self, x: torch.matmul(x, x))
    merged, apart = pair(model, recipe=paper(gradient_rounding="nearest"))
    assert len(quantizers(merged, "activation")) == 1
    assert [node.args[0] is node.args[1] for node in merged.graph.nodes if node.target is torch.matmul] == [True]
    for module in (merged, apart):
        set_bits(module, 2)
    assert_same(numbers(merged, torch.randn(3, 3)), numbers(merged, torch.randn(3, 3)))
    assert operator.eq(len(quantizers(apart, "activation")), 2)


# Several captures of one model.


def capture_again(function: Callable[..., Any], first: fx.GraphModule | None, *, training: bool) -> fx.GraphModule:
    module = captured(Apply(function, q=nn.Linear(3, 3), k=nn.Linear(3, 3)).train(training))
    module.meta[NAMES] = first.meta[NAMES] if first is not None else Names()
    if first is not None:
        module._modules["_cpt_fx"] = first._modules["_cpt_fx"]
        precision_of(first).pin()
    Pipeline.standard(recipe=OBSERVED).run(module)
    return module


def ranges_of(module: fx.GraphModule) -> list[str]:
    return [quantizer.ranges for quantizer in quantizers(module, "activation")]


def test_evaluation_reads_the_range_that_learned_in_training() -> None:
    def same(self: Any, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)  # type: ignore[no-any-return]

    def apart(self: Any, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x[:1])  # type: ignore[no-any-return]

    training = capture_again(same, None, training=True)
    assert ranges_of(training) == ["q.cpt_fx_input_range"]
    evaluation = capture_again(apart, training, training=False)
    assert ranges_of(evaluation) == ["q.cpt_fx_input_range"] * 2
    read = {str(node.target) for node in evaluation.graph.nodes if "_range_" in str(node.target)}
    assert {name.partition(".")[0] for name in read} == {"q"}
    training(torch.randn(4, 3))
    set_bits(evaluation, 8)
    assert evaluation(torch.randn(4, 3)).isfinite().all()
    assert ranges_of(capture_again(same, training, training=True)) == ["q.cpt_fx_input_range"]
    # In training, what reads another tensor learns another range, and evaluation reads that one from then on.
    assert ranges_of(capture_again(apart, training, training=True)) == ["q.cpt_fx_input_range", "k.cpt_fx_input_range"]
    assert ranges_of(capture_again(apart, training, training=False)) == ["q.cpt_fx_input_range", "k.cpt_fx_input_range"]


# Contexts that graphs record as nodes: gradients switched off and on, autocast, inference mode.


def switching(*switches: Callable[[GraphMaker], Any]) -> fx.GraphModule:
    """`q(x)`, a switch, `q(x)`, a switch, ...: the same layer again and again."""
    make = GraphMaker(q=nn.Linear(3, 3))
    (x,) = make.inputs("x")
    weight = make.read("q.weight")
    results = [make.call(F.linear, x, weight, at="q")]
    for index, switch in enumerate(switches):
        switch(make)
        results.append(make.call(F.linear, x, weight, at="q"))
        results[-1].meta["nn_module_stack"] = {f"q@{index + 1}": ("q", nn.Linear)}
    return at_stage(make.finish(tuple(results)), "share", recipe=DYNAMIC)


def gradients(on: bool) -> Callable[[GraphMaker], Any]:
    return lambda make: make.call(torch._C._set_grad_enabled, on)


def autocast(make: GraphMaker) -> fx.Node:
    return make.call(torch.amp.autocast_mode._enter_autocast, "cpu", torch.bfloat16, True, True)


def autocast_and_back(make: GraphMaker) -> None:
    make.call(torch.amp.autocast_mode._exit_autocast, autocast(make))


def inference(make: GraphMaker) -> fx.Node:
    return make.call(torch.autograd.grad_mode._enter_inference_mode, True)


SWITCHES: dict[str, tuple[tuple[Callable[[GraphMaker], Any], ...], int]] = {
    "none": ((lambda make: None,), 1),
    "no_grad and back": ((gradients(False), gradients(True)), 3),
    "no_grad twice": ((gradients(False), gradients(True), gradients(False), gradients(True)), 3),
    "the same mode again": ((gradients(True), gradients(True)), 2),
    "autocast": ((autocast,), 2),
    "autocast, and out of it": ((autocast_and_back,), 1),
    "inference mode": ((inference,), 2),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_nothing_is_merged_across_a_change_of_context(name: str) -> None:
    switches, expected = SWITCHES[name]
    module = switching(*switches)
    assert len(quantizers(module, "activation")) == len(quantizers(module, "weight")) == expected


def test_a_quantizer_made_without_gradients_does_not_cut_those_of_a_later_layer() -> None:
    module = switching(gradients(False), gradients(True))
    x = torch.randn(2, 3, requires_grad=True)
    set_bits(module, 4)
    first, second, third = module(x)
    assert (first.requires_grad, second.requires_grad, third.requires_grad) == (True, False, True)
    module.zero_grad()
    third.sum().backward()
    assert x.grad is not None
    assert module.get_parameter("q.weight").grad is not None
