"""Sums over neighbours: every way to write one, under every capture, against the plain form of quantized messages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.functional import fake_quantize
from cpt_fx.recipes import default
from cpt_fx.schedules import Static
from tests.capture.programs import PROGRAM, taken
from tests.ir.aggregations import (
    ALL,
    BITS,
    DENSE,
    DYNAMO,
    FEATURES,
    FORMS,
    FP,
    NODES,
    SOURCE,
    SYMBOLIC,
    TARGET,
    Q,
    Summing,
    columns,
    given,
    transformed,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR"),
    pytest.mark.filterwarnings("ignore:.*_reduce.*is in beta"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
]


CASES = [
    pytest.param(name, capture, id=f"{name}-{capture}") for name, made in FORMS.items() for capture in made.captures
]


@pytest.mark.parametrize(("name", "capture"), CASES)
def test_messages_are_quantized_before_and_gradients_after(name: str, capture: str) -> None:
    made = FORMS[name]
    inputs = tuple(given(part) for part in made.inputs)
    model = transformed(made.run, inputs, capture)
    h = torch.randn(NODES, FEATURES, requires_grad=True)
    gradient = torch.randn(NODES, FEATURES)
    y = model(h, *inputs)
    y.backward(gradient)

    messages = fake_quantize(h.detach(), BITS, keep=(0,)).requires_grad_()
    expected = made.run(messages, *inputs)
    expected.backward(fake_quantize(gradient, BITS + 1))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(h.grad, messages.grad)

    inspection = cpt_fx.inspect(model)
    assert inspection.verify().proven
    found = {item.role: item for item in inspection.quantizers if item.times_run}
    assert {role: item.op for role, item in found.items()} == {"activation": made.op, "gradient": made.op}
    assert found["activation"].levels[BITS] == 2**BITS
    assert 2**BITS < found["gradient"].levels[BITS + 1] <= 2 ** (BITS + 1)


@pytest.mark.parametrize("name", FORMS)
def test_full_precision_says_why(name: str) -> None:
    made = FORMS[name]
    capture = made.captures[0]
    inputs = tuple(given(part) for part in made.inputs)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, 2)
            self.sum = Summing(made.run)

        def forward(self, h: Tensor, one: Tensor, other: Tensor | None = None) -> Tensor:
            y: Tensor = self.head(self.sum(h, one, other))
            return y

    h = torch.randn(NODES, FEATURES)
    model = taken(Layer(), Static(3), capture, (h, *inputs), recipe=FP)
    model(h, *inputs).sum().backward()
    inspection = cpt_fx.inspect(model)
    assert {item.layer for item in inspection.quantizers} <= {"head", "head.add"}
    family = "matmul" if made.op in ("matmul", "mm", "addmm") else "aggregation"
    assert {(item.op, item.reason) for item in inspection.uncovered} == {
        (made.op, f"recipe 'paper/graph' leaves {family} in full precision")
    }


class Attention(nn.Module):
    """Graph attention written by hand, on edges."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(FEATURES, 4, bias=False)
        self.score = nn.Parameter(torch.randn(8))

    def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        z = self.project(h)
        pairs = torch.cat([z[source], z[target]], dim=1)
        scores = F.leaky_relu((pairs * self.score).sum(-1))
        lowest = torch.full((NODES,), -1e9)
        largest = lowest.scatter_reduce(0, target, scores.detach(), "amax")
        powers = (scores - largest[target]).exp()
        totals = torch.zeros(NODES).index_add(0, target, powers)
        shares = powers / (totals[target] + 1e-16)
        return torch.zeros_like(z).index_add(0, target, shares.unsqueeze(-1) * z[source])


@pytest.mark.parametrize("capture", ALL)
def test_attention_quantizes_coefficients_and_messages_but_no_softmax(capture: str) -> None:
    inputs = (torch.randn(NODES, FEATURES), SOURCE, TARGET)
    model = taken(Attention(), Static(BITS, 8), capture, inputs, recipe=Q)
    model(*inputs).square().sum().backward()
    inspection = cpt_fx.inspect(model)
    assert inspection.verify().proven
    assert [(item.op, item.role, item.group) for item in inspection.quantizers] == [
        ("linear", "activation", "vector"),
        ("linear", "weight", "row"),
        ("linear", "gradient", "inner"),
        ("mul", "activation", "vector"),
        ("mul", "weight", "tensor"),
        ("mul", "gradient", "inner"),
        ("mul", "activation", "tensor"),
        ("mul", "activation", "row"),
        ("mul", "gradient", "inner"),
        ("index_add", "activation", "row"),
        ("index_add", "gradient", "inner"),
    ]
    softmax = "part of a softmax over neighbours, which stays in full precision: it sums scores, not messages"
    assert {(item.op, item.reason, item.by_choice) for item in inspection.uncovered} == {
        ("scatter_reduce", softmax, True), ("index_add", softmax, True)
    }  # fmt: skip


@pytest.mark.parametrize("capture", ALL)
def test_the_gradient_of_a_score_is_that_of_its_sum(capture: str) -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vector = nn.Parameter(torch.randn(1, FEATURES))

        def forward(self, h: Tensor) -> Tensor:
            return (h * self.vector).sum(dim=-1)

    h, gradient = torch.randn(NODES, FEATURES, requires_grad=True), torch.randn(NODES)
    plain = Score()
    model = taken(plain, Static(BITS, BITS), capture, (h.detach(),), recipe=FP)
    model(h).backward(gradient)
    quantized = fake_quantize(plain.vector.detach(), BITS, keep=(0,))
    torch.testing.assert_close(h.grad, fake_quantize(gradient, BITS).unsqueeze(1) * quantized)


def test_degrees_and_writes_are_no_aggregation() -> None:
    def count(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ones = torch.zeros(NODES).index_add(0, target, torch.ones(len(SOURCE)))
        written = torch.zeros_like(h).scatter(0, columns(target, h[source]), h[source])
        put = torch.zeros_like(h).index_put((target,), h[source])
        numbers = torch.zeros_like(h).scatter_(0, columns(target, h[source]), 1.0)
        return written + put + numbers + ones.unsqueeze(1)

    class Layer(Summing):
        def __init__(self) -> None:
            super().__init__(count)
            self.head = nn.Linear(FEATURES, 2)

        def forward(self, h: Tensor, one: Tensor, other: Tensor | None = None) -> Tensor:
            y: Tensor = self.head(super().forward(h, one, other))
            return y

    for capture in ALL:
        inputs = (torch.randn(NODES, FEATURES), SOURCE, TARGET)
        model = taken(Layer(), Static(3), capture, inputs, recipe=Q)
        model(*inputs).sum().backward()
        inspection = cpt_fx.inspect(model)
        assert {item.layer for item in inspection.quantizers} <= {"head", "head.add"}
        assert inspection.uncovered == ()


def test_a_scatter_that_adds_is_one() -> None:
    def add(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        return torch.zeros_like(h).scatter_(0, columns(target, h[source]), h[source], reduce="add")

    h = torch.randn(NODES, FEATURES)  # torch has no gradient for it
    model = transformed(add, (SOURCE, TARGET), SYMBOLIC)
    torch.testing.assert_close(model(h, SOURCE, TARGET), add(fake_quantize(h, BITS, keep=(0,)), SOURCE, TARGET))


def test_weights_of_edges_are_degrees_where_their_shape_is_known() -> None:
    def weighted(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
        weight = source.float() + 1
        degree = torch.zeros(NODES).index_add(0, target, weight)
        return torch.zeros_like(h).index_add(0, target, h[source] * weight.unsqueeze(1)) / degree.unsqueeze(1)

    for capture in (PROGRAM, DYNAMO):
        model = transformed(weighted, (SOURCE, TARGET), capture)
        model(torch.randn(NODES, FEATURES, requires_grad=True), SOURCE, TARGET).sum().backward()
        roles = [(item.layer, item.role) for item in cpt_fx.inspect(model).quantizers]
        assert sorted(roles) == [("index_add", "activation"), ("index_add", "gradient")]


@pytest.mark.parametrize("capture", [SYMBOLIC, DYNAMO])
def test_sparse_features_times_a_parameter_are_a_linear_layer(capture: str) -> None:
    class Projection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(FEATURES, 3))

        def forward(self, features: Tensor) -> Tensor:
            y: Tensor = torch.sparse.mm(features, self.weight)
            return y

    features = torch.eye(NODES, FEATURES).to_sparse_csr()
    for recipe in (FP, default()):
        plain = Projection()
        model = taken(plain, Static(3), capture, (features,), recipe=recipe)
        model(features).sum().backward()
        inspection = cpt_fx.inspect(model)
        assert inspection.verify().proven
        assert {item.role for item in inspection.quantizers} == {"weight", "gradient"}
        (left,) = inspection.uncovered
        assert (left.operand, left.reason) == ("input", "a sparse operand is passed on as it is")


@pytest.mark.parametrize("capture", [SYMBOLIC, DYNAMO])
def test_a_sparse_factor_of_another_product_is_listed_once_it_came(capture: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, 3)

        def forward(self, a: Tensor, h: Tensor) -> Tensor:
            return a @ self.head(h)  # type: ignore[no-any-return]

    h = torch.randn(NODES, FEATURES)
    model = cpt_fx.transform(Product(), Static(3), capture=capture)
    model(DENSE, h)
    assert cpt_fx.inspect(model).uncovered == ()
    for _ in range(2):
        model(DENSE.to_sparse_coo(), h)
        (left,) = cpt_fx.inspect(model).uncovered
        assert (left.op, left.operand) == ("matmul", "input")
        assert left.reason == "a sparse operand is passed on as it is"
        assert all(view.skipped == 0 for view in cpt_fx.inspect(model).quantizers)


def test_products_with_a_sparse_result_are_listed() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, 3)

        def forward(self, a: Tensor, h: Tensor) -> Tensor:
            y: Tensor = self.head(torch.hspmm(a, h).to_dense())
            return y

    inputs = (DENSE.to_sparse_coo(), torch.randn(NODES, FEATURES))
    model = cpt_fx.transform(Both(), Static(3), recipe=FP, capture=SYMBOLIC)
    model(*inputs)
    (left,) = cpt_fx.inspect(model).uncovered
    assert (left.op, left.by_choice) == ("hspmm", False)
    with pytest.raises(cpt_fx.TransformError, match=r"hspmm.*call torch\.sparse\.mm"):
        cpt_fx.transform(Both(), Static(3), recipe=FP, capture=SYMBOLIC, strict=True)


def test_leaving_sums_in_full_precision_is_no_omission() -> None:
    model = cpt_fx.transform(Attention(), Static(3), recipe=FP, capture=SYMBOLIC, strict=True)
    uncovered = cpt_fx.inspect(model).uncovered
    assert [item.op for item in uncovered] == ["scatter_reduce", "index_add", "index_add"]
    assert all(item.by_choice for item in uncovered)
