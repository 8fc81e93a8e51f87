"""same, dynamo: Wrong: evaluation at 32 bits: gradient block2.block1.decoder1.linear2.weight is off by 1e-05 of the largest; gradient block2.block1.decoder1.linear2.bias is off by 1e-05 of the largest"""

# ruff: noqa
# mypy: ignore-errors

from pathlib import Path

from tests.fuzz.saving import faults_of
import torch
from torch import nn
from torch.nn.utils import parametrize
from cpt_fx.schedules import Static


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 0.5


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention1 = nn.MultiheadAttention(7, 1, batch_first=True, dropout=0.2)
        self.mask1 = nn.Buffer(torch.ones(7, 7, dtype=torch.bool).triu(1))
        self.made1 = nn.Linear(7, 2)
        parametrize.register_parametrization(self.made1, "weight", Scaled())
        self.decoder1 = nn.TransformerDecoderLayer(2, 1)

    def forward(self, h):
        h = self.attention1(h, h, h)[0]
        h = self.made1(h)
        h = self.decoder1(h, h.sin())
        return h


class Block2(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1 = Block1()
        self.w1 = nn.Parameter(torch.randn(6, 2, 7) * 0.5)
        self.w2 = nn.Parameter(torch.randn(7) * 0.5)
        self.norm1 = nn.BatchNorm1d(7)

    def forward(self, h):
        h = self.block1(h)
        h = self.w2.baddbmm(h, self.w1)
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding1 = nn.Embedding(9, 7)
        self.block2 = Block2()
        self.w3 = nn.Parameter(torch.randn(7, 7) * 0.5)

    def forward(self, x):
        h = self.embedding1(x)
        h = self.block2(h)
        return h


def inputs():
    return ((torch.randint(0, 9, (6, 7)),), {})


def schedule():
    return Static(4)


def options():
    return dict()


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="dynamo", oracle="same")
