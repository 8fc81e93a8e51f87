"""proof, dynamo: VerificationError: 1 problem with quantization: matmul: mm of 7x1 and 1x7 in the backward pass, 2 times: its second operand comes from no quantizer, and no entry of `uncovered` says why transform has proven its examples: prove=False leaves it out"""

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
        self.w1 = nn.Parameter(torch.randn(7, 7) * 0.5)

    def forward(self, x, deep=True):
        h = x
        h = h @ self.w1
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        return h


def inputs():
    return ((torch.randn(7),), {"deep": False})


def schedule():
    return Static(4)


def options():
    return dict()


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="dynamo", oracle="proof")
