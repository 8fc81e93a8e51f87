"""Weights of products, read or computed: a range for each output, against quantization written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import cpt_fx
from cpt_fx.formats import Format, Group, Scheme
from cpt_fx.functional import fake_quantize
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Static

BITS = 3
ALL = None
"""One range for the weight; a number is the dim that each range spans."""


def by_hand(weight: Tensor, summed: int | None) -> Tensor:
    """Round to 7 levels around zero, one scale for all that goes into one output."""
    largest = weight.abs().amax() if summed is ALL else weight.abs().amax(summed, keepdim=True)
    scale = largest / 3
    rounded: Tensor = torch.round(weight / scale).clamp(-3, 3) * scale
    return rounded


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


Case = tuple[Callable[[Any, Any], Any], tuple[int, ...], tuple[int, ...], int | None]
CASES: dict[str, Case] = {
    "mv": (lambda x, w: torch.mv(x, w), (5, 4), (4,), ALL),
    "mv, method": (lambda x, w: x.mv(w), (5, 4), (4,), ALL),
    "mv of a weight": (lambda x, w: w.mv(x), (4,), (5, 4), 1),
    "matrix @ vector": (lambda x, w: x @ w, (5, 4), (4,), ALL),
    "batch @ vector": (lambda x, w: x @ w, (2, 5, 4), (4,), ALL),
    "vector @ matrix": (lambda x, w: w @ x, (4, 5), (4,), ALL),
    "vector @ weight": (lambda x, w: x @ w, (4,), (4, 5), 0),
    "vector @ vector": (lambda x, w: x @ w, (4,), (4,), ALL),
    "dot": (lambda x, w: torch.dot(w, x), (4,), (4,), ALL),
    "vdot": (lambda x, w: torch.vdot(x, w), (4,), (4,), ALL),
    "inner": (lambda x, w: torch.inner(x, w), (5, 4), (6, 4), 1),
    "inner, the other way": (lambda x, w: w.inner(x), (5, 4), (6, 4), 1),
    "inner with a vector": (lambda x, w: torch.inner(x, w), (5, 4), (4,), ALL),
    "outer": (lambda x, w: torch.outer(x, w), (3,), (4,), ALL),
    "addmv": (lambda x, w: torch.addmv(x[:, 0], x, w), (5, 4), (4,), ALL),
    "addmv of a weight": (lambda x, w: torch.addmv(torch.zeros(5), w, x), (4,), (5, 4), 1),
    "addr": (lambda x, w: torch.addr(x[:, None] * x, x, w), (4,), (4,), ALL),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(5, 6), x, w), (5, 4), (4, 6), 0),
    "linear": (lambda x, w: F.linear(x, w), (5, 4), (6, 4), 1),
    "linear of one output": (lambda x, w: F.linear(x, w), (5, 4), (4,), ALL),
    "vecdot": (lambda x, w: torch.linalg.vecdot(x, w), (5, 4), (5, 4), 1),
    "vecdot along rows": (lambda x, w: torch.linalg.vecdot(x, w, dim=0), (5, 4), (5, 4), 0),
    "vecdot with a vector": (lambda x, w: torch.linalg.vecdot(x, w), (5, 4), (4,), ALL),
    "einsum, vector": (lambda x, w: torch.einsum("bi,i->b", x, w), (5, 4), (4,), ALL),
    "einsum, vectors": (lambda x, w: torch.einsum("i,i->", x, w), (4,), (4,), ALL),
    "einsum, rows": (lambda x, w: torch.einsum("bi,oi->bo", x, w), (5, 4), (6, 4), 1),
    "einsum, columns": (lambda x, w: torch.einsum("...i,io->...o", x, w), (5, 4), (4, 6), 0),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 1), (5, 4), (4, 6), ALL),
    "tensordot, vector": (lambda x, w: torch.tensordot(x, w, dims=([1], [0])), (5, 4), (4,), ALL),
    "bmm": (lambda x, w: torch.bmm(x, w.expand(2, 4, 6)), (2, 5, 4), (4, 6), 0),
    "kron": (lambda x, w: torch.kron(x, w), (3,), (4,), ALL),
}  # fmt: skip
COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "read": lambda w: w,
    "scaled": lambda w: w * 2.0,
    "picked": lambda w: torch.stack([w, w])[0],
}


class Model(nn.Module):
    def __init__(self, name: str, how: str, hidden: bool) -> None:
        super().__init__()
        function, _, shape, _ = CASES[name]
        self.weight = nn.Parameter(randn(*shape))
        # What Dynamo does not look into goes through the net, operator by operator.
        self.product = torch.compiler.disable(function) if hidden else function
        self.compute = torch.compiler.disable(COMPUTED[how]) if hidden else COMPUTED[how]

    def forward(self, x: Tensor) -> Any:
        return self.product(x, self.compute(self.weight))


def recipe(group: Group) -> Recipe:
    rule = Rule(weight=Format(scheme=Scheme.SYMMETRIC, group=group))
    return Recipe(name="weights", linear=rule, matmul=rule)


def check(name: str, how: str, capture: str, hidden: bool = False) -> None:
    function, inputs, shape, summed = CASES[name]
    result = cpt_fx.transform(Model(name, how, hidden), Static(BITS), recipe=recipe(Group.CHANNEL), capture=capture)
    x, weight = randn(*inputs), COMPUTED[how](randn(*shape))
    expected = function(x, by_hand(weight, summed))
    assert torch.allclose(result(x), expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(expected, function(x, weight), rtol=1e-3), "the oracle tells nothing"
    assert {item.role for item in cpt_fx.inspect(result).quantizers} == {"weight"}


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize("name", CASES)
def test_a_range_for_each_output(name: str, how: str) -> None:
    check(name, how, "auto")


@pytest.mark.parametrize("name", ["mv", "inner", "linear of one output", "einsum, vector"])
def test_a_range_for_each_output_under_dynamo(name: str) -> None:
    check(name, "picked", "dynamo")
    check(name, "scaled", "dynamo", hidden=True)
    torch._dynamo.reset()


@pytest.mark.parametrize("group", list(Group))
@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name][2]) == 1])
def test_a_vector_has_one_range_whatever_the_group(name: str, group: Group) -> None:
    function, inputs, shape, _ = CASES[name]
    result = cpt_fx.transform(Model(name, "scaled", False), Static(BITS), recipe=recipe(group))
    x, weight = randn(*inputs), randn(*shape) * 2.0
    assert torch.allclose(result(x), function(x, by_hand(weight, ALL)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("group", list(Group))
@pytest.mark.parametrize("how", COMPUTED)
def test_activations_that_are_vectors_have_one_range(how: str, group: Group) -> None:
    rule = Rule(input=Format(scheme=Scheme.SYMMETRIC, group=group))
    result = cpt_fx.transform(
        Model("mv of a weight", how, False), Static(BITS), recipe=Recipe(name="inputs", linear=rule, matmul=rule)
    )
    x, weight = randn(4), COMPUTED[how](randn(5, 4))
    assert torch.allclose(result(x), weight @ by_hand(x, ALL), rtol=1e-5, atol=1e-6)


def test_a_block_in_a_vector_is_more_than_one_element() -> None:
    rule = Rule(weight=Format(scheme=Scheme.SYMMETRIC, group=Group.ROW, block=4))
    result = cpt_fx.transform(Model("mv", "scaled", False), Static(BITS), recipe=Recipe(name="blocks", linear=rule))
    x, weight = randn(5, 4), randn(4) * 2.0
    expected = x @ fake_quantize(weight, BITS, scheme="symmetric", block=4)
    assert torch.equal(result(x), expected)
    assert not torch.allclose(expected, x @ weight, rtol=1e-3)


@pytest.mark.parametrize("group", [Group.ROW, Group.CHANNEL])
def test_complex_vectors_have_one_range(group: Group) -> None:
    result = cpt_fx.transform(Model("mv", "scaled", False), Static(BITS), recipe=recipe(group))
    weight = torch.complex(randn(4), randn(4).flip(0))
    result.weight = nn.Parameter(weight)
    x = torch.complex(randn(5, 4), randn(5, 4).flip(0))
    assert torch.allclose(result(x), x @ torch.view_as_complex(by_hand(torch.view_as_real(weight * 2), ALL)), atol=1e-5)


class Expanded(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.w, self.fc = way, nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        w: Tensor = self.w
        if self.way == "shape":
            w = w.expand(x.shape[0], 4, 8)
        elif self.way == "size":
            w = w.expand(x.size(0), 4, 8)
        elif self.way == "computed":
            w = w.repeat(x.shape[0] * 2, 1, 1)[: x.shape[0]]
        else:
            w = w.to(x.dtype).unsqueeze(0).expand(x.size()[0], -1, -1)
        return torch.bmm(w, x.unsqueeze(2))


@pytest.mark.parametrize("capture", ["symbolic", "dynamo", "program"])
@pytest.mark.parametrize("way", ["shape", "size", "computed", "dtype"])
def test_a_parameter_expanded_to_the_batch_is_a_weight(way: str, capture: str) -> None:
    """Every frontend says so: a weight and an activation have other formats, and may have other widths."""
    model, x = Expanded(way), torch.randn(5, 8)
    given: Any = torch.export.export(model, (x,), dynamic_shapes=({0: Dim.AUTO},)) if capture == "program" else model
    result = cpt_fx.transform(given, Static(4), capture="auto" if capture == "program" else capture)
    for size in (5, 7):
        result.train()(torch.randn(size, 8))
    roles = {view.operand: view.role for view in cpt_fx.inspect(result).quantizers if view.op == "bmm"}
    assert roles == {"input": "weight", "other": "activation", "gradient": "gradient"}
