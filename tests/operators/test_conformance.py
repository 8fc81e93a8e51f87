"""Every row gets the same verdict under each of its names, in every frontend and execution."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from cpt_fx import cost, recipes
from cpt_fx.operators import FORMS, MULTIPLY, ROWS, Row, form_of, why_left
from cpt_fx.operators.table import WRITES, spelled
from tests.operators.row_calls import BREAKS, CALLS, NO_PROGRAM, X
from tests.operators.row_verdicts import FRONTENDS, SCHEDULE, Call, transformed, verdicts

aten = torch.ops.aten
CALLED = [row for row in ROWS if row.name in CALLS]
NOT_HERE = {
    "convolution", "_compute_linear_combination", "packed_mm", "fused_attention", "mkldnn_linear",
    "fused_recurrent", "_sparse_mm_reduce_impl", "_trilinear", "scaled_mm", "sampled_addmm", "flex_attention",
    "lowrank", "sspaddmm", "segment_reduce", "convolution_gradient", "_flash_attention_forward_no_dropout_inplace",
}  # fmt: skip
"""Operators of one backend, that no code calls by itself, or that take more than positions."""
_DESCRIPTORS = (type(torch.Tensor.mm), type(torch.Tensor.__matmul__), type(torch.Tensor.lu))
pytestmark = pytest.mark.filterwarnings("ignore")


def normal(row: Row) -> Callable[..., Any]:
    """Return what a row is called by: in place, the method, as code has it."""
    if row.name.endswith("_"):
        return lambda x, *args: getattr(x, row.name)(*args)
    places = (key for name in row.names for key in spelled(name))
    found = row.function or next(key for key in (*row.others, *places) if not isinstance(key, str))
    return found


def other_spellings(row: Row) -> dict[str, Callable[..., Any]]:
    """Return every other way of calling a row with the same positional arguments."""
    found: dict[str, Callable[..., Any]] = {}
    for key, form in FORMS.items():
        if form.row is not row or form.convert is not None or key is row.function or row.name.endswith("_"):
            continue
        if not isinstance(key, str):
            found[str(key)] = key
        elif "::" not in key and isinstance(CALLS[row.name][0], torch.Tensor):
            found[f"method {key}"] = lambda x, *args, name=key, **more: getattr(x, name)(*args, **more)
        elif key.startswith("aten::") and torch._C._jit_get_schemas_for_operator(key):
            packet = getattr(torch.ops.aten, key[6:])
            found |= {f"{key}.{overload}": getattr(packet, overload) for overload in packet.overloads()[:1]}
            found[key] = packet
    return found


def _runs(call: Call) -> bool:
    """Whether the arguments are those of this spelling, and there is a kernel for it here."""
    try:
        call(call.example.clone())
    except (TypeError, RuntimeError, NotImplementedError, AttributeError, ValueError):
        return False
    return True


@cache
def decided(frontend: str) -> dict[str, tuple[Any, ...]]:
    """Return the verdicts of a frontend about one model that calls every row."""
    calls = {row.name: Call(normal(row), *CALLS[row.name]) for row in CALLED}
    if frontend == "program":
        calls = {name: call for name, call in calls.items() if name not in NO_PROGRAM}
    breaking = {name: calls.pop(name) for name in BREAKS & calls.keys() if frontend == "dynamo"}
    apart = verdicts(transformed(breaking, frontend)) if breaking else {}
    return verdicts(transformed(calls, frontend)) | apart


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_same_verdict_in_every_frontend(frontend: str) -> None:
    wanted, found = decided("symbolic"), decided(frontend)
    for row in CALLED:
        if frontend != "program" or row.name not in NO_PROGRAM:
            assert found.get(row.name) == wanted.get(row.name), row.name


def test_what_multiplies_has_a_verdict() -> None:
    for row in CALLED:
        notes = decided("symbolic").get(row.name, ())
        assert notes or (row.family not in MULTIPLY and not row.left) or row.when, row.name
        quantized = any(note[0] != row.name for note in notes)  # decomposed
        assert not row.left or row.when or quantized or row.left in {note[1] for note in notes}, row.name


@pytest.mark.parametrize("frontend", ["symbolic", "between"])
def test_the_same_verdict_under_every_name(frontend: str) -> None:
    calls: dict[str, Call] = {}
    rows: dict[str, tuple[str, str]] = {}
    for row in CALLED:
        for spelling, function in other_spellings(row).items():
            call = Call(function, *CALLS[row.name])
            # torch.fx has values that are no tensors: `torch.Tensor.mm(x, y)` is an error there, `x.mm(y)` is none.
            seen = isinstance(function, _DESCRIPTORS) == (frontend == "between")
            if seen and (frontend == "symbolic" or not row.left) and _runs(call):
                key = f"c{len(calls)}"
                calls[key], rows[key] = call, (row.name, spelling)
    assert len(calls) > 10
    found = verdicts(transformed(calls, frontend))
    for key, (name, spelling) in rows.items():
        assert found.get(key) == decided("symbolic").get(name), (name, spelling)


def test_the_same_verdict_on_integers() -> None:
    calls = {row.name: Call(normal(row), *CALLS[row.name]) for row in CALLED if row.integer}
    recipe = recipes.integer()
    simulated = verdicts(transformed(calls, "symbolic", recipe=recipe))
    integer = verdicts(transformed(calls, "symbolic", recipe=recipe, execution="integer"))
    assert integer == simulated and len(integer) == len(calls)


def test_every_row_is_called_here_or_named_as_one_that_is_not() -> None:
    assert {row.name for row in ROWS if row.name not in CALLS} <= NOT_HERE


def test_keywords_of_torch_find_their_places() -> None:
    """A keyword is an operand's name in torch's schema: each must end up at that operand's position."""
    for row in CALLED:
        for name in row.names:
            schemas = torch._C._jit_get_schemas_for_operator(name if "::" in name else f"aten::{name}")
            for place, _ in row.operands if schemas else ():
                given = {schema.arguments[place].name for schema in schemas}
                assert row.arguments[place] in {dict(row.keywords).get(one, one) for one in given}, (row.name, given)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("name", "keywords"), [
    ("mm", ("a", "mat2")), ("matmul", ("x1", "x2")), ("linear", ("x", "weight")), ("kron", ("x1", "x2")),
    ("addmm", ("x", "mat1", "mat2")), ("conv1d", ("x", "weight")), ("vecdot", ("x", "y")),
])  # fmt: skip
def test_names_that_numpy_has_for_arguments_are_keywords_too(
    name: str, keywords: tuple[str, ...], frontend: str
) -> None:
    (row,) = [row for row in CALLED if row.name == name]
    function = normal(row)
    call = Call(lambda *args: function(**dict(zip(keywords, args, strict=True))), *CALLS[name])
    assert verdicts(transformed(call, frontend))["call"] == decided("symbolic")[name]


@pytest.mark.parametrize("frontend", ["symbolic", "between", "program"])
def test_a_norm_is_looked_at_whatever_its_argument_is_called(frontend: str) -> None:
    weight = CALLS["norm"][0]
    calls = {
        "numpy": Call(lambda x: torch.linalg.norm(x=x, ord="nuc"), weight),
        "aten": Call(lambda x: torch.ops.aten.linalg_norm.ord_str(self=x, ord="nuc"), weight),
        "frobenius": Call(lambda x: torch.ops.aten.linalg_norm(self=x), weight),
    }
    found = verdicts(transformed(calls, frontend))
    assert found["numpy"] == found["aten"] != () and "frobenius" not in found


@pytest.mark.parametrize("frontend", ["symbolic", "dynamo", "between"])
@pytest.mark.parametrize(("function", "args", "shape"), [
    (aten.tensordot, (X, X, [1], [0]), (3, 3)),
    (aten.chain_matmul, ([X, X, X],), (3, 3)),
    (aten.convolution, (X[None], X[..., None], None, [1], [0], [1], False, [0], 1), (1, 3, 3)),
], ids=["tensordot", "chain_matmul", "convolution"])  # fmt: skip
def test_a_spelling_of_its_own_that_writes_to_a_tensor_is_listed(
    function: Callable[..., Any], args: tuple[Any, ...], shape: tuple[int, ...], frontend: str
) -> None:
    call = Call(lambda *given: function(*given, out=torch.empty(shape)), *args)
    notes = verdicts(transformed(call.requires_grad_(False), frontend))["call"]
    assert [reason for _, reason, _ in notes] == [WRITES]


def test_an_axis_is_a_dim() -> None:
    calls = {
        key: Call(lambda x, y, key=key: torch.linalg.vecdot(x, y, **{key: 0}), *CALLS["vecdot"])
        for key in ("dim", "axis")
    }
    found = verdicts(transformed(calls, "symbolic"))
    assert found["dim"] == found["axis"] != decided("symbolic")["vecdot"]


BY_ELEMENTS = {"outer", "vecdot", "kron"}
"""Products that torch computes by elements: no product reaches ATen, and none is counted."""


def test_what_is_quantized_as_a_product_costs_something() -> None:
    for row in CALLED:
        if row.family in MULTIPLY and not row.left and row.name not in BY_ELEMENTS:
            model = Call(normal(row), *CALLS[row.name])
            assert cost(model, SCHEDULE, (model.example,)).flops > 0, row.name


@pytest.mark.parametrize(("function", "shapes", "flops"), [
    (torch.Tensor.addmm_, ((4, 6), (4, 5), (5, 6)), 2 * 4 * 5 * 6),
    (torch.addbmm, ((4, 6), (3, 4, 5), (3, 5, 6)), 2 * 3 * 4 * 5 * 6),
    (torch.Tensor.baddbmm_, ((3, 4, 6), (3, 4, 5), (3, 5, 6)), 2 * 3 * 4 * 5 * 6),
    (torch.Tensor.addmv_, ((4,), (4, 5), (5,)), 2 * 4 * 5),
    (torch.addr, ((4, 5), (4,), (5,)), 2 * 4 * 5),
    (torch.bilinear, ((3, 5), (3, 6), (7, 5, 6), (7,)), 2 * 3 * 7 * 5 * 6 + 2 * 3 * 7 * 6),
])  # fmt: skip
def test_costs_by_hand(function: Callable[..., Any], shapes: tuple[Any, ...], flops: int) -> None:
    model = Call(lambda first, *rest: function(first.clone(), *rest), *map(torch.ones, shapes))
    assert cost(model, SCHEDULE, (model.example,)).flops == flops


def test_operators_of_other_names() -> None:
    for one in (operator.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.linalg.matmul):
        form = form_of(one)
        assert form is not None and form.target is torch.matmul
    functions: Any = torch._C
    assert why_left(functions._linalg.linalg_inv) == why_left(torch.inverse) != ""


@pytest.mark.parametrize("frontend", ["dynamo", "between"])
def test_attention_with_a_function_of_the_users(frontend: str) -> None:
    """An operator of a higher order: its code, and what it masks, are arguments that no node can hold."""
    x = torch.linspace(-1, 1, 128).reshape(1, 1, 16, 8)
    call = Call(lambda q, k, v: flex_attention(q, k, v, score_mod=lambda score, *at: score + at[2] - at[3]), x, x, x)
    notes = verdicts(transformed(call.requires_grad_(False), frontend))["call"]
    assert [(op, reason[:15]) for op, reason, _ in notes] == [("flex_attention", "fused attention")]
