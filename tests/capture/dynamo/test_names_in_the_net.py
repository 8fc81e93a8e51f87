"""What runs operator by operator keeps the names, and with them the ranges, that it has in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cpt_fx
from cpt_fx.schedules import Static

WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.einsum": lambda h, w: torch.einsum("ab,bc->ac", h, w),
    "torch.tensordot": lambda h, w: torch.tensordot(h, w, dims=1),
    "an operator of ATen": torch.ops.aten.matmul.default,
    "a packet of ATen": torch.ops.aten.mm,
    "a method": Tensor.matmul,
    "an operator of Python": lambda h, w: h @ w,
    "a function of torch.nn": F.linear,
    "attention": lambda h, w: F.scaled_dot_product_attention(h, w, w),
}


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.w = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x, self.w)


@pytest.mark.parametrize("name", WAYS)
def test_an_operator_has_one_name(name: str) -> None:
    result, x = cpt_fx.transform(Model(WAYS[name]), Static(4), capture="dynamo"), torch.randn(5, 6)
    result(x).sum().backward()
    names = {layer for view in cpt_fx.inspect(result).quantizers for layer in view.layers}
    assert names
    with FlopCounterMode(display=False):  # under which torch's compiler does nothing
        result(x).sum().backward()
    assert {layer for view in cpt_fx.inspect(result).quantizers for layer in view.layers} == names
