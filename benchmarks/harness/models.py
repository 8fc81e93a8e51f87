"""Workloads: a model, a batch and a loss, from a preset or from a user's own function."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpt_fx.capture.dry_run import tensors_in
from cpt_fx.errors import check_choice, check_int
from harness.catalog import PRESETS
from harness.nets import Bottleneck, CifarResNet, EncoderLayer, PlainBert

Loss = Callable[[Any], Tensor]
CLASSES, LENGTH, WORDS = 10, 128, 30_522


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its batch. Contenders train copies of the model."""

    name: str
    about: str
    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Loss

    @property
    def shapes(self) -> str:
        """The shapes of the batch."""
        return ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors_in(self.inputs))


def preset(name: str, batch: int | None = None) -> Workload:
    """Return a preset, with another batch size than the usual one if requested."""
    known = PRESETS[check_choice("model", name, PRESETS)]
    size = known.batch if batch is None else check_int("batch", batch, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs, loss, about = _BUILDERS[name](size)
    return Workload(name=name, about=f"{known.about}{about}", model=model, inputs=inputs, loss=loss)


def given(name: str, made: object) -> Workload:
    """Return the workload that a user's function gave: (model, example_inputs) or (model, example_inputs, loss)."""
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ValueError(f"{name} must return (model, example_inputs) or (model, example_inputs, loss)")
    model, inputs, *loss = made
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(inputs, tuple):
        raise ValueError(f"{name} must return example_inputs as a tuple, got {type(inputs).__name__}")
    if loss and not callable(loss[0]):
        raise ValueError(f"{name} must return a loss that can be called with the model's output, got {loss[0]!r}")
    used = loss[0] if loss else mean_square
    return Workload(name=name, about=f"{type(model).__name__} of {name}", model=model, inputs=inputs, loss=used)


def mean_square(output: Any) -> Tensor:
    """Return the mean of the squares of all floating outputs, a loss for any model."""
    means = [tensor.float().square().mean() for tensor in tensors_in(output) if tensor.is_floating_point()]
    if not means:
        raise ValueError("the model returned no floating point tensor to train on: return a loss as a third value")
    return torch.stack(means).sum()


def _cross_entropy(batch: int, classes: int) -> Loss:
    labels = torch.arange(batch) % classes

    def loss(output: Any) -> Tensor:
        scores = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(scores.float(), labels)

    return loss


_Made = tuple[nn.Module, tuple[Tensor, ...], Loss, str]


def _resnet(layers: int) -> Callable[[int], _Made]:
    def build(batch: int) -> _Made:
        return CifarResNet(layers, CLASSES), (torch.randn(batch, 3, 32, 32),), _cross_entropy(batch, CLASSES), ""

    return build


def _bert_small(batch: int) -> _Made:
    tokens = torch.randint(0, WORDS, (batch, LENGTH))
    if importlib.util.find_spec("transformers") is None:
        model: nn.Module = PlainBert(4, 256, 4, WORDS, LENGTH, CLASSES)
        return model, (tokens,), _cross_entropy(batch, CLASSES), ", in plain torch"
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=WORDS,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = CLASSES
    model = BertForSequenceClassification(config)
    return model, (tokens,), _cross_entropy(batch, CLASSES), " from transformers, no dropout"


def _bert_layer(batch: int) -> _Made:
    return EncoderLayer(768, 3072, 12), (torch.randn(batch, LENGTH, 768),), mean_square, ""


def _bottlenecks(batch: int) -> _Made:
    blocks = (Bottleneck(256, 64), Bottleneck(256, 64), Bottleneck(256, 128, stride=2), Bottleneck(512, 128))
    return nn.Sequential(*blocks), (torch.randn(batch, 256, 56, 56),), mean_square, ""


def _mlp(batch: int) -> _Made:
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), (torch.randn(batch, 1024),), mean_square, ""


def _linears(batch: int) -> _Made:
    layers = [nn.Linear(*sizes) for _ in range(2) for sizes in ((768, 3072), (3072, 768))]
    return nn.Sequential(*layers), (torch.randn(batch, 768),), mean_square, ""


_BUILDERS: dict[str, Callable[[int], _Made]] = {
    "resnet74": _resnet(74),
    "resnet20": _resnet(20),
    "bert-small": _bert_small,
    "bert-layer": _bert_layer,
    "bottlenecks": _bottlenecks,
    "mlp": _mlp,
    "linears": _linears,
}
