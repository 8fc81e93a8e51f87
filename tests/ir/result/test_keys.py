"""The names under which our state is saved are pinned: a checkpoint of today loads tomorrow.

CPT_FX_REGENERATE=1 pytest tests/ir/result/test_keys.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.formats import Format, Range
from cpt_fx.schedules import Static
from tests.ir.result.models import QUIET

pytestmark = QUIET
GOLDEN = Path(__file__).parents[2] / "golden" / "state_keys.json"
LEARNED = cpt_fx.recipes.default().with_rule("linear", input=Format(range=Range.LEARNED))


class Mixing(nn.Module):
    """Products with and without a layer, one of them in a module without tensors."""

    class Scores(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return torch.softmax(q @ k.transpose(-1, -2), -1)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scores = Mixing.Scores()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scores(self.q(x), self.k(x)) @ x
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "sequential": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (3, 4), None),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)),
        (2, 2, 5, 5),
        None,
    ),
    "products": (Mixing, (2, 3, 4), None),
    "recurrent": (lambda: nn.LSTM(4, 4, batch_first=True), (2, 3, 4), None),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (2, 3, 4), None),
    "learned": (lambda: nn.Sequential(nn.Linear(4, 4)), (3, 4), LEARNED),
    "paper": (lambda: nn.Sequential(nn.Linear(4, 4)), (3, 4), "paper"),
    "integer": (lambda: nn.Sequential(nn.Linear(4, 4)), (3, 4), "integer"),
}


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_those_on_file(name: str) -> None:
    make, shape, recipe = MODELS[name]
    model = make()
    result = cpt_fx.transform(model, Static(4), recipe=recipe, example_inputs=(torch.randn(shape),))
    ours = {key: f"{value.dtype} {tuple(value.shape)}" for key, value in result.state_dict().items() if "cpt_fx" in key}
    assert [key for key in result.state_dict() if key not in ours] == list(model.state_dict())
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("CPT_FX_REGENERATE") == "1":
        GOLDEN.write_text(json.dumps({**golden, name: ours}, indent=1, sort_keys=True) + "\n")
    else:
        assert ours == golden[name]
