"""integers, symbolic: Wrong: evaluation on integers: buffer norm1.running_mean is off by 0.8 of the largest"""

# ruff: noqa
# mypy: ignore-errors

from pathlib import Path

from tests.fuzz.saving import faults_of
import torch
from torch import nn
from cpt_fx.schedules import Static


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(5, 5) * 0.5)
        self.norm1 = nn.BatchNorm2d(5)

    def forward(self, x):
        h = x
        h = h.__matmul__(self.w1)
        h = h - h.mean(-1, keepdim=True)
        h = self.norm1(h)
        return h


def inputs():
    return ((torch.randn(4, 5, 2, 5),), {})


def schedule():
    return Static(4)


def options():
    return dict()


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="symbolic", oracle="integers")
