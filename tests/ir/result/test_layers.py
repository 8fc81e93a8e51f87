"""Layers of torch that multiply inside: attention, recurrent ones, encoders with a fast path; as a whole and alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Static
from tests.ir.result.models import QUIET, close, far, made, quantized_or_refused, runs

pytestmark = QUIET
OPEN = ("dynamo", "auto")
"""torch.fx alone calls such layers as a whole, and refuses encoders."""
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))


class Around(nn.Module):
    """One such layer between two of the usual ones, whatever it returns."""

    def __init__(self, layer: nn.Module, calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.layer, self.head = nn.Linear(8, 8), layer, nn.Linear(8, 2)
        self.calls = calls

    def inner(self, h: Tensor) -> Tensor:
        output: Any = self.layer(*(h,) * self.calls)
        y: Tensor = output[0] if isinstance(output, tuple) else output
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(self.before(x)))
        return y


def seeded(make: Callable[[], nn.Module], calls: int = 1) -> Callable[[], Around]:
    def build() -> Around:
        torch.manual_seed(0)
        return Around(make(), calls)

    return build


LAYERS: dict[str, Callable[[], Around]] = {
    "attention": seeded(lambda: nn.MultiheadAttention(8, 2, batch_first=True), 3),
    "encoder layer": seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
    "encoder": seeded(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
    ),
    "decoder layer": seeded(lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2),
    "lstm": seeded(lambda: nn.LSTM(8, 8, batch_first=True)),
    "gru": seeded(lambda: nn.GRU(8, 8, batch_first=True)),
    "bilinear": seeded(lambda: nn.Bilinear(8, 8, 8), 2),
    "convolution": seeded(lambda: nn.Conv1d(5, 5, 3, padding=1)),
}
ways = pytest.mark.parametrize("way", OPEN)
every = pytest.mark.parametrize("name", LAYERS)


@ways
@every
def test_the_tree_stays_and_the_layer_quantizes(name: str, way: str) -> None:
    result, model = made(LAYERS[name](), way), LAYERS[name]()
    kinds = [(path, type(module).__name__) for path, module in model.named_modules()]
    assert [(path, type(module).__name__) for path, module in result.named_modules()] == kinds
    assert isinstance(result.layer, type(model.layer))
    assert [path for path, _ in result.named_parameters()] == [path for path, _ in model.named_parameters()]
    for training in (True, False):
        result.train(training)
        model.train(training)
        for grad in (torch.enable_grad, torch.no_grad):
            with grad():
                assert far(result(X), model(X))
    assert {layer.partition(".")[0] for layer in runs(result)} >= {"before", "layer", "head"}


@pytest.mark.slow
@ways
@every
def test_the_layer_called_by_itself(name: str, way: str) -> None:
    """In training and evaluation, with gradients and without: the fast path of encoders is plain."""
    model = LAYERS[name]()
    for called in (True, False):
        result = made(LAYERS[name](), way)
        if called:
            result(X)
        for training in (True, False):
            result.train(training)
            model.train(training)
            for grad in (torch.enable_grad, torch.no_grad):
                with grad():
                    quantized_or_refused(lambda: Around.inner(result, X), model.inner(X))  # noqa: B023


@pytest.mark.parametrize("exclude", [(), ("layer",)])
@pytest.mark.parametrize("name", ["attention", "lstm", "gru"])
def test_torch_fx_alone_calls_it_as_a_whole(name: str, exclude: tuple[str, ...]) -> None:
    """In full precision, and listed."""

    class Picked(Around):
        def inner(self, h: Tensor) -> Tensor:
            y: Tensor = self.layer(*(h,) * self.calls)[0]
            return y

    def build() -> Around:
        found = LAYERS[name]()
        return Picked(found.layer, found.calls)

    model = build()
    result: Any = cpt_fx.transform(build(), Static(32), capture="symbolic", exclude=exclude)
    for twin in (result, copy.deepcopy(result)):
        for training in (True, False):
            twin.train(training)
            model.train(training)
            assert torch.equal(twin(X), model(X)) and torch.equal(Picked.inner(twin, X), model.inner(X))
        twin(X).sum().backward()
        assert all(parameter.grad is not None for parameter in twin.layer.parameters())
        twin.zero_grad()
    low: Any = cpt_fx.transform(build(), Static(4), capture="symbolic", exclude=exclude)
    assert far(low(X), model(X)) and torch.equal(Picked.inner(low, X), model.inner(X))
    assert [item.layer for item in cpt_fx.inspect(low).uncovered] == ["layer"]


@ways
@every
def test_a_hook_of_the_layer(name: str, way: str) -> None:
    result, model = made(LAYERS[name](), way), LAYERS[name]()
    expected = result(X)
    seen: list[Any] = []
    handle = result.layer.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    assert close(result(X), expected) and far(expected, model(X)) and len(seen) == 1
    handle.remove()
    assert close(result(X), expected) and len(seen) == 1


@ways
@pytest.mark.parametrize("name", ["attention", "lstm", "convolution"])
def test_replaced_copied_and_reverted(name: str, way: str) -> None:
    result = made(LAYERS[name](), way)
    result(X)
    fresh = LAYERS[name]()
    result.layer = fresh.layer
    plain: Any = cpt_fx.revert(result)
    assert far(result(X), plain(X)) and type(plain.layer) is type(LAYERS[name]().layer)
    twin = copy.deepcopy(result)
    assert close(twin(X), result(X))
    result.layer = nn.Identity()
    result.calls = 1
    assert result(X).shape == (3, 5, 2) and close(twin(X), made(plain, "dynamo")(X))
