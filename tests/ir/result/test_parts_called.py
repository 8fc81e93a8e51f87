"""A module of the result that is called by itself runs its quantizers or raises; never plain."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ir.result.models import (
    QUIET,
    Chain,
    Images,
    Net,
    batch,
    check_ran,
    close,
    far,
    made,
    quantized_or_refused,
    runs,
    ways,
)

pytestmark = QUIET

PARTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "backbone": lambda m, x: m.backbone(x),
    "first layer": lambda m, x: m.backbone[0](x),
    "forward of a layer": lambda m, x: m.backbone[0].forward(x),
    "class's forward of a layer": lambda m, x: type(m.backbone[0]).forward(m.backbone[0], x),
    "by name": lambda m, x: m.get_submodule("backbone.0")(x),
    "slice": lambda m, x: m.backbone[:3](x),
    "loop over layers": lambda m, x: m.backbone[2](m.backbone[1](m.backbone[0](x))),
    "children without the head": lambda m, x: nn.Sequential(*list(m.children())[:-1])(x),
    "children without two": lambda m, x: nn.Sequential(*list(m.children())[:-2])(x),
    "all children": lambda m, x: nn.Sequential(*m.children())(x),
    "children by name": lambda m, x: nn.Sequential(dict(m.named_children())["backbone"], nn.Tanh())(x),
    "all layers of modules()": lambda m, x: next(n for n in m.modules() if isinstance(n, nn.Linear))(x),
    "in another model": lambda m, x: nn.ModuleDict({"old": m.backbone, "new": nn.Tanh()})["old"](x),
    "in a list": lambda m, x: [m.backbone][0](x),
    "copied": lambda m, x: copy.deepcopy(m.backbone)(x),
    "copied layer": lambda m, x: copy.deepcopy(m.backbone[0])(x),
    "without a layer": lambda m, x: m.mix(F.pad(x, (0, 2))),
    "under functional_call": lambda m, x: torch.func.functional_call(
        m.backbone, {name: 1 * value for name, value in m.backbone.named_parameters()}, (x,)
    ),
    "checkpointed": lambda m, x: torch.utils.checkpoint.checkpoint(m.backbone, x, use_reentrant=False),
}


@ways
@pytest.mark.parametrize("name", PARTS)
def test_a_part_called_by_itself(name: str, way: str) -> None:
    part, x = PARTS[name], batch()
    model = Chain()
    plain = part(model, x)
    for called in (True, False):
        result = made(Chain(), way)
        if called:
            result(x)
        quantized_or_refused(lambda: part(result, x), plain)  # noqa: B023


CUT: dict[str, Callable[[Any], nn.Module]] = {
    "backbone": lambda m: m.backbone,
    "first layer": lambda m: m.backbone[0],
    "slice": lambda m: m.backbone[:3],
    "loop over layers": lambda m: m.backbone[:3],
    "children without the head": lambda m: nn.Sequential(m.backbone, m.mix),
    "children without two": lambda m: nn.Sequential(m.backbone),
}


@ways
@pytest.mark.parametrize("name", CUT)
def test_a_part_computes_what_it_computes_when_it_is_transformed_alone(name: str, way: str) -> None:
    part, x = PARTS[name], batch()
    plain = part(Chain(), x)
    expected = made(CUT[name](Chain()), "dynamo")(x)
    result, exact = made(Chain(), way), made(Chain(), way, 32)
    quantized_or_refused(lambda: part(result, x), plain, expected)
    try:
        output = part(exact, x)
    except Exception:
        return
    assert torch.equal(output, plain)


@ways
def test_feature_extraction(way: str) -> None:
    """`nn.Sequential(*list(t.children())[:-1])` is the network without its head, in evaluation too, and quantized."""
    result, model = made(Chain(), way), Chain()
    for seed in range(3):
        result(batch(seed))
    features = nn.Sequential(*list(result.children())[:-1])
    assert [type(layer).__name__ for layer in features] == ["Sequential", "Mixer"]
    plain = nn.Sequential(*list(model.children())[:-1])
    assert plain(batch()).shape == (5, 8)
    quantized_or_refused(lambda: features(batch()), plain(batch()))
    features.eval()
    with torch.no_grad():
        quantized_or_refused(lambda: features(batch()), plain(batch()))


@ways
def test_a_part_in_a_new_model_that_is_trained(way: str) -> None:
    """Transfer learning: the backbone of a result under a plain head."""
    result = made(Chain(), way)
    result(batch())

    class New(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = result.backbone, nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.body(x))
            return y

    new = New()
    torch.manual_seed(2)
    plain = F.linear(Chain().backbone(batch()), new.head.weight, new.head.bias)
    before = runs(result)
    try:
        output = new(batch())
    except Exception as error:
        assert "cpt_fx" in str(error) or "transform" in str(error)
        return
    assert far(output, plain)
    check_ran(result, before, "backbone.0", "backbone.2")
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in new.parameters())
    assert far(new.eval()(batch()), plain)


@ways
def test_convolutions_and_a_part_called_in_evaluation(way: str) -> None:
    x = torch.randn(4, 3, 8, 8)
    result, model = made(Images(), way), Images()
    for _ in range(3):
        result(x)
        model(x)
    for training in (True, False):
        result.train(training)
        model.train(training)
        plain = model.conv(x)
        quantized_or_refused(lambda: result.conv(x), plain)
        h = torch.randn(4, 8, 8, 8)
        quantized_or_refused(lambda: result.body(h), model.body(h))  # noqa: B023


@ways
def test_layers_called_by_a_users_function(way: str) -> None:
    """A forward pass written anew outside of the class, as in attribution and distillation."""

    def own(m: Any, x: Tensor) -> Tensor:
        h = m.act(m.stem(x))
        for block in m.blocks:
            h = h + block.two(torch.tanh(block.one(h)))
        y: Tensor = m.fc(h)
        return y

    result, model = made(Net(), way), Net()
    result(batch())
    quantized_or_refused(lambda: own(result, batch()), own(model, batch()))


@ways
def test_a_part_follows_the_schedule_of_the_whole(way: str) -> None:
    """Under `Static(32)` parts are plain to the bit, and with a width that changes they change."""
    from cpt_fx.schedules import Piecewise

    plan = Piecewise({0: 2, 1: 32})
    result, model = made(Chain(), way, schedule=plan), Chain()
    result(batch())
    quantized_or_refused(lambda: result.backbone(batch()), model.backbone(batch()))
    plan.step()
    try:
        output = result.backbone(batch())
    except Exception:
        return
    assert torch.equal(output, model.backbone(batch()))


@ways
def test_a_part_compiled_by_itself(way: str) -> None:
    result = made(Chain(), way)
    result(batch())
    part: Any = torch.compile(result.backbone, backend="eager")
    quantized_or_refused(lambda: part(batch()), Chain().backbone(batch()))


@ways
def test_a_part_transformed_stays_close_to_itself(way: str) -> None:
    """What a part returns by itself is what it hands on within the whole."""
    result = made(Chain(), way)
    caught: list[Tensor] = []
    result.backbone.register_forward_hook(lambda module, args, output: caught.append(output.detach().clone()))
    result(batch())
    assert len(caught) == 1 and far(caught[0], Chain().backbone(batch()))
    try:
        output = result.backbone(batch())
    except Exception:
        return
    assert close(output, caught[0])
