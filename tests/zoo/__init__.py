"""Tiny models, one for every way to write a network that `transform` has to keep. `ZOO` maps names to builders.

`ZOO` is what torch.fx can capture. `ANY_MODEL` is the rest of the world: libraries of models, and code that has to be
run to be known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Buffer, Parameter

from tests import paper_models
from tests.zoo.any_model import ANY_MODEL, Entry
from tests.zoo.layers import ZOO, Build, Built, add, image, ints, normal, zoo

__all__ = ["ANY_MODEL", "ZOO", "Build", "Built", "Entry"]

PARTS = "torch_layers transformers_text transformers_seen geometric timm_models nasty nasty_torch nasty_values"
for _part in PARTS.split():
    import_module(f"tests.zoo.{_part}")  # registers its models


@zoo(normal(3, 6), make=lambda: {"fc": nn.Linear(6, 6)})
def called_twice(self: Any, x: Tensor) -> Any:
    return self.fc(torch.tanh(self.fc(x)))


@zoo(image(), image(), make=lambda: {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)})
def two_tensors_one_module(self: Any, left: Tensor, right: Tensor) -> Any:
    return self.norm(self.conv(left)), self.norm(self.conv(right))


@zoo(normal(2, 4), normal(2, 5), make=lambda: {"a": nn.Linear(4, 3), "b": nn.Linear(5, 3)})
def several_inputs_and_outputs(self: Any, x: Tensor, y: Tensor) -> Any:
    a, b = self.a(x), self.b(y)
    return [a, (b, a * b)], a - b


@zoo(normal(2, 4), make=lambda: {"fc": nn.Linear(4, 4)})
def dict_output(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    return {"logits": y, "hidden": {"state": y.relu(), "nothing": None, "number": 3}}


class Pair(NamedTuple):
    """An output with names."""

    first: Tensor
    second: Tensor | None


@dataclass
class Output:
    """An output as libraries of models make them."""

    logits: Tensor
    loss: Tensor | None = None


@zoo(normal(2, 4), make=lambda: {"fc": nn.Linear(4, 4)})
def namedtuple_output(self: Any, x: Tensor) -> Any:
    return Pair(self.fc(x), None)


@zoo(normal(2, 4), make=lambda: {"fc": nn.Linear(4, 4)})
def dataclass_output(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    return Output(logits=y, loss=y.square().mean())


@zoo(lambda: {"x": torch.randn(2, 4), "scale": torch.rand(2, 1)}, make=lambda: {"fc": nn.Linear(4, 4)})
def dict_input(self: Any, batch: Any) -> Any:
    return self.fc(batch["x"]) * batch["scale"]


@zoo(normal(2, 4), make=lambda: {"fc": nn.Linear(4, 4)}, kwargs={"scale": normal(2, 1), "shift": normal(4)})
def keyword_arguments(self: Any, x: Tensor, *, shift: Tensor, scale: Tensor) -> Any:
    return self.fc(x) * scale + shift


def _masked(self: Any, x: Tensor, mask: Tensor | None = None) -> Any:
    scores = self.q(x) @ self.k(x).transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.softmax(scores, dim=-1) @ x


zoo(normal(2, 3, 4), make=lambda: {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)})(_masked, name="optional_mask_left_out")


@zoo(normal(2, 3, 4), make=lambda: {"body": nn.Linear(4, 4), "heads": nn.ModuleDict({"a": nn.Linear(4, 2),
     "b": nn.Linear(4, 2)}), "blocks": nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)]),
     "scales": nn.ParameterList([torch.rand(4), torch.rand(4)])})  # fmt: skip
def containers(self: Any, x: Tensor) -> Any:
    x = self.body(x)
    for block, scale in zip(self.blocks, self.scales, strict=True):
        x = x + block(x) * scale
    return {name: head(x) for name, head in self.heads.items()}


@zoo(image(), make=lambda: {"a": nn.Conv2d(3, 4, 3, padding=1), "b": nn.Conv2d(4, 4, 3, padding=1)})
def in_place(self: Any, x: Tensor) -> Any:
    y = F.relu(self.a(x), inplace=True)
    z = self.b(y)
    z += 1.0
    z.add_(y).mul_(0.5)
    return z.relu_()


@zoo(image(), make=lambda: {"body": nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3),
     nn.BatchNorm2d(4), nn.ReLU6(inplace=True)), "fc": nn.Linear(4, 3)})  # fmt: skip
def in_place_modules(self: Any, x: Tensor) -> Any:
    return self.fc(self.body(x).mean((2, 3)))


class Residual(nn.Module):
    """Two convolutions with batch norm, and a projection where the sizes differ."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.project = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.project(x))


@zoo(image(), make=lambda: {"blocks": nn.Sequential(Residual(3, 4), nn.MaxPool2d(2), Residual(4, 4)),
                            "head": nn.Linear(4, 5)})  # fmt: skip
def residual_net(self: Any, x: Tensor) -> Any:
    return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


@zoo(image(), make=lambda: {"conv": nn.Conv2d(3, 4, 3), "group": nn.GroupNorm(2, 4), "layer": nn.LayerNorm(6),
                            "instance": nn.InstanceNorm2d(4, affine=True, track_running_stats=True)})  # fmt: skip
def norms(self: Any, x: Tensor) -> Any:
    return self.layer(self.group(self.conv(x))) + self.instance(self.conv(x))


@zoo(normal(4, 6), make=lambda: {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "drop": nn.Dropout(0.3)})
def dropouts(self: Any, x: Tensor) -> Any:
    return F.dropout(self.b(self.drop(self.a(x))), 0.4, self.training)


@zoo(image(), make=lambda: {"conv": nn.Conv2d(3, 4, 3), "mean": Buffer(torch.zeros(4)), "var": Buffer(torch.ones(4)),
                            "gain": Parameter(torch.rand(4))})  # fmt: skip
def functional_batch_norm(self: Any, x: Tensor) -> Any:
    return F.batch_norm(self.conv(x), self.mean, self.var, weight=self.gain, training=self.training, momentum=0.2)


@zoo(normal(4, 6), make=lambda: {"fc": nn.Linear(6, 3), "seen": Buffer(torch.zeros((), dtype=torch.int64)),
     "average": Buffer(torch.zeros(3)), "hidden": Buffer(torch.ones(1), persistent=False)})  # fmt: skip
def buffers_mutated(self: Any, x: Tensor) -> Any:
    y = self.fc(x) * self.hidden
    self.seen += 1
    self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y - self.average


@zoo(normal(4, 6), lambda: torch.tensor([0, 1, 1, 2]), make=lambda: {"fc": nn.Linear(6, 3)})
def constants_made_in_forward(self: Any, x: Tensor, index: Tensor) -> Any:
    y = self.fc(x)
    total = torch.zeros(3, 3).index_add_(0, index, y)
    positions = torch.arange(3, dtype=torch.float32)
    return total + positions + y.new_zeros(3, 3) + torch.ones(3) + torch.eye(3)


@zoo(normal(2, 4), make=lambda: {"fc": nn.Linear(4, 4), "shift": torch.arange(4.0), "scales": [0.5, 2.0]})
def plain_attributes(self: Any, x: Tensor) -> Any:
    return self.fc(x) * self.scales[0] + self.shift


def _with_frozen() -> dict[str, Any]:
    return {"body": nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False), "head": nn.Linear(4, 2)}


@zoo(normal(2, 4), make=_with_frozen)
def frozen(self: Any, x: Tensor) -> Any:
    return self.head(self.body(x))


@zoo(normal(3, 4), normal(3, 2), make=lambda: {"maker": nn.Linear(2, 12), "fc": nn.Linear(3, 2)})
def hypernetwork(self: Any, x: Tensor, task: Tensor) -> Any:
    weight = self.maker(task.mean(0)).view(3, 4)
    return self.fc(F.linear(x, weight))


@zoo(image(), make=lambda: {"weight": Parameter(torch.randn(4, 3, 3, 3)), "bias": Parameter(torch.randn(4))})
def weight_standardised(self: Any, x: Tensor) -> Any:
    mean = self.weight.mean((1, 2, 3), keepdim=True)
    deviation = self.weight.std((1, 2, 3), keepdim=True)
    return F.conv2d(x, (self.weight - mean) / (deviation + 1e-5), self.bias)


@zoo(image(), make=lambda: {"conv": nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
     "fc": nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))})  # fmt: skip
def weight_normalised(self: Any, x: Tensor) -> Any:
    return self.fc(self.conv(x))


class ScaledLinear(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input * 2.0, self.weight.clamp(-0.2, 0.2), self.bias)


@zoo(normal(2, 4), make=lambda: {"fc": ScaledLinear(4, 4), "out": nn.Linear(4, 2)})
def linear_subclass(self: Any, x: Tensor) -> Any:
    return self.out(self.fc(x))


def _with_hooks() -> dict[str, Any]:
    fc, act = nn.Linear(4, 4), nn.Tanh()
    fc.register_forward_hook(lambda module, args, output: output * 3.0)
    act.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
    return {"fc": fc, "act": act}


@zoo(normal(2, 4), make=_with_hooks)
def forward_hooks(self: Any, x: Tensor) -> Any:
    return self.act(self.fc(x))


class LoRA(nn.Module):
    """A frozen layer and a low-rank correction beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = Parameter(torch.randn(rank, base.in_features))
        self.up = Parameter(torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up) * 0.5  # type: ignore[no-any-return]


@zoo(normal(2, 4), make=lambda: {"net": nn.Sequential(LoRA(nn.Linear(4, 6), 2), nn.ReLU(), LoRA(nn.Linear(6, 3), 2))})
def lora(self: Any, x: Tensor) -> Any:
    return self.net(x)


@zoo(normal(2, 4), make=lambda: {"spare": nn.Conv2d(3, 3, 3), "fc": nn.Linear(4, 4), "left": Parameter(torch.ones(2)),
                                 "nothing": None})  # fmt: skip
def unused(self: Any, x: Tensor) -> Any:
    return self.fc(x)


def _registered_twice() -> dict[str, Any]:
    layer = nn.Linear(4, 4)
    return {"fc": layer, "again": layer, "out": nn.Linear(4, 2)}


@zoo(normal(2, 4), make=_registered_twice)
def two_names(self: Any, x: Tensor) -> Any:
    return self.out(self.again(self.fc(x).relu()))


@zoo(lambda: torch.randint(0, 255, (2, 3, 6, 6)), make=lambda: {"conv": nn.Conv2d(3, 4, 3)})
def integer_image(self: Any, x: Tensor) -> Any:
    return self.conv(x.float() / 255)


@zoo(image(), make=lambda: {"down": nn.Conv2d(3, 4, 3, stride=2, padding=1), "mid": nn.Conv2d(4, 4, 3, padding=1),
     "up": nn.ConvTranspose2d(4, 3, 2, stride=2), "out": nn.Conv2d(6, 2, 1)})  # fmt: skip
def unet(self: Any, x: Tensor) -> Any:
    low = F.silu(self.down(x))
    return self.out(torch.cat([self.up(low + self.mid(low)), x], dim=1))


@zoo(normal(2, 5, 4), make=lambda: {"n1": nn.LayerNorm(4), "n2": nn.LayerNorm(4), "tokens": nn.Sequential(
     nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)), "channels": nn.Linear(4, 4)})  # fmt: skip
def mlp_mixer(self: Any, x: Tensor) -> Any:
    x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
    return x + self.channels(self.n2(x))


@zoo(image(), make=lambda: {"patch": nn.Conv2d(3, 8, 4, stride=4), "token": Parameter(torch.randn(1, 1, 8)),
     "place": Parameter(torch.randn(1, 5, 8)), "norm": nn.LayerNorm(8), "qkv": nn.Linear(8, 24),
     "out": nn.Linear(8, 8), "head": nn.Linear(8, 3), "drop": nn.Dropout(0.1)})  # fmt: skip
def vision_transformer(self: Any, x: Tensor) -> Any:
    tokens = self.patch(x).flatten(2).transpose(1, 2)
    x = torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.place
    q, k, v = self.qkv(self.norm(x)).reshape(x.shape[0], 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    weights = self.drop((q @ k.transpose(-2, -1) * 0.5).softmax(-1))
    x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape[0], 5, 8))
    return self.head(x[:, 0])


@zoo(normal(2, 4), make=lambda: {"bits": nn.Linear(4, 4), "ranges": Parameter(torch.rand(4)), "counters": 2.0,
                                 "schedule": nn.Linear(4, 4), "precision": Buffer(torch.rand(4))})  # fmt: skip
def names_like_ours(self: Any, x: Tensor) -> Any:
    return self.schedule(self.bits(x) * self.ranges) * self.counters + self.precision


@zoo(normal(2, 4), make=lambda: {"fc": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "out": nn.Linear(4, 2)},
     dtype=torch.bfloat16)  # fmt: skip
def bfloat16(self: Any, x: Tensor) -> Any:
    return self.out(self.norm(self.fc(x)))


@zoo(image(), make=lambda: {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4)}, dtype=torch.float64)
def float64(self: Any, x: Tensor) -> Any:
    return self.norm(self.conv(x))


@zoo(normal(2, 4), make=lambda: {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
def checkpointed(self: Any, x: Tensor) -> Any:
    def block(h: Tensor) -> Any:
        return self.b(torch.tanh(self.a(h)))

    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def _edges() -> list[Callable[[], Tensor]]:
    return [normal(5, 6), lambda: torch.tensor([0, 1, 2, 3, 4, 0]), lambda: torch.tensor([1, 2, 3, 4, 0, 2])]


add("gcn", lambda: paper_models.GCN((6, 4, 5, 2), 5), *_edges())
add("sage", lambda: paper_models.SageConv(6, 4, 5), *_edges())
add("gat", lambda: paper_models.GATLayer(6, 4, 1), normal(5, 6), lambda: torch.tensor([0, 1, 2, 3, 4]),
               lambda: torch.tensor([1, 2, 3, 4, 0]))  # fmt: skip
add("lstm", lambda: paper_models.LSTM(4, 3, 3), normal(3, 2, 4), normal(1, 2, 3), normal(1, 2, 3))
add("language_model", lambda: paper_models.LanguageModel(7, 4, 3, 3), ints(7, 3, 2), normal(1, 2, 3),
               normal(1, 2, 3))  # fmt: skip
add("bert_layer", lambda: paper_models.BertLayer(8, 2, 12, 1e-5), normal(2, 3, 8), normal(2, 1, 1, 3))
add("self_attention", lambda: paper_models.SelfAttention(8, 2), normal(2, 3, 8))
