"""Number formats: frozen data that says how one tensor is quantized."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar

from cpt_fx.errors import check_choice

FULL_PRECISION = 32
"""The bit-width at which every quantizer is the identity, bit for bit."""


class Scheme(str, Enum):
    """How codes map to values."""

    AFFINE = "affine"
    """Uniform between minimum and maximum, float zero point: the published quantizer."""
    AFFINE_INTEGER = "affine_integer"
    """Uniform with an integer zero point: zero is on the grid, and QDQ can represent it exactly."""
    SYMMETRIC = "symmetric"
    """Uniform and symmetric around zero."""
    FLOAT = "float"
    """A sign bit, `exponent` exponent bits, and the rest of the bit-width as mantissa."""


class Rounding(str, Enum):
    """How a value between two grid points is rounded."""

    NEAREST = "nearest"
    """To the nearest grid point, ties to even codes."""
    STOCHASTIC = "stochastic"
    """Up or down at random, with the probabilities that make the result unbiased."""


class Group(str, Enum):
    """The granularity: which elements share one range."""

    TENSOR = "tensor"
    """The whole tensor."""
    CHANNEL = "channel"
    """Each index of the operator's output axis, which depends on the operator, not on the layout."""
    ROW = "row"
    """Each index of dim 0 of the tensor as stored."""
    VECTOR = "vector"
    """Each vector along the last dim."""
    INNER = "inner"
    """Each index of the dims between the first and the last, as in the published gradient ranges."""


class Range(str, Enum):
    """How a range is determined."""

    DYNAMIC = "dynamic"
    """Minimum and maximum of the current tensor, in training and in evaluation."""
    OBSERVER = "observer"
    """Minimum and maximum of the batch in training; their running average in evaluation."""
    PERCENTILE = "percentile"
    """Like observer, without the tails beyond `Format.percentile`."""
    LEARNED = "learned"
    """Two parameters, initialized from the first finite tensor and then trained with the model."""


class Specials(str, Enum):
    """Which codes of a floating point format are reserved for special values."""

    IEEE = "ieee"
    """The largest exponent is reserved, as in float16 and e5m2."""
    FN = "fn"
    """Only the all-ones code is reserved, as in e4m3fn."""
    NONE = "none"
    """Every code is a number, as in the 4- and 6-bit MX formats."""


EnumT = TypeVar("EnumT", bound=Enum)


def choice(kind: type[EnumT], value: object, field: str) -> EnumT:
    """Convert a string to a member of the enum `kind`; the error lists the accepted values."""
    return kind(check_choice(field, value, [str(member.value) for member in kind]))


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one operand is quantized: grid, granularity, how the range is determined, rounding.

    `exponent` and `specials` belong to `scheme="float"`. `block` > 0 splits every group into blocks of that many
    elements that share a power-of-two scale (the MX formats). `percentile` is the percentage of the elements that
    `range="percentile"` covers. `corrected` divides the running average by its accumulated weight, so that the first
    batches count fully; the published observers start at zero without it. `observe_when_off` updates the running
    range at 0 bits, too, as published linear layers do. `floored` limits the step of `scheme="affine"` to at least
    1e-8, as published: smaller differences are rounded away.
    """

    scheme: Scheme = Scheme.AFFINE
    group: Group = Group.TENSOR
    range: Range = Range.DYNAMIC
    rounding: Rounding = Rounding.NEAREST
    exponent: int = 0
    specials: Specials = Specials.NONE
    block: int = 0
    percentile: float = 99.9
    momentum: float = 0.9
    corrected: bool = True
    observe_when_off: bool = False
    floored: bool = False

    def __post_init__(self) -> None:
        """Convert strings to enums and reject combinations that have no meaning."""
        for field in fields(self):
            if isinstance(field.default, Enum):
                value = choice(type(field.default), getattr(self, field.name), f"Format.{field.name}")
                object.__setattr__(self, field.name, value)
        check_grid(self.scheme, self.exponent, self.block)
        if self.specials is not Specials.NONE and self.scheme is not Scheme.FLOAT:
            raise ValueError(f"Format.specials belongs to scheme='float', got scheme={self.scheme.value!r}")
        if self.floored and (self.scheme is not Scheme.AFFINE or self.range is Range.LEARNED):
            raise ValueError(
                "Format.floored belongs to measured ranges of scheme='affine', got "
                f"scheme={self.scheme.value!r}, range={self.range.value!r}"
            )
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"Format.momentum must be in [0, 1), got {self.momentum!r}")
        if not 0.0 < self.percentile <= 100.0:
            raise ValueError(f"Format.percentile must be in (0, 100], got {self.percentile!r}")
        if self.range is not Range.DYNAMIC and (self.group is not Group.TENSOR or self.block):
            raise ValueError(
                f"Format.range={self.range.value!r} keeps one range per tensor: it needs group='tensor' and block=0, "
                f"got group={self.group.value!r}, block={self.block}"
            )
        if self.range is Range.LEARNED and self.scheme is not Scheme.AFFINE:
            raise ValueError(f"Format.range='learned' needs scheme='affine', got {self.scheme.value!r}")

    def __repr__(self) -> str:
        """Show what differs from the defaults: a pipeline's repr holds dozens of formats."""
        shown = (
            f"{field.name}={(value.value if isinstance(value, Enum) else value)!r}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        )
        return f"Format({', '.join(shown)})"

    def __str__(self) -> str:
        """Return a short name for tables, such as `symmetric/channel` or `e4fn/tensor/observer/stochastic`."""
        scheme = f"e{self.exponent}{self.specials.value}" if self.scheme is Scheme.FLOAT else self.scheme.value
        parts = [scheme, f"{self.group.value}:{self.block}" if self.block else self.group.value]
        if self.range is not Range.DYNAMIC:
            parts.append(self.range.value)
        if self.rounding is not Rounding.NEAREST:
            parts.append(self.rounding.value)
        return "/".join(parts)


def check_grid(scheme: Scheme, exponent: int, block: int) -> None:
    """Reject exponent widths and block sizes that the scheme does not support."""
    if scheme is Scheme.FLOAT and not 1 <= exponent <= 8:
        raise ValueError(f"scheme='float' needs exponent between 1 and 8, got {exponent!r}")
    if scheme is not Scheme.FLOAT and exponent:
        raise ValueError(f"exponent belongs to scheme='float', got exponent={exponent!r} with {scheme.value!r}")
    if block < 0:
        raise ValueError(f"block must be 0 (none) or positive, got {block!r}")


def minimum_bits(scheme: Scheme) -> int:
    """Return the smallest bit-width of a scheme: a float needs a sign bit and one exponent bit."""
    return 2 if scheme is Scheme.FLOAT else 1


def most_levels(scheme: Scheme, bits: int) -> int:
    """Return the maximum number of levels at a bit-width; below the scheme's minimum, those of the minimum."""
    return int(2 ** max(bits, minimum_bits(scheme)))


def group_dims(group: Group, channel_axis: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return `(keep, over)` of a granularity, for the quantize ops: the dims a range keeps, or the dims it spans."""
    return {
        Group.TENSOR: ((), None),
        Group.CHANNEL: ((channel_axis,), None),
        Group.ROW: ((0,), None),
        Group.VECTOR: ((), (-1,)),
        Group.INNER: ((), (0, -1)),
    }[group]
