"""Unusual inputs, outputs and tensors, and models inside wrappers of torch and of other libraries."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.zoo.any_model import add, normal, package, written_out
from tests.zoo.nasty import layers, one_layer

distributed: Any = torch.distributed
VALUES, WRAPPED = "nasty values", "nasty wrappers"


class Named(NamedTuple):
    """An output with names."""

    logits: Tensor
    extra: Tensor | None


@dataclass
class Record:
    """An output of a library of models."""

    logits: Tensor
    named: Named
    loss: Tensor | None = None


class ByAttribute(OrderedDict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@written_out(VALUES, lambda size: {"x": torch.randn(size, 6), "scale": torch.rand(size, 1), "mode": "loud"},
             make=one_layer)  # fmt: skip
def free_keywords(self: Any, x: Tensor, **kwargs: Any) -> Any:
    factor = 2.0 if kwargs.get("mode") == "loud" else 1.0
    return self.head(self.layers[0](x) * kwargs["scale"] * factor), None


@written_out(VALUES, normal(6), make=one_layer)
def dataclass_output(self: Any, x: Tensor) -> Any:
    logits = self.head(self.layers[0](x))
    return Record(logits, named=Named(logits * 2, None))


@written_out(VALUES, normal(6), make=one_layer)
def ordered_dict_output(self: Any, x: Tensor) -> Any:
    output = ByAttribute(logits=self.head(self.layers[0](x)), loss=None)
    output["loss"] = output.logits.square().mean()
    return output


@written_out(VALUES, lambda size: ({"a": [torch.randn(size, 6), torch.randn(size, 6)], "b": torch.rand(size, 1)},),
             make=layers)  # fmt: skip
def nested_input(self: Any, batch: dict[str, Any]) -> Any:
    total = sum(layer(x) for layer, x in zip(self.layers, batch["a"], strict=True))
    return {"logits": [self.head(total * batch["b"])], "count": len(batch["a"])}


@written_out(VALUES, lambda size: (torch.randn(size, 8),), make=lambda: {
    **one_layer(), "weight": Parameter(torch.randn(5, 5, dtype=torch.complex64))})  # fmt: skip
def complex_spectrum(self: Any, x: Tensor) -> Any:
    spectrum = torch.fft.rfft(x) @ self.weight
    return self.head(self.layers[0](torch.fft.irfft(spectrum, n=8)[:, :6])), spectrum.abs()


@written_out(VALUES, normal(6), make=one_layer)
def sparse_product(self: Any, x: Tensor) -> Any:
    count = x.shape[0]
    ring = torch.stack([torch.arange(count), (torch.arange(count) + 1) % count])
    adjacency = torch.sparse_coo_tensor(ring, torch.ones(count), (count, count), check_invariants=False)
    return self.head(torch.sparse.mm(adjacency, torch.relu(self.layers[0](x))))


class Tagged(Tensor):
    """A tensor that stays what it is through every function."""


@written_out(VALUES, lambda size: (torch.randn(size, 6).as_subclass(Tagged),), make=one_layer)
def tensor_subclass(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    return self.head(torch.tanh(y))


def _rearrange(x: Any, pattern: str, **sizes: int) -> Any:
    """Split the axis in brackets, then bring all axes into the order on the right."""
    left, right = (side.split() for side in pattern.split("->"))
    (place,) = [index for index, name in enumerate(left) if name.startswith("(")]
    names = left[place].strip("()").split(",")
    split = [sizes.get(name, -1) for name in names]
    order = [*left[:place], *names, *left[place + 1 :]]
    return x.unflatten(place, split).permute([order.index(name) for name in right])


@written_out(VALUES, normal(4, 6), make=lambda: {**one_layer(), "qkv": nn.Linear(6, 18)})
def rearranged_by_pattern(self: Any, x: Tensor) -> Any:
    q, k, v = _rearrange(self.qkv(x), "b t (n,h,d) -> n b h t d", n=3, h=2).unbind(0)
    mixed = (q @ k.mT).softmax(-1) @ v
    return self.head(mixed.transpose(1, 2).flatten(2))


@written_out(VALUES, normal(6), make=one_layer)
def views_in_place(self: Any, x: Tensor) -> Any:
    y = self.layers[0](x)
    y[:, :2] += 1.0
    y.view(-1).mul_(2.0)
    y.t()[0].zero_()
    return self.head(torch.relu_(y))


@written_out(VALUES, normal(6), make=lambda: {"narrow": nn.Linear(6, 6).bfloat16(), "head": nn.Linear(6, 3)})
def two_dtypes(self: Any, x: Tensor) -> Any:
    return self.head(self.narrow(x.bfloat16()).float())


# Wrappers


@written_out(WRAPPED, normal(6), make=lambda: {**one_layer(), "inner": torch.compile(
    nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="eager")})  # fmt: skip
def compiled_child(self: Any, x: Tensor) -> Any:
    return self.head(self.inner(self.layers[0](x)))


def _compiled_in_place() -> dict[str, Any]:
    made = one_layer()
    made["layers"][0].compile(backend="eager")
    return made


@written_out(WRAPPED, normal(6), make=_compiled_in_place)
def child_compiled_in_place(self: Any, x: Tensor) -> Any:
    return self.head(torch.tanh(self.layers[0](x)))


def _scripted() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return {**one_layer(), "inner": torch.jit.script(nn.Linear(6, 6))}


@written_out(WRAPPED, normal(6), make=_scripted, refused="TorchScript")
def scripted_child(self: Any, x: Tensor) -> Any:
    return self.head(self.inner(x))


def _distributed() -> nn.Module:
    """One process is a group too."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    return nn.parallel.DistributedDataParallel(model)


add(WRAPPED, "distributed", _distributed, normal(6))


@written_out(WRAPPED, normal(6), make=lambda: {"inner": nn.DataParallel(nn.Linear(6, 6)), "head": nn.Linear(6, 3)})
def data_parallel_child(self: Any, x: Tensor) -> Any:
    return self.head(torch.tanh(self.inner(x)))


def _peft() -> nn.Module:
    library = package("peft")
    body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    config = library.LoraConfig(r=2, target_modules=["0"], lora_dropout=0.1, modules_to_save=["2"])
    wrapped = library.get_peft_model(body, config)
    assert isinstance(wrapped, nn.Module)
    return wrapped


add(WRAPPED, "peft", _peft, normal(6), needs="peft")
