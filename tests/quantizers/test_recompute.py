"""What the backward pass keeps: the tensors that were quantized, not a copy of each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx import native
from cpt_fx.quantizers import recompute as saving
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, QUANTIZE_GRADIENT


class Kept:
    """Counts the bytes that a forward pass saves: each memory once, and for every time it is saved."""

    def __init__(self) -> None:
        self.once: dict[int, int] = {}
        self.each = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.once[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        self.each += tensor.numel() * tensor.element_size()
        return tensor

    def run(self, model: nn.Module, x: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            loss = model(x).square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def convolutional() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers), torch.randn(8, 3, 32, 32)


def linear() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), torch.randn(4, 64, 256)


@pytest.fixture(autouse=True)
def kernels() -> None:
    if native.status() != "used":
        pytest.skip(f"native kernels: {native.status()}")


@pytest.mark.parametrize("build", [convolutional, linear])
@pytest.mark.parametrize("recipe", ["default", "paper", "integer"])
def test_no_more_is_kept_than_by_the_plain_model(build: Callable[[], tuple[nn.Module, Tensor]], recipe: str) -> None:
    model, x = build()
    quantized = cpt_fx.transform(copy.deepcopy(model), cpt_fx.schedules.Static(4), recipe=recipe)
    plain, ours = Kept(), Kept()
    plain.run(model, x)
    with_hooks = ours.run(quantized, x)
    assert sum(ours.once.values()) <= 1.02 * sum(plain.once.values())
    assert ours.each <= 1.02 * plain.each

    # The same gradients without anybody's hooks, and with the copies kept.
    quantized.zero_grad()
    torch.manual_seed(0)
    quantized(x).square().mean().backward()
    without_hooks = [p.grad.clone() for p in quantized.parameters() if p.grad is not None]
    assert all(map(torch.equal, with_hooks, without_hooks))


@pytest.mark.parametrize("build", [convolutional, linear])
def test_the_gradients_of_kept_copies(
    build: Callable[[], tuple[nn.Module, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build()
    quantized = cpt_fx.transform(model, cpt_fx.schedules.Static(4))
    sources = Kept()
    gradients = sources.run(quantized, x)
    monkeypatch.setattr(saving, "_WORTH_IT", 1 << 60)
    copies = Kept()
    assert all(map(torch.equal, gradients, copies.run(quantized, x)))
    assert sum(copies.once.values()) > 1.2 * sum(sources.once.values())


def test_the_width_of_the_forward_pass_counts() -> None:
    """A schedule may have stepped before the backward pass computes again."""
    x, weight = torch.randn(64, 1024, requires_grad=True), torch.randn(8, 1024, requires_grad=True)
    bits = torch.tensor(3)
    result = QUANTIZE_GRADIENT(F.linear(FAKE_QUANTIZE(x, bits), weight), torch.tensor(32))
    expected = FAKE_QUANTIZE(x.detach(), bits)
    bits.fill_(8)
    result.sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones(64, 8).t() @ expected)


def test_a_source_changed_in_place_is_an_error() -> None:
    x, weight = torch.randn(64, 1024), torch.randn(8, 1024, requires_grad=True)
    result = QUANTIZE_GRADIENT(F.linear(FAKE_QUANTIZE(x, torch.tensor(3)), weight), torch.tensor(8))
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*shape \(64, 1024\)"):
        result.sum().backward()


def test_hooks_that_move_tensors_see_sources() -> None:
    """Hooks such as save_on_cpu hand back another tensor: its values are quantized."""
    x, weight = torch.randn(64, 1024), torch.randn(8, 1024, requires_grad=True)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        seen.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = QUANTIZE_GRADIENT(F.linear(FAKE_QUANTIZE(x, torch.tensor(3)), weight), torch.tensor(32))
        outside = weight * 2
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in seen)
    result.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(64, 8).t() @ FAKE_QUANTIZE(x, torch.tensor(3)))
    assert saving._hooks() is None and outside.requires_grad


def test_checkpointing_computes_once_more_and_not_earlier() -> None:
    runs = [0]

    def region(x: Tensor, weight: Tensor) -> Tensor:
        runs[0] += 1
        result: Tensor = QUANTIZE_GRADIENT(F.linear(FAKE_QUANTIZE(x, torch.tensor(3)), weight), torch.tensor(32))
        return result

    x, weight = torch.randn(64, 1024, requires_grad=True), torch.randn(8, 1024, requires_grad=True)
    result = checkpoint(region, x, weight, use_reentrant=False)
    assert runs == [1]
    result.sum().backward()
    assert runs == [2] and weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(64, 8).t() @ FAKE_QUANTIZE(x.detach(), torch.tensor(3)))
