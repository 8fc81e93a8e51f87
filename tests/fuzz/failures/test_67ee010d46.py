"""census, dynamo: Wrong: not quantized at 2 bits, and listed are []: mm (forward), operand 0 of (36, 6): 5 levels in one range; mm (backward), operand 0 of (6, 36): 5 levels in one range"""

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
        self.w1 = nn.Parameter(torch.randn(6) * 0.5)

    def forward(self, x, scale=None):
        h = x
        h = torch.ops.aten.tensordot(h, self.w1, [-1], [0])
        return h


def inputs():
    return ((torch.randn(6, 6),), {"scale": 2.0})


def schedule():
    return Static(4)


def options():
    return dict(
        recipe=Recipe(
            name="drawn", linear=Rule(input=Format(group="channel", block=32), weight=Format(), gradient=Format())
        )
    )


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="dynamo", oracle="census")
