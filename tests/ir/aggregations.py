"""Every way to write a sum over neighbours, by the operator it comes down to and the captures that allow it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpt_fx.recipes import Recipe, paper
from cpt_fx.schedules import Static
from tests.capture.programs import PROGRAM, taken

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
