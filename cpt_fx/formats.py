"""Number formats: how one tensor is quantized. Plain frozen data, no tensor is touched here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar

from cpt_fx.errors import check_choice

FULL_PRECISION = 32
"""The width at which every quantizer is the identity, bit for bit."""


class Scheme(str, Enum):
    """How codes map to values."""

    AFFINE = "affine"
    """Uniform between minimum and maximum, float zero point: the published quantizer."""
    AFFINE_INTEGER = "affine_integer"
    """Uniform with an integer zero point: zero is on the grid, and QDQ can express it exactly."""
    SYMMETRIC = "symmetric"
    """Uniform around zero, same reach on both sides."""
    FLOAT = "float"
    """Sign, `exponent` exponent bits, and whatever is left of the width as mantissa."""


class Rounding(str, Enum):
    """How a value between two grid points is rounded."""

    NEAREST = "nearest"
    """To the nearest grid point, ties to even codes."""
    STOCHASTIC = "stochastic"
    """Up or down with the probability that makes the expectation exact."""


class Group(str, Enum):
    """Which elements share one range."""

    TENSOR = "tensor"
    """The whole tensor."""
    CHANNEL = "channel"
    """Each index of the operator's output axis (the axis comes from the operator, not from the layout)."""
    ROW = "row"
    """Each index of dim 0, as stored."""
    VECTOR = "vector"
    """Each vector along the last dim."""
    INNER = "inner"
    """Each index of the dims between the first and the last: the published gradient ranges."""


class Range(str, Enum):
    """Where the range of a group comes from."""

    DYNAMIC = "dynamic"
    """The extremes of the tensor at hand, in training and in evaluation."""
    OBSERVER = "observer"
    """The batch's own extremes in training; their running average in evaluation."""
    PERCENTILE = "percentile"
    """Like observer, without the tails beyond `Format.percentile`."""
    LEARNED = "learned"
    """Two parameters, set by the first finite tensor they see and then trained with the model."""


class Specials(str, Enum):
    """Which codes of a floating point format are not numbers."""

    IEEE = "ieee"
    """The largest exponent is reserved, as in float16 and e5m2."""
    FN = "fn"
    """Only the all-ones code is reserved, as in e4m3fn."""
    NONE = "none"
    """Every code is a number, as in the 4- and 6-bit MX formats."""


EnumT = TypeVar("EnumT", bound=Enum)


def choice(kind: type[EnumT], value: object, field: str) -> EnumT:
    """Turn a string into a member of `kind`, or say what would have been accepted."""
    return kind(check_choice(field, value, [str(member.value) for member in kind]))


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one operand is quantized: grid, range groups, where the range comes from, rounding.

    `exponent` and `specials` belong to `scheme="float"`. `block` > 0 splits every group into runs of that many
    elements which share a power-of-two scale (the MX formats). `percentile` is the part of the elements, in percent,
    that `range="percentile"` covers. `corrected` divides the running average by its
    accumulated weight, so that the first batches count fully; the published observers start at zero without it.
    `observe_when_off` keeps the running range going at 0 bits, as published linear layers do. `floored` gives grids of
    `scheme="affine"` steps of at least 1e-8, as published: what is small in its unit is rounded away.
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
        """Coerce strings to enums and refuse combinations that have no meaning."""
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
        """A short name for tables, such as `symmetric/channel` or `e4fn/tensor/observer/stochastic`."""
        scheme = f"e{self.exponent}{self.specials.value}" if self.scheme is Scheme.FLOAT else self.scheme.value
        parts = [scheme, f"{self.group.value}:{self.block}" if self.block else self.group.value]
        if self.range is not Range.DYNAMIC:
            parts.append(self.range.value)
        if self.rounding is not Rounding.NEAREST:
            parts.append(self.rounding.value)
        return "/".join(parts)


def check_grid(scheme: Scheme, exponent: int, block: int) -> None:
    """Refuse exponent widths and block sizes that the scheme cannot have."""
    if scheme is Scheme.FLOAT and not 1 <= exponent <= 8:
        raise ValueError(f"scheme='float' needs exponent between 1 and 8, got {exponent!r}")
    if scheme is not Scheme.FLOAT and exponent:
        raise ValueError(f"exponent belongs to scheme='float', got exponent={exponent!r} with {scheme.value!r}")
    if block < 0:
        raise ValueError(f"block must be 0 (none) or positive, got {block!r}")


def minimum_bits(scheme: Scheme) -> int:
    """Return the smallest width the scheme can express: a float needs a sign and one exponent bit."""
    return 2 if scheme is Scheme.FLOAT else 1


def most_levels(scheme: Scheme, bits: int) -> int:
    """Return how many levels a range may show at a width. Below its smallest width a scheme is what it is there."""
    return int(2 ** max(bits, minimum_bits(scheme)))


def group_dims(group: Group, channel_axis: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Return `(keep, over)` for the ops: exactly one of them describes the group, whatever the tensor's rank."""
    return {
        Group.TENSOR: ((), None),
        Group.CHANNEL: ((channel_axis,), None),
        Group.ROW: ((0,), None),
        Group.VECTOR: ((), (-1,)),
        Group.INNER: ((), (0, -1)),
    }[group]
