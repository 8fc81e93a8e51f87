"""Products of two factors: linear, matmul and convolution, forward and for both gradients.

Factors are codes, or the floating point numbers that simulated execution multiplies. Products of codes are summed as
integers and multiplied by the scales once. Without our kernels they are summed in float64, which holds every sum of
codes exactly; torch's own product of int8 matrices does not, on processors without VNNI. The result is the product of
the dequantized operands up to the rounding of its dtype, and exactly `scale * integer` for integers below 2**24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cpt_fx.integer import kernels
from cpt_fx.integer.codes import Codes
from cpt_fx.integer.kernels import LONGEST_SUM, Geometry

FLOAT = torch.float32
Factor = TypeVar("Factor", Codes, Tensor)


class Options(NamedTuple):
    """The arguments of a product besides its factors."""

    bias: Tensor | None = None
    shape: Sequence[int] = ()
    """Of the result. Forward products do not need it."""
    geometry: Geometry = Geometry()
    """Of a convolution."""


_NOTHING_ELSE = Options()


@dataclass(frozen=True)
class Product:
    """One product, called with its two factors."""

    function: Callable[..., Tensor]
    direction: int
    """The index of its counters: see `counts.DIRECTIONS`."""
    letters: tuple[str, ...]
    """The dims of both factors and of the result, which has none that are summed over. In front of matrices there may
    be more dims, which belong to the first letter; vectors have fewer."""

    @property
    def name(self) -> str:
        """Its key in `PRODUCTS`."""
        return self.function.__name__

    def __call__(
        self, a: Codes | Tensor, b: Codes | Tensor, call: Options = _NOTHING_ELSE, dtype: torch.dtype = FLOAT
    ) -> Tensor:
        """Multiply codes, unless their scales do not factor out of the sums, or floating point numbers."""
        if isinstance(a, Codes) and isinstance(b, Codes) and (why := self.misfit(a, b)):
            raise ValueError(why)
        result: Tensor = self.function(a, b, call, dtype)
        return result.to(dtype)

    def misfit(self, a: Codes, b: Codes) -> str:
        """Return what is wrong if a scale differs along a summed dim; empty if both can be applied to the sums."""
        for which, codes, letters in zip(("first", "second"), (a, b), self.letters, strict=False):
            if codes.scale.ndim == 0:
                continue
            dims = [dim for dim in range(-codes.ndim, 0) if letters[max(dim, -len(letters))] not in self.letters[2]]
            if not _is_constant(codes.scale, dims):
                return (
                    f"{self.name} sums over dims {dims} of its {which} operand, along which the scales differ: "
                    f"shape {tuple(codes.scale.shape)}. Such a product cannot run on integers."
                )
        return ""


PRODUCTS: dict[str, Product] = {}
"""All products defined below, by name."""


def _product(direction: int, *letters: str) -> Callable[[Callable[..., Tensor]], Product]:
    return lambda function: PRODUCTS.setdefault(function.__name__, Product(function, direction, letters))


@_product(0, "ri", "ci", "rc")
def linear_forward(x: Factor, w: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return x @ w.T + bias."""
    if isinstance(x, Tensor):
        return F.linear(x, w, _bias_like(x, call))
    return _matmul(x, w.mT, dtype, call.bias)


@_product(1, "ri", "ic", "rc")
def linear_grad_input(g: Factor, w: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x: g @ w."""
    return _matmul(_gradient_as_matrix(g, False, w.ndim == 1), _as_matrix(w, 0), dtype)


@_product(2, "ir", "ic", "rc")
def linear_grad_weight(g: Factor, x: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return the gradient of w: the sum over all rows of the outer products of g and x."""
    return _matmul(_rows(_gradient_as_matrix(g, False, len(call.shape) == 1)).mT, _rows(x), dtype)


@_product(0, "bri", "bic", "brc")
def matmul_forward(a: Factor, b: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return a @ b, batches broadcast as in torch.matmul, plus `bias`."""
    result = _matmul(a, b, dtype).to(dtype)
    return result if call.bias is None else result + call.bias.to(dtype)


@_product(1, "bri", "bci", "brc")
def matmul_grad_left(g: Factor, b: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a, of its shape: g @ b.T, summed over the batches that a was broadcast to."""
    vector = len(call.shape) == 1
    g, b = _gradient_as_matrix(g, vector, b.ndim == 1), _as_matrix(b, -1)
    return _matmul(g, b.mT, dtype).sum_to_size(*[1] * vector, *call.shape).reshape(tuple(call.shape))


@_product(2, "bic", "bir", "brc")
def matmul_grad_right(g: Factor, a: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return the gradient of b, of its shape: a.T @ g, summed over the batches that b was broadcast to."""
    vector = len(call.shape) == 1
    g, a = _gradient_as_matrix(g, a.ndim == 1, vector), _as_matrix(a, 0)
    if isinstance(a, Codes) and len(call.shape) <= 2 and all(_is_constant(x.scale, range(x.ndim - 1)) for x in (a, g)):
        # One product over the rows of all batches.
        g, a = _rows(g), _rows(a)
    return _matmul(a.mT, g, dtype).sum_to_size(*call.shape, *[1] * vector).reshape(tuple(call.shape))


@_product(0, "nchw", "fckl", "nfpq")
def conv2d_forward(x: Factor, w: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return the convolution of images x with filters w. For one in one dim, give both a height of 1."""
    if isinstance(x, Tensor):
        return torch.conv2d(x, w, _bias_like(x, call), *call.geometry)
    out = call.geometry.output_size(x.values.shape[2:], w.values.shape[2:])
    done = kernels.convolution(x, w, call.bias, out, call.geometry)
    if done is not None:
        return done
    sums = torch.conv2d(x.values.double(), w.values.double(), None, *call.geometry)
    return _scaled(sums, x.scale, w.scale.reshape(-1, 1, 1), None if call.bias is None else call.bias[:, None, None])


@_product(1, "nfpq", "fckl", "nchw")
def conv2d_grad_input(g: Factor, w: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return the gradient of x, of its shape."""
    if isinstance(g, Tensor):
        return _conv2d_backward(g, w, call, 0)
    done = kernels.convolution(g, w, None, tuple(call.shape[2:]), call.geometry, turned=True)
    if done is not None:
        return done
    sums = _conv2d_backward(g.values.double(), w.values.double(), call, 0)
    return _scaled(sums, g.scale, w.scale.reshape(-1, 1, 1))


@_product(2, "nfpq", "nchw", "fckl")
def conv2d_grad_weight(g: Factor, x: Factor, call: Options, dtype: torch.dtype) -> Tensor:
    """Return the gradient of w, of its shape."""
    if isinstance(g, Tensor):
        return _conv2d_backward(g, x, call, 1)
    done = kernels.filters(g, x, tuple(call.shape[2:]), call.geometry)
    if done is not None:
        return done
    sums = _conv2d_backward(g.values.double(), x.values.double(), call, 1)
    return _scaled(sums, g.scale.reshape(-1, 1, 1, 1), x.scale)


def _conv2d_backward(g: Tensor, other: Tensor, call: Options, which: int) -> Tensor:
    """Return the gradient of the images (0) or of the filters (1), of which only the shape is read."""
    # Not by torch.nn.grad, which passes uninitialized numbers for it: the census of a proof would count them.
    own = g.new_zeros(1).expand(tuple(call.shape))
    x, w = (own, other) if which == 0 else (other, own)
    wanted = (which == 0, which == 1, False)
    made = torch.ops.aten.convolution_backward(g, x, w, None, *call.geometry, False, (0, 0), 1, wanted)
    return made[which]  # type: ignore[no-any-return]


def _bias_like(x: Tensor, call: Options) -> Tensor | None:
    return None if call.bias is None else call.bias.to(x.dtype)


def bias_grad(g: Codes, channel: int = -1, dtype: torch.dtype = FLOAT) -> Tensor:
    """Return the gradient of a bias: the sum of a gradient over all dims but the channels."""
    dims = [dim for dim in range(g.ndim) if dim != channel % g.ndim]
    if not _is_constant(g.scale, dims):
        return g.dequantized().sum(dims).to(dtype)
    sums, rows, made = g.values, _rows(g.values), None
    if channel % g.ndim == g.ndim - 1 and rows.numel() >= 1 << 16 and len(rows) <= LONGEST_SUM:
        # As a product with ones: torch's own sum over many rows takes several times as long.
        ones = rows.new_ones(1, len(rows))
        made = kernels.product(ones, rows, None)
    if made is not None:
        sums = made[0]
    elif dims:
        few = g.values.numel() < 1 << 24
        sums = g.values.sum(dims, dtype=torch.int32 if few else torch.int64)
    return (sums.to(g.scale.dtype) * (g.scale if g.scale.ndim == 0 else g.scale.reshape(-1))).to(dtype)


def _is_constant(scale: Tensor, dims: Iterable[int]) -> bool:
    return scale.ndim == 0 or all(scale.shape[dim] == 1 for dim in dims)


def _matmul(a: Factor, b: Factor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a @ b; `dtype` and `bias` are for codes."""
    if isinstance(a, Tensor):
        return torch.matmul(a, b)
    # With a single matrix on the right, the rows of all batches are multiplied at once.
    (x, first), (y, second) = _as_matrix(a, 0), _as_matrix(b, -1)
    many = y.ndim == 2 and x.ndim != 2
    rows = _rows(x) if many else x
    plain = first.ndim == second.ndim == 0 and first.dtype == second.dtype == torch.float32
    result: Tensor | None = None
    if x.numel() and y.numel() and x.shape[-1] <= LONGEST_SUM:
        result = kernels.product(rows, y, (first, second) if plain else None, bias if plain else None)
    scaled = plain and result is not None
    result = torch.matmul(rows.double(), y.double()) if result is None else result
    result = result.view(*x.shape[:-1], y.shape[-1]) if many else result
    result = (result if scaled else _scaled(result, first, second, bias)).to(dtype)
    result = result.squeeze(-2) if a.ndim == 1 else result
    return result.squeeze(-1) if b.ndim == 1 else result


def _rows(x: Factor) -> Factor:
    """Flatten all dims but the last into the rows of a matrix."""
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


def _scaled(sums: Tensor, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply sums by both scales, add the bias."""
    scale = first * second
    result = sums.to(scale.dtype).mul_(scale)
    return result if bias is None else result.add_(bias)


def _as_matrix(x: Factor, dim: int) -> Factor:
    """Give a vector a second dim of size 1."""
    return x if x.ndim > 1 else x.unsqueeze(dim)


def _gradient_as_matrix(g: Factor, no_rows: bool, no_columns: bool) -> Factor:
    """Restore the dims that a product with a vector dropped."""
    # Columns first: then -2 is where the rows were.
    g = g.unsqueeze(-1) if no_columns else g
    return g.unsqueeze(-2) if no_rows else g
