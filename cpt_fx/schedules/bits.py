"""The bit-widths of one training step."""

from typing import NamedTuple

from cpt_fx.errors import check_int

FULL_PRECISION = 32


class Bits(NamedTuple):
    """Bit-widths of one step; 32 is full precision, and 0 switches a quantizer off, as published."""

    weight: int
    activation: int
    gradient: int


def check_width(field: str, value: object, *, zero: bool = False) -> int:
    """Return a width of 1..32 bits, or 0..32 where switching off is allowed."""
    return check_int(field, value, 0 if zero else 1, FULL_PRECISION)


def as_bits(field: str, value: object) -> Bits:
    """Convert one int for all three widths, or a ``Bits`` (or plain triple), to ``Bits``; 0 is allowed."""
    if isinstance(value, tuple):
        if len(value) != 3:
            raise ValueError(f"{field} must be an int or Bits(weight, activation, gradient), got {value!r}")
        named = zip(Bits._fields, value, strict=True)
        return Bits(*(check_width(f"{field}.{part}", width, zero=True) for part, width in named))
    width = check_width(field, value, zero=True)
    return Bits(width, width, width)


def plain(bits: Bits) -> Bits | int:
    """Return the shortest form that :func:`as_bits` reads back: the int when all widths are equal."""
    return bits.weight if len(set(bits)) == 1 else bits


def widest(several: list[Bits]) -> Bits:
    """Return the most precise width of each column; 0 (off) is more precise than any number of bits."""
    columns = zip(*several, strict=True)
    return Bits(*(max(column, key=lambda width: width or FULL_PRECISION + 1) for column in columns))


def check_range(low: object, high: object, names: tuple[str, str] = ("q_min", "q_max")) -> tuple[int, int]:
    """Return a checked pair of widths, the smaller first."""
    first, second = check_width(names[0], low), check_width(names[1], high)
    if first > second:
        raise ValueError(f"{names[0]} must not exceed {names[1]}, got {names[0]}={first} and {names[1]}={second}")
    return first, second
