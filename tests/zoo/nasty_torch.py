"""What torch itself allows and graphs tend to lose: own backward passes, contexts, hooks, parametrizations."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.any_model import add, normal, written_out
from tests.zoo.nasty import layers, one_layer

AUTOGRAD, HOOKS = "nasty autograd", "nasty hooks"


# Autograd


class Sign(torch.autograd.Function):
    """Straight-through sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clamp(-1, 1)


class OwnLinear(torch.autograd.Function):
    """A product with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


@written_out(AUTOGRAD, normal(6), make=one_layer)
def straight_through(self: Any, x: Tensor) -> Any:
    return self.head(Sign.apply(self.layers[0](x)))  # type: ignore[no-untyped-call]


@written_out(AUTOGRAD, normal(6), make=one_layer)
def product_in_a_function(self: Any, x: Tensor) -> Any:
    return self.head(torch.relu(OwnLinear.apply(x, self.layers[0].weight)))  # type: ignore[no-untyped-call]


def _dropped(self: Any, x: Tensor) -> Any:
    return F.dropout(torch.tanh(self.layers[0](x)), 0.4, self.training) + self.layers[1](x)


@written_out(AUTOGRAD, normal(6), make=layers)
def checkpoint_with_dropout(self: Any, x: Tensor) -> Any:
    return self.head(checkpoint(_dropped, self, x, use_reentrant=False))


@written_out(AUTOGRAD, normal(6), make=layers)
def checkpoint_reentrant(self: Any, x: Tensor) -> Any:
    return self.head(checkpoint(_dropped, self, x, use_reentrant=True))


@written_out(AUTOGRAD, normal(6), make=layers)
def autocast_region(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.tanh(self.layers[0](x))
        with torch.autocast("cpu", enabled=False):
            y = self.layers[1](y.float())
    return self.head(y)


@written_out(AUTOGRAD, normal(6), make=lambda: {
    "student": nn.Linear(6, 4), "teacher": nn.Linear(6, 4).requires_grad_(False)})  # fmt: skip
def momentum_teacher(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        if self.training:
            for ours, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
        target = self.teacher(x)
    return (self.student(x) - target).square().mean()


@written_out(AUTOGRAD, normal(6), make=layers)
def gradient_switch(self: Any, x: Tensor) -> Any:
    with torch.set_grad_enabled(self.training):
        y = torch.tanh(self.layers[0](x))
    return self.head(y), self.layers[1](y.detach())


@written_out(AUTOGRAD, normal(6), make=one_layer)
def gradient_penalty(self: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        score = self.head(torch.tanh(self.layers[0](point)))
        (slope,) = torch.autograd.grad(score.sum(), point, create_graph=True)
    return score, (slope.norm(dim=-1) - 1).square().mean()


@written_out(AUTOGRAD, normal(6), make=one_layer)
def vmap_inside(self: Any, x: Tensor) -> Any:
    layer = self.layers[0]
    return self.head(torch.vmap(lambda row: torch.tanh(layer.weight @ row + layer.bias))(x))


@written_out(AUTOGRAD, normal(6), make=one_layer)
def fast_weights(self: Any, x: Tensor) -> Any:
    """One inner step of gradient descent, and a call with the weights it gives."""
    layer = self.layers[0]
    weights = dict(layer.named_parameters())

    def energy(inner: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(layer, inner, (x,)).square().mean()

    slopes = torch.func.grad(energy)(weights)
    moved = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
    return self.head(torch.func.functional_call(layer, moved, (x,)))


# Hooks and parametrizations


def _hooked() -> dict[str, Any]:
    made = layers()
    one, two = made["layers"]
    one.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1.0,), kwargs), with_kwargs=True)
    one.register_forward_hook(lambda module, args, output: output * 2.0)
    two.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return made


@written_out(HOOKS, normal(6), make=_hooked)
def hooks_on_layers(self: Any, x: Tensor) -> Any:
    return self.head(self.layers[1](torch.tanh(self.layers[0](x))))


@written_out(HOOKS, normal(6), make=one_layer)
def hook_on_a_tensor(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    return self.head(y)


@written_out(HOOKS, normal(6), make=lambda: {**layers(), "seen": []})
def features_by_hooks(self: Any, x: Tensor) -> Any:
    self.seen.clear()
    handles = [layer.register_forward_hook(lambda *call: self.seen.append(call[-1])) for layer in self.layers]
    for layer in self.layers:
        x = torch.tanh(layer(x))
    for handle in handles:
        handle.remove()
    return self.head(x + sum(self.seen))


@written_out(HOOKS, normal(6), make=one_layer)
def called_twice(self: Any, x: Tensor) -> Any:
    return self.head(self.layers[0](torch.tanh(self.layers[0](x))))


def _normalised() -> dict[str, Any]:
    rules = nn.utils.parametrizations
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old ones are deprecated, and everywhere
        old = nn.utils.weight_norm(nn.Linear(6, 6)), nn.utils.spectral_norm(nn.Linear(6, 6))
    new = rules.weight_norm(nn.Linear(6, 6)), rules.spectral_norm(nn.Linear(6, 6)), rules.orthogonal(nn.Linear(6, 6))
    return {"old": nn.Sequential(*old), "new": nn.Sequential(*new)}


@written_out(HOOKS, normal(6), make=_normalised)
def normalised_weights(self: Any, x: Tensor) -> Any:
    return self.new(torch.tanh(self.old(x)))


class Adapter(nn.Module):
    """A layer, frozen, beside adapters of low rank of which one is switched on."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.ModuleDict({name: nn.Linear(base.in_features, 2, bias=False) for name in "ab"})
        self.up = nn.ModuleDict({name: nn.Linear(2, base.out_features, bias=False) for name in "ab"})
        self.drop, self.active = nn.Dropout(0.1), ["a"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.base(x, *args, **kwargs)
        for name in self.active:
            y = y + self.up[name](self.down[name](self.drop(x))) * 0.5
        return y


@written_out(HOOKS, normal(6), make=lambda: {"one": Adapter(nn.Linear(6, 8)), "two": Adapter(nn.Linear(8, 3))})
def adapters(self: Any, x: Tensor) -> Any:
    return self.two(torch.relu(self.one(x)))


class FrozenNorm(nn.Module):
    """Batch norm that `train()` leaves in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.train()

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


add(HOOKS, "train_overridden", FrozenNorm, normal(3, 8, 8))
