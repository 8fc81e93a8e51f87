"""Quantizers as ONNX local functions in the domain `cpt_fx`: the arithmetic of `numerics`, operator by operator.

Each call is one node, whose width is an input: `FakeQuantize(x, bits, axes)`. What differs from the defaults of the
torch operator of that name is said by the function's name, since a function cannot branch on an attribute:
`FakeQuantizeSymmetric`, `FakeQuantizeAffineIntegerObserved`. The numbers are equal to PyTorch's, noise of stochastic
rounding included: it is the same hash, of a seed that is an input, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx
import onnx_ir as ir
from onnx import parser

from cpt_fx.export.expressions import onnx_text
from cpt_fx.export.function_text import (
    FLOOR,
    GRIDS,
    LEARNED_GRADIENT,
    MEASURE,
    NOISE,
    ROUND,
    ROUNDINGS,
    WIDTH,
    floating_grid,
    learn,
    measure_all,
    recall,
)
from cpt_fx.formats import Rounding, Scheme, Specials
from cpt_fx.numerics import SCALE_FLOOR

if TYPE_CHECKING:
    from cpt_fx.export.program import Graph

DOMAIN = "cpt_fx"
OPSET = 18
LEARNED = "LearnedRangeGradient"
"""The gradients of a tensor and of its learned range."""
BLOCKS = "Blocks"

SEED = ("seeds", "draw")
"""The inputs of a function that draws: the seeds of a step, and which of them is its own."""
UNIFORM = "Uniform"
"""Noise of a seed in [0, 1), shaped like a tensor: what dropout draws."""

_SUFFIX = {Scheme.AFFINE: "", Scheme.AFFINE_INTEGER: "AffineInteger", Scheme.SYMMETRIC: "Symmetric"}


class Kind(NamedTuple):
    """Which quantizer a function is. Its name is made of what differs from the defaults.

    `source` is where the range comes from: "" (the tensor at hand), "Observed" (that, while a running range learns),
    "Recalled" (the running range) or "Learned" (parameters). `percentile` leaves out tails; `exponent`, `specials`,
    `corrected`, `when_off` and `floored` are those of `Format`. `blocks`: groups share a scale that is a power of two.
    """

    scheme: Scheme = Scheme.AFFINE
    rounding: Rounding = Rounding.NEAREST
    source: str = ""
    percentile: float = 100.0
    corrected: bool = True
    when_off: bool = False
    exponent: int = 0
    specials: Specials = Specials.NONE
    blocks: str = ""
    floored: bool = False

    @property
    def name(self) -> str:
        """The function's name."""
        name = "FakeQuantize" + self._format()
        name += "Stochastic" if self.rounding is Rounding.STOCHASTIC else ""
        if self.source == "Recalled":
            name += "" if self.corrected else "AsIs"
        if self.source == "Observed":
            name += "Always" if self.when_off else ""
        if self.source in ("Observed", "Recalled") and self.percentile < 100:
            name += "Percentile"
        return name + self.source

    def _format(self) -> str:
        if self.scheme is not Scheme.FLOAT:
            return _SUFFIX[self.scheme] + "Floored" * self.floored
        specials = "" if self.specials is Specials.NONE else self.specials.value.capitalize()
        return f"Float{self.exponent}{specials}{self.blocks}"


def function(kind: Kind) -> onnx.FunctionProto:
    """Return the function of a kind of quantizer."""
    inputs = ["x", "bits"]
    outputs = ["y"]
    attributes: list[str] = []
    body = WIDTH
    if not kind.source:
        inputs.append("axes")
        body += MEASURE
    elif kind.source == "Learned":
        # What has a gradient comes first: ONNX Runtime finds it by its place among those that have one.
        inputs = ["x", "low", "span", "bits"]
        body += "high = low + span\n"
    else:
        inputs += ["zero_point", "range", "weight"]
        body += measure_all(percentile=kind.percentile < 100)
        attributes += ["percentile"] if kind.percentile < 100 else []
        if kind.source == "Observed":
            outputs += ["new_zero_point", "new_range", "new_weight"]
            attributes += ["kept", "taken"]
            body += learn(when_off=kind.when_off)
        else:
            body += recall(corrected=kind.corrected)
    if kind.rounding is Rounding.STOCHASTIC:
        inputs += SEED
        body += NOISE
    floating = kind.scheme is Scheme.FLOAT
    grid = floating_grid(kind.exponent, kind.specials, blocks=bool(kind.blocks)) if floating else GRIDS[kind.scheme]
    grid = grid.replace(FLOOR, str(SCALE_FLOOR if kind.floored else 0.0))
    body += grid.replace(ROUND, ROUNDINGS[kind.rounding]) + "\ny = Where(passes, x, values)\n"
    return parsed(kind.name, inputs, outputs, body, attributes)


def parsed(
    name: str, inputs: Iterable[str], outputs: Iterable[str], body: str, attributes: Iterable[str] = ()
) -> onnx.FunctionProto:
    """Return a function whose body is written in expressions."""
    declared = f"<{', '.join(attributes)}>" if attributes else ""
    made: Any = parser.parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n'
        f"{name} {declared} ({', '.join(inputs)}) => ({', '.join(outputs)}) {{\n{onnx_text(body)}\n}}"
    )
    return made


FIXED = {
    made.name: made
    for made in (
        parsed(UNIFORM, ["x", *SEED], ["y"], NOISE + "y = noise"),
        parsed(LEARNED, ["dy", "x", "low", "span", "bits"], ["dx", "dlow", "dspan"], WIDTH + LEARNED_GRADIENT),
    )
}
"""The functions of which there is one kind, by name."""


def add_functions(graph: Graph) -> None:
    """Add the functions that a graph's nodes call."""
    model = graph.model
    called = {node.op_type for node in model.graph if node.domain == DOMAIN}
    found = [function(placed.kind) for placed in dict.fromkeys(graph.placed)]
    for made in (*found, *FIXED.values()):
        if made.name in called:
            added = ir.serde.deserialize_function(made)
            model.functions[added.identifier()] = added
    if called:
        model.opset_imports[DOMAIN] = 1
    else:
        model.opset_imports.pop(DOMAIN, None)
