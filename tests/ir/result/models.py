"""Models with what a user's own classes have, and the ways to tell that a result runs its quantizers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Bits, Schedule, Static
from tests.capture.captures import CAPTURES
from tests.training import tensors_in

LOW = Bits(2, 2, 32)
"""Coarse enough that nobody takes a quantized output for a plain one; gradients without noise."""

QUIET = pytest.mark.filterwarnings("default")
"""What a result says about itself is no error here: tests of the words ask for them."""

ways = pytest.mark.parametrize("way", CAPTURES)


def batch(seed: int = 7, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


class Mixer(nn.Module):
    """Two products without a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x @ x.transpose(-2, -1), -1) @ x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.mix = Mixer()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(x + self.two(F.relu(self.one(self.norm(x)))))
        return y


class Net(nn.Module):
    """Layers, containers, a part that is optional, plain values that the code reads, methods that multiply."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"width": width, "classes": classes}
        self.stem = nn.Linear(6, width)
        self.act = nn.LeakyReLU(0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(width, 3)})
        self.fc = nn.Linear(width, classes)
        self.adapter: nn.Module | None = None
        self.temperature = 1.0
        self.scales = [1.0, 0.5]
        self.options = {"gain": 1.0, "residual": True}

    def encode(self, x: Tensor) -> Tensor:
        """The features."""
        h: Tensor = self.act(self.stem(x))
        for index, block in enumerate(self.blocks):
            y = block(h) * self.scales[index % len(self.scales)]
            h = h + y if self.options["residual"] else y
        if self.adapter is not None:
            h = h + self.adapter(h)
        return h

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Logits of all heads."""
        h = self.encode(x) * self.options["gain"]
        return (self.fc(h) / self.temperature, *(head(h) for head in self.heads.values()))

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        return self.encode(x) @ self.encode(y).t()

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        y: Tensor = self(torch.linspace(-1, 1, count * 6).view(count, 6))[0]
        return y

    @property
    def width(self) -> int:
        return self.stem.out_features


class Chain(nn.Module):
    """A backbone and a head, in the order in which they run: what feature extraction cuts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.mix = Mixer()
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.mix(self.backbone(x)))
        return y


class Images(nn.Module):
    """Convolutions with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.drop(self.body(F.relu(self.bn(self.conv(x)))).mean((2, 3))))
        return y


class Config:
    """What a Hugging Face model keeps as `config`."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Pretrained(nn.Module):
    """The manners of a model of Hugging Face's: `config`, `save_pretrained`, `from_pretrained`, ties, `generate`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config: Any = config
        self.embed = nn.Embedding(11, config.width)
        self.layer = Block(config.width)
        self.lm_head = nn.Linear(config.width, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.lm_head(self.layer(self.embed(input_ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            ids = torch.cat((ids, self(ids)["logits"][:, -1:].argmax(-1)), 1)
        return ids

    def save_pretrained(self, folder: Path) -> None:
        config = {"architectures": [type(self).__name__], **vars(self.config)}
        (folder / "config.json").write_text(json.dumps(config))
        torch.save({key: value for key, value in self.state_dict().items() if "cpt_fx" not in key}, folder / "w.pt")

    @classmethod
    def from_pretrained(cls, folder: Path) -> Any:
        config = json.loads((folder / "config.json").read_text())
        assert config.pop("architectures") == [cls.__name__]
        model = cls(Config(**config))
        model.load_state_dict(torch.load(folder / "w.pt"))
        return model


def made(model: nn.Module, way: str, bits: Bits | int = LOW, **options: Any) -> Any:
    """Transform with widths that stand still, or with a schedule that is given."""
    plan = options.pop("schedule", None)
    assert plan is None or isinstance(plan, Schedule)
    return cpt_fx.transform(model, plan or Static(bits), capture=way, **options)


def runs(result: nn.Module) -> Counter[str]:
    """How often weights and activations of each layer were quantized."""
    count: Counter[str] = Counter()
    for view in cpt_fx.inspect(result).quantizers:
        if view.role in ("weight", "activation"):
            for layer in set(view.layers):
                count[layer] += view.times_run
    return count


def check_ran(result: nn.Module, before: Counter[str], *layers: str) -> None:
    """These layers quantized since."""
    now = runs(result)
    assert [layer for layer in layers if now[layer] <= before[layer]] == []


def flat(output: Any) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors_in(output)])


def far(ours: Any, theirs: Any) -> bool:
    """Whether these differ by more than rounding: what two bits make of anything here."""
    left, right = flat(ours), flat(theirs)
    return left.shape != right.shape or bool((left - right).norm() > 0.02 * right.norm())


def close(ours: Any, theirs: Any) -> bool:
    left, right = flat(ours), flat(theirs)
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-4, atol=1e-5)


def equal(ours: Any, theirs: Any) -> bool:
    left, right = flat(ours), flat(theirs)
    return left.shape == right.shape and torch.equal(left, right)


def quantized_or_refused(call: Callable[[], Any], plain: Any, expected: Any = None) -> None:
    """It runs its quantizers, or it raises and says who and why; never plain."""
    try:
        output = call()
    except Exception as error:
        named = isinstance(error, cpt_fx.TransformError) or "cpt_fx" in str(error) or "transform" in str(error)
        assert named, f"a raw error: {error!r}"
        return
    assert far(output, plain)
    if expected is not None:
        assert close(output, expected)


def ours(keys: Any) -> list[str]:
    return [key for key in keys if "cpt_fx" in key]


def ranges(result: nn.Module) -> dict[str, Tensor]:
    """The floating numbers that we keep in a state_dict."""
    return {
        key: value.clone()
        for key, value in result.state_dict().items()
        if "cpt_fx" in key and isinstance(value, Tensor) and value.is_floating_point()
    }


def learned(result: nn.Module) -> dict[str, tuple[float, float]]:
    """Running ranges as `inspect` shows them, by layer and operand."""
    return {f"{v.layer}.{v.operand}": v.range for v in cpt_fx.inspect(result).quantizers if v.range is not None}


def trained(way: str, bits: int = 8, scale: float = 1.0, **options: Any) -> Any:
    result = made(Chain(), way, bits, **options)
    for seed in range(3):
        result(scale * batch(seed))
    return result


def without_ours(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if "cpt_fx" not in key}


class Heard:
    """What was said, by warnings and in the log."""

    def __init__(self, warned: pytest.WarningsRecorder, log: pytest.LogCaptureFixture) -> None:
        self.warned, self.log = warned, log

    def text(self) -> str:
        return "\n".join([*(str(warning.message) for warning in self.warned.list), self.log.text])

    def clear(self) -> None:
        self.warned.clear()
        self.log.clear()


def forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()
