"""Granularity: which elements of an operand share a range, given what the operator sums over."""

from __future__ import annotations

from cpt_fx.formats import Format, Group, group_dims
from cpt_fx.operators.row import Groups, Index, Row


def einsum_group(equation: str, position: int, format: Format) -> Groups | None:
    """Return `(keep, over)` of an operand of a two-operand einsum, as in the product that the equation describes.

    A channel range spans the summed dims. A vector range spans what `matmul` has in its last dim: the summed dims on
    the left, the free dims on the right. None if the equation does not determine it, or for another granularity.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != 2 or format.group not in (Group.CHANNEL, Group.VECTOR):
        return None
    if not arrow:  # every letter that occurs once
        output = "".join(letter for letter in inputs if inputs.count(letter) == 1)
    mine, other = names[position], names[1 - position]
    # Letters after an ellipsis are counted from the end.
    before, dots, after = mine.partition("...")
    dims = dict(zip(before, range(len(before)), strict=True))
    dims |= dict(zip(after, range(-len(after), 0), strict=True)) if dots else {}
    summed = tuple(dim for letter, dim in dims.items() if letter in other and letter not in output)
    free = tuple(dim for letter, dim in dims.items() if letter not in other)
    over = free if format.group is Group.VECTOR and position == 1 else summed
    return ((), over) if over else None


def group_of(row: Row, index: Index, format: Format) -> Groups:
    """Return `(keep, over)` of an operand; channel ranges follow the operator's output axis."""
    if format.group is Group.CHANNEL:
        # Without an output axis of its own (an activation, an einsum operand) a tensor has one range.
        return dict(row.channels).get(index if isinstance(index, int) else index[0], ((), None))
    return group_dims(format.group, 0)


def gradient_groups(format: Format) -> Groups:
    """Return `(keep, over)` of an output gradient, which has no output axis: per channel means one range here."""
    return ((), None) if format.group is Group.CHANNEL else group_dims(format.group, 0)
