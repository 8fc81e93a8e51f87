"""Products beyond the usual ones: groups of experts, chains, and the names that ATen has for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.formats import Format
from cpt_fx.ir.meta import QUANTIZER
from cpt_fx.passes import Annotate, Insert, Normalize, Verify
from tests.decompose.fused_graphs import GraphMaker
from tests.passes import NEAREST, at_stage, decisions, quantizers, set_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")

OFFSETS = torch.tensor([2, 2, 6, 8], dtype=torch.int32)

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "F.grouped_mm": (F.grouped_mm, (), {"offs": OFFSETS}, (8, 16), (4, 16, 8)),
    "torch._grouped_mm": (torch._grouped_mm, (OFFSETS,), {}, (8, 16), (4, 16, 8)),
    "aten._grouped_mm": (torch.ops.aten._grouped_mm, (OFFSETS,), {}, (8, 16), (4, 16, 8)),
    "aten._grouped_mm.default": (torch.ops.aten._grouped_mm.default, (OFFSETS,), {}, (8, 16), (4, 16, 8)),
    "chain_matmul": (torch.chain_matmul, (), {}, (3, 4), (4, 5)),
    "tensordot": (torch.tensordot, (), {"dims": 2}, (3, 4, 5), (4, 5, 2)),
    "kron": (torch.kron, (), {}, (3, 4), (2, 5)),
    "vdot": (torch.vdot, (), {}, (4,), (4,)),
    "vecdot": (torch.linalg.vecdot, (), {}, (3, 4), (3, 4)),
    "aten.mm": (torch.ops.aten.mm, (), {}, (3, 4), (4, 5)),
    "aten.bmm.default": (torch.ops.aten.bmm.default, (), {}, (2, 3, 4), (2, 4, 5)),
    "aten.linear.default": (torch.ops.aten.linear.default, (), {}, (3, 4), (5, 4)),
}  # fmt: skip


class Holder(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def graph(function: Callable[..., Any], weight: Tensor, *rest: Any, **options: Any) -> fx.GraphModule:
    make = GraphMaker(layer=Holder(weight))
    (x,) = make.inputs("x")
    constants = []
    for value in (*rest, *options.values()):
        if isinstance(value, Tensor):
            make.module.register_buffer("offsets", value)
            constants.append(make.read("offsets"))
        else:
            constants.append(value)
    given = constants[: len(rest)]
    named = dict(zip(options, constants[len(rest) :], strict=True))
    return make.finish(make.call(function, x, make.read("layer.weight"), *given, at="layer", **named))


@pytest.mark.parametrize("name", CALLS)
def test_both_operands_are_quantized(name: str) -> None:
    function, rest, options, left, right = CALLS[name]
    x, weight = torch.randn(left), torch.randn(right)
    if "grouped" in name:
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    module = graph(function, weight, *rest, **options)
    expected = module(x)
    at_stage(module, "share", recipe=NEAREST)
    assert [(item.operand, item.role) for item in quantizers(module)][:2] == [
        (quantizers(module)[0].operand, "activation"), (quantizers(module)[1].operand, "weight"),
    ]  # fmt: skip
    assert {item.role for item in quantizers(module)} == {"activation", "weight", "gradient"}
    assert torch.equal(module(x), expected)
    set_bits(module, 2)
    assert not torch.equal(module(x), expected)


@pytest.mark.parametrize("name", CALLS)
def test_decisions_are_about_operands_in_their_places(name: str) -> None:
    function, rest, options, _, right = CALLS[name]
    module = graph(function, torch.randn(right), *rest, **options)
    Normalize()(module)
    Annotate(NEAREST)(module)
    Verify()(module)
    ((layer, decision),) = decisions(module).items()
    assert layer.startswith("layer.")
    assert decision.family == "linear"
    assert [operand.role for operand in decision.operands] == ["activation", "weight"]


def test_experts_have_a_range_per_output_channel() -> None:
    function, rest, options, _, right = CALLS["F.grouped_mm"]
    module = graph(function, torch.randn(right), *rest, **options)
    weight = Format(group="channel")  # type: ignore[arg-type]
    for step in (Normalize(), Annotate(NEAREST.with_rule("linear", weight=weight)), Insert()):
        step(module)
    (made,) = [node for node in module.graph.nodes if QUANTIZER in node.meta and node.meta[QUANTIZER].role == "weight"]
    assert made.kwargs["over"] == [-2]


def test_the_experts_of_transformers() -> None:
    importlib.import_module("transformers.integrations.moe") if importlib.util.find_spec("transformers") else (
        pytest.skip("needs transformers")
    )
    function = torch.ops.transformers.grouped_mm_fallback
    for target in (function, function.default):
        module = graph(target, torch.randn(4, 16, 8), OFFSETS)
        x = torch.randn(8, 16)
        expected = module(x)
        at_stage(module, "share", recipe=NEAREST)
        assert {item.role for item in quantizers(module)} == {"activation", "weight", "gradient"}
        assert torch.equal(module(x), expected)
        set_bits(module, 2)
        assert not torch.equal(module(x), expected)
