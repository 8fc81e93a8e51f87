"""Recipes are frozen data; the presets say what their documentation says."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from cpt_fx import recipes
from cpt_fx.formats import Format, Group, Range, Rounding, Scheme, Specials
from cpt_fx.recipes import FAMILIES, OPERANDS, PRESETS, Recipe, Rule, resolve

PRODUCTS = ("conv", "linear", "matmul", "attention", "recurrent")


def rule(recipe: Recipe, family: str) -> Rule:
    found = recipe.rule(family)
    assert found is not None
    return found


def form(recipe: Recipe, family: str, operand: str) -> Format:
    found = getattr(rule(recipe, family), operand)
    assert isinstance(found, Format)
    return found


def wrong(value: object) -> Any:
    """What a type checker would refuse, and a notebook lets through."""
    return value


def text(recipe: Recipe) -> dict[str, str]:
    """Family and operand to format, as tables show it."""
    return {
        f"{family}.{operand}": str(getattr(found, operand))
        for family in FAMILIES
        if (found := recipe.rule(family)) is not None
        for operand in OPERANDS
        if getattr(found, operand) is not None
    }


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build_and_are_values(name: str) -> None:
    recipe = PRESETS[name]()
    assert recipe == PRESETS[name]() == resolve(name) == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(PRESETS[name]())
    assert recipe.name.split("/")[0] == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.conv = None  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule(recipe, "linear").input = None  # type: ignore[misc]


def test_presets_differ() -> None:
    assert len({str(text(preset())) for preset in PRESETS.values()}) == len(PRESETS)


def test_the_published_dense_scheme() -> None:
    recipe = recipes.paper()
    assert recipe.name == "paper/dense"
    linear = {"input": "affine/tensor/observer", "weight": "affine/channel", "bias": "affine/tensor",
              "gradient": "affine/inner/stochastic"}  # fmt: skip
    product = {"input": "affine/vector", "weight": "affine/vector", "gradient": "affine/inner/stochastic"}
    expected = {"conv": {**linear, "gradient": "affine/tensor/stochastic"}, "linear": linear, "recurrent": linear,
                "matmul": product, "attention": product}  # fmt: skip
    assert text(recipe) == {f"{family}.{operand}": name for family, operands in expected.items()
                            for operand, name in operands.items()}  # fmt: skip
    assert (
        recipe.rule("aggregation")
        is recipe.rule("bias_add")
        is recipe.rule("scale")
        is recipe.rule("embedding")
        is None
    )
    # The quirks: running ranges without correction; zero bits mean different things.
    for family, off in (("conv", False), ("linear", True)):
        observed = form(recipe, family, "input")
        assert (observed.momentum, observed.corrected, observed.observe_when_off) == (0.9, False, off)
    assert rule(recipe, "conv").gradient_with_forward and not rule(recipe, "linear").gradient_with_forward
    assert rule(recipe, "attention").return_quantized


def test_the_published_graph_scheme() -> None:
    recipe = recipes.paper(family="graph", gradient_rounding="nearest")
    assert text(recipe) == {
        "linear.input": "affine/vector", "linear.weight": "affine/row", "linear.bias": "affine/tensor",
        "linear.gradient": "affine/inner", "bias_add.input": "affine/vector", "bias_add.bias": "affine/tensor",
        "bias_add.gradient": "affine/inner",
    }  # fmt: skip
    quantized = recipes.paper(family="graph", aggregation="q", quantize_norm=True, gradient_rounding="nearest")
    more = {key: value for key, value in text(quantized).items() if key not in text(recipe)}
    assert more == {
        "aggregation.input": "affine/row", "aggregation.gradient": "affine/inner", "matmul.input": "affine/row",
        "matmul.gradient": "affine/inner", "scale.input": "affine/vector", "scale.gradient": "affine/inner",
    }  # fmt: skip
    assert rule(quantized, "matmul").messages_only


def test_gradient_rounding() -> None:
    stochastic, nearest = recipes.paper(), recipes.paper(gradient_rounding="nearest")
    for family in PRODUCTS:
        assert form(stochastic, family, "gradient").rounding is Rounding.STOCHASTIC
        assert form(nearest, family, "gradient").rounding is Rounding.NEAREST


def test_the_default_mends_the_faults() -> None:
    recipe = recipes.default()
    for family in PRODUCTS:
        observed = form(recipe, family, "input")
        assert (observed.scheme, observed.range, observed.corrected) == (Scheme.AFFINE_INTEGER, Range.OBSERVER, True)
        assert not observed.observe_when_off and not rule(recipe, family).gradient_with_forward
        assert str(form(recipe, family, "weight")) == "symmetric/channel"
        assert str(form(recipe, family, "bias")) == "symmetric/tensor"
        assert str(form(recipe, family, "gradient")) == "affine/tensor/stochastic"
        assert not rule(recipe, family).return_quantized
    assert recipe.rule("embedding") is None


def test_integer_is_symmetric_throughout() -> None:
    for name in text(recipes.integer()).values():
        assert name.startswith("symmetric/")
    assert all(rule(recipes.integer(), family).bias is None for family in PRODUCTS)
    # The same scale for all that a tensor is multiplied with, forward and backward, factors out of every sum.
    for family in PRODUCTS:
        formats = [form(recipes.integer(), family, name) for name in ("input", "weight", "gradient")]
        assert {found.group for found in formats} == {Group.TENSOR}
        assert formats[2].rounding is Rounding.STOCHASTIC


def test_fp8_and_mx() -> None:
    fp8 = text(recipes.fp8())
    assert (fp8["linear.input"], fp8["linear.weight"], fp8["linear.gradient"]) == (
        "e4fn/tensor", "e4fn/channel", "e5ieee/tensor/stochastic")  # fmt: skip
    mx = text(recipes.mx())
    assert (mx["linear.input"], mx["linear.weight"], mx["conv.weight"]) == (
        "e4fn/vector:32", "e4fn/vector:32", "e4fn/row:32")  # fmt: skip
    for recipe in (recipes.fp8(), recipes.mx()):
        for family in PRODUCTS:
            assert form(recipe, family, "input").specials is Specials.FN
            assert form(recipe, family, "gradient").rounding is Rounding.STOCHASTIC


def test_with_rule() -> None:
    base = recipes.default()
    changed = base.with_rule("conv", bias=None)
    assert rule(changed, "conv") == dataclasses.replace(rule(base, "conv"), bias=None)
    assert rule(base, "conv").bias is not None and changed.linear == base.linear
    added = base.with_rule("embedding", weight=Format())
    assert added.embedding == Rule(weight=Format())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: recipes.default().with_rule("convv", bias=None), ValueError, 'family must be .*Did you mean "conv"'),
        (lambda: recipes.default().with_rule("name"), ValueError, "family must be one of"),
        (lambda: recipes.default().with_rule("conv", biass=None), TypeError, "biass"),
        (lambda: recipes.default().with_rule("conv", bias="affine"), TypeError, "Rule.bias must be a Format or None"),
        (lambda: Rule(weight=wrong(8)), TypeError, "Rule.weight must be a Format or None, got 8"),
        (lambda: Rule(gradient=Format(range=Range.OBSERVER)), ValueError, "Rule.gradient needs range='dynamic'"),
        (lambda: Recipe(name="mine", conv=wrong(Format())), TypeError, "Recipe.conv must be a Rule or None"),
        (lambda: recipes.paper(family="grahp"), ValueError, 'family must be one of .*Did you mean "graph"'),
        (lambda: recipes.paper(family="graph", aggregation="fq"), ValueError, "aggregation must be one of"),
        (lambda: recipes.paper(gradient_rounding="nearst"), ValueError, 'Did you mean "nearest"'),
        (lambda: recipes.paper(aggregation="q"), ValueError, "belong to family='graph', got family='dense'"),
        (lambda: recipes.paper(quantize_norm=True), ValueError, "belong to family='graph'"),
        (lambda: resolve("defalt"), ValueError, "unknown recipe 'defalt'; presets are .*Did you mean \"default\""),
        (lambda: resolve(wrong(8)), TypeError, "recipe must be a Recipe, the name of a preset or None, got 8"),
    ],
)  # fmt: skip
def test_bad_recipes(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_resolve() -> None:
    mine = recipes.default().with_rule("conv", bias=None)
    assert resolve(mine) is mine
    assert resolve(None) == recipes.default()
