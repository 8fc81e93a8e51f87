"""same, program: Wrong: training at 32 bits: gradient attention1.in_proj_bias is off by 1.4e-08 of the largest"""

# ruff: noqa
# mypy: ignore-errors

from pathlib import Path

from tests.fuzz.saving import faults_of
import torch
from torch import nn
from cpt_fx import Format
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Static


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention1 = nn.MultiheadAttention(7, 1)

    def forward(self, x, scale=None):
        h = x
        h = self.attention1(h, h + 1, h + 1)[0]
        return (h.mean(),)


def inputs():
    return ((torch.randn(5, 7),), {})


def schedule():
    return Static(4)


def options():
    return dict(recipe=Recipe(name="drawn", matmul=Rule(input=Format(range="learned"))))


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="program", oracle="same")
