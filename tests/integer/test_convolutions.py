"""Integer convolutions of every geometry give what simulated ones give: a short run of `fuzz_convolutions.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cpt_fx
from cpt_fx import recipes
from cpt_fx.integer import products
from cpt_fx.integer.choice import chosen
from cpt_fx.integer.codes import Codes
from cpt_fx.integer.kernels import LONGEST_SUM
from cpt_fx.schedules import Static
from tests.integer.fuzz_convolutions import ROUNDING, Shape, errors, wrong
from tests.native.kernel_kinds import KINDS, kernels_of


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 3, 4, [3], [1], [2], [1], [1], False),  # as many places as pixels, but others
        Shape(1, 3, 4, [5], [1], [3], [5], [1], True),
        Shape(2, 3, 4, [1, 3], [1, 1], [1, 2], [0, 1], [1, 1], False),
        Shape(2, 3, 4, [1, 3], [1, 1], [2, 2], [0, 1], [1, 1], False),
        Shape(2, 3, 4, [3, 3], [1, 1], [1, 1], [2, 2], [1, 1], True),
        Shape(1, 5, 7, [4, 4], [1, 1], [1, 1], [0, 0], [1, 1], True),
    ],
    ids=str,
)
def test_kernels_of_one_pixel(shape: Shape) -> None:
    """The shortcut for images without neighbours is for those that lie as they are."""
    with chosen("always"):
        assert max(errors(shape, 0)) < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_any_geometry(kind: str) -> None:
    with kernels_of(kind):
        assert wrong(700 if kind == KINDS[-1] else 250, seed=KINDS.index(kind)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_at_the_longest_sum(kind: str) -> None:
    """With 128 added to one of the operands, such sums pass 31 bits on the way."""
    channels = LONGEST_SUM // 9
    ends = Codes(torch.full((1, channels, 3, 3), 127, dtype=torch.int8), torch.tensor(1.0))
    for sign in (1, -1):
        with kernels_of(kind):
            result = products.conv2d_forward(ends, Codes(sign * ends.values, ends.scale))
        assert result.item() == sign * float(torch.tensor(float(127 * 127 * 9 * channels)))


@pytest.mark.parametrize("size, kernel, padding", [((1, 2), (1, 5), 0), ((3, 2), (4, 4), (0, 2)), ((13, 1), (3, 5), 1)])
def test_a_filter_that_does_not_fit_is_an_error(size: tuple[int, int], kernel: tuple[int, int], padding: Any) -> None:
    layer = nn.Conv2d(1, 2, kernel, padding=padding)
    result = cpt_fx.transform(layer, Static(8), recipe=recipes.integer(), execution="integer")
    for model in (layer, result):
        with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
            model(torch.randn(1, 1, *size))
