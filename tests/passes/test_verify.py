"""Verify: every promise of every stage, broken on purpose by a small pass; the error says who and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.formats import Format
from cpt_fx.ir.meta import DECISION, QUANTIZER, WidthSource
from cpt_fx.ir.pass_base import Pass, Report, set_stage
from cpt_fx.ir.verifier import SpecError
from cpt_fx.passes.verify import Verify
from cpt_fx.pipeline import Pipeline
from cpt_fx.quantizers.ops import FAKE_QUANTIZE
from cpt_fx.recipes import default
from tests.passes import at_stage, captured, node, numbers

Edit = Callable[[fx.GraphModule], Any]


@dataclass(frozen=True)
class Vandal(Pass):
    """A pass with a bug."""

    edit: Edit

    name: ClassVar[str] = "vandal"

    def run(self, module: fx.GraphModule) -> Report:
        self.edit(module)
        return Report(self.name, 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.fc(x))
        return y


def call(module: fx.GraphModule, target: Any, *args: Any, method: bool = False, **kwargs: Any) -> fx.Node:
    """Add a call behind the tanh and return its result from the model."""
    with module.graph.inserting_before(module.graph.output_node()):
        create = module.graph.call_method if method else module.graph.call_function
        made = create(target, tuple(args) or (node(module, "tanh"), node(module, "tanh")), kwargs)
    module.graph.output_node().args = (made,)
    return made


def tensor_as_layer(module: fx.GraphModule) -> fx.Node:
    with module.graph.inserting_before(module.graph.output_node()):
        return module.graph.create_node("call_module", "fc.weight", (node(module, "tanh"),))


def call_a_layer(module: fx.GraphModule) -> None:
    module.set_submodule("spare", nn.Linear(3, 3))
    with module.graph.inserting_before(module.graph.output_node()):
        made = module.graph.call_module("spare", (node(module, "tanh"),))
    module.graph.output_node().args = (made,)


def read(module: fx.GraphModule, path: str, before: str) -> fx.Node:
    with module.graph.inserting_before(node(module, before)):
        return module.graph.create_node("get_attr", path)


def change_quantizer(name: str, **changes: Any) -> Edit:
    def edit(module: fx.GraphModule) -> None:
        found = node(module, name)
        found.meta[QUANTIZER] = replace(found.meta[QUANTIZER], **changes)

    return edit


def add_operand(module: fx.GraphModule) -> None:
    linear = node(module, "linear")
    decision = linear.meta[DECISION]
    linear.meta[DECISION] = replace(
        decision, operands=(*decision.operands, replace(decision.operands[0], index=7, name="ghost"))
    )


def bypass_input(module: fx.GraphModule) -> None:
    node(module, "linear").update_arg(0, node(module, "x"))


def bypass_gradient(module: fx.GraphModule) -> None:
    call(module, torch.add, node(module, "tanh"), node(module, "linear"))


def drop_gradient(module: fx.GraphModule) -> None:
    made = node(module, "fc_gradient_q")
    made.replace_all_uses_with(node(module, "linear"))
    module.graph.erase_node(made)


def orphan(module: fx.GraphModule) -> None:
    call(module, FAKE_QUANTIZE, node(module, "tanh"), node(module, "_cpt_fx_bits_weight"))


def idle(module: fx.GraphModule) -> None:
    made = call(module, FAKE_QUANTIZE, node(module, "tanh"), node(module, "_cpt_fx_bits_weight"))
    made.meta[QUANTIZER] = node(module, "fc_input_q").meta[QUANTIZER]
    module.graph.output_node().args = (node(module, "tanh"),)


def plain_for_observed(module: fx.GraphModule) -> None:
    made = node(module, "fc_input_q")
    made.target, made.args = FAKE_QUANTIZE, made.args[:2]
    made.kwargs = {"counters": made.kwargs["counters"]}


def wrong_width(module: fx.GraphModule) -> None:
    node(module, "fc_weight_q").update_arg(1, node(module, "_cpt_fx_bits_activation"))


def no_tensor(module: fx.GraphModule) -> None:
    bits = module.get_submodule("_cpt_fx.bits")
    del bits._buffers["weight"]
    bits.__dict__["weight"] = 8


def same_counters(module: fx.GraphModule) -> None:
    for name in ("fc_weight_q", "fc_bias_q"):
        node(module, name).update_kwarg("counters", node(module, "fc_input_q").kwargs["counters"])


def no_state(module: fx.GraphModule) -> None:
    module._modules["_cpt_fx"] = nn.Module()
    for found in module.graph.nodes:
        if str(found.target).startswith("_cpt_fx."):
            module.register_buffer(found.name, torch.tensor(8))
            found.target = found.name


BROKEN: dict[str, tuple[str, Edit, str]] = {
    # name: after which pass, what it does, what the error says
    "read of nothing": (
        "normalize", lambda m: call(m, torch.add, node(m, "tanh"), read(m, "nowhere.weight", "x")), "nowhere"),
    "use before it exists": (
        "normalize", lambda m: node(m, "linear").update_arg(0, node(m, "tanh")), "not a well-formed graph"),
    "a value of another graph": (
        "normalize", lambda m: node(m, "tanh").update_arg(0, fx.Graph().placeholder("stray")),
        "tanh uses stray before it is made, or from another graph"),
    "two values of one name": (
        "normalize", lambda m: setattr(node(m, "tanh"), "name", "linear"), "two values are called linear"),
    "a call of what is no function": (
        "normalize", lambda m: setattr(call(m, torch.add), "target", "add"), "calls 'add', which is no function"),
    "a call of what is no layer": (
        "normalize", lambda m: m.graph.output_node().update_arg(0, tensor_as_layer(m)),
        "calls fc.weight, which does not exist"),
    "a layer is called": ("normalize", call_a_layer, r"spare still calls the layer spare \(Linear\)"),
    "a method": ("normalize", lambda m: call(m, "matmul", method=True), "still calls the method matmul"),
    "an alias": ("normalize", lambda m: call(m, torch.linalg.matmul), "another name of"),
    "an operand by keyword": (
        "normalize", lambda m: call(m, F.linear, node(m, "tanh"), weight=node(m, "fc_weight")),
        "takes its operand weight by keyword"),
    "a parameter twice": (
        "normalize", lambda m: call(m, torch.add, node(m, "tanh"), read(m, "fc.weight", "linear")),
        "read the same parameter"),
    "a decision without argument": ("annotate", add_operand, r"linear \(fc\) has no operand ghost"),
    "an operand goes around": ("insert", bypass_input, "fc: operand input of linear is not quantized"),
    "another format": (
        "insert", change_quantizer("fc_weight_q", format=Format()),
        "fc: operand weight has format affine/tensor, not symmetric/channel"),
    "another width source": (
        "insert", change_quantizer("fc_weight_q", width_source=WidthSource("weight", offset=2)),
        "fc: operand weight follows weight_plus_2, not weight"),
    "plain where observed": ("insert", plain_for_observed, "operand input of linear is not quantized"),
    "no gradient quantizer": ("insert", drop_gradient, "fc: the gradient of linear is not quantized"),
    "a reader of the raw output": ("insert", bypass_gradient, "fc: add bypasses the gradient quantizer of linear"),
    "an unknown quantizer": ("insert", orphan, "is a quantize op that no pass accounts for"),
    "a quantizer nobody reads": ("insert", idle, "quantizes the activation of fc, but nothing reads it"),
    "another width": ("bind", wrong_width, "fc_weight_q reads its width from _cpt_fx_bits_activation, not from "
                      r"_cpt_fx\.bits\.weight"),
    "a width that is no tensor": ("bind", no_tensor, "_cpt_fx.bits.weight is not a tensor"),
    "the same counters for two": ("bind", same_counters, "write the same counters"),
    "no state": ("bind", no_state, "but no state module _cpt_fx"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_caught_and_the_pass_is_named(name: str) -> None:
    last, edit, message = BROKEN[name]
    pipeline = Pipeline.standard().after(last, Vandal(edit))
    with pytest.raises(SpecError, match=message) as caught:
        pipeline.run(captured(Model()))
    assert str(caught.value).startswith("after pass 'vandal' the graph breaks the promises of a graph that is ")


@pytest.mark.parametrize("name", [name for name, (last, _, _) in BROKEN.items() if last == "normalize"])
def test_later_stages_keep_the_promises_of_earlier_ones(name: str) -> None:
    _, edit, message = BROKEN[name]
    with pytest.raises(SpecError, match=message):
        Pipeline.standard().after("annotate", Vandal(edit)).run(captured(Model()))


def test_every_stage_of_the_standard_pipeline_passes() -> None:
    module = captured(Model())
    for step in Pipeline.standard():
        step(module)
        report = Verify()(module)
        assert (report.changed, len(report.notes)) == (0, 1)
    assert report.notes[0].endswith("nodes keep the promises of a graph that is bound")


def test_it_changes_nothing() -> None:
    model, x = Model(), torch.randn(2, 3)
    module = at_stage(model, "bind")
    before, code = str(module.graph), module.code
    Verify()(module)
    assert (str(module.graph), module.code) == (before, code)
    assert len(numbers(module, x)) == len(numbers(model, x))


def test_alone_it_names_no_pass() -> None:
    module = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    Verify()(module)  # captured promises little
    set_stage(module, "normalized")
    with pytest.raises(SpecError, match=r"^the graph breaks the promises of a graph that is normalized:\n  _0 still"):
        Verify()(module)


def test_every_violation_is_listed_up_to_ten() -> None:
    module = fx.symbolic_trace(nn.Sequential(*(nn.Linear(3, 3) for _ in range(12))))
    set_stage(module, "normalized")
    with pytest.raises(SpecError) as caught:
        Verify()(module)
    assert len(str(caught.value).splitlines()) == 12
    assert str(caught.value).endswith("... and 2 more")


def test_a_product_that_came_after_annotate_is_caught() -> None:
    """A pass that adds a product behind annotate's back: it would stay in full precision and nobody would know."""
    pipeline = Pipeline.standard().after("annotate", Vandal(lambda module: call(module, torch.matmul)))
    with pytest.raises(SpecError, match="matmul came after annotate: nobody decided about it"):
        pipeline.run(captured(Model()))


def test_annotating_again_is_the_cure() -> None:
    pipeline = Pipeline.standard().before("annotate", Vandal(lambda module: call(module, torch.matmul)))
    module = captured(Model())
    pipeline.run(module)
    assert sum(DECISION in found.meta for found in module.graph.nodes) == 2
    assert default().matmul is not None
