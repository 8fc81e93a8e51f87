"""Quantizers as ONNX local functions in the domain `cpt_fx`.

Each call is one node with the bit-width as an input: `FakeQuantize(x, bits, axes)`. A function cannot branch on an
attribute, so what differs from the defaults of the torch operator is part of the function's name:
`FakeQuantizeSymmetric`, `FakeQuantizeAffineIntegerObserved`. The results equal PyTorch's, noise of stochastic
rounding included: it is the same hash of a seed, and the seed is an input.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx
import onnx_ir as ir
import torch

from cpt_fx.export.bodies import RANGE, SEED, Trace, traced
from cpt_fx.export.local_functions import DOMAIN
from cpt_fx.formats import Rounding, Scheme, Specials
from cpt_fx.quantizers import noise, numerics, ops
from cpt_fx.quantizers.numerics import Extent, Grid

if TYPE_CHECKING:
    from cpt_fx.export.program import Graph

LEARNED = "LearnedRangeGradient"
"""Function that returns the gradients of a tensor, as a vector, and of its learned range."""
UNIFORM = "Uniform"
"""Function that returns noise in [0, 1) from a seed, shaped like a tensor; dropout uses it."""


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


def _quantize(trace: Trace, kind: QuantizerKind) -> Any:
    """Run a quantizer on the inputs of its trace."""
    x, bits, grid = trace["x"], trace["bits"], kind.grid
    if kind.source in ("Observed", "Recalled"):
        state = [trace[name].clone() for name in RANGE]
        options = grid.keywords() | dict(kind.options)
        y = ops.FAKE_QUANTIZE_OBSERVED(x, bits, *state, kind.source == "Observed", **options)
        return (y, *state) if kind.source == "Observed" else y
    extent = Extent(trace["low"], trace["span"]) if kind.source else trace.measured(x, trace["axes"])
    return torch.where(numerics.passes(bits), x, numerics.on_grid(x, bits, grid, extent))


def _learned_gradient(trace: Trace) -> Any:
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
        inputs = sources.get(kind.source, ["x", "bits", *RANGE]) + [*SEED] * kind.draws
        outputs += [f"new_{name}" for name in RANGE] if kind.source == "Observed" else []
        name, run = kind.name, lambda trace: _quantize(trace, kind)
    elif kind == LEARNED:
        inputs, outputs = ["dy", "x", "low", "span", "bits"], ["dx", "dlow", "dspan"]
        name, run = kind, _learned_gradient
    else:
        inputs = ["x", *SEED]
        name, run = kind, lambda trace: noise.uniform(trace.seed(), trace["x"])
    return ir.serde.serialize_function(traced(name, run, inputs, outputs))


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
