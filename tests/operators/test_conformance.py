"""Every row gets the same verdict under each of its names, in every frontend and execution."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cpt_fx import recipes
from cpt_fx.operators import FORMS, MULTIPLY, ROWS, Row, form_of, why_left
from cpt_fx.operators.table import spelled
from tests.operators.row_calls import CALLS, NO_PROGRAM
from tests.operators.row_verdicts import FRONTENDS, Call, transformed, verdict

CALLED = [row for row in ROWS if row.name in CALLS]
NOT_HERE = {
    "fused_convolution", "convolution", "_compute_linear_combination", "packed_mm", "fused_attention", "mkldnn_linear",
    "fused_recurrent", "_sparse_mm_reduce_impl", "_trilinear", "scaled_mm", "sampled_addmm",
}  # fmt: skip
"""Operators of one backend, or that no code calls by itself."""


def normal(row: Row) -> Callable[..., Any]:
    """Return what a row is called by: in place, the method, as code has it."""
    if row.name.endswith("_"):
        return lambda x, *args: getattr(x, row.name)(*args)
    found = row.function or next(key for name in row.names for key in spelled(name) if not isinstance(key, str))
    return found  # type: ignore[no-any-return]


def other_spellings(row: Row) -> dict[str, Callable[..., Any]]:
    """Return every other way of calling a row with the same positional arguments."""
    found: dict[str, Callable[..., Any]] = {}
    first = CALLS[row.name][0]
    for key, form in FORMS.items():
        if form.row is not row or form.convert is not None or key is row.function or row.name.endswith("_"):
            continue
        if not isinstance(key, str):
            found[str(key)] = key
        elif "::" not in key and isinstance(first, torch.Tensor):
            found[f"method {key}"] = lambda x, *args, name=key, **more: getattr(x, name)(*args, **more)
        elif key.startswith("aten::") and torch._C._jit_get_schemas_for_operator(key):
            packet = getattr(torch.ops.aten, key[6:])
            found[key] = packet
            if packet.overloads()[0] == "default":
                found[f"{key} default"] = packet.default
    return found


@pytest.mark.parametrize("row", CALLED, ids=lambda row: row.name)
def test_the_same_verdict_in_every_frontend(row: Row) -> None:
    verdicts = {}
    for frontend in FRONTENDS:
        if frontend != "program" or row.name not in NO_PROGRAM:
            verdicts[frontend] = verdict(transformed(Call(normal(row), *CALLS[row.name]), frontend))
    assert len(set(map(repr, verdicts.values()))) == 1, verdicts
    found = verdicts["dynamo"]
    multiplies = row.family in MULTIPLY or row.left
    assert not multiplies or found["quantized"] or found["left"]
    assert not row.left or found["quantized"] or row.left in {reason for _, _, reason in found["left"]}


@pytest.mark.parametrize("row", CALLED, ids=lambda row: row.name)
def test_the_same_verdict_under_every_name(row: Row) -> None:
    wanted = verdict(transformed(Call(normal(row), *CALLS[row.name]), "symbolic"))
    for name, function in other_spellings(row).items():
        call = Call(function, *CALLS[row.name])
        for frontend in ("symbolic", "between"):
            try:
                call(call.example.clone())
            except (TypeError, RuntimeError, NotImplementedError, AttributeError):
                continue  # another overload, or no kernel for it here
            assert verdict(transformed(call, frontend)) == wanted, (name, frontend)


@pytest.mark.parametrize("row", [row for row in CALLED if row.integer], ids=lambda row: row.name)
def test_the_same_verdict_on_integers(row: Row) -> None:
    call, recipe = Call(normal(row), *CALLS[row.name]), recipes.integer()
    simulated = verdict(transformed(call, "symbolic", recipe=recipe))
    integer = verdict(transformed(call, "symbolic", recipe=recipe, execution="integer"))
    assert [site[:3] for site in integer["quantized"]] == [site[:3] for site in simulated["quantized"]]
    assert integer["left"] == simulated["left"]


def test_every_row_is_called_here_or_named_as_one_that_is_not() -> None:
    assert {row.name for row in ROWS if row.name not in CALLS} <= NOT_HERE


def test_keywords_of_torch_find_their_places() -> None:
    """A keyword is an operand's name in torch's schema: each must end up at that operand's position."""
    for row in CALLED:
        for name in row.names:
            for schema in torch._C._jit_get_schemas_for_operator(name if "::" in name else f"aten::{name}")[:1]:
                renamed = dict(row.keywords)
                for place, _ in row.operands:
                    given = schema.arguments[place].name
                    assert renamed.get(given, given) == row.arguments[place], (row.name, given)


def test_operators_of_other_names() -> None:
    for one in (operator.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.linalg.matmul):
        form = form_of(one)
        assert form is not None and form.target is torch.matmul
    assert why_left(torch._C._linalg.linalg_inv) == why_left(torch.inverse) != ""
