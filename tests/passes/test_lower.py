from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.errors import TransformError
from cpt_fx.formats import Format, Group, Range, Rounding, Scheme
from cpt_fx.integer.ops import INTEGER_CONV, INTEGER_LINEAR, INTEGER_MATMUL, TO_INTEGER
from cpt_fx.ir.meta import DECISION, QUANTIZER, SIMULATED
from cpt_fx.ir.pass_base import stage_of
from cpt_fx.ir.verifier import SpecError
from cpt_fx.passes import Insert, Lower, Verify
from cpt_fx.pipeline import Pipeline
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, QUANTIZE_GRADIENT
from cpt_fx.recipes import Recipe, Rule, integer
from cpt_fx.schedules import Bits, Static
from tests.integer.models import CONVOLUTIONS_PRODUCTS, Convolutions, always
from tests.passes import Apply, assert_same, at_stage, captured, node, numbers, only, quantizers, set_bits, targets

__all__ = ["always"]
WHOLE = Format(scheme=Scheme.SYMMETRIC)


def lowered(model: nn.Module, **options: Any) -> Any:
    return at_stage(model, "lower", Static(Bits(4, 4, 8)), execution="integer", **options)


def returns_factor(self: Any, x: Tensor) -> Any:
    """What is multiplied is also an output."""
    y = x.relu()
    return y, y @ x


def reasons(module: Any) -> dict[str, str]:
    return {
        found.meta[DECISION].layer: found.meta.get(SIMULATED, "")
        for found in module.graph.nodes
        if DECISION in found.meta
    }


def test_it_fires() -> None:
    module = lowered(Convolutions())
    assert stage_of(module) == "lowered"
    assert targets(module).count(INTEGER_CONV) == 3 and targets(module).count(INTEGER_LINEAR) == 1
    # stem and its image, conv and shortcut of one input, head: 4 weights and 3 inputs.
    assert targets(module).count(TO_INTEGER) == 7
    assert not {FAKE_QUANTIZE, QUANTIZE_GRADIENT} & set(targets(module))
    assert not any(reasons(module).values())


def test_quantizers_are_the_same_ones() -> None:
    before, after = at_stage(Convolutions(), "bind", recipe=integer()), lowered(Convolutions())
    assert quantizers(before) == quantizers(after)
    assert list(before.state_dict()) == list(after.state_dict())


def test_twice_changes_nothing() -> None:
    module = lowered(Convolutions())
    text = str(module.graph)
    report = Lower()(module)
    assert report.changed == 0 and str(module.graph) == text


def test_it_needs_a_bound_graph() -> None:
    with pytest.raises(ValueError, match="pass 'lower' needs a graph that is bound, this one is inserted"):
        Lower()(at_stage(nn.Sequential(nn.Linear(3, 3)), "insert", recipe=integer()))


def test_at_32_bits_the_numbers_are_those_of_the_plain_model() -> None:
    model, x = Convolutions().eval(), torch.randn(2, 1, 8, 8)
    module = lowered(model)
    set_bits(module, 32)
    assert_same(numbers(module, x), numbers(model, x))


def test_several_readers_share_codes_and_others_keep_numbers() -> None:
    """The grouped convolution cannot read codes: its quantizers stay, the others get some of their own."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)
            self.grouped = nn.Conv2d(4, 4, 3, groups=2)

        def forward(self, x: Tensor) -> Any:
            return self.a(x), self.b(x), self.grouped(x)

    module = lowered(Both())
    found = {name: item.meta[QUANTIZER] for name in ("a_input_q", "a_input_q_codes") for item in [node(module, name)]}
    assert found["a_input_q"].layers == ("grouped",)
    assert found["a_input_q_codes"].layers == ("a", "b")
    assert found["a_input_q"].counters != found["a_input_q_codes"].counters
    assert [user.name for user in node(module, "a_input_q_codes").users] == ["conv2d", "conv2d_1"]
    assert reasons(module) == {"a": "", "b": "", "grouped": "a grouped convolution has no integer form"}
    Verify()(module)


def test_a_quantized_tensor_that_is_returned_stays_a_tensor() -> None:
    rule = Rule(input=WHOLE, gradient=WHOLE, return_quantized=True)
    module = lowered(Apply(returns_factor), recipe=Recipe(name="mine", matmul=rule))
    assert targets(module).count(TO_INTEGER) == 2 and FAKE_QUANTIZE in targets(module)
    assert INTEGER_MATMUL in targets(module)
    assert all(isinstance(value, Tensor) for value in module(torch.randn(3, 3)))


CASES: dict[str, tuple[nn.Module, Recipe, str]] = {
    "einsum": (Apply(lambda self, x: torch.einsum("ij,kj->ik", x, self.w), w=torch.randn(3, 3)), integer(),
               "einsum has no integer form"),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 3, 3)), integer(), "conv_transpose2d has no integer form"),
    "3d": (nn.Sequential(nn.Conv3d(3, 3, 1)), integer(), "conv3d has no integer form"),
    "grouped": (nn.Sequential(nn.Conv1d(4, 4, 3, groups=4)), integer(), "a grouped convolution has no integer form"),
    "same": (nn.Sequential(nn.Conv2d(3, 3, 2, padding="same")), integer(),
             "padding='same' that differs between two sides has no integer form"),
    "beta": (Apply(lambda self, x: torch.addmm(self.b, x, self.w, beta=2), w=torch.randn(3, 3), b=torch.randn(3)),
             integer(), "addmm is called with beta"),
    "affine": (nn.Sequential(nn.Linear(3, 3)), only("linear", input=Format(), weight=WHOLE),
               "operand input: format affine/tensor is not symmetric: its zero point does not factor out of a product"),
    "float": (nn.Sequential(nn.Linear(3, 3)),
              only("linear", input=WHOLE, weight=Format(scheme=Scheme.FLOAT, exponent=4)),
              "operand weight: format e4none/tensor has no integer codes"),
    "blocks": (nn.Sequential(nn.Linear(3, 3)),
               only("linear", input=Format(scheme=Scheme.SYMMETRIC, group=Group.VECTOR, block=2), weight=WHOLE),
               "operand input: format symmetric/vector:2 has a scale per block, "
               "which does not factor out of a product"),
    "observer": (nn.Sequential(nn.Linear(3, 3)),
                 only("linear", input=Format(scheme=Scheme.SYMMETRIC, range=Range.OBSERVER), weight=WHOLE),
                 "operand input: format symmetric/tensor/observer has a range that is observer, "
                 "not that of the tensor"),
    "half": (nn.Sequential(nn.Linear(3, 3)), only("linear", weight=WHOLE), "one of its operands is not quantized"),
    "noise": (Apply(returns_factor),
              Recipe(name="mine", matmul=Rule(input=Format(scheme=Scheme.SYMMETRIC, rounding=Rounding.STOCHASTIC),
                                              return_quantized=True)),
              "operand input is rounded stochastically, and output reads it, too"),
    "gradient": (nn.Sequential(nn.Linear(3, 3)), only("linear", input=WHOLE, weight=WHOLE, gradient=Format()),
                 "backward in floating point: gradient: format affine/tensor is not symmetric: "
                 "its zero point does not factor out of a product"),
    "no gradient": (nn.Sequential(nn.Linear(3, 3)), only("linear", input=WHOLE, weight=WHOLE),
                    "backward in floating point: its gradient is not quantized"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_no_has_a_reason(name: str) -> None:
    model, recipe, reason = CASES[name]
    module = lowered(model, recipe=recipe)
    assert reason in reasons(module).values()
    partly = reason.startswith("backward")
    assert (TO_INTEGER in targets(module)) == partly
    assert (QUANTIZE_GRADIENT in targets(module)) == (name in ("gradient", "einsum", "transposed", "3d", "grouped",
                                                               "same", "beta"))  # fmt: skip


def test_the_report_lists_what_stays() -> None:
    pipeline = Pipeline.standard(execution="integer", schedule=Static(8))
    reports = pipeline.run(captured(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 3, groups=2))))
    assert str(reports[-1]) == (
        "lower: 1 changed\n    1 of 2 products on integers\n    1: conv1d: a grouped convolution has no integer form"
    )


def test_a_weight_of_a_loop_is_quantized_outside() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]  # type: ignore[no-any-return]

    x = torch.randn(3, 2, 4)
    result = cpt_fx.transform(Recurrent(), Static(Bits(4, 4, 8)), execution="integer", capture="dynamo")
    result(x).sum().backward()
    views = {view.layer: view for view in cpt_fx.inspect(result).products}
    assert views["lstm.ih_l0"].on_integers
    (reason,) = views["lstm.hh_l0"].reasons
    assert "quantized once, outside of the loop" in reason


def test_lookups_are_no_products() -> None:
    recipe = integer().with_rule("embedding", weight=WHOLE)
    module = lowered(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3)), recipe=recipe)
    assert reasons(module) == {"0": "no product of two tensors", "1": ""}
    result = cpt_fx.transform(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3)), Static(8), recipe=recipe,
                              execution="integer", strict=True)  # fmt: skip
    assert [view.layer for view in cpt_fx.inspect(result).products] == ["1"]


def test_a_pass_that_adds_a_product_later_is_caught() -> None:
    module = lowered(nn.Sequential(nn.Linear(4, 4)))
    linear = node(module, "linear")
    linear.target = INTEGER_LINEAR
    del linear.meta[QUANTIZER]
    with pytest.raises(SpecError, match="the gradient of linear is not quantized"):
        Verify(after="mine")(module)
    module = lowered(nn.Sequential(nn.Conv1d(4, 4, 3, groups=2)))
    del node(module, "conv1d").meta[SIMULATED]
    with pytest.raises(SpecError, match="conv1d came after lower: it is simulated, and nothing says why"):
        Verify(after="mine")(module)


def test_a_raw_operand_is_caught() -> None:
    module = lowered(nn.Sequential(nn.Linear(4, 4)))
    linear = node(module, "linear")
    linear.update_arg(2, linear.args[2].args[0])  # type: ignore[union-attr]
    with pytest.raises(SpecError, match="operand weight of linear is not quantized"):
        Verify(after="mine")(module)


def test_the_pipeline_ends_with_it() -> None:
    names = [step.name for step in Pipeline.standard(execution="integer")]
    assert names[-1] == "lower" and Pipeline.standard(execution="integer").executing("integer").passes[-1] == Lower()
    assert "lower" not in [step.name for step in Pipeline.standard()]
    edited = Pipeline.standard(recipe=integer()).drop("share")
    result = edited.transform(Convolutions(), Static(8), execution="integer")
    assert [report.name for report in cpt_fx.inspect(result).passes][-1] == "lower"
    with pytest.raises(ValueError, match="execution must be one of"):
        Pipeline.standard(execution="integers")


def test_strict_wants_integers(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4))
    with pytest.raises(TransformError, match=r"1 products do not wholly run on integers:\n  1: conv2d: a grouped"):
        cpt_fx.transform(model, Static(8), execution="integer", strict=True)
    with caplog.at_level(logging.WARNING, "cpt_fx"):
        cpt_fx.transform(model, Static(8), execution="integer")
    assert "not on integers: 1: conv2d: a grouped convolution has no integer form" in caplog.text
    cpt_fx.transform(model, Static(8), execution="integer", strict=True, exclude="1")
    wholly = cpt_fx.transform(Convolutions(), Static(8), execution="integer", strict=True)
    assert len(cpt_fx.inspect(wholly).products) == CONVOLUTIONS_PRODUCTS


def test_behind_insert_of_another_recipe_it_lowers_what_factors() -> None:
    """Convolutions of one recipe, linear layers of another."""
    recipe = integer().with_rule("linear", input=Format(), bias=Format())
    module = lowered(Convolutions(), recipe=recipe)
    assert targets(module).count(INTEGER_CONV) == 3 and F.linear in targets(module)
    assert Insert()(module).changed == 0
