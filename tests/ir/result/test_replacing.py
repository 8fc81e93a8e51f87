"""Layers that are put in, replaced or taken out: they are quantized, start unlearned, and `revert` keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from tests.ir.result.models import (
    QUIET,
    Block,
    Chain,
    Images,
    Net,
    batch,
    check_ran,
    close,
    equal,
    far,
    learned,
    made,
    runs,
    ways,
)

pytestmark = QUIET


@ways
def test_a_new_head_is_quantized_and_trained(way: str) -> None:
    result = made(Chain(), way)
    result(batch())
    result.fc = nn.Linear(8, 7, bias=False)
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    assert [name for name, _ in result.named_parameters()][-1] == "fc.weight"
    before, weight = runs(result), result.fc.weight.detach().clone()
    result(batch()).square().sum().backward()
    check_ran(result, before, "backbone.0", "fc")
    optimizer.step()
    assert not torch.equal(result.fc.weight, weight)
    assert {view.role for view in cpt_fx.inspect(result).quantizers if view.layer == "fc"} >= {"weight", "activation"}
    assert isinstance(result.fc, nn.Linear) and result.fc.out_features == 7


@ways
def test_what_is_put_in_is_what_is_found(way: str) -> None:
    """`t.fc is head`: the user goes on working with the object that was put in."""
    result = made(Chain(), way)
    head = nn.Linear(8, 3)
    result.fc = head
    assert result.fc is head or result.fc.weight is head.weight
    result(batch())
    assert result.fc.weight is head.weight
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(1)
    assert torch.equal(result(batch()), torch.ones(5, 3))


@ways
def test_a_head_of_several_layers(way: str) -> None:
    result = made(Images(), way)
    x = torch.randn(4, 3, 8, 8)
    result(x)
    result.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 3))
    before = runs(result)
    assert result(x).shape == (4, 3)
    check_ran(result, before, "conv", "body.0", "fc.0", "fc.3")


@ways
def test_identity_for_features(way: str) -> None:
    """The other way to get features: the head made an identity."""
    model: Any = Chain()
    result = made(Chain(), way)
    model.fc = nn.Identity()
    result.fc = nn.Identity()
    assert far(result(batch()), model(batch()))
    assert result(batch()).shape == (5, 8)
    assert not [view for view in cpt_fx.inspect(result).quantizers if view.layer == "fc" and view.times_run]
    exact = made(Chain(), way, 32)
    exact(batch())
    exact.fc = nn.Identity()
    assert equal(exact(batch()), model(batch()))


@ways
def test_a_replaced_layer_starts_unlearned(way: str) -> None:
    """And the others keep what they learned."""
    result = made(Chain(), way, 8)
    for seed in range(3):
        result(100 * batch(seed))
    before = learned(result)
    assert "fc.input" in before
    result.fc = nn.Linear(8, 4)
    result.eval()
    now = learned(result)
    assert {key: value for key, value in now.items() if not key.startswith("fc.")} == {
        key: value for key, value in before.items() if not key.startswith("fc.")
    }
    assert now.get("fc.input") != before["fc.input"]
    result.train()
    result(0.01 * batch())
    low, high = learned(result)["fc.input"]
    assert max(abs(low), abs(high)) < 1


@ways
def test_a_layer_in_a_container_replaced(way: str) -> None:
    result = made(Chain(), way)
    result(batch())
    result.backbone[0] = nn.Linear(6, 8, bias=False)
    result.backbone[1] = nn.Tanh()
    model = cpt_fx.revert(result)
    before = runs(result)
    assert far(result(batch()), model(batch()))
    check_ran(result, before, "backbone.0", "backbone.2", "fc")
    assert model.backbone[0].bias is None  # type: ignore[index, union-attr]


@ways
def test_lists_and_dicts_of_modules(way: str) -> None:
    result = made(Net(), way)
    result(batch())
    result.blocks.append(Block(8))
    result.blocks.insert(1, Block(8))
    result.blocks.extend([Block(8)])
    result.heads["late"] = nn.Linear(8, 2)
    result.heads.update({"later": nn.Linear(8, 5)})
    before = runs(result)
    outputs = result(batch())
    assert [output.shape[1] for output in outputs] == [4, 3, 2, 5]
    check_ran(result, before, *(f"blocks.{n}.one" for n in range(5)), "heads.late", "heads.later", "heads.a")
    assert far(outputs, cpt_fx.revert(result)(batch()))
    del result.blocks[2:]
    del result.heads["a"]
    assert [output.shape[1] for output in result(batch())] == [4, 2, 5]
    assert far(result(batch()), cpt_fx.revert(result)(batch()))


@ways
def test_a_deleted_layer_is_missed(way: str) -> None:
    """As on the plain model: the code that reads it fails, it does not go on with the old one."""
    result = made(Chain(), way)
    result(batch())
    del result.fc
    with pytest.raises(AttributeError, match="fc"):
        result(batch())
    assert "fc.weight" not in result.state_dict() and "fc" not in dict(result.named_children())
    result.fc = nn.Linear(8, 2)
    assert result(batch()).shape == (5, 2)


@ways
def test_a_layer_put_in_while_the_model_evaluates(way: str) -> None:
    result = made(Chain(), way, 8)
    for seed in range(3):
        result(batch(seed))
    result.eval()
    with torch.no_grad():
        result(batch())
    result.fc = nn.Linear(8, 2)
    with torch.no_grad():
        output = result(batch())
    plain = cpt_fx.revert(result)
    assert not torch.equal(output, plain(batch())) and bool(output.isfinite().all())
    assert (flat_error := float((output - plain(batch())).norm() / plain(batch()).norm())) < 0.2, flat_error


class Wrapper(nn.Module):
    """LoRA that calls the layer it wraps."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


class ByFunction(Wrapper):
    """LoRA that multiplies with the weight of the layer it wraps."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.linear(x, self.base.weight, self.base.bias) + self.b(self.a(x))
        return y


def inject(model: nn.Module, wrapper: type[Wrapper]) -> int:
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, wrapper(module))
    return len(found)


@ways
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("wrapper", [Wrapper, ByFunction])
def test_lora(wrapper: type[Wrapper], called: bool, way: str) -> None:
    result = made(Net(), way)
    expected = result(batch()) if called else made(Net(), "dynamo")(batch())
    assert inject(result, wrapper) == 7
    assert close(result(batch()), expected)  # the second factor is zero
    result(batch())[0].sum().backward()
    trained = {name for name, parameter in result.named_parameters() if parameter.grad is not None}
    assert "stem.a.weight" in trained and "stem.base.weight" not in trained
    layers = {view.layer for view in cpt_fx.inspect(result).quantizers if view.times_run}
    assert {"stem.a", "stem.b", "fc.a"} <= layers
    plain = cpt_fx.revert(result)
    assert type(plain.stem) is wrapper and type(plain.stem.base) is nn.Linear


@ways
def test_a_new_root_attribute_does_not_touch_the_given_model(way: str) -> None:
    model = Chain()
    result = made(model, way)
    result.extra = nn.Linear(2, 2)
    result.backbone.append(nn.Tanh())
    result.fc = nn.Identity()
    assert not hasattr(model, "extra") and len(model.backbone) == 4 and isinstance(model.fc, nn.Linear)


@ways
def test_a_layer_of_another_result(way: str) -> None:
    """A part of one transformed model put into another."""
    first, second = made(Chain(), way), made(Chain(), way)
    first(batch())
    first.backbone = second.backbone
    plain = Chain()
    try:
        output = first(batch())
    except cpt_fx.TransformError:
        return
    assert far(output, plain(batch()))


@ways
def test_a_model_changed_again_and_again(way: str) -> None:
    result = made(Chain(), way)
    for size in range(2, 8):
        result.fc = nn.Linear(8, size)
        output = result(batch())
        assert output.shape == (5, size) and far(output, cpt_fx.revert(result)(batch()))


@ways
def test_a_layer_inserted_is_quantized_before_the_next_call_of_the_whole(way: str) -> None:
    result = made(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), way)
    result(batch())
    result.insert(0, nn.Linear(6, 6))
    assert far(result[0](batch()), F.linear(batch(), result[0].weight, result[0].bias))


@ways
def test_a_class_that_gets_another_forward(way: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x)
            return y

    result = made(Scaled(), way, 32)
    before = result(batch())
    Scaled.forward = lambda self, x: self.fc(x) * 5  # type: ignore[method-assign]
    assert equal(result(batch()), before * 5)
