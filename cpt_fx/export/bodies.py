"""The bodies of our ONNX functions: traces of torch operators for vectors, which serve tensors of any number of dims.

Quantizers work on each element for itself. What depends on dims, and what ONNX Runtime has no kernel for on CUDA, is
said here: ranges and places of elements by operators that ask for no dims, bits of integers by products, quotients and
tables. All of it gives the numbers of PyTorch, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.onnx import ops as onnx_ops

from cpt_fx import numerics, ops
from cpt_fx.export.local_functions import as_function, in_place_of
from cpt_fx.export.recording import OPSET, Table
from cpt_fx.numerics import Extent

SEED = ("seeds", "draw")
"""The inputs of a function that draws: the seeds of a step, and which of them is its own."""
RANGE = ("zero_point", "range", "weight")
"""The inputs with a running range. Where it learns, outputs called `new_zero_point` and so on hold the next one."""
_EXAMPLES: dict[str, Callable[[], Tensor]] = {
    **dict.fromkeys(("x", "dy"), lambda: torch.ones(7)),
    **dict.fromkeys(("low", "span", *RANGE), lambda: torch.ones(())),
    "bits": lambda: torch.tensor(8),
    "axes": lambda: torch.zeros(2, dtype=torch.int64),
    "seeds": lambda: torch.zeros(3, 2, dtype=torch.int32),
    "draw": lambda: torch.zeros(1, dtype=torch.int64),
}
"""What a function is traced with."""


def traced(name: str, run: Callable[[Trace], Any], inputs: list[str], outputs: list[str]) -> ir.Function:
    """Trace what a function does with inputs of these names."""
    trace = Trace()

    def call(*given: Tensor) -> Any:
        trace.inputs = dict(zip(inputs, given, strict=True))
        return run(trace)

    with in_place_of(
        (numerics, "floor_to_power_of_two", _floor_to_power_of_two), (numerics, "power_of_two", _power_of_two),
        (ops, "_extent", trace.extent),
    ):  # fmt: skip
        made = as_function(name, call, tuple(_EXAMPLES[key]() for key in inputs), trace.table())
    for value, key in zip((*made.inputs, *made.outputs), (*inputs, *outputs), strict=True):
        value.name = key
    return made


class Trace:
    """The inputs of a function while it is traced, and how some operators are said of them."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name]

    def seed(self) -> Tensor:
        """Return the two numbers of the function's own seed."""
        seeds = self["seeds"].to(torch.int64)
        return _node("GatherND", (seeds, self["draw"]), seeds, (2,))

    def measured(self, x: Tensor, axes: Tensor | None = None) -> Extent:
        """Return the range of every group, or of the whole tensor."""
        inputs, shape, keeps = ((x,), (), 0) if axes is None else ((x, axes), (1,), 1)
        low, high = (
            _node(name, inputs, x, shape, keepdims=keeps, noop_with_empty_axes=keeps)
            for name in ("ReduceMin", "ReduceMax")
        )
        return Extent(low, high - low, high)

    def extent(self, x: Tensor, percentile: float) -> Extent:
        """Return the range of a whole tensor, or of its central part, in place of `ops._extent`."""
        low, _, high = self.measured(x) if percentile >= 100 else _without_tails(x, percentile)
        assert high is not None
        # ONNX does not say whether a minimum sees a NaN: zero times each element does.
        poison = (x * 0).sum()
        low, high = low + poison, high + poison
        return Extent(low, high - low, high)

    def places(self, *_: Any, **__: Any) -> Tensor:
        """Return the place of every element, in a tensor of its shape."""
        x = self["x"]
        count = _node("Size", (x,), self["draw"], ())
        line = _node("Range", (torch.full((), 0), count, torch.full((), 1)), count, (1,))
        return _node("Reshape", (line, _node("Shape", (x,), count, (1,))), count, x.shape)

    def table(self) -> Table:
        """Return how operators are said: places as integers, and bits by sums, products and quotients."""
        aten = torch.ops.aten
        return {
            **dict.fromkeys((aten.as_strided.default, aten.view.default), lambda x, *_: x.detach()),
            aten.arange.default: self.places,
            aten.randint.default: lambda *_, **__: self.seed(),
            aten.randint.low: lambda *_, **__: self.seed(),
            aten.bitwise_left_shift.Tensor: _shifted,
            aten.__rshift__.Scalar: _quotient,
            aten.bitwise_right_shift.Tensor_Scalar: _quotient,
            aten.bitwise_right_shift_.Tensor_Scalar: lambda x, places: x.copy_(_quotient(x, places)),
            aten.__and__.Scalar: _remainder,
            aten.bitwise_and.Scalar: _remainder,
            aten.bitwise_and_.Scalar: lambda x, mask: x.copy_(_remainder(x, mask)),
        }


def _node(name: str, inputs: tuple[Tensor, ...], like: Tensor, shape: Any, **attributes: Any) -> Tensor:
    made: Tensor = onnx_ops.symbolic(
        f"::{name}", inputs, attrs=attributes, dtype=like.dtype, shape=shape, version=OPSET
    )
    return made


def constant(values: Sequence[int] | Sequence[float]) -> Tensor:
    """Trace a vector of numbers."""
    if not values:
        return torch.zeros(0, dtype=torch.int64)
    key, dtype = ("value_ints", torch.int64) if isinstance(values[0], int) else ("value_floats", torch.float32)
    made: Tensor = onnx_ops.symbolic(
        "::Constant", (), attrs={key: list(values)}, dtype=dtype, shape=(len(values),), version=OPSET
    )
    return made


def _vector(x: Tensor) -> Tensor:
    """Return a tensor without its dims, of however many it has."""
    return _node("Reshape", (x, constant([-1])), x, x.shape or (1,))


def _shifted(_: Tensor, places: Tensor) -> Tensor:
    """Return 1 << places from a table."""
    table = constant([1 << place for place in range(33)])
    return _node("GatherND", (table, _vector(places)), table, ())


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2**exponent from a table, for all exponents of normal numbers."""
    assert dtype == torch.float32
    table = constant([2.0**power for power in range(-126, 128)])
    return _node("GatherND", (table, _vector(exponent + 126)), table, ())


def _quotient(x: Tensor, places: int) -> Tensor:
    """Return x >> places, for an x that is not negative."""
    return _node("Div", (x, torch.full((), 1 << places)), x, x.shape)


def _remainder(x: Tensor, mask: int) -> Tensor:
    """Return x & mask, for a mask of ones."""
    assert mask & (mask + 1) == 0, mask
    return torch.remainder(x, mask + 1)


def _floor_to_power_of_two(x: Tensor) -> Tensor:
    """Return 2**floor(log2(abs(x))) by sums and products, exactly: the unit in the first place (Rump).

    It is that of subnormal numbers, too, which are zero in `numerics`: what takes it is bounded by normal numbers.
    """
    wide = x.abs().to(torch.float64)
    large = wide * 2.0**52 + wide
    return (large - (large - large * 2.0**-53)).to(torch.float32)


def _without_tails(x: Tensor, percentile: float) -> Extent:
    """Return the range of the central part of a tensor: `numerics.percentile_extent`, with a count that is a tensor."""
    size = _node("Size", (x,), torch.zeros((), dtype=torch.int64), ())
    share = torch.tensor(1 - percentile / 100, dtype=torch.float64)  # a number would be rounded to float32
    cut = (size.to(torch.float64) * share / 2).to(torch.int64)
    line, count = _vector(x), _vector(cut + 1)
    ends = []
    for largest in (0, 1):
        values, _ = onnx_ops.symbolic_multi_out(
            "::TopK", (line, count), attrs={"largest": largest}, dtypes=(x.dtype, torch.int64),
            shapes=(x.shape, x.shape), version=OPSET,
        )  # fmt: skip
        ends.append(_node("GatherND", (values, constant([-1])), x, ()))
    low, high = ends
    return Extent(low, high - low, high)
