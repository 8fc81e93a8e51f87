"""Sums over neighbours: every way to write one, under every capture, against the plain form of quantized messages."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.functional import fake_quantize
from cpt_fx.recipes import Recipe, default, paper
from cpt_fx.schedules import Static
from tests.programs import PROGRAM, taken

NODES, FEATURES, BITS = 6, 9, 2
SOURCE = torch.tensor([0, 1, 2, 3, 4, 5, 0, 2, 4, 1])
TARGET = torch.tensor([1, 2, 3, 4, 5, 0, 3, 5, 1, 4])
ORDER = torch.argsort(TARGET, stable=True)
ENDS = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(TARGET, minlength=NODES).cumsum(0)])
DENSE = torch.zeros(NODES, NODES).index_put((TARGET, SOURCE), torch.ones(len(SOURCE)))

FP = paper(family="graph", gradient_rounding="nearest")
Q = paper(family="graph", gradient_rounding="nearest", aggregation="q")

SYMBOLIC, DYNAMO = "symbolic", "dynamo"
ALL = (SYMBOLIC, PROGRAM, DYNAMO)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
    pytest.mark.filterwarnings("ignore:Converting sparse tensor to CSR"),
    pytest.mark.filterwarnings("ignore:.*_reduce.*is in beta"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
]


@dataclass(frozen=True)
class Form:
    """A way to sum over neighbours, the operator it comes down to, and the captures that it allows."""

    run: Callable[..., Tensor]
    op: str
    captures: tuple[str, ...] = ALL
    inputs: tuple[str, ...] = ("source", "target")


FORMS: dict[str, Form] = {}


def form(op: str, *captures: str, inputs: tuple[str, ...] = ("source", "target")) -> Callable[..., Any]:
    """Add a function to the table."""

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        FORMS[function.__name__] = Form(function, op, captures or ALL, inputs)
        return function

    return add


def given(name: str) -> Tensor:
    """Make an input of a form."""
    if name in ("coo", "csr", "csc"):
        layouts = {"coo": torch.sparse_coo, "csr": torch.sparse_csr, "csc": torch.sparse_csc}
        return DENSE.to_sparse(layout=layouts[name])
    return {"source": SOURCE, "target": TARGET, "sorted_source": SOURCE[ORDER], "ends": ENDS, "dense": DENSE}[name]


def columns(index: Tensor, like: Tensor) -> Tensor:
    return index.unsqueeze(1).expand_as(like)


def degrees(target: Tensor) -> Tensor:
    return torch.zeros(NODES).index_add(0, target, torch.ones(target.shape[0])).clamp(min=1).unsqueeze(1)


@form("index_add")
def index_add(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, target, h[source])


@form("index_add_")
def zeros_and_index_add_in_place(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    total = torch.zeros(h.shape[0], h.shape[1])
    total.index_add_(0, target, h[source])
    return total


@form("index_add")
def index_add_and_division_is_a_mean(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(0, target, h[source]) / degrees(target)


@form("scatter_add")
def scatter_add(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(h).scatter_add(0, columns(target, h[source]), h[source])


@form("scatter_add_")
def scatter_add_in_place(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return h.new_zeros(h.shape).scatter_add_(0, columns(target, h[source]), h[source])


@form("scatter_reduce")
def scatter_reduce_sum(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(h).scatter_reduce(0, columns(target, h[source]), h[source], reduce="sum")


@form("scatter_reduce")
def scatter_reduce_mean(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    index = columns(target, h[source])
    return torch.zeros_like(h).scatter_reduce(0, index, h[source], "mean", include_self=False)


@form("scatter_reduce_")
def scatter_reduce_max_in_place(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    index = columns(target, h[source])
    return torch.zeros_like(h).scatter_reduce_(0, index, h[source], "amax", include_self=False)


@form("index_reduce")
def index_reduce_mean(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(h).index_reduce(0, target, h[source], "mean", include_self=False)


@form("index_reduce_")
def index_reduce_max_in_place(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(h).index_reduce_(0, target, h[source], "amax", include_self=False)


@form("index_put")
def index_put(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(h).index_put((target,), h[source], accumulate=True)


@form("index_put_")
def index_put_in_place(h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    return torch.zeros_like(h).index_put_((target,), h[source], True)


@form("segment_reduce", inputs=("sorted_source", "ends"))
def segment_reduce(h: Tensor, sorted_source: Tensor, ends: Tensor) -> Tensor:
    return torch.segment_reduce(h[sorted_source], "sum", offsets=ends, unsafe=True, initial=0)


@form("embedding_bag", inputs=("sorted_source", "ends"))
def embedding_bag(h: Tensor, sorted_source: Tensor, ends: Tensor) -> Tensor:
    return F.embedding_bag(sorted_source, h, ends[:-1], mode="sum")


@form("embedding_bag", inputs=("sorted_source", "ends"))
def embedding_bag_mean(h: Tensor, sorted_source: Tensor, ends: Tensor) -> Tensor:
    return F.embedding_bag(sorted_source, h, ends, mode="mean", include_last_offset=True)


def _products() -> None:
    """Products with an adjacency matrix. torch.export has no sparse inputs."""
    calls: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "at": ("matmul", lambda h, a: a @ h),
        "matmul": ("matmul", lambda h, a: torch.matmul(a, h)),
        "mm": ("mm", lambda h, a: torch.mm(a, h)),
        "method mm": ("mm", lambda h, a: a.mm(h)),
        "spmm": ("mm", lambda h, a: torch.spmm(a, h)),
        "addmm": ("addmm", lambda h, a: torch.addmm(torch.zeros_like(h), a, h)),
    }
    sparse_calls: dict[str, tuple[str, Callable[..., Tensor]]] = {
        "sparse.mm": ("sparse_mm", lambda h, a: torch.sparse.mm(a, h)),
        "sparse.addmm": ("sparse_addmm", lambda h, a: torch.sparse.addmm(torch.zeros_like(h), a, h)),
    }
    for layout in ("dense", "coo", "csr", "csc"):
        known = calls if layout == "dense" else calls | sparse_calls
        if layout == "csc":
            known = {name: known[name] for name in ("at", "sparse.mm")}
        captures = ALL if layout == "dense" else (SYMBOLIC, DYNAMO)
        for name, (op, run) in known.items():
            FORMS[f"{name}, {layout}"] = Form(run, op, captures, (layout,))
    reductions: dict[str, Callable[..., Tensor]] = {
        "mean": lambda h, a: torch.sparse.mm(a, h, "mean"),
        "amax": lambda h, a: torch.sparse.mm(a, h, "amax"),
    }
    for name, run in reductions.items():
        FORMS[f"sparse.mm {name}, csr"] = Form(run, "sparse_mm", (SYMBOLIC, DYNAMO), ("csr",))


_products()


def _geometric() -> None:
    """What PyTorch Geometric sums with; it asks for types and values, which torch.fx cannot follow."""

    if importlib.util.find_spec("torch_geometric") is None:
        return
    # Here, not in a forward: capture would take the modules that an import makes for a part of it.
    utils = importlib.import_module("torch_geometric.utils")

    def scatter(reduce: str) -> Callable[..., Tensor]:
        return lambda h, source, target: utils.scatter(h[source], target, 0, h.shape[0], reduce)

    def segment(reduce: str) -> Callable[..., Tensor]:
        return lambda h, source, ends: utils.segment(h[source], ends, reduce)

    def spmm(reduce: str) -> Callable[..., Tensor]:
        return lambda h, adjacency: utils.spmm(adjacency, h, reduce)

    for reduce in ("sum", "mean", "max", "min", "mul"):
        adds = reduce in ("sum", "mean")
        op = "scatter_add_" if adds else "scatter_reduce_"
        FORMS[f"utils.scatter {reduce}"] = Form(scatter(reduce), op, (PROGRAM, DYNAMO))
    for reduce in ("sum", "mean", "max"):
        run = segment(reduce)
        FORMS[f"utils.segment {reduce}"] = Form(run, "segment_reduce", (PROGRAM, DYNAMO), ("sorted_source", "ends"))
        for layout in ("csr", "coo"):
            FORMS[f"utils.spmm {reduce}, {layout}"] = Form(spmm(reduce), "sparse_mm", (DYNAMO,), (layout,))


_geometric()


class Summing(nn.Module):
    """Nothing but a sum over neighbours."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, h: Tensor, one: Tensor, other: Tensor | None = None) -> Tensor:
        return self.run(h, one) if other is None else self.run(h, one, other)


def transformed(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], capture: str, recipe: Recipe = Q) -> nn.Module:
    example = (torch.randn(NODES, FEATURES), *inputs)
    return taken(Summing(run), Static(BITS, BITS + 1), capture, example, recipe=recipe)


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
