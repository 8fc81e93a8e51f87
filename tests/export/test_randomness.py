"""Whole numbers from the noise of an exported graph: all of a range, and none beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cpt_fx.quantizers.noise import new_seed, uniform

pytest.importorskip("onnxscript")

from cpt_fx.export.operators import drawing

aten = torch.ops.aten


def noise(like: Tensor) -> Tensor:
    return uniform(new_seed(like.device), like)


@pytest.mark.parametrize("low", [0, -5, 2**24 + 1, 2**40 + 1, -(2**31)])
@pytest.mark.parametrize("count", [1, 3, 8, 1000, 2**24, 2**24 + 1, 2**31 - 1, 2**40])
def test_whole_numbers(low: int, count: int) -> None:
    torch.manual_seed(0)
    drawn = drawing(noise)[aten.randint.low](low, low + count, (20_000,)) - low
    assert int(drawn.min()) >= 0 and int(drawn.max()) < count
    assert count > 1000 or len(drawn.unique()) == count
    assert count == 1 or abs(float(drawn.double().mean()) / (count - 1) - 0.5) < 0.02
    if count > 8:
        assert abs(float((drawn % 2).double().mean()) - 0.5) < 0.02, "odd numbers come as often as even ones"
