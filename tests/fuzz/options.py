"""Random recipes, schedules, excludes and overrides, as source."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cpt_fx import recipes
from cpt_fx.formats import Format, Rounding
from cpt_fx.recipes import Recipe
from cpt_fx.schedules import NAMES


@dataclass(frozen=True)
class Alternating:
    """A function for `Custom` that can be pickled, which a lambda cannot."""

    low: int
    high: int

    def __call__(self, step: int) -> int:
        """Return the width of a step."""
        return self.low if step % 2 else self.high


FAMILIES = ("conv", "linear", "matmul", "attention", "recurrent")


def nearest(recipe: Recipe) -> Recipe:
    """Return a recipe without random numbers: its runs can be compared."""
    for family in recipes.FAMILIES:
        rule = recipe.rule(family)
        if rule is not None and rule.gradient is not None:
            recipe = recipe.with_rule(family, gradient=_changed(rule.gradient))
    return recipe


def _changed(format: Format) -> Format:
    from dataclasses import replace

    return replace(format, rounding=Rounding.NEAREST)


def drawn_format(chance: random.Random, *, gradient: bool, deterministic: bool) -> str:
    """Draw the fields of a format until they go together."""
    while True:
        fields = {
            "scheme": chance.choice(("affine", "affine_integer", "symmetric", "float")),
            "group": chance.choice(("tensor", "tensor", "channel", "row", "vector", "inner")),
            "range": "dynamic"
            if gradient
            else chance.choice(("dynamic", "dynamic", "observer", "percentile", "learned")),
        }
        options: dict[str, object] = {key: value for key, value in fields.items() if value != "dynamic"}
        if not deterministic and chance.random() < 0.4:
            options["rounding"] = "stochastic"
        if fields["scheme"] == "float":
            options |= {"exponent": chance.choice((2, 3, 4, 5)), "specials": chance.choice(("none", "fn", "ieee"))}
        if chance.random() < 0.1:
            options["block"] = chance.choice((4, 16, 32))
        if fields["range"] == "percentile":
            options["percentile"] = chance.choice((90.0, 99.0, 99.9))
        try:
            Format(**options)  # type: ignore[arg-type]
        except ValueError:
            continue
        return f"Format({', '.join(f'{key}={value!r}' for key, value in options.items())})"


def drawn_recipe(chance: random.Random) -> str:
    """Draw a recipe. About half of them have no random numbers, so that runs can be compared."""
    deterministic = chance.random() < 0.6
    if chance.random() < 0.65:
        preset = chance.choice(
            (
                "default()",
                "default()",
                "default()",
                "paper()",
                'paper(family="graph")',
                "integer()",
                'paper(family="graph", aggregation="q", quantize_norm=True)',
                "fp8()",
                "mx()",
            )
        )
        text = f"recipes.{preset}"
        if chance.random() < 0.1:
            text += f'.with_rule("embedding", weight={drawn_format(chance, gradient=False, deterministic=True)})'
        return f"nearest({text})" if deterministic else text
    families = []
    for family in FAMILIES:
        if chance.random() < 0.9:
            parts = []
            for operand in ("input", "weight", "bias", "gradient"):
                if chance.random() < (0.95 if operand != "bias" else 0.5):
                    made = drawn_format(chance, gradient=operand == "gradient", deterministic=deterministic)
                    parts.append(f"{operand}={made}")
            families.append(f"{family}=Rule({', '.join(parts)})")
    return f'Recipe(name="drawn", {", ".join(families)})'


def _bits(chance: random.Random) -> str:
    if chance.random() < 0.7:
        return str(chance.choice((2, 3, 4, 5, 6, 8, 8, 12)))
    return f"Bits({', '.join(str(chance.choice((1, 2, 3, 4, 8, 16, 32, 0))) for _ in range(3))})"


def drawn_schedule(chance: random.Random, depth: int = 0) -> str:
    """Draw a schedule."""
    low = chance.randrange(2, 6)
    high = chance.randrange(low, 10)
    total = chance.choice((16, 40, 64))
    evaluation = chance.choice(("", "", ", eval_bits='current'", ", eval_bits=6"))
    kind = chance.randrange(9 if depth == 0 else 5)
    if kind <= 3:
        grad = chance.choice(("", ", q_grad=8", f", q_grad=({high}, {high + 2})"))
        return (
            f'named("{chance.choice(NAMES)}", q_min={low}, q_max={high}, total_steps={total}, '
            f"cycles={chance.choice((2, 4, 8))}{grad}{evaluation})"
        )
    if kind == 4:
        return f"Static({_bits(chance)}, total_steps={total}{evaluation})"
    if kind == 5:
        return (
            f"Deficit(q_min={low}, q_max={high}, start=1, end={chance.choice((2, 5))}, total_steps={total}{evaluation})"
        )
    if kind == 6:
        return f"Delayed({drawn_schedule(chance, 1)}, start={chance.choice((1, 3))})"
    if kind == 7:
        members = f"[{drawn_schedule(chance, 1)}, {drawn_schedule(chance, 1)}]"
        return f"Sequence({members}, eval_bits={chance.choice((5, 8))})"
    if chance.random() < 0.5:
        pieces = ", ".join(f"{step}: {_bits(chance)}" for step in (0, 1, 3))
        return f"Piecewise({{{pieces}}}, total_steps={total}{evaluation})"
    function = chance.choice((f"lambda step: {low} if step % 2 else {high}", f"Alternating({low}, {high})"))
    return f"Custom({function}, total_steps={total}{evaluation})"


def drawn_patterns(chance: random.Random, layers: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Draw what is excluded, and what is overridden, of layers given by name and kind."""
    exclude, overrides = "()", "None"
    if layers and chance.random() < 0.12:
        name, kind = chance.choice(layers)
        exclude = chance.choice((f'"{name}"', f'["*{name[-2:]}"]', f"nn.{kind}"))
    if layers and chance.random() < 0.2:
        name, kind = chance.choice(layers)
        pattern = chance.choice((f'"{name}"', f'"{name}"', f'"{name[:3]}*"', f"nn.{kind}"))
        change = chance.choice(
            (
                "8",
                '"+1"',
                "Bits(4, 5, 6)",
                '{"weight": 4}',
                '{"gradient": "+1"}',
                "Static(5)",
                '{"input": None}',
                '{"weight": Format(scheme="symmetric")}',
                '{"offset": Bits(2, 0, 0)}',
                "recipes.fp8()",
                "32",
                '{"schedule": named("RR", q_min=3, q_max=7, total_steps=32)}',
                '{"gradient": None, "bits": 6}',
            )
        )
        overrides = f"{{{pattern}: {change}}}"
    return exclude, overrides
