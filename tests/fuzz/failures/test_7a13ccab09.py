"""census, symbolic: Wrong: not quantized at 2 bits, and listed are []: bmm (backward), operand 1 of (36, 5, 7): 5 levels in one range; bmm (backward), operand 0 of (36, 5, 7): 5 levels in one range"""

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
        self.linear1 = nn.Linear(8, 7)
        self.w1 = nn.Parameter(torch.randn(7, 6, 6, 7) * 0.5)

    def forward(self, x):
        h = x
        h = self.linear1(h)
        h = torch.einsum("abcd,dcak->cbka", h, self.w1)
        return h.sum(-1)


def inputs():
    return ((torch.randn(6, 5, 6, 8),), {})


def schedule():
    return Static(4)


def options():
    return dict(
        recipe=Recipe(
            name="drawn",
            linear=Rule(input=Format(), weight=Format(), gradient=Format(scheme="float", group="vector", exponent=5)),
        )
    )


def test_it_is_mended(tmp_path: Path) -> None:
    assert not faults_of(Path(__file__), tmp_path, frontend="symbolic", oracle="census")
