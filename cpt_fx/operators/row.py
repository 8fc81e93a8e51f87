"""What an operator is to quantization: one row, from which every table of operators is made.

And which numbers of an operand share a range, by what the operator sums over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cpt_fx.formats import Format, Group, group_dims

Target = Callable[..., Any]
Call = tuple[Target | str, tuple[Any, ...], dict[str, Any]]
"""A function, or the name of a method, and its arguments."""
Convert = Callable[..., Call]
"""Takes the arguments of one spelling and returns the call in normal form."""
Index = int | tuple[int, int]
Groups = tuple[tuple[int, ...], tuple[int, ...] | None]
Places = tuple[int, ...]

FIRST_DIM: Groups = ((0,), None)

MULTIPLY = ("conv", "linear", "matmul", "attention", "recurrent")
"""Families of products. The operators of the others multiply nothing by themselves: they look up, add, or scale."""


@dataclass(frozen=True)
class Row:
    """One operator: its family, its argument names in order, which of them are multiplied, and all its names."""

    family: str
    name: str
    arguments: tuple[str, ...] = ()
    operands: tuple[tuple[int, str], ...] = ()
    """An argument's position and its kind: `input`, `weight`, `bias`, `either` where a product takes two tensors of
    which each may be a weight, `sparse` for one that is passed on as it is."""
    channels: tuple[tuple[int, Groups], ...] = ()
    """By position, what `group="channel"` means for a weight there, as `(keep, over)`: its output axis is kept, or all
    that a product sums over shares a range."""
    variadic: int | None = None
    """Position from which all further arguments are operands (einsum, multi_dot)."""
    function: Target | None = None
    """The function it is called by in normal form; None for what is recognised in several operators (graph_sites)."""
    names: tuple[str, ...] = ()
    """Its names in torch, as ATen writes them: `mm`, `linalg_matmul`. Each is looked for among the functions and the
    methods of torch, and as an operator of ATen; all take the same arguments in the same order. With `::`: that."""
    others: tuple[Target | str, ...] = ()
    """Functions with the same arguments that are not found by a name."""
    keywords: tuple[tuple[str, str], ...] = ()
    """Keywords of torch where they differ from `arguments`."""
    converts: Mapping[Target | str, Convert] = field(default_factory=dict)
    """Spellings with other arguments: a function, the name of a method, or that of an operator with `::`."""
    firsts: tuple[Target | str, ...] = ()
    """Those of `converts` that return several tensors, of which `function` returns the first."""
    modules: tuple[type[nn.Module], ...] = ()
    """Torch's layers that are this one operator, or that have it inside."""
    integer: str = ""
    """Its form on integers, if it has one: `linear`, `matmul` or `conv`."""
    kernels: Mapping[str, Places] = field(default_factory=dict)
    """What it becomes below autograd, forward and backward: operators, and the positions of what they multiply."""
    flops: Mapping[str, Callable[..., int]] = field(default_factory=dict)
    """Operations of those that torch's counter does not know, from the shapes of their arguments and `out_shape`."""
    left: str = ""
    """Why it stays in full precision, unless something opens it."""
    when: Callable[..., bool] | None = None
    """Whether a call of it multiplies, by its arguments; None where every call does."""
    between: bool = False
    """Whether it multiplies more than two operands, so that it has products of which nobody sees the factors."""
    mutates: Places = ()
    """Arguments it overwrites, where its schema does not say."""
    fresh: bool = True
    """Whether its result is always a new tensor."""

    @property
    def factors(self) -> Places:
        """The positions of the tensors it multiplies."""
        if self.family not in MULTIPLY and not any(kind == "sparse" for _, kind in self.operands):
            return ()
        places = tuple(place for place, kind in self.operands if kind != "bias")
        return places if self.variadic is None else (*places, self.variadic)


def left(reason: str, *names: str, name: str = "", **more: Any) -> Row:
    """Return the row of an operator that multiplies and stays as it is."""
    return Row("", name or names[0], names=names, left=reason, **more)


def einsum_group(equation: str, position: int, format: Format) -> Groups | None:
    """Return `(keep, over)` of an operand of a two-operand einsum, as the product that the equation spells has them.

    A channel range spans what is summed over. A vector is what `matmul` has along its last dim: on the left what is
    summed over, on the right what is left over. None where the equation does not tell, or the group does not ask.
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
    """Return `(keep, over)` of an operand: channel groups follow the operator's output axis."""
    if format.group is Group.CHANNEL:
        # Without an output axis of its own (an activation, an einsum operand) a tensor has one range.
        return dict(row.channels).get(index if isinstance(index, int) else index[0], ((), None))
    return group_dims(format.group, 0)


def gradient_groups(format: Format) -> Groups:
    """Return `(keep, over)` of an output gradient, which has no output axis of its own: channels are the tensor."""
    return ((), None) if format.group is Group.CHANNEL else group_dims(format.group, 0)
