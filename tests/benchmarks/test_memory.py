"""Memory and products of a step, against what is known of it beforehand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import memory
from harness.memory import kept_for_backward, storages, traced
from torch import Tensor, nn
from torch._C._profiler import _EventType

KIB = 1024


def test_peak_is_that_of_known_allocations() -> None:
    def step() -> None:
        first = torch.empty(400 * KIB, dtype=torch.uint8)
        second = torch.empty(100 * KIB, dtype=torch.uint8)
        del first
        third = torch.empty(300 * KIB, dtype=torch.uint8)
        del second, third

    # 500 KiB with the first two, 400 with the last two.
    assert traced(step).peak_bytes == 500 * KIB


def test_what_was_there_before_is_not_counted_twice() -> None:
    kept = [torch.empty(256 * KIB, dtype=torch.uint8)]

    def step() -> None:
        kept.clear()
        kept.append(torch.empty(100 * KIB, dtype=torch.uint8))

    assert traced(step).peak_bytes == 100 * KIB


def test_backward_is_part_of_a_step() -> None:
    x, weight = torch.randn(8, 64), torch.randn(64, 64, requires_grad=True)
    assert traced(lambda: (x @ weight).sum().backward()).peak_bytes >= 64 * 64 * 4


def test_storages_are_counted_once() -> None:
    before = storages()
    whole = torch.zeros(1000)
    views = [whole[:10], whole.view(10, 100)]
    new = {address: size for address, size in storages().items() if address not in before}
    assert new[whole.data_ptr()] == 4000
    assert sum(size for address, size in new.items() if address == whole.data_ptr()) == 4000
    del views


def test_products_by_kind() -> None:
    a, b = (torch.randint(-8, 8, (32, 32), dtype=torch.int8) for _ in range(2))
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    done = traced(lambda: (torch._int_mm(a, b), net(x).sum().backward()))
    assert (done.integer, done.floating) == (1, 2)


def test_an_attention_kernel_is_one_product() -> None:
    q = torch.randn(1, 2, 8, 4)
    assert traced(lambda: nn.functional.scaled_dot_product_attention(q, q, q)).floating == 1


def test_what_a_product_consists_of_is_not_counted_again() -> None:
    def event(name: str, *children: Any) -> Any:
        return SimpleNamespace(name=name, typed=(_EventType.TorchOp, None), children=list(children))

    tree = [
        event("aten::linear", event("aten::addmm", event("aten::mm"))),
        event("onednn::qlinear", event("aten::_int_mm")),
    ]
    assert sorted(memory._kind(found) or "" for found in memory._outermost(tree)) == ["", "floating", "integer"]


@pytest.mark.parametrize("batch", [6, 7])
def test_kept_for_backward_is_what_grows_with_the_batch(batch: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            # The doubled weight is kept for the gradient of x, and does not grow.
            return (x.relu() @ (2 * self.weight)).relu()

    # Both results of relu: the first one is kept for itself and for the product, once.
    assert kept_for_backward(Net(), (torch.randn(batch, 5),)) == 2 * batch * 5 * 4


@pytest.mark.parametrize("inputs", [(torch.randn(1, 3),), (torch.tensor(2.0),), (torch.randn(4), torch.randn(6)), ()])
def test_a_batch_without_halves(inputs: tuple[Any, ...]) -> None:
    assert kept_for_backward(nn.Identity(), inputs) is None
