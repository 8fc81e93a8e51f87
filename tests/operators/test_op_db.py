"""Whatever multiplies matrices in torch's own database of operators is quantized or reported, in every frontend."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.operators.census import FRONTENDS, Run
from tests.operators.entries import Call
from tests.operators.op_db import SAMPLES, faults, multiplying, of_strangers
from tests.operators.seen import Products

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@cache
def multiplying_entries() -> list[tuple[Call, Run]]:
    return list(multiplying(SAMPLES, variants=False))


@pytest.mark.parametrize("frontend", [name for name in FRONTENDS if name != "auto"])
def test_nothing_in_the_database_of_torch_is_silent(frontend: str) -> None:
    assert list(faults(multiplying_entries(), (frontend,))) == []


def test_nothing_is_silent_that_is_called_by_other_names() -> None:
    assert list(faults(of_strangers(), ("symbolic",))) == []


def test_the_census_sees_what_is_not_on_a_grid() -> None:
    x, weight = torch.randn(5, 6), torch.randn(6, 7, requires_grad=True)
    with Products() as products:
        (x @ weight).sin().sum().backward()
    assert [(product.name, product.off_grid) for product in products.seen] == [("mm", True), ("mm", True)]
    with Products() as products:
        torch.einsum("ij,jk->ik", x.sign(), weight.sign())
        torch.nn.functional.conv1d(torch.nn.functional.pad(x.sign()[None], (1, 1)), torch.ones(2, 6, 3)[:, :5])
    assert [product.off_grid for product in products.seen] == [False, False]
