"""Small models of every kind that exports are tested with, and files of them for other versions of ONNX Runtime.

    python -m tests.export.exported_cases FOLDER

writes a folder for each case, for `run_exported.py` to run where there is no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx import export

CLASSES = 10


class Residual(nn.Module):
    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.norm2(self.conv(x)))
        y: Tensor = self.head(F.avg_pool2d(x, 2).mean((2, 3)))
        return y


class GroupedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.deep = nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.deep(F.relu(self.conv(x)))
        return y


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(30, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(x)
        y: Tensor = self.head(x.mean(1))
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def _normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def _tokens(batch: int) -> Tensor:
    return torch.randint(0, 30, (batch, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], str]] = {
    "mlp": (_mlp, _normal(12), "input"),
    "residual": (Residual, _normal(4, 6, 6), "x"),
    "grouped": (GroupedConv, _normal(4, 7, 7), "x"),
    "transformer": (Transformer, _tokens, "tokens"),
    "lstm": (Recurrent, _normal(4, 6), "x"),
}
"""Name -> what makes the model, what makes a batch for it, and what its argument is called."""


def trained(name: str, bits: int = 8, *, recipe: Any = None, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """Return a transformed model whose ranges and statistics have seen a few batches, and a batch."""
    make, batch, _ = MODELS[name]
    torch.manual_seed(seed)
    model = cpt_fx.transform(make(), cpt_fx.schedules.Static(bits), recipe=recipe)
    with torch.no_grad():
        for _ in range(3):
            model(batch(8))
    return model, batch(8)


def evaluated(model: nn.Module, x: Tensor, bits: int | None = None) -> np.ndarray[Any, Any]:
    """Return what a model in evaluation makes of a batch, at a width; leave it in the mode it was in."""
    training = model.training
    if bits is not None:
        cpt_fx.schedules.Static(bits).bind(model)
    with torch.no_grad():
        y: Tensor = model.eval()(x)
    model.train(training)
    return y.numpy()


def save(folder: Path, inputs: dict[str, Any], outputs: dict[str, Any], tolerance: float) -> None:
    """Write what a file has to return for what. Differences are relative to the largest element of an output."""
    values = {f"input.{name}": value for name, value in inputs.items()}
    values |= {f"output.{name}": value for name, value in outputs.items()}
    np.savez(folder / "case.npz", tolerance=np.array(tolerance), **values)


def write(folder: Path) -> None:
    """Write all cases."""
    for name in MODELS:
        for bits in (8, 5, 4, 2):
            model, x = trained(name, bits)
            expected = {"output": evaluated(model, x)}
            for kind in ("open", "fixed", "qdq"):
                case = folder / f"{name}-{kind}-{bits}"
                path = case / "case.onnx"
                inputs = {MODELS[name][2]: x.numpy()}
                if kind == "qdq":
                    report = export.qdq(model, (x,), path, bits, verbose=False)
                    assert report.exact, str(report)
                    # The integer kernels that 8 bits allow add biases as whole steps of the product.
                    save(case, inputs, expected, 0.01 if bits == 8 else 1e-5)
                    continue
                export.onnx(model, (x,), path, bits if kind == "fixed" else None)
                if kind == "open":
                    inputs |= {f"bits.{role}": np.array(bits) for role in ("weight", "activation")}
                save(case, inputs, expected, 1e-5)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
