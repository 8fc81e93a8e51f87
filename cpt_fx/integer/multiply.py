"""One product of two operands: on integers where both are codes and that pays, else in floating point, and counted."""

from __future__ import annotations

import torch
from torch import Tensor

from cpt_fx.integer import choice
from cpt_fx.integer.codes import Codes
from cpt_fx.integer.counts import RATIO, Outcome
from cpt_fx.integer.geometry import Geometry
from cpt_fx.integer.operands import Operand, define, exact, revealed, value_of
from cpt_fx.integer.products import PRODUCTS, Call, Product

Dtypes = tuple[torch.dtype, torch.dtype]
"""Of floating point arithmetic, and of the result."""


def multiply(name: str, call: Call, a: Operand, b: Operand, dtypes: Dtypes, counts: Tensor | None) -> Tensor:
    """Return a product, by its name in `products`, and count how it was made."""
    if a.traced or b.traced:
        parts = ([part for part in operand if part is not None] for operand in (a, b))
        geometry = [number for pair in call.geometry for number in pair]
        return MULTIPLY(name, *parts, call.bias, call.shape, geometry, *dtypes, counts)
    return _multiply(name, call, revealed(a), revealed(b), dtypes, counts)


def _multiply(
    name: str, call: Call, a: Codes | Tensor, b: Codes | Tensor, dtypes: Dtypes, counts: Tensor | None
) -> Tensor:
    product = PRODUCTS[name]
    outcome = _outcome(product, call, a, b, counts)
    if counts is not None:
        counts[product.direction, outcome].add_(1)
    if outcome is not Outcome.INTEGER:
        a, b = value_of(a, dtypes[0]), value_of(b, dtypes[0])
    return product.run(a, b, call, dtypes[1])


def _outcome(product: Product, call: Call, a: Codes | Tensor, b: Codes | Tensor, counts: Tensor | None) -> Outcome:
    """Decide how a product is made, and note the measurement that it rests on."""
    if not isinstance(a, Codes) or not isinstance(b, Codes):
        empty = any(isinstance(factor, Tensor) and not factor.numel() for factor in (a, b))
        return Outcome.NO_CODES if empty else Outcome.WIDTH
    if product.misfit(a, b):
        return Outcome.GROUPS
    decision = choice.decide(product.run.__name__, a.values.shape, b.values.shape, call)
    if counts is not None and decision.measured:
        counts[product.direction, RATIO].fill_(round(1000 * decision.ratio))
    return Outcome.INTEGER if decision.worth else Outcome.SIZE


def _multiply_at_run_time(
    name: str, a: list[Tensor], b: list[Tensor], bias: Tensor | None, shape: list[int], geometry: list[int],
    arithmetic: torch.dtype, dtype: torch.dtype, counts: Tensor | None,
) -> Tensor:  # fmt: skip
    left, right = (revealed(exact(*parts) if len(parts) == 1 else Operand(*(*parts, None)[:3])) for parts in (a, b))
    call = Call(bias, tuple(shape), Geometry(*zip(geometry[::2], geometry[1::2], strict=True)))
    # What a compiler was told: a tensor of this shape, in this order.
    return _multiply(name, call, left, right, (arithmetic, dtype), counts).reshape(shape).contiguous()


MULTIPLY = define(
    "_multiply(str name, Tensor[] a, Tensor[] b, Tensor? bias, SymInt[] shape, int[] geometry, ScalarType arithmetic, "
    "ScalarType dtype, Tensor(a!)? counts) -> Tensor",
    _multiply_at_run_time,
    lambda name, a, b, bias, shape, geometry, arithmetic, dtype, counts: a[0].new_empty(shape, dtype=dtype),
)
