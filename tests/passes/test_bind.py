"""Bind: every quantizer reads the width its layer follows, and the schedule writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from cpt_fx.capture.standalone import precision_of
from cpt_fx.formats import Format
from cpt_fx.ir.meta import QUANTIZER
from cpt_fx.ir.pass_base import stage_of
from cpt_fx.passes.annotate import Annotate
from cpt_fx.passes.bind import Bind
from cpt_fx.passes.insert import Insert
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.share import Share
from cpt_fx.passes.verify import Verify
from cpt_fx.recipes import paper
from cpt_fx.schedules import Bits, Piecewise, Static
from tests.graph_text import graph_text
from tests.passes import NEAREST, assert_same, at_stage, numbers, only

BITS = Static(Bits(4, 6, 8))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))


def bound(model: nn.Module, schedule: Any = BITS, **options: Any) -> fx.GraphModule:
    return at_stage(model, "bind", schedule, **options)


def widths(module: fx.GraphModule) -> dict[str, int]:
    held: Any = precision_of(module).bits
    return {name: int(width) for name, width in sorted(held.named_buffers())}


def test_the_three_roles_follow_the_schedule() -> None:
    module = bound(layers())
    assert widths(module) == {"weight": 4, "activation": 6, "gradient": 8}
    assert stage_of(module) == "bound"


def test_the_schedule_moves_them() -> None:
    schedule = Piecewise({0: 3, 2: 8}, total_steps=4)
    module = bound(layers(), schedule)
    assert widths(module)["weight"] == 3
    schedule.step(2)
    assert widths(module)["weight"] == 8


def test_without_a_schedule_widths_stay_at_32() -> None:
    model, x = layers(), torch.randn(2, 3)
    expected = numbers(model, x)
    module = bound(model, None)
    assert set(widths(module).values()) == {32}
    assert_same(numbers(module, x), expected)
    BITS.bind(module)
    assert widths(module)["weight"] == 4


def test_overrides_have_widths_of_their_own() -> None:
    module = bound(layers(), overrides={"0": 8, "1": "+2"})
    assert widths(module) == {
        "activation": 6, "activation_fixed_8": 8, "activation_plus_2": 8,
        "gradient": 8, "gradient_fixed_8": 8, "gradient_plus_2": 10,
        "weight": 4, "weight_fixed_8": 8, "weight_plus_2": 6,
    }  # fmt: skip
    for node in module.graph.nodes:
        if QUANTIZER in node.meta:
            assert node.args[1].target == f"_cpt_fx.bits.{node.meta[QUANTIZER].width_source.name}"


def test_fixed_widths_for_some_roles() -> None:
    module = bound(layers(), overrides={"*": {"offset": Bits(-1, 0, 1)}})
    assert widths(module) == {
        "activation": 6, "gradient": 8, "gradient_plus_1": 9, "weight": 4, "weight_minus_1": 3,
    }  # fmt: skip


def test_offsets_stop_at_one_bit_and_leave_full_precision_alone() -> None:
    assert widths(bound(layers(), Static(2), overrides={"0": "-4"}))["weight_minus_4"] == 1
    assert widths(bound(layers(), Static(32), overrides={"0": "-4"}))["weight_minus_4"] == 32
    assert widths(bound(layers(), Static(0), overrides={"0": "+4"}))["weight_plus_4"] == 0


def test_published_convolutions_switch_the_gradient_off_with_the_forward() -> None:
    conv = nn.Sequential(nn.Conv2d(1, 1, 1))
    assert widths(bound(conv, Static(Bits(0, 0, 8)), recipe=paper()))["gradient_with_forward"] == 0
    assert widths(bound(conv, Static(Bits(4, 4, 8)), recipe=paper()))["gradient_with_forward"] == 8


def test_unused_dials_go_and_roles_stay() -> None:
    module = bound(nn.Sequential(nn.Linear(3, 3)), overrides={"0": 8})
    assert set(widths(module)) == {
        "weight", "weight_fixed_8", "activation", "activation_fixed_8", "gradient", "gradient_fixed_8",
    }  # fmt: skip
    # Nothing reads the plain roles here: they are kept for the user, not for the graph.
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    assert "_cpt_fx.bits.weight" not in read


def test_the_three_roles_are_there_even_where_nothing_follows_them() -> None:
    module = bound(nn.Sequential(nn.Linear(3, 3)), recipe=only("linear", weight=Format()))
    assert widths(module) == {"weight": 4, "activation": 6, "gradient": 8}


def test_a_dial_that_lost_its_readers_stays_for_other_graphs() -> None:
    module = bound(nn.Sequential(nn.Linear(3, 3)), overrides={"0": 8})
    for node in module.graph.nodes:
        if QUANTIZER in node.meta:
            quantizer = node.meta[QUANTIZER]
            node.meta[QUANTIZER] = replace(quantizer, width_source=replace(quantizer.width_source, fixed=5))
    assert Bind(BITS)(module).changed == 4
    read = {str(node.target) for node in module.graph.nodes if node.op == "get_attr" and "fixed" in str(node.target)}
    assert read == {f"_cpt_fx.bits.{role}_fixed_5" for role in ("weight", "activation", "gradient")}
    # Graphs of a model share its widths: another one may read what this one reads no more.
    assert {name: width for name, width in widths(module).items() if "fixed" in name} == {
        "weight_fixed_5": 5, "activation_fixed_5": 5, "gradient_fixed_5": 5,
        "weight_fixed_8": 8, "activation_fixed_8": 8, "gradient_fixed_8": 8,
    }  # fmt: skip


def test_evaluation_has_its_own_widths() -> None:
    schedule = Static(Bits(4, 4, 8), eval_bits=7)
    module = bound(layers(), schedule)
    module.eval()
    assert widths(module)["weight"] == 7
    module.train()
    assert widths(module)["weight"] == 4
    assert widths(bound(layers().eval(), schedule))["weight"] == 7


def test_bits_decide_the_numbers() -> None:
    x = torch.randn(64, 3)
    module = bound(nn.Sequential(nn.Linear(3, 1, bias=False)), Static(Bits(2, 32, 32)), recipe=NEAREST)
    weight = module.get_submodule("0").weight
    assert isinstance(weight, Tensor)
    assert not torch.equal(module(x), x @ weight.t())
    Static(32).bind(module)
    assert torch.equal(module(x), torch.nn.functional.linear(x, weight))


def test_alone_on_a_plain_trace() -> None:
    module = fx.symbolic_trace(layers())
    with pytest.raises(ValueError, match="'bind' needs a graph that is inserted"):
        Bind(BITS)(module)
    for step in (Normalize(), Annotate(overrides={"0": 3}), Insert(), Bind(BITS), Verify("bind")):
        step(module)
    assert widths(module)["weight_fixed_3"] == 3
    module(torch.randn(2, 3))


def test_before_and_after_share() -> None:
    first = bound(layers(), overrides={"1": 8})
    other = at_stage(layers(), "insert", overrides={"1": 8})
    for step in (Bind(BITS), Share(), Verify()):
        step(other)
    assert widths(first) == widths(other)


def test_twice_changes_nothing_more() -> None:
    module = bound(layers(), overrides={"0": 8})
    before = graph_text(module)
    assert Bind(BITS)(module).changed == 0
    Verify()(module)
    assert (graph_text(module), widths(module)["weight_fixed_8"]) == (before, 8)


def test_the_report_names_the_widths() -> None:
    report = Bind(BITS)(at_stage(layers(), "share", overrides={"0": {"bits": Bits(8, 8, 8)}}))
    assert report.changed == 4
    assert report.notes == (
        "widths: activation, activation_fixed_8, gradient, gradient_fixed_8, weight, weight_fixed_8",
    )
