"""Quantizers as ONNX local functions in the domain `cpt_fx`.

Each call is one node with the bit-width as an input: `FakeQuantize(x, bits, axes)`. A function cannot branch on an
attribute, so what differs from the defaults of the torch operator is part of the function's name:
`FakeQuantizeSymmetric`, `FakeQuantizeAffineIntegerObserved`. The results equal PyTorch's, noise of stochastic
rounding included: it is the same hash of a seed, and the seed is an input.

The functions are traced from torch operators on vectors and serve tensors of any rank. Operators that depend on the
rank, or have no CUDA kernel in ONNX Runtime, are rewritten: ranges and element indices by operators that work at any
rank, bit operations on integers by products, quotients and tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from torch import Tensor
from torch.onnx import ops as onnx_ops

from cpt_fx.capture.base import patched
from cpt_fx.export.recording import OPSET, Table, convert, normalize, record, strip
from cpt_fx.formats import Rounding, Scheme, Specials
from cpt_fx.quantizers import noise, numerics, ops
from cpt_fx.quantizers.numerics import Grid, ValueRange

if TYPE_CHECKING:
    from cpt_fx.export.program import Graph

DOMAIN = "cpt_fx"
LEARNED = "LearnedRangeGradient"
"""Function that returns the gradients of a tensor, as a vector, and of its learned range."""
UNIFORM = "Uniform"
"""Function that returns noise in [0, 1) from a seed, shaped like a tensor; dropout uses it."""
_SEED = ("seeds", "draw")
"""Inputs of a function that draws random numbers: the seeds of a step, and the index of its own seed."""
_RANGE = ("zero_point", "range", "weight")
"""Inputs with a running range. A function that updates it returns `new_zero_point` and so on."""
_EXAMPLES: dict[str, Callable[[], Tensor]] = {
    **dict.fromkeys(("x", "dy"), lambda: torch.ones(7)),
    **dict.fromkeys(("low", "span", *_RANGE), lambda: torch.ones(())),
    "bits": lambda: torch.tensor(8),
    "axes": lambda: torch.zeros(2, dtype=torch.int64),
    "seeds": lambda: torch.zeros(3, 2, dtype=torch.int32),
    "draw": lambda: torch.zeros(1, dtype=torch.int64),
}
"""Example inputs for tracing, by input name."""


class QuantizerKind(NamedTuple):
    """The static options of a quantizer function. Those that differ from the defaults make up its name.

    `source` is where the range comes from: "" (the tensor, over axes that are an input), "Observed" (the whole tensor,
    which also updates the running range), "Recalled" (the running range) or "Learned" (parameters).
    """

    grid: Grid = Grid(floored=False)
    source: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of `fake_quantize_observed` that differ from its defaults."""

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.grid.rounding is Rounding.STOCHASTIC

    @property
    def name(self) -> str:
        """The function's name."""
        grid = self.grid
        parts = ["fake_quantize", "" if grid.scheme is Scheme.AFFINE else grid.scheme.value]
        if grid.scheme is Scheme.FLOAT:
            parts += [str(grid.exponent), "" if grid.specials is Specials.NONE else grid.specials.value]
        parts += ["blocks" * (grid.block > 0), "floored" * grid.floored, "stochastic" * self.draws, self.source]
        for key, value in self.options:
            parts += [key] if value is True else [f"not_{key}"] if value is False else [key, str(value)]
        words = "_".join(parts).split("_")
        return "".join(word[:1].upper() + word[1:] for word in words).replace(".", "_")


def kind_of(grid: Grid, source: str = "", **options: Any) -> QuantizerKind:
    """Return the kind of a quantizer, without options that do not affect its results."""
    floored = grid.floored and grid.scheme is Scheme.AFFINE and source != "Learned"
    block = int(grid.block > 0 and grid.scheme is Scheme.FLOAT)
    usual = {
        argument.name: argument.default_value
        for argument in torch.ops.cpt_fx.fake_quantize_observed.default._schema.arguments
    }
    read = {"Observed": ("momentum", "when_off", "percentile"), "Recalled": ("corrected", "percentile")}.get(source, ())
    other = tuple((name, options[name]) for name in read if options.get(name, usual[name]) != usual[name])
    return QuantizerKind(grid._replace(keep=(), over=None, block=block, floored=floored), source, other)


def _quantize(trace: _Trace, kind: QuantizerKind) -> Any:
    """Run a quantizer on the inputs of its trace."""
    x, bits, grid = trace["x"], trace["bits"], kind.grid
    if kind.source in ("Observed", "Recalled"):
        state = [trace[name].clone() for name in _RANGE]
        options = grid.keywords() | dict(kind.options)
        y = ops.FAKE_QUANTIZE_OBSERVED(x, bits, *state, kind.source == "Observed", **options)
        return (y, *state) if kind.source == "Observed" else y
    value_range = ValueRange(trace["low"], trace["span"]) if kind.source else trace.measured(x, trace["axes"])
    return torch.where(numerics.passes(bits), x, numerics.on_grid(x, bits, grid, value_range))


def _learned_gradient(trace: _Trace) -> Any:
    leaves = [trace[name].detach().requires_grad_() for name in ("x", "low", "span")]
    with torch.enable_grad():
        y = ops.LearnedRange.apply(*leaves, trace["bits"], Grid(floored=False))  # type: ignore[no-untyped-call]
    return torch.autograd.grad(y, leaves, trace["dy"])


@cache
def function(kind: QuantizerKind | str) -> onnx.FunctionProto:
    """Return the function of a quantizer kind, `UNIFORM` or `LEARNED`."""
    outputs = ["y"]
    if isinstance(kind, QuantizerKind):
        sources = {"": ["x", "bits", "axes"], "Learned": ["x", "low", "span", "bits"]}
        inputs = sources.get(kind.source, ["x", "bits", *_RANGE]) + [*_SEED] * kind.draws
        outputs += [f"new_{name}" for name in _RANGE] if kind.source == "Observed" else []
        name, run = kind.name, lambda trace: _quantize(trace, kind)
    elif kind == LEARNED:
        inputs, outputs = ["dy", "x", "low", "span", "bits"], ["dx", "dlow", "dspan"]
        name, run = kind, _learned_gradient
    else:
        inputs = ["x", *_SEED]
        name, run = kind, lambda trace: noise.uniform(trace.seed(), trace["x"])
    return ir.serde.serialize_function(_traced(name, run, inputs, outputs))


def add_functions(graph: Graph) -> None:
    """Add the functions that a graph's nodes call."""
    model = graph.model
    called = {node.op_type for node in model.graph if node.domain == DOMAIN}
    kinds: dict[str, QuantizerKind | str] = {UNIFORM: UNIFORM, LEARNED: LEARNED, **graph.kinds}
    for kind in (kind for name, kind in kinds.items() if name in called):
        added = ir.serde.deserialize_function(function(kind))
        model.functions[added.identifier()] = added
    model.opset_imports.pop(DOMAIN, None)
    if called:
        model.opset_imports[DOMAIN] = 1


def as_function(
    name: str, run: Callable[..., Any], given: tuple[Tensor, ...], table: Table, *, exact: bool = False
) -> ir.Function:
    """Trace a tensor function as an ONNX local function for tensors of the same rank or, if `exact`, sizes."""
    varying = tuple(value.ndim > 0 and not exact for value in given)
    recorded, *_ = record(run, given, varying, table)
    model = normalize(convert(recorded, given)[0])
    graph = model.graph
    for index, value in enumerate(graph.inputs):
        value.name = f"in_{index}"
    common.DeduplicateInitializersPass()(model)
    _write_constants(graph)
    common.CommonSubexpressionEliminationPass(size_limit=64)(model)
    common.RemoveUnusedNodesPass()(model)
    for node in graph:
        for value in node.outputs:
            value.type = value.shape = None  # these are from the examples
    common.NameFixPass()(model)
    strip(model)
    return ir.Function(DOMAIN, name, graph=graph, attributes=[])


def _write_constants(graph: ir.Graph) -> None:
    """Replace initializers, which functions cannot have, by Constant nodes."""
    for value in list(graph.initializers.values()):
        node = ir.node("Constant", [], {"value": value.const_value})
        graph.insert_before(graph[0], node)
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        graph.initializers.pop(str(value.name))


def _traced(name: str, run: Callable[[_Trace], Any], inputs: list[str], outputs: list[str]) -> ir.Function:
    """Trace `run` as a function with inputs and outputs of these names."""
    trace = _Trace()

    def call(*given: Tensor) -> Any:
        trace.update(zip(inputs, given, strict=True))
        return run(trace)

    replaced = {
        (numerics, "floor_to_power_of_two"): _floor_to_power_of_two,
        (numerics, "power_of_two"): _power_of_two,
        (ops, "_value_range"): trace.value_range,
    }
    with patched(replaced):
        made = as_function(name, call, tuple(_EXAMPLES[key]() for key in inputs), trace.table())
    for value, key in zip((*made.inputs, *made.outputs), (*inputs, *outputs), strict=True):
        value.name = key
    return made


class _Trace(dict[str, Tensor]):
    """The inputs of a function while it is traced, and replacements of operators that depend on them."""

    def seed(self) -> Tensor:
        """Return the two numbers of the function's own seed."""
        seeds = self["seeds"].to(torch.int64)
        return _node("GatherND", (seeds, self["draw"]), torch.int64, (2,))

    def measured(self, x: Tensor, axes: Tensor | None = None) -> ValueRange:
        """Return the range of a tensor over `axes`, or over all of it."""
        inputs, shape, keeps = ((x,), (), 0) if axes is None else ((x, axes), (1,), 1)
        low, high = (
            _node(name, inputs, x.dtype, shape, keepdims=keeps, noop_with_empty_axes=keeps)
            for name in ("ReduceMin", "ReduceMax")
        )
        return ValueRange(low, high - low, high)

    def value_range(self, x: Tensor, percentile: float) -> ValueRange:
        """Replace `ops._value_range`: return the range of a whole tensor, or of its central part."""
        low, _, high = self.measured(x) if percentile >= 100 else _without_tails(x, percentile)
        assert high is not None
        # ONNX does not define whether ReduceMin propagates NaN: adding zero times every element does.
        poison = (x * 0).sum()
        low, high = low + poison, high + poison
        return ValueRange(low, high - low, high)

    def places(self, *_: Any, **__: Any) -> Tensor:
        """Return the flat index of every element, in the shape of `x`."""
        x = self["x"]
        count = _node("Size", (x,), torch.int64, ())
        line = _node("Range", (torch.full((), 0), count, torch.full((), 1)), torch.int64, (1,))
        return _node("Reshape", (line, _node("Shape", (x,), torch.int64, (1,))), torch.int64, x.shape)

    def table(self) -> Table:
        """Return the decomposition table: element indices, the function's seed, and bit operations as arithmetic."""
        aten = torch.ops.aten
        return {
            **dict.fromkeys((aten.as_strided.default, aten.view.default), lambda x, *_: x.detach()),
            aten.arange.default: self.places,
            aten.randint.default: lambda *_, **__: self.seed(),
            aten.randint.low: lambda *_, **__: self.seed(),
            aten.bitwise_left_shift.Tensor: lambda _, places: _looked_up([1 << place for place in range(33)], places),
            aten.__rshift__.Scalar: _quotient,
            aten.bitwise_right_shift.Tensor_Scalar: _quotient,
            aten.bitwise_right_shift_.Tensor_Scalar: lambda x, places: x.copy_(_quotient(x, places)),
            aten.__and__.Scalar: _remainder,
            aten.bitwise_and.Scalar: _remainder,
            aten.bitwise_and_.Scalar: lambda x, mask: x.copy_(_remainder(x, mask)),
        }


def _node(name: str, inputs: tuple[Tensor, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Tensor:
    made: Tensor = onnx_ops.symbolic(f"::{name}", inputs, attrs=attributes, dtype=dtype, shape=shape, version=OPSET)
    return made


def constant(values: Sequence[int] | Sequence[float]) -> Tensor:
    """Trace a constant vector."""
    if not values:
        return torch.zeros(0, dtype=torch.int64)
    key, dtype = ("value_ints", torch.int64) if isinstance(values[0], int) else ("value_floats", torch.float32)
    return _node("Constant", (), dtype, (len(values),), **{key: list(values)})


def _vector(x: Tensor) -> Tensor:
    """Flatten a tensor of any rank."""
    return _node("Reshape", (x, constant([-1])), x.dtype, x.shape or (1,))


def _looked_up(values: Sequence[int] | Sequence[float], place: Tensor) -> Tensor:
    table = constant(values)
    return _node("GatherND", (table, _vector(place)), table.dtype, ())


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Look up 2**exponent, for all exponents of normal float32 numbers."""
    assert dtype == torch.float32
    return _looked_up([2.0**power for power in range(-126, 128)], exponent + 126)


def _quotient(x: Tensor, places: int) -> Tensor:
    """Return x >> places for a non-negative x, as a division."""
    return _node("Div", (x, torch.full((), 1 << places)), x.dtype, x.shape)


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


def _without_tails(x: Tensor, percentile: float) -> ValueRange:
    """Return `numerics.percentile_range`, with the number of elements as a tensor."""
    size = _node("Size", (x,), torch.int64, ())
    share = torch.tensor(1 - percentile / 100, dtype=torch.float64)  # a Python number would be rounded to float32
    cut = (size.to(torch.float64) * share / 2).to(torch.int64)
    line, count = _vector(x), _vector(cut + 1)
    ends = []
    for largest in (0, 1):
        values, _ = onnx_ops.symbolic_multi_out(
            "::TopK", (line, count), attrs={"largest": largest}, dtypes=(x.dtype, torch.int64),
            shapes=(x.shape, x.shape), version=OPSET,
        )  # fmt: skip
        ends.append(_node("GatherND", (values, constant([-1])), x.dtype, ()))
    low, high = ends
    return ValueRange(low, high - low, high)
