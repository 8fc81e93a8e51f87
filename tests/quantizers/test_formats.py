"""Formats are frozen data, checked where they are built."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch

from cpt_fx.formats import (
    FULL_PRECISION,
    Format,
    Group,
    Range,
    Rounding,
    Scheme,
    Specials,
    choice,
    group_dims,
    minimum_bits,
)  # fmt: skip
from cpt_fx.functional import fake_quantize
from cpt_fx.quantizers.numerics import range_of


def test_the_default_format_is_the_published_one() -> None:
    form = Format()
    assert (form.scheme, form.group, form.range, form.rounding) == (
        Scheme.AFFINE, Group.TENSOR, Range.DYNAMIC, Rounding.NEAREST)  # fmt: skip
    assert (form.exponent, form.specials, form.block, form.momentum) == (0, Specials.NONE, 0, 0.9)
    assert FULL_PRECISION == 32


def test_strings_become_enums() -> None:
    form = Format(scheme="float", group="vector", rounding="stochastic", specials="fn", exponent=4)  # type: ignore[arg-type]
    assert form == Format(
        scheme=Scheme.FLOAT, group=Group.VECTOR, rounding=Rounding.STOCHASTIC, specials=Specials.FN, exponent=4
    )
    assert isinstance(form.scheme, Scheme) and form.range is Range.DYNAMIC


def test_frozen_hashable_keyword_only_and_picklable() -> None:
    form = Format(scheme=Scheme.SYMMETRIC)
    with pytest.raises(dataclasses.FrozenInstanceError):
        form.scheme = Scheme.AFFINE  # type: ignore[misc]
    with pytest.raises(TypeError):
        Format(Scheme.AFFINE)  # type: ignore[call-arg]
    assert {form: 1}[Format(scheme=Scheme.SYMMETRIC)] == 1
    assert pickle.loads(pickle.dumps(form)) == form
    assert dataclasses.replace(form, group=Group.ROW).scheme is Scheme.SYMMETRIC


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "symetric"}, 'Format.scheme must be one of .*, got .symetric.. Did you mean "symmetric"'),
        ({"group": "chanel"}, 'Format.group must be one of .*Did you mean "channel"'),
        ({"range": "observed"}, 'Format.range must be one of .*Did you mean "observer"'),
        ({"rounding": "nerest"}, 'Format.rounding must be one of .*Did you mean "nearest"'),
        ({"scheme": "float", "exponent": 4, "specials": "iee"}, 'Format.specials must be one of .*Did you mean "ieee"'),
        ({"scheme": None}, "Format.scheme must be one of .*got None"),
        ({"scheme": "float"}, "scheme='float' needs exponent between 1 and 8, got 0"),
        ({"scheme": "float", "exponent": 9}, "between 1 and 8, got 9"),
        ({"exponent": 3}, "exponent belongs to scheme='float', got exponent=3 with 'affine'"),
        ({"block": -2}, r"block must be 0 \(none\) or positive, got -2"),
        ({"momentum": 1.0}, r"Format.momentum must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, "got -0.1"),
        ({"momentum": float("nan")}, "got nan"),
        ({"range": "observer", "group": "row"}, "needs group='tensor' and block=0, got group='row', block=0"),
        ({"range": "observer", "block": 32}, "got group='tensor', block=32"),
    ],
)  # fmt: skip
def test_bad_formats(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Format(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "affine/tensor"),
        ({"scheme": "symmetric", "group": "channel"}, "symmetric/channel"),
        ({"scheme": "affine_integer", "range": "observer"}, "affine_integer/tensor/observer"),
        ({"group": "inner", "rounding": "stochastic"}, "affine/inner/stochastic"),
        ({"scheme": "float", "exponent": 4, "specials": "fn", "range": "observer", "rounding": "stochastic"},
         "e4fn/tensor/observer/stochastic"),
        ({"scheme": "float", "exponent": 5, "specials": "ieee"}, "e5ieee/tensor"),
        ({"scheme": "float", "exponent": 2, "group": "vector", "block": 32}, "e2none/vector:32"),
    ],
)  # fmt: skip
def test_names_for_tables(fields: dict[str, Any], text: str) -> None:
    assert str(Format(**fields)) == text


def test_choice_passes_members_and_their_values() -> None:
    assert choice(Scheme, "float", "x") is choice(Scheme, Scheme.FLOAT, "x") is Scheme.FLOAT
    with pytest.raises(ValueError, match=r'^here must be one of "nearest", "stochastic", got 3\.$'):
        choice(Rounding, 3, "here")


def test_minimum_bits() -> None:
    assert {scheme: minimum_bits(scheme) for scheme in Scheme} == {
        Scheme.AFFINE: 1, Scheme.AFFINE_INTEGER: 1, Scheme.SYMMETRIC: 1, Scheme.FLOAT: 2}  # fmt: skip
    x = torch.randn(100)
    for scheme, bits in ((scheme, minimum_bits(scheme)) for scheme in Scheme):
        exponent = 1 if scheme is Scheme.FLOAT else 0
        assert 1 < fake_quantize(x, bits, scheme=scheme.value, exponent=exponent).unique().numel() <= 2**bits


@pytest.mark.parametrize(
    ("group", "shape", "count"),
    [
        (Group.TENSOR, (2, 3, 4, 5), 1),
        (Group.ROW, (2, 3, 4, 5), 2),
        (Group.CHANNEL, (2, 3, 4, 5), 3),
        (Group.VECTOR, (2, 3, 4, 5), 24),
        (Group.INNER, (2, 3, 4, 5), 12),
        (Group.INNER, (2, 3, 5), 3),
        (Group.INNER, (2, 5), 1),
        (Group.INNER, (5,), 1),
        (Group.VECTOR, (5,), 1),
        (Group.VECTOR, (), 1),
        (Group.INNER, (), 1),
        (Group.TENSOR, (), 1),
    ],
)
def test_group_dims(group: Group, shape: tuple[int, ...], count: int) -> None:
    """How many ranges a group has, whatever the rank."""
    keep, over = group_dims(group, channel_axis=1)
    assert over is None or not keep
    assert range_of(torch.rand(shape), keep, over).range.numel() == count
