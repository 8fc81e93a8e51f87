"""torch.func, batched gradients, forward mode, gradients inside forward, conjugates: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, stack_module_state, vmap

import cpt_fx
from cpt_fx.errors import TransformError
from cpt_fx.formats import Rounding
from cpt_fx.functional import fake_quantize
from cpt_fx.recipes import Recipe, default, integer
from cpt_fx.schedules import Static

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def nearest(recipe: Recipe, *, gradient: bool = True) -> Recipe:
    for family in ("linear", "matmul"):
        rule: Any = recipe.rule(family)
        chosen = replace(rule.gradient, rounding=Rounding.NEAREST) if gradient else None
        recipe = recipe.with_rule(family, gradient=chosen)
    return recipe


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def learned(
    recipe: Recipe,
    *,
    capture: str = "auto",
    execution: str = "simulated",
    model: nn.Module | None = None,
    bits: int = 4,
) -> nn.Module:
    """Return a transformed model whose ranges have learned, in evaluation."""
    result = cpt_fx.transform(model or net(), Static(bits), recipe=recipe, capture=capture, execution=execution)
    result.train()(X)
    return result.eval()


RECIPES = {"default": nearest(default()), "integer": nearest(integer())}
WAYS = [("default", "simulated"), ("integer", "simulated"), ("integer", "integer")]


@pytest.mark.parametrize("name, execution", WAYS)
def test_vmap_is_a_loop(name: str, execution: str) -> None:
    result = learned(RECIPES[name], execution=execution)
    assert torch.allclose(vmap(result)(X), torch.stack([result(row) for row in X]), atol=1e-6)
    vmap(result)(X).square().sum().backward()
    ours = [parameter.grad for parameter in result.parameters()]
    result.zero_grad()
    torch.stack([result(row) for row in X]).square().sum().backward()
    for mine, parameter in zip(ours, result.parameters(), strict=True):
        assert mine is not None and parameter.grad is not None
        assert torch.allclose(mine, parameter.grad, atol=1e-5)


def by_rows(result: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian by one backward pass for each output."""
    x = x.clone().requires_grad_()
    output = result(x)
    rows = [torch.autograd.grad(output, x, row, retain_graph=True)[0] for row in torch.eye(output.numel())]
    return torch.stack(rows)


JACOBIANS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jacrev": lambda m, x: jacrev(m)(x),
    "jacobian": lambda m, x: jacobian(m, x),
    "vectorized": lambda m, x: jacobian(m, x, vectorize=True),
    "grads batched": lambda m, x: torch.autograd.grad(
        m(y := x.clone().requires_grad_()), y, torch.eye(3), is_grads_batched=True
    )[0],
    "vmap of jacrev": lambda m, x: vmap(jacrev(m))(torch.stack([x, x]))[1],
    "vmap of grad": lambda m, x: torch.stack(
        [vmap(grad(lambda row, i=i: m(row)[i]))(torch.stack([x, x]))[1] for i in range(3)]
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("how", JACOBIANS)
@pytest.mark.parametrize("name, execution", WAYS)
def test_jacobians_are_rows_of_backward_passes(name: str, execution: str, how: str, training: bool) -> None:
    result = learned(RECIPES[name], execution=execution).train(training)
    if training and name == "default" and "vmap of" in how:
        with pytest.raises(RuntimeError, match="running range learns in training, and under vmap"):
            JACOBIANS[how](result, X[0])
        return
    expected = by_rows(result, X[0])
    assert torch.allclose(JACOBIANS[how](result, X[0]), expected, atol=1e-6)
    exact = learned(nearest(integer(), gradient=False), bits=32)
    assert not torch.allclose(expected, by_rows(exact, X[0]), atol=1e-3)


@pytest.mark.parametrize("how", ["jacobian", "vectorized", "grads batched"])
def test_batched_gradients_of_what_dynamo_captures(how: str) -> None:
    result = learned(RECIPES["default"], capture="dynamo")
    assert torch.allclose(JACOBIANS[how](result, X[0]), by_rows(result, X[0]), atol=1e-6)


@pytest.mark.parametrize("how", [*JACOBIANS, "hessian"])
def test_noise_may_be_drawn_anywhere(how: str) -> None:
    result = learned(default())
    made = hessian(lambda x: result(x).sum())(X[0]) if how == "hessian" else JACOBIANS[how](result, X[0])
    assert made.isfinite().all()


FORWARD: dict[str, Callable[[Any, Tensor], Any]] = {
    "jacfwd": lambda m, x: jacfwd(m)(x),
    "vectorized": lambda m, x: jacobian(m, x, vectorize=True, strategy="forward-mode"),
    "dual numbers": lambda m, x: torch.stack([_slope(m, x, row) for row in torch.eye(4)], 1),
}


def _slope(model: Any, x: Tensor, tangent: Tensor) -> Any:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent
    assert found is not None
    return found


@pytest.mark.parametrize("how", FORWARD)
@pytest.mark.parametrize("name, execution", WAYS)
def test_forward_mode(name: str, execution: str, how: str) -> None:
    """There are no gradients in it that could be quantized."""
    result = learned(nearest(RECIPES[name], gradient=False), execution=execution)
    assert torch.allclose(FORWARD[how](result, X[0]), by_rows(result, X[0]), atol=1e-5)


def test_ranges_learn_under_grad_as_in_a_plain_call() -> None:
    ours, plain = learned(RECIPES["default"]).train(), learned(RECIPES["default"]).train()
    grad(lambda x: ours(x).sum())(3 * X)
    plain(3 * X)
    theirs = dict(plain.named_buffers())
    assert all(torch.allclose(value, theirs[key]) for key, value in ours.named_buffers() if "_range_" in key)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_an_ensemble_is_its_models(name: str, training: bool) -> None:
    models = [cpt_fx.transform(net(seed), Static(4), recipe=RECIPES[name]).train() for seed in (1, 2, 3)]
    for model in models:
        model(X)
        model.train(training)
    parameters, buffers = stack_module_state(models)
    together = vmap(lambda p, b: functional_call(models[0], (p, b), (X,)))(parameters, buffers)
    assert torch.allclose(together, torch.stack([model(X) for model in models]), atol=1e-6)


TOOLS: dict[str, Callable[[nn.Module], Any]] = {
    "vmap": lambda m: vmap(m)(X),
    "jacrev": lambda m: jacrev(m)(X[0]),
    "jacfwd": lambda m: jacfwd(m)(X[0]),
    "grad": lambda m: grad(lambda x: m(x).sum())(X),
    "hessian": lambda m: hessian(lambda x: m(x).sum())(X[0]),
    "functional_call": lambda m: functional_call(m, {key: 2 * value for key, value in m.named_parameters()}, (X,)),
    "functional_call with a bias": lambda m: functional_call(m, {"0.bias": torch.ones(5)}, (X,)),
    "ensemble": lambda m: vmap(lambda p, b: functional_call(m, (p, b), (X,)))(*stack_module_state([m, m])),
}


@pytest.mark.parametrize("how", TOOLS)
def test_what_cannot_follow_dynamo_is_refused_by_name(how: str) -> None:
    with pytest.raises(TransformError, match=r"torch\.func.* cannot follow a transformed model that Dynamo captures"):
        TOOLS[how](learned(RECIPES["default"], capture="dynamo"))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_functional_call_with_parameters(capture: str) -> None:
    result = learned(RECIPES["default"], capture=capture)
    given: dict[str, Tensor] = {key: nn.Parameter(2 * value.detach()) for key, value in result.named_parameters()}
    ours = functional_call(result, given, (X,))
    with torch.no_grad():
        for key, parameter in result.named_parameters():
            parameter.copy_(given[key])
    assert torch.equal(ours, result(X))


class Gram(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return q @ q.mH


class Einsum(nn.Module):
    def forward(self, q: Tensor) -> Any:
        return torch.einsum("ij,kj->ik", q, q.conj())


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, q: Tensor) -> Tensor:
        return q.conj() @ self.weight.conj()


class Imaginary(nn.Module):
    """The imaginary part of a conjugate: real numbers with a sign that is still to come."""

    def forward(self, q: Tensor) -> Tensor:
        return q.conj().imag @ q.real


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("execution", ["simulated", "integer"])
@pytest.mark.parametrize("kind", [Gram, Einsum, Weighed, Imaginary])
def test_conjugates(kind: type[nn.Module], capture: str, execution: str) -> None:
    q = torch.randn(4, 4, dtype=torch.complex64)

    def run(model: nn.Module) -> tuple[Tensor, Tensor | None]:
        given = q.clone().requires_grad_()
        made = model(given)
        (made.real.sum() + (made.imag.sum() if made.is_complex() else 0)).backward()
        return made, given.grad

    def transformed(bits: int) -> nn.Module:
        return cpt_fx.transform(model, Static(bits), recipe=nearest(integer()), capture=capture, execution=execution)

    torch.manual_seed(0)
    model = kind()
    for ours, theirs in zip(run(transformed(32)), run(model), strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    rough, exact = run(transformed(4))[0], model(q)
    assert 0.001 < (rough - exact).norm() / exact.norm() < 0.3
    if kind is Gram:
        parts = fake_quantize(torch.view_as_real(q), 4, scheme="symmetric")
        by_hand = torch.view_as_complex(parts)
        assert torch.allclose(rough, by_hand @ by_hand.mH, atol=1e-5)


class Slope(nn.Module):
    """A gradient inside forward, as in models of energies and in physics-informed nets."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        energy = self.two(torch.tanh(self.one(x))).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return slope * energy


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_gradients_inside_forward(capture: str) -> None:
    found = []
    for execution in ("simulated", "integer"):
        torch.manual_seed(0)
        result = cpt_fx.transform(Slope(), Static(6), recipe=nearest(integer()), capture=capture, execution=execution)
        for _ in range(2):
            result.zero_grad()
            made = result(X)
            made.square().sum().backward()
        products = [item for item in cpt_fx.inspect(result).quantizers if item.role == "weight"]
        assert {item.layer for item in products} == {"one", "two"}, "the backward pass was taken for the model's code"
        found.append([made, *(parameter.grad for parameter in result.parameters())])
    assert not torch.allclose(found[0][0], Slope()(X), rtol=1e-3)
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
