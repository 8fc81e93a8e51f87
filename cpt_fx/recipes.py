"""Recipes: frozen data that says what is quantized and how; the presets are functions that return one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from cpt_fx.errors import check_choice, nearest
from cpt_fx.formats import Format, Group, Range, Rounding, Scheme, Specials

OPERANDS = ("input", "weight", "bias", "gradient")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The formats of one op family; None leaves that operand in full precision.

    `gradient_with_forward`: at 0 forward bits the gradient is not quantized either (published convolutions).
    `return_quantized`: if an operand is also an output of the model, return the quantized one (published attention
    probabilities). `messages_only`: treat the left operand of a product as an adjacency matrix and do not quantize
    it, unless it depends on a parameter.
    """

    input: Format | None = None
    weight: Format | None = None
    bias: Format | None = None
    gradient: Format | None = None
    gradient_with_forward: bool = False
    return_quantized: bool = False
    messages_only: bool = False

    def __post_init__(self) -> None:
        """Reject operands that are not formats, and gradient formats whose range is not dynamic."""
        for name in OPERANDS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, Format):
                raise TypeError(f"Rule.{name} must be a Format or None, got {value!r}")
        if self.gradient is not None and self.gradient.range is not Range.DYNAMIC:
            raise ValueError(f"Rule.gradient needs range='dynamic', got {self.gradient.range.value!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One rule per op family; None leaves the family in full precision.

    `bias_add` is a separate addition of a parameter, `scale` an elementwise product of two activations: the published
    graph layers quantize both.
    `not_finite`: running ranges never learn from a batch with a NaN or an infinity. `"skip"` ignores it without a
    device read; `"raise"` makes `schedule.step()` raise FloatingPointError, which costs one device read per step.
    """

    name: str
    conv: Rule | None = None
    linear: Rule | None = None
    matmul: Rule | None = None
    attention: Rule | None = None
    recurrent: Rule | None = None
    aggregation: Rule | None = None
    embedding: Rule | None = None
    bias_add: Rule | None = None
    scale: Rule | None = None
    not_finite: str = "skip"

    def __post_init__(self) -> None:
        """Reject an unknown `not_finite` and values that are not rules."""
        check_choice("Recipe.not_finite", self.not_finite, ("skip", "raise"))
        for family in FAMILIES:
            value = getattr(self, family)
            if value is not None and not isinstance(value, Rule):
                raise TypeError(f"Recipe.{family} must be a Rule or None, got {value!r}")

    def rule(self, family: str) -> Rule | None:
        """Return the rule of a family."""
        value: Rule | None = getattr(self, family)
        return value

    def with_rule(self, family: str, **changes: object) -> Recipe:
        """Return a copy in which fields of one family's rule are changed."""
        check_choice("family", family, FAMILIES)
        return replace(self, **{family: replace(self.rule(family) or Rule(), **changes)})  # type: ignore[arg-type]


FAMILIES = tuple(field.name for field in fields(Recipe) if field.name not in ("name", "not_finite"))


def paper(
    *,
    family: str = "dense",
    gradient_rounding: str = "stochastic",
    aggregation: str = "fp",
    quantize_norm: bool = False,
) -> Recipe:
    """Return the published scheme, including its quirks that affect the numbers.

    Args:
        family: `"dense"` for convolutions, linear layers, LSTMs and attention; `"graph"` for graph layers.
        gradient_rounding: `"stochastic"` as published; `"nearest"` makes a run reproducible to the bit.
        aggregation: `"fp"` sums over neighbours in full precision, `"q"` quantizes messages (graph only).
        quantize_norm: quantize products with degree norms too (graph only).
    """
    check_choice("family", family, ("dense", "graph"))
    check_choice("aggregation", aggregation, ("fp", "q"))
    rounding = Rounding(check_choice("gradient_rounding", gradient_rounding, ("stochastic", "nearest")))
    whole = Format(scheme=Scheme.AFFINE, floored=True)
    rows = replace(whole, group=Group.ROW)
    vectors = replace(whole, group=Group.VECTOR)
    inner = replace(whole, group=Group.INNER, rounding=rounding)
    if family == "graph":
        messages = Rule(input=rows, gradient=inner, messages_only=True) if aggregation == "q" else None
        return Recipe(
            name="paper/graph",
            linear=Rule(input=vectors, weight=rows, bias=whole, gradient=inner),
            matmul=messages,
            aggregation=messages,
            bias_add=Rule(input=vectors, bias=whole, gradient=inner),
            scale=Rule(input=vectors, gradient=inner) if quantize_norm else None,
        )
    if aggregation == "q" or quantize_norm:
        raise ValueError("aggregation='q' and quantize_norm=True belong to family='graph', got family='dense'")
    channels = replace(whole, group=Group.CHANNEL)
    observed = replace(whole, range=Range.OBSERVER, corrected=False)
    linear = Rule(input=replace(observed, observe_when_off=True), weight=channels, bias=whole, gradient=inner)
    products = Rule(input=vectors, weight=vectors, gradient=inner, return_quantized=True)
    return Recipe(
        name="paper/dense",
        conv=Rule(
            input=observed,
            weight=channels,
            bias=whole,
            gradient=replace(whole, rounding=rounding),
            gradient_with_forward=True,
        ),
        linear=linear,
        matmul=products,
        attention=products,
        recurrent=linear,
    )


def default() -> Recipe:
    """Return the recipe used by default: it quantizes what the published scheme does, without its faults.

    Weights symmetric per output channel; activations affine with an integer zero point, so that zero (and with it
    padding) is on the grid and QDQ export is exact; biases symmetric per tensor; running ranges corrected for their
    start at zero; gradients affine per tensor with stochastic rounding.
    """
    activation = Format(scheme=Scheme.AFFINE_INTEGER, range=Range.OBSERVER)
    gradient = Format(scheme=Scheme.AFFINE, rounding=Rounding.STOCHASTIC)
    weight = Format(scheme=Scheme.SYMMETRIC, group=Group.CHANNEL)
    bias = Format(scheme=Scheme.SYMMETRIC)
    return _everywhere("default", Rule(input=activation, weight=weight, bias=bias, gradient=gradient))


def integer() -> Recipe:
    """Return symmetric formats throughout, one scale per tensor, as integer kernels need them.

    A tensor is an operand of several products, forward and backward, which sum over different dims; only a scale per
    tensor factors out of all of them. Biases stay in full precision: they are added to the accumulator.
    """
    whole = Format(scheme=Scheme.SYMMETRIC)
    gradient = replace(whole, rounding=Rounding.STOCHASTIC)
    return _everywhere("integer", Rule(input=whole, weight=whole, gradient=gradient))


def fp8() -> Recipe:
    """Return e4m3 for weights and activations, e5m2 for gradients, at 8 bits; other widths change the mantissa."""
    forward = Format(scheme=Scheme.FLOAT, exponent=4, specials=Specials.FN)
    backward = Format(scheme=Scheme.FLOAT, exponent=5, specials=Specials.IEEE, rounding=Rounding.STOCHASTIC)
    weight = replace(forward, group=Group.CHANNEL)
    return _everywhere("fp8", Rule(input=forward, weight=weight, gradient=backward))


def mx() -> Recipe:
    """Return the MX layout: blocks of 32 elements share a power-of-two scale; e4m3 elements at 8 bits.

    In matrix products, the blocks of weights and activations run along the last dim, which is summed over; in
    convolutions, they run through each output channel of the weight and each sample of the input.
    """
    blocks = Format(scheme=Scheme.FLOAT, exponent=4, specials=Specials.FN, group=Group.VECTOR, block=32)
    rows = replace(blocks, group=Group.ROW)
    backward = replace(blocks, rounding=Rounding.STOCHASTIC)
    products = Rule(input=blocks, weight=blocks, gradient=backward)
    spatial = Rule(input=rows, weight=rows, gradient=replace(rows, rounding=Rounding.STOCHASTIC))
    return replace(_everywhere("mx", products), conv=spatial)


def _everywhere(name: str, rule: Rule) -> Recipe:
    """Return a recipe with one rule for every family of products; embeddings are lookups and have none."""
    return Recipe(name=name, conv=rule, linear=rule, matmul=rule, attention=rule, recurrent=rule)


PRESETS = {"paper": paper, "default": default, "integer": integer, "fp8": fp8, "mx": mx}


def resolve(recipe: Recipe | str | None) -> Recipe:
    """Return the recipe itself, a preset by name, or the default."""
    if recipe is None:
        return default()
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        if recipe not in PRESETS:
            raise ValueError(f"unknown recipe {recipe!r}; presets are {sorted(PRESETS)}.{nearest(recipe, PRESETS)}")
        return PRESETS[recipe]()
    raise TypeError(f"recipe must be a Recipe, the name of a preset or None, got {recipe!r}")
