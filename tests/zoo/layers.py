"""The part of the zoo that shows single operators, and the decorator that registers a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
Build = Callable[[], Built]
ZOO: dict[str, Build] = {}
"""Every model by name: a builder of (model, args, kwargs), the same ones at every call."""


def normal(*shape: int) -> Callable[[], Tensor]:
    """Make a random input of this shape when the model is built."""
    return lambda: torch.randn(*shape)


def image() -> Callable[[], Tensor]:
    """Make two small pictures."""
    return normal(2, 3, 8, 8)


def ints(limit: int, *shape: int) -> Callable[[], Tensor]:
    """Make random indices below a limit."""
    return lambda: torch.randint(0, limit, shape)


def add(
    name: str, model: Callable[[], nn.Module], *inputs: Callable[[], Any],
    kwargs: dict[str, Callable[[], Any]] | None = None, into: dict[str, Build] = ZOO,
) -> None:  # fmt: skip
    """Register a model and its inputs."""

    def build() -> Built:
        torch.manual_seed(0)
        return model(), tuple(make() for make in inputs), {key: make() for key, make in (kwargs or {}).items()}

    assert name not in into, name
    into[name] = build


def zoo(
    *inputs: Callable[[], Any], make: Callable[[], dict[str, Any]], kwargs: dict[str, Callable[[], Any]] | None = None,
    dtype: torch.dtype = torch.float32, into: dict[str, Build] = ZOO,
) -> Callable[..., Any]:  # fmt: skip
    """Register a forward function with the attributes it needs as a model of its own class."""

    def register(forward: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        label = name or forward.__name__
        kind = type(f"Zoo_{label}", (nn.Module,), {"forward": forward})

        def model() -> nn.Module:
            new: nn.Module = kind()
            for attribute, value in make().items():
                setattr(new, attribute, value)
            return new.to(dtype)

        add(label, model, *(_cast(value, dtype) for value in inputs), kwargs=kwargs, into=into)
        return forward

    return register


def _cast(value: Callable[[], Any], dtype: torch.dtype) -> Callable[[], Any]:
    return value if dtype is torch.float32 else lambda: value().to(dtype)


def _conv(name: str, make: Callable[[], nn.Module], *shape: int) -> None:
    add(name, lambda: nn.Sequential(make(), nn.ReLU()), normal(*shape))


_conv("conv1d", lambda: nn.Conv1d(3, 4, 3), 2, 3, 8)
_conv("conv2d", lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), 2, 3, 8, 8)
_conv("conv3d", lambda: nn.Conv3d(2, 3, 2), 2, 2, 4, 4, 4)
_conv("conv_transpose1d", lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, output_padding=1), 2, 3, 5)
_conv("conv_transpose2d", lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, padding=1), 2, 4, 5, 5)
_conv("conv_transpose3d", lambda: nn.ConvTranspose3d(2, 3, 2, bias=False), 2, 2, 3, 3, 3)
_conv("conv_grouped", lambda: nn.Conv2d(4, 6, 3, groups=2), 2, 4, 6, 6)
_conv("conv_depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), 2, 4, 6, 6)
_conv("conv_dilated", lambda: nn.Conv2d(3, 4, 3, dilation=2), 2, 3, 8, 8)
_conv("conv_circular", lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), 2, 3, 6, 6)
_conv("conv_reflect", lambda: nn.Conv1d(3, 4, 3, padding=1, padding_mode="reflect"), 2, 3, 6)
_conv("conv_replicate", lambda: nn.Conv2d(3, 4, (3, 1), padding=(1, 0), padding_mode="replicate"), 2, 3, 6, 6)
_conv("conv_same", lambda: nn.Conv2d(3, 4, (3, 5), padding="same"), 2, 3, 6, 6)
_conv("conv_same_reflect", lambda: nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"), 2, 3, 6, 6)
_conv("linear", lambda: nn.Linear(6, 4), 3, 6)
_conv("linear_no_bias", lambda: nn.Linear(6, 4, bias=False), 2, 3, 6)


@zoo(normal(2, 3, 8), image(), make=lambda: {"w1": Parameter(torch.randn(4, 3, 3)), "b": Parameter(torch.randn(4)),
     "w2": Parameter(torch.randn(4, 3, 3, 3)), "w3": Parameter(torch.randn(4, 1, 1, 2, 2))})  # fmt: skip
def functional_conv(self: Any, x: Tensor, y: Tensor) -> Any:
    one = F.conv1d(x, self.w1, stride=2, bias=self.b)
    two = F.conv2d(padding=1, weight=self.w2, input=y, bias=self.b, dilation=2)
    three = F.conv3d(two.unsqueeze(2), groups=4, weight=self.w3[:, :, :, :, :1])
    return one, torch.conv2d(y, self.w2, None, 2), three


@zoo(normal(2, 3, 5, 5), make=lambda: {"up": nn.ConvTranspose2d(3, 4, 3, stride=2)})
def conv_transpose_output_size(self: Any, x: Tensor) -> Any:
    return self.up(x, output_size=[12, 12])


@zoo(normal(2, 3, 5), image(), make=lambda: {"w1": Parameter(torch.randn(3, 4, 3)), "b": Parameter(torch.randn(4)),
     "w2": Parameter(torch.randn(3, 4, 3, 3)), "w3": Parameter(torch.randn(4, 2, 1, 2, 2))})  # fmt: skip
def functional_conv_transpose(self: Any, x: Tensor, y: Tensor) -> Any:
    one = F.conv_transpose1d(x, self.w1, stride=2, output_padding=1, bias=self.b)
    two = F.conv_transpose2d(y, bias=self.b, weight=self.w2, padding=1)
    return one, F.conv_transpose3d(two.unsqueeze(2), weight=self.w3, groups=2)


@zoo(normal(3, 4), normal(3, 5), make=lambda: {"w": Parameter(torch.randn(6, 4)), "b": Parameter(torch.randn(6)),
     "w2": Parameter(torch.randn(2, 4, 5)), "layer": nn.Bilinear(4, 5, 3)})  # fmt: skip
def functional_linear(self: Any, x: Tensor, y: Tensor) -> Any:
    one = F.linear(weight=self.w, input=x)
    two = F.linear(x, bias=self.b, weight=self.w)
    return one, two, F.bilinear(x, y, self.w2), self.layer(x, y)


@zoo(normal(2, 3, 4), normal(2, 4, 3), make=lambda: {"w": Parameter(torch.randn(4, 5)), "v": Parameter(torch.randn(4)),
     "b": Parameter(torch.randn(5)), "c": Parameter(torch.randn(2, 3, 3))})  # fmt: skip
def products(self: Any, x: Tensor, y: Tensor) -> Any:
    first = torch.addmm(self.b, mat2=self.w, mat1=x[0], beta=0.5, alpha=2)
    batches = torch.baddbmm(self.c, x, y, beta=2), torch.bmm(x, mat2=y), torch.matmul(input=x, other=y)
    return first, batches, torch.mv(x[0], self.v), torch.mm(x[0], self.w), torch.addbmm(self.c[0], x, y)


@zoo(normal(2, 3, 4), normal(2, 4, 3), make=lambda: {"w": Parameter(torch.randn(4, 4))})
def product_operators(self: Any, x: Tensor, y: Tensor) -> Any:
    z = x @ self.w
    z @= self.w
    return z @ y, torch.linalg.matmul(x, y), torch.linalg.multi_dot([x[0], self.w, y[0]])


@zoo(normal(3, 4), normal(2, 4), make=lambda: {"w": Parameter(torch.randn(4)), "m": Parameter(torch.randn(5, 4))})
def vectors(self: Any, x: Tensor, y: Tensor) -> Any:
    outer = torch.outer(x[0], vec2=self.w), torch.ger(x[0], self.w)
    return torch.inner(x, y), outer, torch.dot(x[0], self.w), self.m.mv(x[1]), torch.addmv(x[2, :1], self.m, x[1])


@zoo(normal(2, 3, 4), normal(2, 4, 3), make=lambda: {"w": Parameter(torch.randn(4, 5)), "p": Parameter(torch.randn(5))})
def einsums(self: Any, x: Tensor, y: Tensor) -> Any:
    two = torch.einsum("bij,bjk->bik", x, y)
    three = torch.einsum("bij,jk,k->bi", x, self.w, self.p)
    return two, three, torch.einsum("bij,bjk->ik", [x, y]), torch.functional.einsum("...j,jk->...k", x, self.w)


@zoo(normal(2, 3, 4), normal(2, 4, 3), make=lambda: {"w": Parameter(torch.randn(4, 5)), "v": Parameter(torch.randn(4)),
                                                     "c": Parameter(torch.randn(2, 3, 3))})  # fmt: skip
def methods(self: Any, x: Tensor, y: Tensor) -> Any:
    pairs = x.matmul(y), x.bmm(y), x[0].mm(mat2=self.w), x.matmul(other=self.w)
    vector = x[0].mv(self.v), x[0, 0].dot(self.v), x[0, 0].outer(self.v), x[0].inner(x[1])
    return pairs, vector, self.c.baddbmm(x, y), x.new_zeros(3, 5).addmm(x[0], self.w), x.__matmul__(self.w)


@zoo(ints(7, 2, 3), make=lambda: {"table": nn.Embedding(7, 4, padding_idx=0), "w": Parameter(torch.randn(7, 4)),
     "bag": nn.EmbeddingBag(7, 4, mode="sum"), "out": nn.Linear(4, 2)})  # fmt: skip
def embeddings(self: Any, index: Tensor) -> Any:
    both = self.table(index) + F.embedding(index, self.w)
    return self.out(both), self.bag(index), F.embedding_bag(index, self.w, mode="mean")


def _tied() -> dict[str, Any]:
    table, decoder = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    decoder.weight = table.weight
    return {"table": table, "decoder": decoder}


@zoo(ints(7, 2, 3), make=_tied)
def tied_weights(self: Any, index: Tensor) -> Any:
    return self.decoder(torch.tanh(self.table(index)))
