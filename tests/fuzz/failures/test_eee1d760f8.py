"""proof, dynamo: Wrong: verify: 1 problem with quantization: block1.linear1: mm of 390x6 and 6x6 in the backward pass, 2 times: its first operand comes from no quantizer, and no entry of `uncovered` says why"""

# ruff: noqa
# mypy: ignore-errors

from pathlib import Path

from tests.fuzz.saving import faults_of
import torch
from torch import nn
from cpt_fx.schedules import Static


class Block1(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, h):
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        return h


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(7) * 0.5)
        self.block1 = Block1()

    def forward(self, x):
        h = x
        h = torch.linalg.matmul(h, self.w1)
        h = self.block1(h)
        return h


def inputs():
    return ((torch.randn(6, 5, 13, 7),), {})


def schedule():
    return Static(4)


def options():
    return dict()


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="dynamo", oracle="proof")
