"""Python that graphs do not like, in one small model each: control flow that depends on values, effects, state."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.any_model import add, normal, written_out

FLOW, STATE, EFFECTS = "nasty control flow", "nasty state", "nasty effects"
LOGGER = logging.getLogger(__name__)


def layers(count: int = 2, width: int = 6) -> dict[str, Any]:
    """Make a list of layers and a head."""
    return {"layers": nn.ModuleList([nn.Linear(width, width) for _ in range(count)]), "head": nn.Linear(width, 3)}


one_layer = partial(layers, 1)

# Control flow


@written_out(FLOW, normal(6), make=layers)
def branch_on_values(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    y = torch.relu(y) if y.sum() > 0 else torch.tanh(self.layers[1](y))
    return self.head(y)


@written_out(FLOW, normal(6), make=one_layer)
def loop_until_small(self: Any, x: Tensor) -> Any:
    while x.norm() > 1.0:
        x = self.layers[0](x) * 0.5
    return self.head(x)


@written_out(FLOW, normal(6), make=layers)
def early_exit(self: Any, x: Tensor) -> Any:
    for depth, layer in enumerate(self.layers):
        x = torch.tanh(layer(x))
        sure = self.head(x).softmax(-1).max().item()
        if sure > 0.5:
            return {"logits": self.head(x), "depth": depth}
    return {"logits": self.head(x), "depth": len(self.layers)}


@written_out(FLOW, normal(6), make=lambda: layers(3))
def hash_routing(self: Any, x: Tensor) -> Any:
    chosen = int(x.detach().abs().sum() * 1000) % len(self.layers)
    return self.head(self.layers[chosen](x))


@written_out(FLOW, normal(6), make=lambda: layers(3))
def experts_of_tokens(self: Any, x: Tensor) -> Any:
    """Each row goes to the expert that its largest number names; the others never see it."""
    expert, total = x[:, :3].argmax(-1), torch.zeros_like(x)
    for index, layer in enumerate(self.layers):
        rows = torch.where(expert == index)[0]
        if rows.numel():
            total = total.index_add(0, rows, layer(x[rows]))
    return self.head(total)


@written_out(FLOW, normal(6), make=one_layer)
def rows_by_mask(self: Any, x: Tensor) -> Any:
    kept = x[x.sum(-1) > -10.0]
    return self.head(torch.relu(self.layers[0](kept))), kept.shape[0]


@written_out(FLOW, normal(6), make=one_layer)
def as_many_as_needed(self: Any, x: Tensor) -> Any:
    count = max(1, int((x > 0).sum().item()) % 4)
    return self.head(self.layers[0](x).topk(count, dim=-1).values.mean(-1, keepdim=True).expand(-1, 6))


@written_out(FLOW, normal(6), make=one_layer)
def exception_inside(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    try:
        y = self.layers[x.ndim](y)
    except IndexError:
        y = torch.relu(y)
    return self.head(y)


@written_out(FLOW, normal(6), make=layers)
def exception_of_torch(self: Any, x: Tensor) -> Any:
    try:
        y = self.layers[0](x) @ self.layers[1](x)  # the shapes do not fit
    except RuntimeError:
        y = torch.relu(self.layers[0](x))
    return self.head(y)


@written_out(FLOW, normal(6), make=layers)
def depends_on_batch(self: Any, x: Tensor) -> Any:
    return self.head(self.layers[0](x) if x.shape[0] > 2 else torch.tanh(self.layers[1](x)))


def _tree(depth: int, size: int) -> Any:
    return torch.randn(size, 6) if depth == 0 else [_tree(depth - 1, size), torch.randn(size, 6), _tree(0, size)]


def _cell(self: Any, node: Any) -> Tensor:
    if isinstance(node, Tensor):
        return torch.tanh(self.layers[0](node))
    total = torch.stack([_cell(self, child) for child in node]).sum(0)
    return torch.sigmoid(self.layers[0](total)) * torch.tanh(self.layers[1](total))


@written_out(FLOW, lambda size: (_tree(2, size),), make=layers)
def tree_recursion(self: Any, tree: Any) -> Any:
    return self.head(_cell(self, tree))


def _walk(modules: Any, x: Tensor) -> Iterator[Tensor]:
    for module in modules:
        x = torch.relu(module(x))
        yield x


@written_out(FLOW, normal(6), make=layers)
def generator_function(self: Any, x: Tensor) -> Any:
    return self.head(torch.stack(list(_walk(self.layers, x))).sum(0))


# Random draws that decide


@written_out(FLOW, normal(6), make=lambda: layers(3))
def stochastic_depth(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        if not self.training or torch.rand(()).item() < 0.6:
            x = x + torch.tanh(layer(x))
    return self.head(x)


@written_out(FLOW, normal(6), make=lambda: layers(3))
def stochastic_depth_by_row(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        y = torch.tanh(layer(x))
        if self.training:
            y = y * x.new_empty(x.shape[0], 1).bernoulli_(0.7) / 0.7
        x = x + y
    return self.head(F.dropout(x, 0.2, self.training))


@written_out(FLOW, normal(6), make=lambda: layers(3))
def layer_drop_by_python(self: Any, x: Tensor) -> Any:
    for layer in self.layers:
        if self.training and random.random() < 0.4:
            continue
        x = x + torch.tanh(layer(x))
    return self.head(x)


@written_out(FLOW, normal(6), make=one_layer)
def noise_by_numpy(self: Any, x: Tensor) -> Any:
    if self.training:
        x = x + torch.from_numpy(numpy.random.uniform(-0.1, 0.1, size=tuple(x.shape)).astype("float32"))
    return self.head(torch.relu(self.layers[0](x)))


@written_out(FLOW, normal(6), make=one_layer)
def generator_in_forward(self: Any, x: Tensor) -> Any:
    source = torch.Generator().manual_seed(5)
    return self.head(self.layers[0](x + torch.randn(x.shape, generator=source)))


# State that is not a buffer


@written_out(STATE, normal(6), make=lambda: {**one_layer(), "calls": 0})
def counter(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return self.head(self.layers[0](x) / self.calls)


@written_out(STATE, normal(6), make=lambda: {**one_layer(), "history": []})
def list_of_the_past(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    self.history.append(y.detach().mean())
    return self.head(y - torch.stack(self.history[-2:]).mean())


@written_out(STATE, normal(6), make=lambda: {**one_layer(), "masks": {}})
def cache_by_size(self: Any, x: Tensor) -> Any:
    if len(x) not in self.masks:
        self.masks[len(x)] = torch.tril(torch.ones(len(x), len(x)))
    return self.head(self.masks[len(x)] @ self.layers[0](x))


@written_out(STATE, normal(6), make=lambda: {**one_layer(), "source": torch.Generator().manual_seed(3)})
def own_generator(self: Any, x: Tensor) -> Any:
    if self.training:
        x = x + torch.rand(x.shape, generator=self.source)
    return self.head(self.layers[0](x))


def _plain_list() -> dict[str, Any]:
    return {"head": nn.Linear(6, 3), "hidden_layers": [nn.Linear(6, 6), nn.Linear(6, 6)]}


@written_out(STATE, normal(6), make=_plain_list)
def layers_in_a_plain_list(self: Any, x: Tensor) -> Any:
    for layer in self.hidden_layers:
        x = torch.tanh(layer(x))
    return self.head(x)


class ClosingOver(nn.Module):
    """A function of the module is one of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 3)
        self.function: Any = lambda x: torch.relu(self.inner(x))
        self.scaled: Any = partial(F.linear, weight=self.outer.weight)

    def forward(self, x: Tensor) -> Any:
        y = self.function(x)
        return self.outer(y) + self.scaled(y)


add(STATE, "lambda_over_self", ClosingOver, normal(6))

OUTSIDE = torch.linspace(-1, 1, 36).view(6, 6)


@written_out(STATE, normal(6), make=one_layer)
def tensor_outside(self: Any, x: Tensor) -> Any:
    return self.head(torch.relu(self.layers[0](x)) @ OUTSIDE)


@written_out(STATE, normal(6), make=lambda: {**one_layer(), "mean": nn.Buffer(torch.zeros(6)),
             "seen": nn.Buffer(torch.zeros((), dtype=torch.int64))})  # fmt: skip
def buffers_replaced(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.seen += len(x)
    return self.head(y - self.mean)


@written_out(STATE, normal(6), make=one_layer)
def weights_clipped(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        for layer in self.layers:
            layer.weight.clamp_(-0.2, 0.2)
    return self.head(torch.relu(self.layers[0](x)))


# Effects


@written_out(EFFECTS, normal(6), make=layers)
def prints(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    print("between", y.shape)
    return self.head(self.layers[1](y))


@written_out(EFFECTS, normal(6), make=one_layer)
def logs(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    LOGGER.info("largest %s", y.detach().max().item())
    return self.head(y)


class Interrupted(nn.Module):
    """A block whose graph breaks in the middle: its second half is captured in a resumed frame."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.one(x))
        print("inside")
        return x + self.two(y)


@written_out(EFFECTS, normal(6), make=lambda: {"blocks": nn.Sequential(*(Interrupted() for _ in range(4)))})
def broken_blocks(self: Any, x: Tensor) -> Any:
    return self.blocks(x)


@contextmanager
def _scaled(log: list[str]) -> Iterator[float]:
    log.append("in")
    yield 0.5
    log.append("out")


@written_out(EFFECTS, normal(6), make=lambda: {**one_layer(), "log": []})
def own_context_manager(self: Any, x: Tensor) -> Any:
    with _scaled(self.log) as factor:
        y = self.layers[0](x) * factor
    return self.head(y)


@lru_cache
def _positions(width: int) -> Tensor:
    return torch.arange(width, dtype=torch.float32)


@written_out(EFFECTS, normal(6), make=one_layer)
def memoised_function(self: Any, x: Tensor) -> Any:
    return self.head(self.layers[0](x + _positions(x.shape[1])))
