"""Open: fused operators become products, where something in them is quantized, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from cpt_fx.ir.meta import FAMILY, NAME, PASS
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.operators import why_left
from cpt_fx.passes.annotate import Annotate
from cpt_fx.passes.decompose import DECOMPOSERS, Decompose
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.verify import Verify
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import Recipe, default, paper
from cpt_fx.schedules import Static
from tests.decompose.fused_graphs import GraphMaker, assert_close, cell, multi_head, recurrent, results
from tests.passes import only, quantizers

WITHOUT = replace(default(), attention=None, recurrent=None)


class Heads(nn.Module):
    """A module whose code attends."""


def attention(*, twice: bool = False) -> QuantizedGraphModule:
    make = GraphMaker(heads=Heads())
    (x,) = make.inputs("x")
    y = make.call(F.scaled_dot_product_attention, x, x, x, at="heads")
    if twice:
        y = make.call(F.scaled_dot_product_attention, y, x, x, is_causal=True, at="heads")
    return make.finish((y, y))


def run(module: fx.GraphModule, step: Decompose) -> tuple[str, ...]:
    Normalize()(module)
    report = step(module)
    Verify("decompose")(module)
    return report.notes


def fused(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if why_left(node.target)]


def reasons(module: fx.GraphModule, **options: Any) -> list[str]:
    Normalize()(module)
    Decompose(**options)(module)
    return [str(item) for item in Annotate(**options)(module).uncovered]


def test_it_fires_and_says_where() -> None:
    module = attention(twice=True)
    note = "heads: scaled_dot_product_attention decomposed into 2 products: equal to float rounding"
    assert run(module, Decompose()) == (note, note)
    products = [node for node in module.graph.nodes if node.target is torch.matmul]
    assert [(node.meta[NAME], node.meta[FAMILY], node.meta[PASS]) for node in products] == [
        ("scores", "attention", "decompose"), ("context", "attention", "decompose"),
    ] * 2  # fmt: skip
    assert not fused(module)


def test_every_operator_that_can_be_opened_has_a_reason_for_when_it_is_not() -> None:
    assert all(map(why_left, DECOMPOSERS))


def test_it_leaves_alone_what_multiplies_openly() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    Normalize()(module)
    before = str(module.graph)
    assert Decompose()(module).notes == ("nothing to decompose",)
    assert str(module.graph) == before


@pytest.mark.parametrize(
    ("build", "family"),
    [(attention, "attention"), (lambda: recurrent(nn.GRU(3, 4)), "recurrent"),
     (lambda: cell(nn.LSTMCell(3, 4)), "recurrent")],
)  # fmt: skip
def test_without_a_rule_it_stays_fused(build: Any, family: str) -> None:
    module = build()
    assert run(module, Decompose(recipe=WITHOUT)) == ("nothing to decompose",)
    assert len(fused(module)) == 1
    (reason,) = reasons(build(), recipe=WITHOUT)
    assert reason.endswith(f"recipe 'default' leaves {family} in full precision")


def test_projections_are_reached_without_a_rule_for_attention() -> None:
    module = multi_head(nn.MultiheadAttention(8, 2), need_weights=False)
    assert reasons(module, recipe=only("linear", weight=default().rule("linear").weight)) == [  # type: ignore[union-attr]
        "attn.in_proj: linear operand input: the recipe has no format for the activation of this family",
        "attn.scores: matmul: recipe 'only' leaves attention in full precision",
        "attn.context: matmul: recipe 'only' leaves attention in full precision",
        "attn.out_proj: linear operand input: the recipe has no format for the activation of this family",
    ]
    module = multi_head(nn.MultiheadAttention(8, 2))
    assert reasons(module, recipe=Recipe(name="none")) == [
        "attn: multi_head_attention_forward: recipe 'none' leaves attention and linear in full precision"
    ]


@pytest.mark.parametrize("pattern", ["heads", "he*", Heads])
def test_what_is_excluded_stays_fused(pattern: Any) -> None:
    module = attention()
    Normalize()(module)
    assert Decompose(exclude=(pattern,))(module).changed == 0
    (item,) = Annotate(exclude=(pattern,))(module).uncovered
    assert (item.layer, item.by_choice) == ("heads", True)


def test_one_product_may_be_excluded() -> None:
    module = attention()
    Pipeline.standard(exclude="heads.scores").run(module)
    assert {layer for quantizer in quantizers(module) for layer in quantizer.layers} == {"heads.context"}


def test_an_override_may_give_the_rule() -> None:
    rule = default().rule("matmul")
    for pattern in ("heads", "heads.scores"):
        module = attention()
        Pipeline.standard(recipe=WITHOUT, overrides={pattern: rule}).run(module)
        assert not fused(module)
        assert "heads.scores" in {layer for quantizer in quantizers(module) for layer in quantizer.layers}


def test_several_users() -> None:
    module = attention()
    x = torch.randn(2, 5, 4)
    expected = results(module, x)
    run(module, Decompose())
    assert_close(results(module, x), expected)


def test_results_that_are_read_by_part_and_as_a_whole() -> None:
    layer = nn.LSTM(3, 4)
    plain = recurrent(layer)
    inputs = (torch.randn(5, 2, 3), torch.randn(1, 2, 4), torch.randn(1, 2, 4))
    expected = results(plain, *inputs)
    (call,) = [node for node in plain.graph.nodes if node.target is torch.lstm]
    (output,) = [node for node in plain.graph.nodes if node.op == "output"]
    with plain.graph.inserting_before(output):
        part = plain.graph.call_method("mul", (plain.graph.call_function(_second, (call,)), 1))
    output.args = ((call, part),)
    plain.recompile()
    expected = results(plain, *inputs)
    run(plain, Decompose())
    assert_close(results(plain, *inputs), expected)


def _second(values: Any) -> Any:
    return values[1]


def test_arguments_that_only_the_run_knows() -> None:
    make = GraphMaker(rnn=nn.GRU(3, 4))
    x, h, layers = make.inputs("x", "h", "layers")
    weights = [make.read(f"rnn.{name}") for name in make.module.rnn._flat_weights_names]  # type: ignore[union-attr]
    module = make.finish(make.call(torch.gru, x, h, weights, True, layers, 0.0, True, False, False, at="rnn"))
    assert reasons(module) == ["rnn: gru: its argument num_layers is known only when the graph runs"]


def test_a_state_that_only_the_run_knows() -> None:
    make = GraphMaker(rnn=nn.LSTMCell(3, 4))
    x, state = make.inputs("x", "state")
    weights = [make.read(f"rnn.{name}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    module = make.finish(make.call(torch.lstm_cell, x, state, *weights, at="rnn"))
    assert reasons(module) == ["rnn: lstm_cell: fused recurrent cell: its state is known only when the graph runs"]


def test_in_a_chain_after_a_user_s_pass() -> None:
    module = attention()
    Pipeline.standard(recipe=paper(), schedule=Static(4)).drop("share").run(module)
    assert len(quantizers(module)) == 6
    assert module(torch.randn(2, 5, 4))[0].shape == (2, 5, 4)


def test_twice_changes_nothing_more() -> None:
    module = attention()
    run(module, Decompose())
    before = str(module.graph)
    assert Decompose()(module).changed == 0
    assert str(module.graph) == before


def test_without_open_it_is_reported() -> None:
    module = attention()
    (report,) = [report for report in Pipeline.standard().drop("decompose").run(module) if report.uncovered]
    assert "its two products are not separate operators" in str(report.uncovered[0])


def test_under_vmap_it_stays_fused() -> None:
    """Quantizers have no place there, so there would be nothing to gain."""
    make = GraphMaker(heads=Heads())
    (x,) = make.inputs("x")
    make.call(torch._C._functorch._vmap_increment_nesting, 2, "error")
    y = make.call(F.scaled_dot_product_attention, x, x, x, at="heads")
    make.call(torch._C._functorch._vmap_decrement_nesting)
    module = make.finish(make.call(F.scaled_dot_product_attention, y, x, x, at="heads"))
    assert len(run(module, Decompose())) == 1
    assert len(fused(module)) == 1
