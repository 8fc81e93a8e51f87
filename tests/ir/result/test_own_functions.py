"""Functions that a user sets on one object in the place of a method, and bound methods that are kept somewhere."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from tests.capture.captures import CAPTURES
from tests.ir.result.models import QUIET, Chain, batch, close, equal, far, made, ways

pytestmark = QUIET


class Fast(Chain):
    """Picks its forward when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.fast  # type: ignore[method-assign]

    def fast(self, x: Tensor) -> Tensor:
        y: Tensor = 3 * self.fc(self.backbone(x))
        return y


class FastLayer(Chain):
    """The same for a layer."""

    def __init__(self) -> None:
        super().__init__()
        plain = self.fc.forward
        self.fc.forward = lambda input: 3 * plain(input)  # type: ignore[method-assign]


@pytest.mark.parametrize("make", [Fast, FastLayer])
@pytest.mark.parametrize("way", sorted({*CAPTURES, "auto"}))
def test_a_forward_that_an_object_had_before(make: type[nn.Module], way: str) -> None:
    if way == "symbolic":
        with pytest.raises(cpt_fx.TransformError, match="given a forward of its own"):
            made(make(), way)
        return
    assert equal(made(make(), way, 32)(batch()), make()(batch()))
    assert far(made(make(), way)(batch()), make()(batch()))


def _function(module: Any) -> Any:
    return lambda x: F.linear(torch.tanh(x), module.weight)


def _method(module: Any) -> Any:
    return MethodType(lambda self, x: F.linear(torch.tanh(x), self.weight), module)


def _partial(module: Any) -> Any:
    return functools.partial(lambda weight, x: F.linear(torch.tanh(x), weight), module.weight)


@ways
@pytest.mark.parametrize("make", [_function, _method, _partial])
def test_a_forward_that_multiplies_set_on_a_layer(make: Any, way: str) -> None:
    model, result, exact = Chain(), made(Chain(), way), made(Chain(), way, 32)
    features = batch()[:, :1] * torch.linspace(-1, 1, 8)
    result(batch())
    for one in (model, result, exact):
        one.fc.forward = make(one.fc)  # type: ignore[method-assign]
    assert equal(exact(batch()), model(batch())) and equal(exact.fc(features), model.fc(features))
    assert far(result.fc(features), model.fc(features))
    changed: Any = Chain()
    changed.fc.forward = make(changed.fc)
    assert close(result(batch()), made(changed, "dynamo")(batch()))
    assert equal(cpt_fx.revert(result)(batch()), model(batch()))


@ways
def test_a_method_replaced_on_an_object(way: str) -> None:
    class Named(Chain):
        def features(self, x: Tensor) -> Tensor:
            y: Tensor = self.backbone(x)
            return y

    result = made(Named(), way)
    result.features = MethodType(lambda self, x: x @ self.backbone[0].weight.t(), result)
    assert far(result.features(batch()), batch() @ result.backbone[0].weight.t())
    assert copy.deepcopy(result).features.__self__ is not result


@ways
def test_bound_methods_are_kept_as_they_are_by_hooks_around_forward(way: str) -> None:
    """A forward is put aside, and called by another that is set in its place, as libraries for offloading do."""
    result = made(Chain(), way)
    before = result(batch())
    for name in ("fc", ""):
        module: Any = result.get_submodule(name)
        module.kept = module.forward
        module.forward = lambda x, module=module: module.kept(x) * 2
    assert close(result(batch()), 4 * before)
    model = Chain()
    assert equal(cpt_fx.revert(result)(batch()), 4 * model(batch()))
    for name in ("fc", ""):
        module = result.get_submodule(name)
        module.forward = module.kept
    assert equal(result(batch()), before)
    assert equal(cpt_fx.revert(result)(batch()), model(batch()))


@ways
def test_a_class_that_gets_another_method(way: str) -> None:
    class Encoding(Chain):
        def encode(self, x: Tensor) -> Tensor:
            y: Tensor = self.backbone(x)
            return y

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(self.encode(x))
            return y

    first = made(Encoding(), way, 32)
    Encoding.encode = lambda self, x: torch.tanh(self.backbone(x))  # type: ignore[method-assign]
    model = Encoding()
    assert equal(made(Encoding(), way, 32)(batch()), model(batch()))
    assert equal(first.encode(batch()), model.encode(batch()))


@ways
def test_modules_as_keys(way: str) -> None:
    class Keyed(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.scales = {self.fc: 2.0}

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(self.backbone(x)) * self.scales[self.fc]
            return y

    assert equal(made(Keyed(), way, 32)(batch()), Keyed()(batch()))
