"""Which values may share memory, and when it is overwritten."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from cpt_fx.ir.aliasing import Versions, overwritten
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, QUANTIZE_GRADIENT

MODULES: dict[str, nn.Module] = {"relu": nn.ReLU(), "relu_": nn.ReLU(inplace=True)}


def named(step: tuple[Any, ...]) -> str:
    """A name for a test: addresses in it would differ between workers."""
    return str(getattr(step[0], "__name__", step[0]))


def calls(*steps: tuple[Any, ...]) -> tuple[Versions, list[fx.Node]]:
    """Make a graph of calls on `x` and `y`; an int argument is the value of that step (0: x, 1: y)."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    for target, *given in steps:
        kwargs = given.pop() if given and isinstance(given[-1], dict) else {}
        args = tuple(nodes[item] if isinstance(item, int) else item for item in given)
        kwargs = {key: nodes[item] if type(item) is int else item for key, item in kwargs.items()}
        kind = "call_function" if callable(target) else "call_module" if target in MODULES else "call_method"
        nodes.append(graph.create_node(kind, target, args, kwargs))
    graph.output(nodes[-1])
    module = fx.GraphModule(MODULES, graph)
    versions = Versions(module)
    for node in graph.nodes:
        versions.visit(node)
    return versions, nodes


def written(*steps: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether x and y count as overwritten behind these calls."""
    versions, nodes = calls(*steps)
    return versions.of(nodes[0]) > 0, versions.of(nodes[1]) > 0


@pytest.mark.parametrize(
    "write",
    [("add_", 0, 1), (operator.iadd, 0, 1), (operator.setitem, 0, "0", 1), (F.relu, 0, {"inplace": True}),
     ("relu_", 0), (torch.relu_, 0), (torch.Tensor.index_add_, 0, "0", 1), (torch.add, 1, 1, {"out": 0}),
     ("relu_", 0), (nn.init.zeros_, 0)],
    ids=named,
)  # fmt: skip
def test_a_write_is_seen(write: tuple[Any, ...]) -> None:
    assert written(write) == (True, False)


@pytest.mark.parametrize(
    "read",
    [("add", 0, 1), (operator.add, 0, 1), (F.relu, 0, {"inplace": False}), ("relu", 0), ("__add__", 0, 1),
     (operator.getitem, 0, "0")],
    ids=named,
)  # fmt: skip
def test_a_read_is_no_write(read: tuple[Any, ...]) -> None:
    assert written(read) == (False, False)


@pytest.mark.parametrize(
    "view",
    [("view", 0, "-1"), (torch.chunk, 0, "2"), (operator.getitem, 0, "0"), (getattr, 0, "T"), (QUANTIZE_GRADIENT, 0, 1),
     ("relu", 0), ("a_method_of_some_library", 0), (print, 0)],
    ids=named,
)  # fmt: skip
def test_a_write_to_what_may_be_a_view_counts(view: tuple[Any, ...]) -> None:
    assert written(view, ("add_", 2, 1)) == (True, False)
    # And the other way round: whoever reads the view sees what is written to its base.
    versions, nodes = calls(view, ("add_", 0, 1))
    assert versions.of(nodes[2]) == 1


@pytest.mark.parametrize(
    "fresh", [("add", 0, 1), (torch.matmul, 0, 1), (FAKE_QUANTIZE, 0, 1), (torch.cat, [0, 1]), ("clone", 0)], ids=named
)
def test_a_write_to_a_new_tensor_does_not(fresh: tuple[Any, ...]) -> None:
    assert written(fresh, ("add_", 2, 1)) == (False, False)


def test_an_unknown_result_may_be_any_of_its_arguments() -> None:
    assert written((print, 0, 1), ("zero_", 2)) == (True, True)
    assert written(("view", 0, 1), ("zero_", 2)) == (True, False)


def test_chains_of_views_and_several_writes() -> None:
    versions, nodes = calls(("view", 0), (torch.chunk, 2, "2"), (operator.getitem, 3, "1"), ("mul_", 4, 1), ("t", 0),
                            ("add_", 6, 1))  # fmt: skip
    assert [versions.of(node) for node in nodes] == [2, 0, 2, 2, 2, 2, 2, 2]


def test_versions_only_grow() -> None:
    """Two values that turn out to share memory keep what each of them has seen."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    steps = [graph.call_method("add_", (x, 1)), graph.call_function(print, (x, y)), graph.call_method("zero_", (y,))]
    versions = Versions(fx.GraphModule(MODULES, graph))
    seen = []
    for node in steps:
        versions.visit(node)
        seen.append(versions.of(x))
    assert seen == [1, 1, 2]


def test_names_with_two_underscores_are_no_writes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert not overwritten(graph.call_method("__len__", (x,)), {})
    assert not overwritten(x, {})
