"""Parts of a model that are computed again in the backward pass give what they give when they are not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import cpt_fx
from cpt_fx.recipes import Recipe, default
from cpt_fx.schedules import Static
from tests.training import check_same, train_step


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


Again = Callable[..., Any]
"""Calls a function: through a checkpoint, or as it is."""
PLACES = ("nowhere", "before", "inside", "after")
WITHOUT_GRADIENT = default()
for _family in ("linear", "matmul", "conv"):
    WITHOUT_GRADIENT = WITHOUT_GRADIENT.with_rule(_family, gradient=None)


def stop(place: str, here: str) -> None:
    if place == here:
        torch._dynamo.graph_break()


class Part(nn.Module):
    """Products in many forms: layers, functions, with and without weights, and a draw of random numbers."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.one, self.two, self.conv = nn.Linear(6, 6), nn.Linear(6, 6), nn.Conv1d(1, 1, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.place = place

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = F.dropout(torch.tanh(self.one(x)) @ self.weight.t(), 0.2, self.training)
        stop(self.place, "inside")
        y = torch.einsum("bi,oi->bo", self.two(y), self.weight) * scale
        z: Tensor = self.conv(y[:, None])[:, 0] @ (x.t() @ y)
        return z


def one(model: Any, x: Tensor, again: Again) -> Any:
    return again(model.part, x)


def twice(model: Any, x: Tensor, again: Again) -> Any:
    return again(model.part, again(model.part, x).tanh())


def nested(model: Any, x: Tensor, again: Again) -> Any:
    def outer(y: Tensor) -> Any:
        return model.head(again(model.part, model.head(y)))

    return again(outer, x)


def of_a_function(model: Any, x: Tensor, again: Again) -> Any:
    return again(lambda y, scale: model.part(y * 2, scale).tanh() @ y.t() @ y, x, 0.5)


def in_a_row(model: Any, x: Tensor, again: Again) -> Any:
    parts = [model.head, nn.Tanh(), model.part, model.head]
    if isinstance(again, partial):
        return checkpoint_sequential(parts, 2, x, use_reentrant=again.keywords["use_reentrant"])
    return nn.Sequential(*parts)(x)


def not_captured(model: Any, x: Tensor, again: Again) -> Any:
    return torch._dynamo.disable(again)(model.part, x)


WAYS = (one, twice, nested, of_a_function, in_a_row, not_captured)


class Model(nn.Module):
    def __init__(self, way: Callable[..., Any], place: str, again: Again) -> None:
        super().__init__()
        self.part, self.head = Part(place), nn.Linear(6, 6)
        self.way, self.place, self.again = way, place, again

    def forward(self, x: Tensor) -> Any:
        x = self.head(x)
        stop(self.place, "before")
        y = self.way(self, x, self.again)
        stop(self.place, "after")
        return self.head(torch.tanh(y)) @ x.t()


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def quantized(way: Callable[..., Any], place: str, again: Again, recipe: Recipe, capture: str) -> nn.Module:
    torch.manual_seed(0)
    return cpt_fx.transform(Model(way, place, again).double(), Static(3), recipe=recipe, capture=capture)


def close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal but for the order in which gradients of a tensor add up, which checkpoints of plain torch change too."""
    if ours is None or theirs is None:
        return ours is theirs
    return bool((ours - theirs).norm() <= 1e-10 * theirs.norm())


def learned(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if "_range_" in name}


def check(way: Callable[..., Any], place: str, reentrant: bool, recipe: Recipe, capture: str = "dynamo") -> None:
    """Two steps with a checkpoint, and the same two without: the same gradients, and the same ranges."""
    again = partial(checkpoint, use_reentrant=reentrant)
    result = quantized(way, place, again, recipe, capture)
    expected = quantized(way, place, plainly, recipe, capture)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for seed in range(2):
        check_same(train_step(result, (x,), {}, seed=seed), train_step(expected, (x,), {}, seed=seed), close)
    ours, theirs = learned(result), learned(expected)
    assert ours.keys() == theirs.keys(), f"ranges that only one has: {ours.keys() ^ theirs.keys()}"
    assert all(close(value, theirs[name]) for name, value in ours.items()), "taught twice"


EVERY = [(way, place, reentrant) for way in WAYS for place in PLACES for reentrant in (False, True)]
SOME = [(one, "before", False), (twice, "nowhere", True), (nested, "inside", False), (of_a_function, "inside", False),
        (in_a_row, "after", True), (not_captured, "nowhere", False)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint inside another
@pytest.mark.parametrize("way, place, reentrant", EVERY if "CPT_FX_LONG_TESTS" in os.environ else SOME)
def test_recomputation_gives_what_the_forward_pass_gave(way: Callable[..., Any], place: str, reentrant: bool) -> None:
    check(way, place, reentrant, WITHOUT_GRADIENT)


@pytest.mark.parametrize("way", [one, nested], ids=lambda way: way.__name__)
def test_also_with_quantized_gradients(way: Callable[..., Any]) -> None:
    check(way, "before", False, cpt_fx.recipes.paper(gradient_rounding="nearest"))


def asks_the_mode(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.fc(x)
    return y * 2 if torch.is_grad_enabled() else y


def asks_the_tensor(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.fc(x)
    return y * 2 if y.requires_grad else y


class Reentrant(nn.Module):
    def __init__(self, code: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head, self.code = nn.Linear(3, 3), nn.Linear(3, 3), code

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(checkpoint(self.code, self, x, use_reentrant=True))
        return y


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # there, torch has no gradients either
@pytest.mark.parametrize("code", [asks_the_mode, asks_the_tensor])
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_reentrant_checkpoint_runs_without_gradients_first(code: Callable[..., Tensor], needs_gradient: bool) -> None:
    x = torch.randn(2, 3, requires_grad=needs_gradient)
    result, plain = cpt_fx.transform(Reentrant(code), Static(32), capture="dynamo"), Reentrant(code)
    check_same(train_step(result, (x,), {}), train_step(plain, (x,), {}))
    notes = " ".join(cpt_fx.inspect(result).capture.notes)
    assert "use_reentrant=True runs its code without gradients first" in notes


def in_two_graphs(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.fc(x)
    torch._dynamo.graph_break()
    y = y + model.aside(y)
    return y


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_width_that_only_a_part_inside_follows(reentrant: bool) -> None:
    """The widths of a pass hold for its recomputation; a graph that is captured inside of it brings one of its own."""

    class Inside(Reentrant):
        def __init__(self) -> None:
            super().__init__(in_two_graphs)
            self.aside = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(checkpoint(self.code, self, x, use_reentrant=reentrant))
            return y

    x = torch.randn(2, 3, requires_grad=True)
    result = cpt_fx.transform(Inside(), Static(8), capture="dynamo", overrides={"aside": {"bits": 6}})
    for _ in range(2):
        train_step(result, (x,), {})
    found = {quantizer.layers[0]: quantizer.levels.keys() for quantizer in cpt_fx.inspect(result).quantizers}
    assert {layer: set(bits) for layer, bits in found.items()} == {"fc": {8}, "aside": {6}, "head": {8}}


class Readers(nn.Module):
    """Reads attributes of two tensors that a checkpoint is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.layer = nn.ConvTranspose1d(8, 4, 3), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Any:
        def both(a: Tensor, b: Tensor) -> Tensor:
            product: Tensor = self.layer(a) @ a.mT + self.layer(b) @ b.mT
            return product

        return checkpoint(both, self.up(x), self.up(x * 2), use_reentrant=False)


def test_attributes_are_read_inside_of_a_checkpoint() -> None:
    plain, x = Readers(), torch.randn(1, 8, 8)
    result = cpt_fx.transform(plain, Static(32), capture="dynamo", example_inputs=(x,))
    found = []
    for model in (plain, result):
        given = x.clone().requires_grad_()
        output = model(given)
        output.cos().sum().backward()
        found.append([output, given.grad, *(parameter.grad for parameter in model.parameters())])
        for parameter in model.parameters():
            parameter.grad = None
    assert all(one is not None and torch.equal(one, other) for one, other in zip(*found, strict=True))
    around = [graph.code for graph in cpt_fx.graphs(result) if "checkpointed" in graph.code]
    assert around and not any(".mT" in code for code in around)
