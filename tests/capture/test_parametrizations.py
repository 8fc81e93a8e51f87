"""Parametrizations make weights: their own products stay as they are, are listed, and every frontend says the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as hooked_spectral_norm

import cpt_fx
from cpt_fx.passes.annotate import MAKES_A_WEIGHT
from cpt_fx.recipes import Recipe, Rule, default
from cpt_fx.schedules import Static
from tests.operators.test_product_weights import by_hand
from tests.training import check_same, train_step


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


class Made(nn.Module):
    """A weight made by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, weight: Tensor) -> Any:
        return self.layer(weight)


class Rotated(nn.Module):
    """A product with what is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.randn(4, 4))

    def forward(self, weight: Tensor) -> Any:
        return torch.matmul(weight, self.by)  # type: ignore[arg-type]


class Branching(nn.Module):
    """Asks for a value, which torch.fx cannot follow."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ weight if weight.sum() > -1e9 else weight


class Numbers(nn.Module):
    """Makes a number of one, where a stand-in for a tensor raises errors of Python's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight @ weight if float(weight.detach().sum()) > -1e9 else weight


def by(kind: Callable[[], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    return lambda layer: parametrize.register_parametrization(layer, "weight", kind())


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "low rank": (by(LowRank), "1.parametrizations.weight.0: LowRank"),
    "a layer": (by(Made), "1.parametrizations.weight.0: Made"),
    "a buffer": (by(Rotated), "1.parametrizations.weight.0: Rotated"),
    "spectral norm": (parametrizations.spectral_norm, "1.parametrizations.weight.0: _SpectralNorm"),
    "spectral norm, hooked": (hooked_spectral_norm, "1: SpectralNorm"),
    "matrix exponential": (parametrizations.orthogonal, "1.parametrizations.weight.0: _Orthogonal"),
    "cayley": (lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
               "1.parametrizations.weight.0: _Orthogonal"),
    "weight norm, which multiplies nothing": (parametrizations.weight_norm, ""),
}  # fmt: skip


class Used(nn.Module):
    """A weight with a parametrization that is read by the code of the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList([nn.Linear(4, 4), layer])

    def forward(self, x: Tensor) -> Any:
        return self.inside[0](x) @ self.inside[1].weight.t()  # type: ignore[operator]


def model(name: str, *, used: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = WAYS[name][0](nn.Linear(4, 4))
    return Used(layer) if used else nn.Sequential(nn.Linear(4, 4), layer)


def without_noise() -> Recipe:
    recipe = default()
    for family in ("linear", "matmul"):
        recipe = recipe.with_rule(family, gradient=None)
    return recipe


def listed(result: nn.Module) -> list[str]:
    left = cpt_fx.inspect(result).uncovered
    assert all(item.by_choice for item in left)
    return [str(item).removesuffix(f": {MAKES_A_WEIGHT}") for item in left]


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_every_frontend_gives_one_answer(name: str, used: bool) -> None:
    if used and "hooked" in name:
        return  # its weight is made where the layer is called
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    steps, answers = [], []
    for capture in ("auto", "dynamo"):
        result = cpt_fx.transform(model(name, used=used), Static(4), recipe=without_noise(), capture=capture)
        steps.append([train_step(result, (x,), {}) for _ in range(2)])
        quantizers = sorted((item.layer, item.operand, item.role) for item in cpt_fx.inspect(result).quantizers)
        assert not [layer for layer, _, _ in quantizers if "parametrizations" in layer]
        answers.append((quantizers, listed(result)))
        prefix = "inside." if used else ""
        assert listed(result) == [prefix + WAYS[name][1]] * bool(WAYS[name][1])
        assert ("other" if used else "weight", "weight") in {(operand, role) for _, operand, role in quantizers}
    assert answers[0] == answers[1]
    for ours, theirs in zip(*steps, strict=True):
        check_same(ours, theirs)


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_the_weight_that_is_made_is_quantized_as_a_whole(capture: str) -> None:
    plain: Any = model("low rank", used=False)
    recipe = Recipe(name="weights", linear=Rule(weight=default().rule("linear").weight))  # type: ignore[union-attr]
    result = cpt_fx.transform(plain, Static(3), recipe=recipe, capture=capture)
    x = torch.randn(3, 4)
    first = F.linear(x, by_hand(plain[0].weight, 1), plain[0].bias)
    assert torch.allclose(result(x), F.linear(first, by_hand(plain[1].weight, 1), plain[1].bias), atol=1e-6)


@pytest.mark.parametrize("capture", ["dynamo", "auto"])
@pytest.mark.parametrize("kind", [Branching, Numbers])
def test_code_that_cannot_be_traced_is_run_by_dynamo(kind: type[nn.Module], capture: str) -> None:
    torch.manual_seed(0)
    layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", kind())
    result = cpt_fx.transform(nn.Sequential(layer), Static(4), capture=capture)
    result(torch.randn(3, 4))
    assert listed(result) == [f"0.parametrizations.weight.0: {kind.__name__}"]


def test_a_product_of_parameters_in_the_code_of_the_model_is_one_of_the_model() -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.a @ self.b)

    result = cpt_fx.transform(Inline(), Static(4), strict=True)
    assert {item.role for item in cpt_fx.inspect(result).quantizers if item.op == "matmul"} >= {"weight"}
    assert not cpt_fx.inspect(result).uncovered
