"""same, dynamo: Wrong: training at 32 bits: gradient up1.weight is off by 5.7e-08 of the largest; gradient up1.bias is off by 1.5e-07 of the largest; gradient of input 0 is off by 7.5e-08 of the largest"""

# ruff: noqa
# mypy: ignore-errors

from pathlib import Path

from tests.fuzz.saving import faults_of
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from cpt_fx.schedules import Static


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts1 = nn.ModuleDict({"a": nn.Linear(10, 10), "b": nn.Linear(10, 10)})

    def forward(self, h):
        kept1 = h
        h = self.parts1["a"](h)
        h = h @ kept1.mT
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up1 = nn.ConvTranspose1d(8, 4, 3)
        self.block1 = Block1()

    def forward(self, x):
        h = x
        h = self.up1(h)
        h = checkpoint(self.block1, h, use_reentrant=False)
        return h


def inputs():
    return ((torch.randn(1, 8, 8),), {})


def schedule():
    return Static(4)


def options():
    return dict()


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="dynamo", oracle="same")
