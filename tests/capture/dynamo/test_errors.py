"""An exception inside a region without gradients, or under autocast, leaves the modes of the process as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cpt_fx
from cpt_fx.ir.contexts import ModesOf
from cpt_fx.schedules import Static
from tests.selecting import mostly_slow


def no_grad() -> AbstractContextManager[Any]:
    return torch.no_grad()


def set_grad() -> AbstractContextManager[Any]:
    return torch.set_grad_enabled(False)


def inference() -> AbstractContextManager[Any]:
    return torch.inference_mode()


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


REGIONS = [no_grad, set_grad, inference, autocast]


class Picky(nn.Module):
    """A part without gradients, in which a batch of large numbers is an error."""

    def __init__(self, region: Any, breaks: str, how: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.region, self.breaks, self.how = region, breaks, how

    def checked(self, x: Tensor) -> Tensor:
        y: Tensor = self.one(x)
        if self.breaks == "inside":
            torch._dynamo.graph_break()
        if self.how == "operator":
            return y.reshape(-1)[torch.where(x.reshape(-1) > 1e6, 1000, 0)].float()
        if float(x.sum()) > 1e6:
            raise IndexError("too large")
        return y.float()

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks == "before":
            torch._dynamo.graph_break()
        if self.region is no_grad:
            with torch.no_grad():
                part = self.checked(x)
        elif self.region is set_grad:
            with torch.set_grad_enabled(False):
                part = self.checked(x)
        elif self.region is inference:
            with torch.inference_mode():
                part = self.checked(x)
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                part = self.checked(x)
        result: Tensor = self.two(x).sum() + part.sum()
        return result


def modes() -> tuple[object, ...]:
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    autocasts = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocasts, nesting


@pytest.mark.parametrize("region", mostly_slow(REGIONS, every=2))
@pytest.mark.parametrize("breaks", ["nowhere", "before", "inside"])
@pytest.mark.parametrize("how", ["operator", "raise"])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_of_twenty_batches(region: Any, breaks: str, how: str, compiled: bool) -> None:
    if compiled and (breaks == "before" or how == "raise"):
        pytest.skip("the same graphs as elsewhere")
    torch._dynamo.reset()
    model: Any = cpt_fx.transform(Picky(region, breaks, how), Static(8), capture="dynamo")
    called: Any = torch.compile(model, backend="aot_eager") if compiled else model
    before, trained, failed = modes(), 0, 0
    for number in range(20):
        x = torch.full((2, 4), 1e7 if number == 3 else 0.5)
        model.zero_grad()
        try:
            called(x).backward()
        except IndexError:
            failed += 1
        else:
            trained += model.two.weight.grad is not None
        assert modes() == before, number
    assert (trained, failed) == (19, 1)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu"])
def test_autocast_of_every_device_is_put_back(device: str) -> None:
    """What a graph leaves behind when it fails: autocast is set by calls, before the device is asked for anything."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with pytest.raises(IndexError), ModesOf():
        torch.set_autocast_enabled(device, not before[0])
        torch.set_autocast_dtype(device, torch.float32)
        raise IndexError
    assert (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) == before


@contextmanager
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def one_kernel() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.parametrize("region", [doubles, deterministic, one_kernel])
def test_other_modes_of_the_process(region: Any) -> None:
    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: Tensor, index: Tensor) -> Any:
            with region():
                return self.one(x)[index]

    def others() -> tuple[object, ...]:
        library: Any = torch.backends.cuda
        kernels = library.flash_sdp_enabled(), library.math_sdp_enabled(), library.mem_efficient_sdp_enabled()
        return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), *kernels

    torch._dynamo.reset()
    model, before = cpt_fx.transform(Within(), Static(8), capture="dynamo"), others()
    try:
        for number in (0, 99):
            with pytest.raises(IndexError) if number else nullcontext():
                model(torch.ones(2, 4), torch.tensor([number]))
            assert others() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad])
def test_the_callers_own_modes_stay(outer: Any) -> None:
    model = cpt_fx.transform(Picky(no_grad, "nowhere", "operator"), Static(8), capture="dynamo")
    with outer(), torch.autocast("cpu", dtype=torch.float16):
        before = modes()
        for value in (0.5, 1e7):
            try:
                model(torch.full((2, 4), value))
            except IndexError:
                assert value == 1e7
            assert modes() == before


def test_a_traced_graph() -> None:
    """torch.fx records a gradient switch as a node, too."""

    class Traced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            with torch.no_grad():
                part = self.one(x).reshape(-1)[index]
            y: Tensor = self.one(x).sum() + part.sum()
            return y

    model = cpt_fx.transform(Traced(), Static(8))
    before = modes()
    for index in (0, 1000, 1):
        try:
            assert model(torch.ones(2, 4), torch.tensor([index])).requires_grad
        except IndexError:
            assert index == 1000
        assert modes() == before
