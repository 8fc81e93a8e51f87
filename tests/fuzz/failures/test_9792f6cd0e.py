"""proof, dynamo: Wrong: verify: 1 problem with quantization: the backward pass of Addmm: mm of 4x7 and 7x7 in the backward pass, 2 times: its first and second operand comes from no quantizer, and no entry of `uncovered` says why"""

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
        self.linear2 = nn.Linear(7, 7).to(torch.float64)

    def forward(self, x):
        h = x
        z = h.clone()
        h = z.view_as(z)
        h.fill_diagonal_(0.5)
        h = self.linear2(h)
        return h.sum(-1)


def inputs():
    return ((torch.randn(4, 7, dtype=torch.float64),), {})


def schedule():
    return Static(4)


def options():
    return dict(exclude=nn.Linear)


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="dynamo", oracle="proof")
