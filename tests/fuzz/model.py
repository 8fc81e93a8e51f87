"""A whole model, with its inputs and how it is transformed, drawn from a number and written as source."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from tests.fuzz.control import CONTROL, blocks
from tests.fuzz.layers import LAYERS
from tests.fuzz.options import drawn_patterns, drawn_recipe, drawn_schedule
from tests.fuzz.products import PRODUCTS
from tests.fuzz.scope import HEADER, Production, Scope, Shared, Unfit
from tests.fuzz.views import VIEWS
from tests.fuzz.weights import WEIGHTS

IMPORTS = """
import cpt_fx
from cpt_fx import Bits, Format, recipes
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Custom, Deficit, Delayed, Piecewise, Sequence, Static, named
from tests.fuzz.options import Alternating, nearest
"""
MULTIPLY: dict[Production, float] = {**LAYERS, **PRODUCTS}
_GROUPS: tuple[tuple[float, dict[Production, float]], ...] = (
    (4.0, LAYERS),
    (4.0, PRODUCTS),
    (3.5, VIEWS),
    (2.2, WEIGHTS),
    (1.8, CONTROL),
)


def draw_lines(s: Scope, count: int) -> None:
    """Draw some lines into a class; what does not fit is drawn again."""
    groups = (*_GROUPS, (0.9, blocks(draw_lines)))
    for _ in range(count * 6):
        if count <= 0:
            return
        group = s.chance.choices([found for _, found in groups], [weight for weight, _ in groups])[0]
        production = s.chance.choices(list(group), list(group.values()))[0]
        count -= s.attempt(production)


class Input:
    """The first argument: how it is made."""

    def __init__(self, chance: random.Random) -> None:
        few = (5, 6, 7, 8)

        def size() -> int:
            return chance.choice(few) if chance.random() < 0.93 else chance.choice((1, 2, 3, 13))

        batch = chance.choices((5, 6, 4, 3, 2, 1, 0), (5, 5, 2, 2, 2, 2, 0.6))[0]
        kind = chance.choices(
            ("matrix", "sequence", "image", "line", "volume", "vector", "tokens", "heads"),
            (6, 6, 5, 2, 0.6, 0.6, 2, 1.5),
        )[0]
        dims = {"matrix": 1, "sequence": 2, "image": 3, "line": 2, "volume": 4, "vector": 0, "tokens": 1, "heads": 3}[
            kind
        ]
        self.shape = [batch, *(size() for _ in range(dims))] if kind != "vector" else [size()]
        if kind in ("image", "volume"):
            self.shape[1] = chance.choice((2, 3, 4, 5))
        self.tokens = kind == "tokens"
        self.dtype = chance.choices(("float32", "float64", "bfloat16"), (30, 2, 1.5))[0]
        listed, dtype = (
            ", ".join(map(str, self.shape)),
            "" if self.dtype == "float32" else f", dtype=torch.{self.dtype}",
        )
        self.text = f"torch.randn({listed}{dtype})"
        if self.tokens:
            self.text = f"torch.randint(0, 9, ({listed},))"
        elif chance.random() < 0.08 and len(self.shape) > 1:
            swapped = ", ".join(map(str, [*self.shape[:-2], self.shape[-1], self.shape[-2]]))
            self.text = f"torch.randn({swapped}{dtype}).transpose(-1, -2)"
        elif chance.random() < 0.04 and len(self.shape) > 1:
            rest = ", ".join(map(str, self.shape[1:]))
            self.text = f"torch.randn(1, {rest}{dtype}).expand({listed})"
        elif chance.random() < 0.04:
            self.text = f"torch.randn({listed}, 2{dtype})[..., 0]"


OUTPUTS = (
    "h",
    "h",
    "h",
    "h",
    "(h, h.mean())",
    "{'logits': h, 'loss': h.square().mean()}",
    "[h, None, 3]",
    "Output(h, h.sum())",
    "Pair(h, h * 2)",
    "(h, (h.detach(), {'n': 1}))",
    "h.square().mean()",
    "h.sum(-1)",
)
CLASSES = {
    "Output": "@dataclasses.dataclass\nclass Output:\n    logits: Tensor\n    loss: Tensor\n",
    "Pair": "class Pair(NamedTuple):\n    first: Tensor\n    second: Tensor\n",
}


def draw(seed: int, number: int) -> str:
    """Return the source of a model by its number: the same for the same seed, everywhere."""
    for attempt in range(20):
        chance = random.Random(f"{seed} {number} {attempt}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(chance.randrange(2**31))
            try:
                return _drawn(chance)
            except Unfit:
                continue
    raise AssertionError(f"model {number} of seed {seed}: nothing fits")


def _drawn(chance: random.Random) -> str:
    shared, given = Shared(chance), Input(chance)
    x = eval(given.text, shared.names)
    s = Scope(shared, x.float() if given.tokens else x.requires_grad_(), x=x)
    if given.tokens:
        s.attempt(lambda s: f"h = {s.make('embedding', f'nn.Embedding(9, {s.size()})')}(x)")
    else:
        s.lines.append("h = x")
    arguments, values = ["x"], [given.text]
    if chance.random() < 0.15:
        arguments.append("scale=None")
        s.attempt(lambda s: "if scale is not None:\n    h = h * scale" if s.values.setdefault("scale", 2.0) else None)
        values += chance.choice(([], ["scale=2.0"], ["scale=torch.tensor(0.5)"]))
    if chance.random() < 0.08:
        arguments.append("deep=True")
        s.values["deep"] = True
        s.attempt(lambda s: f"if deep:\n    h = {s.layer('linear', f'nn.Linear({s.last}, {s.last})')}(h)")
        values += chance.choice(([], ["deep=False"]))
    draw_lines(s, chance.choice((1, 2, 3, 4, 5, 6, 8)))
    if not any(word in line for line in s.lines for word in ("self.", "@", "torch.", "F.")):
        s.attempt(s.one(list(MULTIPLY)))
    result = s.one(OUTPUTS)
    for name, text in CLASSES.items():
        if name in result:
            shared.define(text)
    return _written(s, ", ".join(arguments), result, values)


def _written(s: Scope, arguments: str, result: str, values: list[str]) -> str:
    chance = s.chance
    text = "\n".join((*shared_text(s), s.text("Model", arguments, result)))
    layers = [
        (name, type(part).__name__)
        for name, part in s.live.named_modules()
        if isinstance(part, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention, nn.RNNBase))
        and hasattr(nn, type(part).__name__)
        and all(word.isdigit() or f"self.{word} = " in text for word in name.split(".")[:2])
    ]
    exclude, overrides = drawn_patterns(chance, layers)
    positional = "".join(f"{value}, " for value in values if "=" not in value.partition("(")[0])
    named = ", ".join(
        f"{value.partition('=')[0]!r}: {value.partition('=')[2]}" for value in values if "=" in value.partition("(")[0]
    )
    options = [f"recipe={drawn_recipe(chance)}"]
    options += [f"exclude={exclude}"] * (exclude != "()") + [f"overrides={overrides}"] * (overrides != "None")
    schedule = drawn_schedule(chance)
    parts = "".join(f"\n\n{text}" for text in shared_text(s))
    return (
        f"{HEADER}{IMPORTS}{parts}\n\n{s.text('Model', arguments, result)}\n\n"
        f"def inputs():\n    return ({positional}), {{{named}}}\n\n\n"
        f"def schedule():\n    return {schedule}\n\n\n"
        f"def options():\n    return dict({', '.join(options)})\n"
    )


def shared_text(s: Scope) -> list[str]:
    """Return the classes and functions above the model."""
    return s.shared.preamble


def plain_input(value: Tensor) -> Tensor:
    """Return an input that asks for a gradient, laid out in memory as it was made."""
    return value.requires_grad_() if value.is_floating_point() else value
