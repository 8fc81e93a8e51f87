"""The table of operators: which multiply, which operands, and under which names; `register` adds a row."""

from __future__ import annotations

from torch import nn

from cpt_fx.operators import (
    aggregations,
    algebra,
    attention,
    convolutions,
    embeddings,
    linear,
    products,
    recurrent,
)
from cpt_fx.operators.registering import Registration, register, returns_one_tensor, whole
from cpt_fx.operators.row import MULTIPLY, Groups, Index, Row, Target
from cpt_fx.operators.table import (
    FLOPS,
    FORMS,
    ROWS,
    add,
    factors,
    form_of,
    is_opaque,
    multiplies,
    respelled,
    row_for,
    row_of,
    why_left,
)

__all__ = [
    "FLOPS", "FORMS", "HIDING", "INLINED", "MULTIPLY", "OPERATOR_OF", "ROWS", "Groups", "Index", "Registration", "Row",
    "Target", "factors", "form_of", "is_opaque", "multiplies", "register", "respelled", "returns_one_tensor", "row_for",
    "row_of", "whole", "why_left",
]  # fmt: skip

for _family in (convolutions, linear, products, attention, recurrent, embeddings, aggregations, algebra):
    for _row in _family.ROWS:
        add(_row)

OPERATOR_OF: dict[type[nn.Module], str] = {kind: row.name for row in ROWS for kind in row.modules if not row.left}
"""The one operator of a layer of torch, by its name in the table."""

INLINED: tuple[type[nn.Module], ...] = tuple(OPERATOR_OF)
"""Layers that normalize replaces by the function they call, with the weight as an explicit value."""

HIDING: tuple[type[nn.Module], ...] = tuple(kind for row in ROWS for kind in row.modules)
"""Modules that multiply: one of these inside an opaque module is reported as uncovered."""
