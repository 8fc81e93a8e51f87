"""compiled, dynamo: TensorifyScalarRestartAnalysis: TensorifyScalarRestartAnalysis"""

# ruff: noqa
# mypy: ignore-errors

from pathlib import Path

from tests.fuzz.saving import faults_of
from typing import NamedTuple
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from cpt_fx.schedules import Static


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8) * 0.5)

    def forward(self, x, scale=None):
        h = x
        h = F.linear(h, self.w1.t())
        if float(h.detach().sum()) > 0:
            pass
        else:
            pass
        return Pair(h, h * 2)


def inputs():
    return ((torch.randn(5, 8),), {})


def schedule():
    return Static(4)


def options():
    return dict()


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="dynamo", oracle="compiled")
