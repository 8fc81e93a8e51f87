"""proof, dynamo: Wrong: verify: 1 problem with quantization: matmul: mm of 8x6 and 6x8 in the backward pass, 2 times: its second operand comes from no quantizer, and no entry of `uncovered` says why"""

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
        self.w1 = nn.Parameter(torch.randn(8) * 0.5)

    def forward(self, x):
        h = x
        h = h @ self.w1
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        h = h.permute(*range(h.ndim - 1, -1, -1))
        return h


def inputs():
    return ((torch.randn(6, 8),), {})


def schedule():
    return Static(4)


def options():
    return dict()


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="dynamo", oracle="proof")
