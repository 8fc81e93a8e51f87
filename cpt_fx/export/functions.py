"""Quantizers as ONNX local functions in the domain `cpt_fx`: the arithmetic of `numerics`, operator by operator.

Each call is one node, whose width is an input: `FakeQuantize(x, bits, axes)`. What differs from the defaults of the
torch operator of that name is said by the function's name, since a function cannot branch on an attribute:
`FakeQuantizeSymmetric`, `FakeQuantizeAffineIntegerObserved`. The numbers are equal to PyTorch's, noise of stochastic
rounding included: it is the same hash, of a seed that is an input, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import onnx
from onnx import parser

from cpt_fx.export.expressions import onnx_text
from cpt_fx.export.function_text import (
    FILL,
    FLOOR,
    GRIDS,
    LEARNED_GRADIENT,
    MEASURE,
    NOISE,
    ROUND,
    ROUNDINGS,
    UNFILL,
    WIDTH,
    floating_grid,
    learn,
    measure_all,
    recall,
)
from cpt_fx.formats import Rounding, Scheme, Specials
from cpt_fx.numerics import SCALE_FLOOR

DOMAIN = "cpt_fx"
OPSET = 18
GRADIENT = "QuantizeGradient"
STOP = "ATen"
"""Identity forward, nothing backward: what `detach` and `torch.no_grad` mean. ONNX Runtime knows edges that gradients
do not take by the name of the operator, and lets new ones be declared for this name only: `ATen<operator="detach">`."""
DETACH = {"operator": "detach", "overload_name": ""}
"""The attributes of `STOP`."""
WITH_GRADIENT_OF = "WithGradientOf"
"""Takes two tensors: the second forward, backward the first."""
SCATTER_ADD, TAKE = "ScatterAdd", "Take"
"""Add to places along the last dim, and take from there, which is the gradient: ORT has that of a scatter that
overwrites."""
LEARNED = "LearnedRangeGradient"
"""The gradients of a tensor and of its learned range."""
BLOCKS, FILLED = "Blocks", "BlocksFilled"

SEED = ("seeds", "draw")
"""The inputs of a function that draws: the seeds of a step, and which of them is its own."""
UNIFORM = "Uniform"
"""Noise of a seed in [0, 1), shaped like a tensor: what dropout draws."""

_SUFFIX = {Scheme.AFFINE: "", Scheme.AFFINE_INTEGER: "AffineInteger", Scheme.SYMMETRIC: "Symmetric"}


class Kind(NamedTuple):
    """Which quantizer a function is. Its name is made of what differs from the defaults.

    `source` is where the range comes from: "" (the tensor at hand), "Observed" (that, while a running range learns),
    "Recalled" (the running range) or "Learned" (parameters). `percentile` leaves out tails; `exponent`, `specials`,
    `corrected`, `when_off` and `floored` are those of `Format`. `blocks`: groups share a scale that is a power of two;
    "Filled" blocks are filled up to the end with the last element of their row first.
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

    @property
    def gradient_name(self) -> str:
        """The name of the function that quantizes the gradient in this way."""
        assert not self.source
        return GRADIENT + self._format() + ("" if self.rounding is Rounding.STOCHASTIC else "Nearest")

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
    if kind.blocks == FILLED:
        inputs.append("length")
        inputs[0], outputs[0] = "given", "result"
        body = FILL + body + UNFILL
    return parsed(kind.name, inputs, outputs, body, attributes)


def gradient_marker(kind: Kind) -> onnx.FunctionProto:
    """Return the function that stands where a gradient is to be quantized: the identity, forward."""
    return parsed(kind.gradient_name, ["x", *gradient_inputs(kind)], ["y"], "y = x")


def gradient_inputs(kind: Kind) -> tuple[str, ...]:
    """Return what a gradient's quantizer is given beside the gradient: it finds it at the forward node."""
    seed = SEED if kind.rounding is Rounding.STOCHASTIC else ()
    return ("bits", "axes", *seed, *(("length",) if kind.blocks == FILLED else ()))


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
        parsed(STOP, ["x"], ["y"], "y = x", DETACH),
        parsed(WITH_GRADIENT_OF, ["x", "value"], ["y"], "y = value"),
        parsed(
            SCATTER_ADD,
            ["parts", "places", "like"],
            ["y"],
            "y = ScatterElements(Expand(0.0, Shape(like)), places, parts, axis=-1, reduction='add')",
        ),
        parsed(TAKE, ["x", "places"], ["y"], "y = GatherElements(x, places, axis=-1)"),
        parsed(UNIFORM, ["x", *SEED], ["y"], NOISE + "y = noise"),
        parsed(LEARNED, ["dy", "x", "low", "span", "bits"], ["dx", "dlow", "dspan"], WIDTH + LEARNED_GRADIENT),
    )
}
"""The functions of which there is one kind, by name."""
