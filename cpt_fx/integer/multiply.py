"""One product of two operands: on integers where both are codes and that pays, else in floating point, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpt_fx.integer import choice, products
from cpt_fx.integer.codes import Codes
from cpt_fx.integer.counts import RATIO, Outcome
from cpt_fx.integer.operands import Operand, revealed, value_of

Dims = tuple[int, ...]
Dtypes = tuple[torch.dtype, torch.dtype]
"""Of floating point arithmetic, and of the result."""


class Product(NamedTuple):
    """One product: where it is counted, and over which dims of its two factors it sums."""

    direction: int
    summed: tuple[Dims, Dims]
    takes_bias: bool = False
    takes_shape: bool = False


_LEADING = tuple(range(-8, -1))
PRODUCTS = {
    "linear_forward": Product(0, ((-1,), (-1,)), takes_bias=True),
    "linear_grad_input": Product(1, ((-1,), (-2,))),
    "linear_grad_weight": Product(2, (_LEADING, _LEADING)),
    "matmul_forward": Product(0, ((-1,), (-2,))),
    "matmul_grad_left": Product(1, ((-1,), (-1,)), takes_shape=True),
    "matmul_grad_right": Product(2, ((-2,), (-2,)), takes_shape=True),
    "conv2d_forward": Product(0, ((1, 2, 3), (1, 2, 3)), takes_bias=True),
    "conv2d_grad_input": Product(1, ((1, 2, 3), (0, 2, 3)), takes_shape=True),
    "conv2d_grad_weight": Product(2, ((0, 2, 3), (0, 2, 3)), takes_shape=True),
}
"""By the name of the function in `products`."""


class Call(NamedTuple):
    """What a product takes besides its factors."""

    name: str
    bias: Tensor | None
    shape: Sequence[int]
    """Of the result."""
    geometry: Sequence[int]
    """Of a convolution: stride, padding and dilation, two numbers each."""


def multiply(call: Call, a: Operand, b: Operand, dtypes: Dtypes, counts: Tensor | None) -> Tensor:
    """Return a product, and count how it was made."""
    if a.traced or b.traced:
        parts = ([part for part in operand if part is not None] for operand in (a, b))
        result: Tensor = MULTIPLY(call.name, *parts, *call[1:], *dtypes, counts)
        return result
    return _multiply(call, revealed(a), revealed(b), dtypes, counts)


def _multiply(call: Call, a: Codes | Tensor, b: Codes | Tensor, dtypes: Dtypes, counts: Tensor | None) -> Tensor:
    product, geometry = PRODUCTS[call.name], call.geometry
    outcome = _outcome(call, product, a, b, counts)
    if counts is not None:
        counts[product.direction, outcome].add_(1)
    options: list[Any] = [call.bias] if product.takes_bias else [call.shape] if product.takes_shape else []
    named: dict[str, Any] = {}
    if geometry:
        named = {"stride": geometry[:2], "padding": geometry[2:4], "dilation": geometry[4:]}
    if outcome is not Outcome.INTEGER:
        a, b = value_of(a, dtypes[0]), value_of(b, dtypes[0])
    result: Tensor = getattr(products, call.name)(a, b, *options, dtypes[1], **named)
    if call.bias is not None and not product.takes_bias:
        result = result + call.bias.to(result.dtype)
    return result


def _outcome(call: Call, product: Product, a: Codes | Tensor, b: Codes | Tensor, counts: Tensor | None) -> Outcome:
    """Decide how a product is made, and note the measurement that it rests on."""
    if not isinstance(a, Codes) or not isinstance(b, Codes):
        return Outcome.NO_CODES if _is_empty(a) or _is_empty(b) else Outcome.WIDTH
    if not (_factors(a, product.summed[0]) and _factors(b, product.summed[1])):
        return Outcome.GROUPS
    sizes = (*a.values.shape, *b.values.shape, *call.geometry)
    decision = choice.measured(call.name, *sizes)
    if decision is not None and counts is not None:
        counts[product.direction, RATIO].fill_(round(1000 * decision.ratio))
    worth = choice.is_worth(call.name, *sizes) if decision is None else decision.worth
    return Outcome.INTEGER if worth else Outcome.SIZE


def _is_empty(factor: Codes | Tensor) -> bool:
    return isinstance(factor, Tensor) and not factor.numel()


def _factors(codes: Codes, dims: Dims) -> bool:
    """Whether a scale can be taken out of a sum. A vector does not have all dims, and is not summed over those."""
    ndim = codes.values.ndim
    return codes.scale.ndim == 0 or products.factors(codes, [dim for dim in dims if -ndim <= dim < ndim])


_LIBRARY = torch.library.Library("cpt_fx", "FRAGMENT")
_LIBRARY.define(
    "_multiply(str name, Tensor[] a, Tensor[] b, Tensor? bias, SymInt[] shape, int[] geometry, ScalarType arithmetic, "
    "ScalarType dtype, Tensor(a!)? counts) -> Tensor"
)
MULTIPLY = torch.ops.cpt_fx._multiply.default


def _operand(parts: Sequence[Tensor]) -> Operand:
    return Operand(*parts) if len(parts) == 3 else Operand(None, None, parts[0])


def _multiply_at_run_time(
    name: str, a: list[Tensor], b: list[Tensor], bias: Tensor | None, shape: list[int], geometry: list[int],
    arithmetic: torch.dtype, dtype: torch.dtype, counts: Tensor | None,
) -> Tensor:  # fmt: skip
    left, right = revealed(_operand(a)), revealed(_operand(b))
    call = Call(name, bias, shape, geometry)
    # What a compiler was told: a tensor of this shape, in this order.
    return _multiply(call, left, right, (arithmetic, dtype), counts).reshape(shape).contiguous()


def _multiply_shape(
    name: str, a: list[Tensor], b: list[Tensor], bias: Tensor | None, shape: list[int], geometry: list[int],
    arithmetic: torch.dtype, dtype: torch.dtype, counts: Tensor | None,
) -> Tensor:  # fmt: skip
    return a[0].new_empty(shape, dtype=dtype)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("_multiply", _multiply_at_run_time, _device)
torch.library.register_fake("cpt_fx::_multiply", _multiply_shape, lib=_LIBRARY)
