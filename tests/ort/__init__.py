"""Training in ONNX Runtime. Here: small models, exported once for all tests, and what they are trained on."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules.base import Schedule

if TYPE_CHECKING:
    from cpt_fx.ort.manifest import Manifest

FEATURES, CLASSES, WORDS = 6, 4, 12


class Net(nn.Module):
    """Two linear layers with batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: before batch norm its gradient is only noise, of which AdamW makes whole steps.
        self.first = nn.Linear(FEATURES, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return made


class Tied(nn.Module):
    """An embedding whose weight is that of the last layer; dropout, some of it in evaluation too; a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.drop = nn.Dropout(0.2)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.embedding(tokens), 0.1, training=True)
        made: Tensor = self.head(self.drop(torch.tanh(self.frozen(hidden.mean(1)))))
        return made


class Remembering(nn.Module):
    """Uses what a buffer held before it writes to it: the backward pass needs the old value after that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 16)
        self.last = nn.Linear(16, CLASSES)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.clone()
        if self.training:
            self.scale.mul_(0.5).add_(x.detach().mean())
        made: Tensor = self.last(self.inner(x) * before)
        return made


def schedule(name: str = "CR") -> Schedule:
    return cpt_fx.schedules.named(name, q_min=3, q_max=8, total_steps=40, cycles=2)


def full() -> Schedule:
    """Full precision, in which nothing is random."""
    return cpt_fx.schedules.Static(32, 32)


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def tied() -> Tied:
    torch.manual_seed(2)
    return Tied()


def batch(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (size,), generator=generator)


def tokens(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(WORDS, (size, 5), generator=generator), torch.randint(WORDS, (size,), generator=generator)


@functools.cache
def net_directory() -> Path:
    """`Net`, exported with SGD."""
    return _exported(net(), batch(0)[:1], "sgd")


@functools.cache
def tied_directory() -> Path:
    """`Tied`, exported with AdamW."""
    return _exported(tied(), tokens(0)[:1], "adamw")


def _exported(model: nn.Module, inputs: tuple[Any, ...], optimizer: Any) -> Path:
    from cpt_fx.export.training import ort_training

    # The tests of all modules of a process share it; it goes with the process.
    holder = tempfile.TemporaryDirectory(prefix="cpt_fx_ort_")
    _HOLDERS.append(holder)
    directory = Path(holder.name) / "exported"
    result = cpt_fx.transform(model, schedule())
    ort_training(result, inputs, directory, loss="cross_entropy", optimizer=optimizer)
    return directory


_HOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def with_optimizer(
    source: Path, target: Path, model: nn.Module, make: str | Callable[[Iterable[Tensor]], torch.optim.Optimizer]
) -> Path:
    """Copy a directory, and give it another optimizer: what an export with that one writes."""
    import onnx_ir as ir
    from onnx_ir.passes import common

    from cpt_fx.common.files import digest
    from cpt_fx.export.training import described
    from cpt_fx.export.updates import clipping_graph, resolve_optimizer, trace_updates
    from cpt_fx.ort import manifest as files

    shutil.copytree(source, target)
    manifest: Manifest = files.read(target)
    named = dict(model.named_parameters(remove_duplicate=False))
    optimizer, members = resolve_optimizer(make if isinstance(make, str) else make(model.parameters()), named)
    groups = {
        item.name: next((members[name] for name in item.names if name in members), -1) for item in manifest.parameters
    }
    trained = {item.name for item in manifest.parameters if item.trainable and groups[item.name] >= 0}
    updates = trace_updates(optimizer, {name: named[name] for name in sorted(trained)}, groups)
    assert not updates.initial
    gradients = ir.load(target / files.GRADIENTS)
    untrained = {item.name + ".grad" for item in manifest.parameters} - {name + ".grad" for name in trained}
    outputs = [one for one in gradients.graph.outputs if str(one.name).removesuffix(".next") not in untrained]
    gradients.graph.outputs[:] = outputs
    common.RemoveUnusedNodesPass()(gradients)
    gradients.graph.inputs[:] = [one for one in gradients.graph.inputs if one.name not in untrained]
    ir.save(gradients, target / files.GRADIENTS)
    ir.save(clipping_graph({name: named[name].shape for name in trained}), target / files.CLIPPING)
    ir.save(updates.first, target / files.FIRST_UPDATE)
    ir.save(updates.later, target / files.UPDATE)
    replace(
        manifest,
        optimizer=described(optimizer, updates.remembered),
        parameters=tuple(
            replace(item, group=groups[item.name], trainable=item.name in trained) for item in manifest.parameters
        ),
        digests={name: digest(target / name) for name in files.FILES},
    ).write(target)
    return target
