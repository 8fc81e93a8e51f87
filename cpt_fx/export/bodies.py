"""The bodies of our ONNX functions, traced from torch operators on vectors so that they serve tensors of any rank.

Quantizers are elementwise. What depends on the rank, or has no CUDA kernel in ONNX Runtime, is rewritten here: ranges
and element indices by operators that work at any rank, bit operations on integers by products, quotients and tables.
All results equal PyTorch's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.onnx import ops as onnx_ops

from cpt_fx.export.local_functions import as_function, in_place_of
from cpt_fx.export.recording import OPSET, Table
from cpt_fx.quantizers import numerics, ops
from cpt_fx.quantizers.numerics import Extent

SEED = ("seeds", "draw")
"""Inputs of a function that draws random numbers: the seeds of a step, and the index of its own seed."""
RANGE = ("zero_point", "range", "weight")
"""Inputs with a running range. A function that updates it returns `new_zero_point` and so on."""
_EXAMPLES: dict[str, Callable[[], Tensor]] = {
    **dict.fromkeys(("x", "dy"), lambda: torch.ones(7)),
    **dict.fromkeys(("low", "span", *RANGE), lambda: torch.ones(())),
    "bits": lambda: torch.tensor(8),
    "axes": lambda: torch.zeros(2, dtype=torch.int64),
    "seeds": lambda: torch.zeros(3, 2, dtype=torch.int32),
    "draw": lambda: torch.zeros(1, dtype=torch.int64),
}
"""Example inputs for tracing, by input name."""


def traced(name: str, run: Callable[[Trace], Any], inputs: list[str], outputs: list[str]) -> ir.Function:
    """Trace `run` as a function with inputs and outputs of these names."""
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
    """The inputs of a function while it is traced, and replacements of operators that depend on them."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name]

    def seed(self) -> Tensor:
        """Return the two numbers of the function's own seed."""
        seeds = self["seeds"].to(torch.int64)
        return _node("GatherND", (seeds, self["draw"]), seeds, (2,))

    def measured(self, x: Tensor, axes: Tensor | None = None) -> Extent:
        """Return the range of a tensor over `axes`, or over all of it."""
        inputs, shape, keeps = ((x,), (), 0) if axes is None else ((x, axes), (1,), 1)
        low, high = (
            _node(name, inputs, x, shape, keepdims=keeps, noop_with_empty_axes=keeps)
            for name in ("ReduceMin", "ReduceMax")
        )
        return Extent(low, high - low, high)

    def extent(self, x: Tensor, percentile: float) -> Extent:
        """Replace `ops._extent`: return the range of a whole tensor, or of its central part."""
        low, _, high = self.measured(x) if percentile >= 100 else _without_tails(x, percentile)
        assert high is not None
        # ONNX does not define whether ReduceMin propagates NaN: adding zero times every element does.
        poison = (x * 0).sum()
        low, high = low + poison, high + poison
        return Extent(low, high - low, high)

    def places(self, *_: Any, **__: Any) -> Tensor:
        """Return the flat index of every element, in the shape of `x`."""
        x = self["x"]
        count = _node("Size", (x,), self["draw"], ())
        line = _node("Range", (torch.full((), 0), count, torch.full((), 1)), count, (1,))
        return _node("Reshape", (line, _node("Shape", (x,), count, (1,))), count, x.shape)

    def table(self) -> Table:
        """Return the decomposition table: element indices, the function's seed, and bit operations as arithmetic."""
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
    """Trace a constant vector."""
    if not values:
        return torch.zeros(0, dtype=torch.int64)
    key, dtype = ("value_ints", torch.int64) if isinstance(values[0], int) else ("value_floats", torch.float32)
    made: Tensor = onnx_ops.symbolic(
        "::Constant", (), attrs={key: list(values)}, dtype=dtype, shape=(len(values),), version=OPSET
    )
    return made


def _vector(x: Tensor) -> Tensor:
    """Flatten a tensor of any rank."""
    return _node("Reshape", (x, constant([-1])), x, x.shape or (1,))


def _shifted(_: Tensor, places: Tensor) -> Tensor:
    """Look up 1 << places in a table."""
    table = constant([1 << place for place in range(33)])
    return _node("GatherND", (table, _vector(places)), table, ())


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up 2**exponent in a table, for all exponents of normal float32 numbers."""
    assert dtype == torch.float32
    table = constant([2.0**power for power in range(-126, 128)])
    return _node("GatherND", (table, _vector(exponent + 126)), table, ())


def _quotient(x: Tensor, places: int) -> Tensor:
    """Return x >> places for a non-negative x, as a division."""
    return _node("Div", (x, torch.full((), 1 << places)), x, x.shape)


def _remainder(x: Tensor, mask: int) -> Tensor:
    """Return x & mask for a mask of low bits, as a remainder."""
    assert mask & (mask + 1) == 0, mask
    return torch.remainder(x, mask + 1)


def _floor_to_power_of_two(x: Tensor) -> Tensor:
    """Return 2**floor(log2(abs(x))) exactly, by sums and products: Rump's "unit in the first place".

    Subnormal numbers give their power of two, not zero as in `numerics`; callers clamp the result to normal numbers.
    """
    wide = x.abs().to(torch.float64)
    large = wide * 2.0**52 + wide
    return (large - (large - large * 2.0**-53)).to(torch.float32)


def _without_tails(x: Tensor, percentile: float) -> Extent:
    """Return `numerics.percentile_extent`, with the number of elements as a tensor."""
    size = _node("Size", (x,), torch.zeros((), dtype=torch.int64), ())
    share = torch.tensor(1 - percentile / 100, dtype=torch.float64)  # a Python number would be rounded to float32
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
