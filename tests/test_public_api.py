"""The names and signatures users hold on to. A change here is a change of the contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cpt_fx
from cpt_fx import functional, operators, recipes, schedules

SIGNATURES: dict[str, tuple[Callable[..., Any], str]] = {
    "transform": (
        cpt_fx.transform,
        "(model, schedule, *, recipe=None, example_inputs=None, example_kwargs=None, capture='auto', exclude=(), "
        "overrides=None, execution='simulated', strict=False, prove=True)",
    ),
    "named": (
        schedules.named,
        "(name, *, q_min, q_max, total_steps, cycles=8, q_grad=None, period=None, eval_bits=None)",
    ),
    "Static": (schedules.Static, "(bits, gradient=None, *, total_steps=None, eval_bits=None)"),
    "Delayed": (schedules.Delayed, "(schedule, start)"),
    "paper": (
        recipes.paper,
        "(*, family='dense', gradient_rounding='stochastic', aggregation='fp', quantize_norm=False)",
    ),
    "default": (recipes.default, "()"),
    "integer": (recipes.integer, "()"),
    "fp8": (recipes.fp8, "()"),
    "mx": (recipes.mx, "()"),
    "fake_quantize": (
        functional.fake_quantize,
        "(x, bits, *, keep=(), rounding='nearest', range=None, over=None, scheme='affine', exponent=0, "
        "specials='none', block=0)",
    ),
    "quantize_gradient": (
        functional.quantize_gradient,
        "(x, bits, *, keep=(), rounding='stochastic', over=None, scheme='affine', exponent=0, "
        "specials='none', block=0)",
    ),
    "cost": (cpt_fx.cost, "(model, schedule, example_inputs, *, example_kwargs=None, count='paper', steps=None)"),
    "inspect": (cpt_fx.inspect, "(result)"),
    "at_bits": (cpt_fx.at_bits, "(model, bits)"),
    "recalibrate": (cpt_fx.recalibrate, "(model, batches, bits=None, *, call=None, exclude=())"),
    "revert": (cpt_fx.revert, "(model)"),
    "graphs": (cpt_fx.graphs, "(model)"),
    "register": (
        operators.register,
        "(function, *, family='matmul', operands=None, output_axes=None, name='', flops=None, mutates=(), left='')",
    ),
    "single_graph": (
        cpt_fx.single_graph,
        "(result, example_inputs=None, example_kwargs=None, *, dynamic=True)",
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    function, expected = SIGNATURES[name]
    parameters = inspect.signature(function).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(bare)) == expected


def test_names() -> None:
    assert cpt_fx.__all__ == [
        "Bits", "CaptureError", "ExportError", "Format", "Override", "Pipeline", "TransformError",
        "VerificationError", "at_bits", "cost", "export", "functional", "graphs", "inspect", "operators", "ort",
        "passes", "recalibrate", "recipes", "revert", "schedules", "single_graph", "study", "transform",
    ]  # fmt: skip
    assert schedules.NAMES == ("CR", "LR", "ER", "RR", "CT", "LT", "ETV", "ETH", "RTV", "RTH")
    assert schedules.Bits._fields == ("weight", "activation", "gradient")
    for name in (
        "Cyclic",
        "Static",
        "Deficit",
        "Delayed",
        "Sequence",
        "Piecewise",
        "Custom",
        "range_test",
        "recommend",
    ):
        assert callable(getattr(schedules, name))
    for name in cpt_fx.__all__:
        assert getattr(cpt_fx, name) is not None
        assert name in dir(cpt_fx)


def test_importing_a_submodule_hides_no_public_name() -> None:
    import cpt_fx.api
    import cpt_fx.inspection
    import cpt_fx.inspection.cost

    for name in ("transform", "revert", "cost", "inspect"):
        assert inspect.isfunction(getattr(cpt_fx, name))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'transfrom'"):
        cpt_fx.transfrom  # noqa: B018


def test_the_ops_are_registered() -> None:
    for name in ("fake_quantize", "fake_quantize_observed", "fake_quantize_learned", "quantize_gradient"):
        assert isinstance(getattr(torch.ops.cpt_fx, name).default, torch._ops.OpOverload)
