"""Integer execution in compiled code: one graph for all widths, the same numbers, counts and memory.

Compiled code draws other random numbers than eager code: gradients are rounded to nearest here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import cpt_fx
from cpt_fx.formats import Format, Scheme
from cpt_fx.integer import operands
from cpt_fx.integer.choice import chosen
from cpt_fx.integer.counts import COUNTS, ProductOutcome
from cpt_fx.recipes import integer
from cpt_fx.schedules import Bits, Static
from tests.integer.models import Convolutions, Encoder, always, both, counts, difference, nearest, products, set_widths

__all__ = ["always"]
EIGHT = Bits(8, 8, 8)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def in_rows(names: list[str]) -> nn.Module:
    """Return a model of five products beside each other: compiling one graph takes less time than compiling five."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(products()[name][0] for name in names)

        def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, ...]:
            return tuple(part(x) for part, x in zip(self.parts, (a, b, c, d, e), strict=True))

    return Rows()


def step(model: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return results and gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = model(*leaves)
    loss = sum(((y - y.mean()) ** 3).sum() for y in results)
    return [*results, *torch.autograd.grad(loss, [*leaves, *model.parameters()])]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_every_product_in_compiled_code(backend: str) -> None:
    names = ["linear", "addmm", "matmul with broadcast batches", "conv2d", "conv1d of one sequence"]
    inputs = [products()[name][1] for name in names]
    ours, theirs = both(in_rows(names), EIGHT, recipe=nearest(), capture="symbolic")
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for forward, gradient in ((8, 8), (16, 8), (4, 8), (8, 16), (32, 32), (1, 1)):
        for result in (ours, theirs):
            set_widths(result, forward, gradient)
        assert difference(step(compiled, inputs), step(theirs, inputs)) < 5e-6, (forward, gradient)
    # 8, 4, 1 with all three; 8 bits forward with gradients of 16.
    assert counts(ours)[:, ProductOutcome.INTEGER].tolist() == [4 * 5, 3 * 5, 3 * 5]
    assert counts(ours).sum() == 6 * 5 * 3
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"), [("transformer", "aot_eager"), ("convolutions", "aot_eager"), ("convolutions", "inductor")]
)
def test_widths_cross_8_without_a_new_graph(kind: str, backend: str) -> None:
    """Every width, up and down, in training and evaluation: two graphs, not one more."""
    model, x = (
        (Encoder(), torch.randint(0, 11, (3, 6)))
        if kind == "transformer"
        else (Convolutions(), torch.randn(3, 1, 8, 8))
    )
    ours, _ = both(model, EIGHT)
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for training in (True, False):
        ours.train(training)
        for forward in (8, 9, 32, 3, 16, 4, 8):
            set_widths(ours, forward, 8)
            with torch.set_grad_enabled(training):
                result = compiled(x)
            if training:
                result.square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"] and not counters["recompiles"]
    table = counts(ours)
    lefts = len(cpt_fx.inspect(ours).products) - (kind == "convolutions")  # an image asks for no gradient
    assert table[0].tolist()[:2] == [8 * len(cpt_fx.inspect(ours).products), 6 * len(cpt_fx.inspect(ours).products)]
    assert table[1].tolist()[:2] == [4 * lefts, 3 * lefts]


def test_levels_are_counted_in_compiled_code() -> None:
    ours, _ = both(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), Bits(3, 3, 8))
    torch.compile(ours, backend="aot_eager", fullgraph=True)(torch.randn(64, 8)).square().mean().backward()
    proof = cpt_fx.inspect(ours).verify()
    assert proof.proven and proof.widths == (3, 8)


def test_autocast_in_compiled_code() -> None:
    model, x = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(5, 16)
    ours, theirs = both(model, EIGHT, recipe=nearest())
    found = []
    for result in (torch.compile(ours, backend="aot_eager", fullgraph=True), theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = result(x)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), list(theirs.parameters()))])
    assert found[0][0].dtype is torch.bfloat16
    assert difference(*found) < 0.05
    assert counts(ours)[:, 0].tolist() == [2, 1, 2]


def test_compiled_code_keeps_codes_for_backward() -> None:
    """What is declared as floating point numbers takes no memory at 8 bits, and takes it above."""
    model = nn.Sequential(nn.Linear(768, 3072), nn.Linear(3072, 768))
    x = torch.randn(64, 768, requires_grad=True)
    ours, _ = both(model, EIGHT)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    plain = kept(model, x)
    assert kept(compiled, x) <= 0.26 * plain
    set_widths(ours, 16, 16)
    assert kept(compiled, x) > plain


def kept(model: Any, x: Tensor) -> int:
    """Return how many bytes are saved for the backward pass, blanks left out: they share memory that nobody touches."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        blank = operands.blank(tensor.shape, tensor.device)
        if tensor.dtype is not blank.dtype or tensor.untyped_storage().data_ptr() != blank.untyped_storage().data_ptr():
            seen[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(x)
    result.sum().backward()
    return sum(seen.values())


def test_saved_tensors_may_be_copied() -> None:
    """A hook that moves what is saved elsewhere copies blanks, too: memory that is there, and that nobody reads."""
    ours, theirs = both(nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4)), EIGHT, recipe=nearest())
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 16)
    for forward in (8, 16):
        for result in (ours, theirs):
            set_widths(result, forward, 8)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
            mine = compiled(x)
        found = [torch.autograd.grad(y.sum(), list(theirs.parameters())) for y in (mine, theirs(x))]
        assert difference(list(found[0]), list(found[1])) < 5e-6


def test_the_operators_keep_the_rules_of_torch() -> None:
    """Schemas say what is written, shapes are known before the run: `torch.library.opcheck` looks."""
    check: Any = torch.library.opcheck
    x, w, bits = torch.randn(4, 16), torch.randn(8, 16), torch.tensor(8)
    counters = cpt_fx.quantizers.counters.new_counters()
    for width in (8, 16, 32):
        bits.fill_(width)
        # One of what is returned is not written, and may hold anything: results are compared for the others.
        rules = ("test_schema", "test_autograd_registration", "test_faketensor")
        check(operands.QUANTIZE, (x, bits, None, [], None, "nearest", counters), test_utils=rules)
        left, right = (list(operands.QUANTIZE(value, bits, None, [], None, "nearest", None)) for value in (x, w))
        table = torch.zeros(COUNTS, dtype=torch.int64)
        check(operands.MULTIPLY, ("linear_forward", left, right, None, [4, 8], [], torch.float32, torch.float32, table))
        check(operands.DEQUANTIZE, (left, torch.float32))
        check(operands.SUM, (left, [16], torch.float32, -1))


class Watching(TorchDispatchMode):
    """What stands around a model and sees its operators: a counter of them, selective checkpointing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("watched", ["forward", "backward", "both"])
@pytest.mark.parametrize("rule", ["always", "never"])
def test_a_mode_around_one_of_the_passes_changes_nothing(watched: str, rule: str) -> None:
    """Under it the width is not looked at, without it, it is: operands of both kinds meet in the backward pass."""
    watching: Any = Watching()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    x, found = torch.randn(7, 6), list[Any]()
    recipe = integer().with_rule("linear", gradient=Format(scheme=Scheme.SYMMETRIC))
    for forward, backward in ((False, False), (watched != "backward", watched != "forward")):
        result = cpt_fx.transform(copy.deepcopy(model), Static(5), recipe=recipe, execution="integer")
        with chosen(rule):
            with watching if forward else nullcontext():
                loss = result(x).square().sum()
            with watching if backward else nullcontext():
                loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in result.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
