"""The names of contenders and models. Nothing here imports torch, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpt_fx.errors import check_choice, check_int
from cpt_fx.schedules.bits import check_range


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to run a training step: a kind of arithmetic, eager or compiled."""

    kind: str
    compiled: bool

    @property
    def name(self) -> str:
        """The name on the command line and in data."""
        return f"{self.kind}-compiled" if self.compiled else self.kind

    @property
    def label(self) -> str:
        """The name in tables."""
        return f"{KINDS[self.kind]}, compiled" if self.compiled else KINDS[self.kind]


KINDS = {
    "fp32": "FP32",
    "bf16": "bf16 autocast",
    "simulated": "simulated",
    "integer": "integer",
    "torch-ao-fx": "torch.ao FX QAT",
    "torchao": "torchao int8 training",
    "brevitas": "Brevitas QAT",
}
OURS = ("simulated", "integer")
PEERS = ("torch-ao-fx", "torchao", "brevitas")
CONTENDERS = {
    contender.name: contender
    for contender in (Contender(kind=kind, compiled=compiled) for kind in KINDS for compiled in (False, True))
}
REFERENCE = "fp32"
"""The contender that every ratio is relative to."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model that can be requested by name; `batch` is its usual batch size."""

    about: str
    batch: int


PRESETS = {
    "resnet74": Preset(about="ResNet-74 for CIFAR, pictures of 3x32x32", batch=32),
    "resnet20": Preset(about="ResNet-20 for CIFAR, pictures of 3x32x32", batch=32),
    "bert-small": Preset(about="BERT classifier of 4 layers, width 256, sequences of 128", batch=32),
    "bert-layer": Preset(about="one encoder layer of BERT-base, 768/3072, 12 heads, sequences of 128", batch=16),
    "bottlenecks": Preset(about="bottlenecks of ResNet-50, two at 56x56 and two at 28x28", batch=8),
    "mlp": Preset(about="four linear layers of width 1024 with ReLU", batch=512),
    "linears": Preset(about="linear layers 768 to 3072 to 768, nothing between them", batch=2048),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to compare. `steps` are rounds: in each, every contender takes one step."""

    steps: int = 20
    threads: int = 1
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    recipe: str = "default"
    schedule: str = "CR"
    q_min: int = 3
    q_max: int = 8
    backend: str = "inductor"

    def __post_init__(self) -> None:
        """Check the settings of this command; schedules and recipes check their own arguments."""
        check_int("steps", self.steps, 2)
        check_int("threads", self.threads, 1)
        check_range(self.q_min, self.q_max)
        for name in self.contenders:
            check_choice("contenders", name, CONTENDERS)


GROUPS = ("eager", "compiled")
"""Words that stand for several contenders."""


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """Return contenders in the order of the catalog, always including the reference; no names mean all."""
    for name in names:
        check_choice("contenders", name, (*CONTENDERS, *GROUPS))
    return tuple(
        name
        for name, contender in CONTENDERS.items()
        if not names or name == REFERENCE or {name, GROUPS[contender.compiled]} & set(names)
    )
