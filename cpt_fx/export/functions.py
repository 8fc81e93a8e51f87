"""Quantizers as ONNX local functions in the domain `cpt_fx`, traced from the operators of torch.

Each call is one node, whose width is an input: `FakeQuantize(x, bits, axes)`. What differs from the defaults of the
torch operator of that name is said by the function's name, since a function cannot branch on an attribute:
`FakeQuantizeSymmetric`, `FakeQuantizeAffineIntegerObserved`. The numbers are equal to PyTorch's, noise of stochastic
rounding included: it is the same hash, of a seed that is an input, too.

A function takes tensors of any number of dims, and its body is a trace for vectors: quantizers work on each element
for itself. What depends on dims, and what ONNX Runtime has no kernel for on CUDA, is said in `_Trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from torch import Tensor
from torch.onnx import ops as onnx_ops

from cpt_fx import noise, numerics, ops
from cpt_fx.export.normalize import normalize
from cpt_fx.export.recording import OPSET, Table, convert, record
from cpt_fx.formats import Rounding, Scheme, Specials
from cpt_fx.numerics import Extent, Grid

if TYPE_CHECKING:
    from cpt_fx.export.program import Graph

DOMAIN = "cpt_fx"
LEARNED = "LearnedRangeGradient"
"""The gradients of a tensor, as a vector, and of its learned range."""
SEED = ("seeds", "draw")
"""The inputs of a function that draws: the seeds of a step, and which of them is its own."""
UNIFORM = "Uniform"
"""Noise of a seed in [0, 1), shaped like a tensor: what dropout draws."""
RANGE = ("zero_point", "range", "weight")
"""The inputs with a running range. Where it learns, outputs called `new_zero_point` and so on hold the next one."""


class Kind(NamedTuple):
    """Which quantizer a function is. Its name is made of what differs from the defaults.

    `source` is where the range comes from: "" (the tensor at hand, over dims that are an input), "Observed" (all of the
    tensor, while a running range learns), "Recalled" (the running range) or "Learned" (parameters).
    """

    grid: Grid = Grid(floored=False)
    source: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    """Those of the torch operator that keeps a running range, where they differ from its defaults."""

    @property
    def draws(self) -> bool:
        """Whether it draws at random."""
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
            parts += [key] if value is True else [f"not_{key}"] if value is False else [key, f"{value:g}"]
        words = "_".join(parts).split("_")
        return "".join(word[:1].upper() + word[1:] for word in words).replace(".", "_")


def kind_of(grid: Grid, source: str = "", **options: Any) -> Kind:
    """Return the kind of a quantizer, without what its numbers do not depend on."""
    floored = grid.floored and grid.scheme is Scheme.AFFINE and source != "Learned"
    block = int(grid.block > 0 and grid.scheme is Scheme.FLOAT)
    usual = {argument.name: argument.default_value for argument in ops.FAKE_QUANTIZE_OBSERVED._schema.arguments}
    read = {"Observed": ("momentum", "when_off", "percentile"), "Recalled": ("corrected", "percentile")}.get(source, ())
    other = tuple((name, options[name]) for name in read if options.get(name, usual[name]) != usual[name])
    return Kind(grid._replace(keep=(), over=None, block=block, floored=floored), source, other)


def _quantize(trace: _Trace, kind: Kind) -> Any:
    """Run a quantizer of some kind on the inputs of its trace."""
    x, bits, grid = trace["x"], trace["bits"], kind.grid
    if kind.source in ("Observed", "Recalled"):
        state = [trace[name].clone() for name in RANGE]
        options = grid.keywords() | dict(kind.options)
        y = ops.FAKE_QUANTIZE_OBSERVED(x, bits, *state, kind.source == "Observed", **options)
        return (y, *state) if kind.source == "Observed" else y
    extent = Extent(trace["low"], trace["span"]) if kind.source else trace.measured(x, trace["axes"])
    return torch.where(numerics.passes(bits), x, numerics.on_grid(x, bits, grid, extent))


def _learned_gradient(trace: _Trace) -> Any:
    leaves = [trace[name].detach().requires_grad_() for name in ("x", "low", "span")]
    with torch.enable_grad():
        y = ops.LearnedRange.apply(*leaves, trace["bits"], Grid(floored=False))  # type: ignore[no-untyped-call]
    return torch.autograd.grad(y, leaves, trace["dy"])


@cache
def function(kind: Kind | str) -> onnx.FunctionProto:
    """Return the function of a kind of quantizer, or `UNIFORM`, or `LEARNED`."""
    outputs = ["y"]
    if isinstance(kind, Kind):
        sources = {"": ["x", "bits", "axes"], "Learned": ["x", "low", "span", "bits"]}
        inputs = sources.get(kind.source, ["x", "bits", *RANGE]) + [*SEED] * kind.draws
        outputs += [f"new_{name}" for name in RANGE] if kind.source == "Observed" else []
        name, run = kind.name, lambda trace: _quantize(trace, kind)
    elif kind == LEARNED:
        inputs, outputs = ["dy", "x", "low", "span", "bits"], ["dx", "dlow", "dspan"]
        name, run = kind, _learned_gradient
    else:
        inputs = ["x", *SEED]
        name, run = kind, lambda trace: noise.uniform(trace.seed(), trace["x"])
    trace = _Trace()
    with _in_place_of(
        (numerics, "floor_to_power_of_two", _floor_to_power_of_two), (numerics, "power_of_two", _power_of_two),
        (ops, "_extent", trace.extent),
    ):  # fmt: skip
        given = tuple(_EXAMPLES[key]() for key in inputs)
        made = as_function(name, trace.running(inputs, run), given, trace.table())
    for value, key in zip((*made.inputs, *made.outputs), (*inputs, *outputs), strict=True):
        value.name = key
    return ir.serde.serialize_function(made)


_EXAMPLES: dict[str, Callable[[], Tensor]] = {
    **dict.fromkeys(("x", "dy"), lambda: torch.ones(7)),
    **dict.fromkeys(("low", "span", *RANGE), lambda: torch.ones(())),
    "bits": lambda: torch.tensor(8),
    "axes": lambda: torch.zeros(2, dtype=torch.int64),
    "seeds": lambda: torch.zeros(3, 2, dtype=torch.int32),
    "draw": lambda: torch.zeros(1, dtype=torch.int64),
}
"""What a function is traced with."""


class _Trace:
    """The inputs of a function while it is traced, and how some operators are said of them."""

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self.inputs[name]

    def running(self, names: list[str], run: Callable[[_Trace], Any]) -> Callable[..., Any]:
        """Return a function of the inputs in their order."""

        def call(*inputs: Tensor) -> Any:
            self.inputs = dict(zip(names, inputs, strict=True))
            return run(self)

        return call

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

        def same(x: Tensor, *_: Any) -> Tensor:
            return x.detach()

        return {
            aten.as_strided.default: same,
            aten.view.default: same,
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


def _node(name: str, inputs: tuple[Tensor, ...], like: Tensor, shape: Any, **attributes: int) -> Tensor:
    made: Tensor = onnx_ops.symbolic(
        f"::{name}", inputs, attrs=attributes, dtype=like.dtype, shape=shape, version=OPSET
    )
    return made


def _constant(values: list[int]) -> Tensor:
    made: Tensor = onnx_ops.symbolic(
        "::Constant", (), attrs={"value_ints": values}, dtype=torch.int64, shape=(len(values),), version=OPSET
    )
    return made


def _vector(x: Tensor) -> Tensor:
    """Return a tensor without its dims, of however many it has."""
    return _node("Reshape", (x, _constant([-1])), x, x.shape or (1,))


def _shifted(_: Tensor, places: Tensor) -> Tensor:
    """Return 1 << places from a table."""
    table = _constant([1 << place for place in range(33)])
    return _node("GatherND", (table, _vector(places)), table, ())


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2**exponent from a table, for all exponents of normal numbers."""
    assert dtype == torch.float32
    table = onnx_ops.symbolic(
        "::Constant", (), attrs={"value_floats": [2.0**power for power in range(-126, 128)]}, dtype=dtype,
        shape=(254,), version=OPSET,
    )  # fmt: skip
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
        ends.append(_node("GatherND", (values, _constant([-1])), x, ()))
    low, high = ends
    return Extent(low, high - low, high)


@contextmanager
def _in_place_of(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Let functions of modules be others."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, other in changes:
            setattr(module, name, other)
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


def as_function(
    name: str, run: Callable[..., Any], given: tuple[Tensor, ...], table: Table, *, exact: bool = False
) -> ir.Function:
    """Trace a function of tensors as a local function of ONNX: for their sizes, or for tensors of as many dims."""
    varying = tuple(value.ndim > 0 and not exact for value in given)
    model = normalize(convert(record(run, given, varying, table), given, varying))
    graph = model.graph
    for index, value in enumerate(graph.inputs):
        value.name = f"in_{index}"
    common.DeduplicateInitializersPass()(model)
    _write_constants(graph)
    common.CommonSubexpressionEliminationPass(size_limit=64)(model)
    common.RemoveUnusedNodesPass()(model)
    for node in graph:
        for value in node.outputs:
            value.type = value.shape = None  # those of the examples
    common.NameFixPass()(model)
    return ir.Function(DOMAIN, name, graph=graph, attributes=[])


def _write_constants(graph: ir.Graph) -> None:
    """Make nodes of initializers, which functions cannot have."""
    for value in list(graph.initializers.values()):
        node = ir.node("Constant", [], {"value": value.const_value})
        graph.insert_before(graph[0], node)
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        graph.initializers.pop(str(value.name))


def add_functions(graph: Graph) -> None:
    """Add the functions that a graph's nodes call."""
    model = graph.model
    called = {node.op_type for node in model.graph if node.domain == DOMAIN}
    kinds: dict[str, Kind | str] = {name: name for name in (UNIFORM, LEARNED)}
    kinds |= {placed.kind.name: placed.kind for placed in graph.placed}
    for name, kind in kinds.items():
        if name in called:
            added = ir.serde.deserialize_function(function(kind))
            model.functions[added.identifier()] = added
    if called:
        model.opset_imports[DOMAIN] = 1
    else:
        model.opset_imports.pop(DOMAIN, None)
