"""same, symbolic and dynamo: RuntimeError: Output 0 of LearnedRange is a view and is being modified inplace. This view was created inside a custom Function (or because an input was returned as-is) and the autograd logic to handle view+inplace would override the custom backward associated with the custom Function, leading to incorrect gradien"""

# ruff: noqa
# mypy: ignore-errors

from pathlib import Path
from tests.fuzz.saving import faults_of
import torch
import torch.nn.functional as F
from torch import nn
from cpt_fx import Format
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Static


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(7, 6)

    def forward(self, h):
        h = self.linear1(h)
        return h


class Block2(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1 = Block1()
        self.w2 = nn.Parameter(torch.randn(9, 6) * 0.5)
        self.w4 = nn.Parameter(torch.randn(9, 4) * 0.5)
        self.w5 = nn.Parameter(torch.randn(4, 6) * 0.5)

    def forward(self, h):
        h = self.block1(h)
        h = F.linear(h, self.w2.clone().addmm_(self.w4, self.w5))
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block2 = Block2()

    def forward(self, x):
        h = x
        h = self.block2(h)
        return (({"n": 1},),)


def inputs():
    return ((torch.randn(1).expand(5, 7),), {})


def schedule():
    return Static(4)


def options():
    return dict(recipe=Recipe(name="drawn", linear=Rule(bias=Format(range="learned"))))


def test_it_is_mended(tmp_path: Path) -> None:
    for frontend in ("symbolic", "dynamo"):
        assert not faults_of(Path(__file__), tmp_path, frontend=frontend, oracle="same")
