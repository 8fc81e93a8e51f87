"""The description of an operator: one row, from which every table of operators is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

Target = Callable[..., Any]
Call = tuple[Target | str, tuple[Any, ...], dict[str, Any]]
"""A function or the name of a method, and its arguments."""
Convert = Callable[..., Call]
"""Takes the arguments of one spelling and returns the call in normal form."""
Index = int | tuple[int, int]
Groups = tuple[tuple[int, ...], tuple[int, ...] | None]
Places = tuple[int, ...]

FIRST_DIM: Groups = ((0,), None)

MULTIPLY = ("conv", "linear", "matmul", "attention", "recurrent")
"""Families of products; operators of the other families look up, add, or scale."""


@dataclass(frozen=True)
class Row:
    """One operator: its family, its argument names in order, which of them are multiplied, and all its names."""

    family: str
    name: str
    arguments: tuple[str, ...] = ()
    operands: tuple[tuple[int, str], ...] = ()
    """An argument's position and its kind: `input`, `weight`, `bias`, `either` for one that may be an activation or a
    weight, `sparse` for one that is never quantized, `coefficients` for one that always has one range."""
    channels: tuple[tuple[int, Groups], ...] = ()
    """By position, `(keep, over)` of an operand with `group="channel"`: the output axis is kept, or the dims that a
    product sums over share a range."""
    variadic: int | None = None
    """Position from which all further arguments are operands (einsum, multi_dot)."""
    function: Target | None = None
    """The function of its normal form; by default, the first one found by `others` and `names`."""
    names: tuple[str, ...] = ()
    """Its names in ATen: `mm`, `linalg_matmul`. Each is looked up among the functions and the methods of torch, and as
    an ATen operator; all take the same arguments in the same order. A name with `::` is only that operator."""
    others: tuple[Target | str, ...] = ()
    """Functions and methods with the same arguments that are not found by a name."""
    keywords: tuple[tuple[str, str], ...] = ()
    """Keywords of torch that differ from `arguments`, with the name there."""
    converts: Mapping[Target | str, Convert] = field(default_factory=dict)
    """Other forms with other arguments, and how to convert them: functions, method names, or operators with `::`."""
    firsts: tuple[Target | str, ...] = ()
    """Those of `converts` that return several tensors, of which `function` returns the first."""
    modules: tuple[type[nn.Module], ...] = ()
    """Torch's layers that consist of this operator or, for one with `left`, contain it."""
    integer: str = ""
    """Its integer form, if it has one: `linear`, `matmul` or `conv`."""
    kernels: Mapping[str, Places] = field(default_factory=dict)
    """The operators it becomes below autograd, forward and backward, and the positions of what they multiply."""
    flops: Mapping[str, Callable[..., int]] = field(default_factory=dict)
    """FLOPs of operators that torch's counter does not know, from the shapes of their arguments and `out_shape`."""
    left: str = ""
    """Why it stays in full precision, unless it is decomposed; empty if its operands are quantized."""
    when: Callable[..., bool] | None = None
    """Returns whether a call multiplies, given its arguments; None if every call does."""
    between: bool = False
    """Whether it may multiply more than two operands, with intermediate products that are not quantized."""
    registered: bool = False
    """Whether a user registered it: products of values that it computes itself count as part of it, and are listed."""
    mutates: Places = ()
    """Positions of arguments that it overwrites, if its schema does not say so."""
    fresh: bool = True
    """Whether its result is always a new tensor."""

    @property
    def factors(self) -> Places:
        """The positions of the tensors it multiplies."""
        if self.family not in MULTIPLY and not any(kind == "sparse" for _, kind in self.operands):
            return ()
        places = tuple(place for place, kind in self.operands if kind != "bias")
        return places if self.variadic is None else (*places, self.variadic)


def with_in_place(row: Row) -> tuple[Row, Row]:
    """Return a row, and the row of the tensor method that writes the same result in place."""
    name = f"{row.name}_"
    flops = {f"{key}_": count for key, count in row.flops.items()}
    function = getattr(Tensor, name)
    return row, replace(row, name=name, names=(name,), function=function, flops=flops, fresh=False, integer="")


def left(reason: str, *names: str, name: str = "", **more: Any) -> Row:
    """Return the row of an operator that multiplies but stays in full precision."""
    return Row("", name or names[0], names=names, left=reason, **more)
