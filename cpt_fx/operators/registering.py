"""The public API to add a row: your own operator is quantized, costed and shown like torch's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from weakref import WeakSet

import torch
from torch.overrides import handle_torch_function, has_torch_function

from cpt_fx.common.torch_private import OpOverload, OpOverloadPacket, has_kernel, pytree
from cpt_fx.errors import check_choice, nearest
from cpt_fx.operators import table
from cpt_fx.operators.row import MULTIPLY, Row
from cpt_fx.recipes import FAMILIES

_WHOLE: WeakSet[Callable[..., Any]] = WeakSet()
"""Functions that `whole` has marked."""


@dataclass(frozen=True)
class Registration:
    """What `register` returns; `remove()` takes the operator out of the table again."""

    row: Row

    def remove(self) -> None:
        """Remove the operator; models that were transformed before keep their quantizers."""
        if self.row in table.ROWS:
            table.remove(self.row)


def register(
    function: Any,
    *,
    family: str = "matmul",
    operands: Mapping[str, str] | None = None,
    output_axes: Mapping[str, int] | None = None,
    name: str = "",
    flops: Callable[..., int] | None = None,
    mutates: tuple[str, ...] = (),
    left: str = "",
) -> Registration:
    """Add an operator to the table, so that every frontend quantizes it, or says why it does not.

    Args:
        function: an operator made by `torch.library`, one of its overloads, its name ("mine::product"), or a Python
            function that is kept whole (`whole`).
        family: the family whose rule in the recipe applies to its operands: "linear", "matmul", "conv", ...
        operands: the arguments that are multiplied, by name, each with its kind: "input", "weight", "bias", or
            "either" for one that may be an activation or a weight.
        output_axes: for weights, the dim whose indices each have a range with `group="channel"`; others have one range.
        name: the name of its layers; by default, the operator's own name.
        flops: floating point operations of one call, from the shapes of its arguments and `out_shape`.
        mutates: arguments that a Python function overwrites; for an operator, its schema says so.
        left: why it stays in full precision, instead of `operands`.

    Raises:
        ValueError: an operand is not an argument, a family or kind is unknown, or it is registered as something else.
    """
    given = operands or {}
    if bool(given) is bool(left):
        raise ValueError("register needs either operands=, the arguments that are multiplied, or left=, a reason")
    check_choice("family", family, FAMILIES)
    for kind in given.values():
        check_choice("operands", kind, ("input", "weight", "either", "bias"))
    title, target, calls = _calls(function)
    known = list(dict.fromkeys(argument for call in calls for argument in call))
    for argument in (*given, *(output_axes or {}), *mutates):
        if argument not in known:
            only = f"{', '.join(known)}.{nearest(argument, known)}"
            raise ValueError(f"{title} has no argument {argument!r} that has a position, only {only}")
    # The leading arguments that all overloads share.
    arguments = tuple(names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*calls, strict=False)))
    for operand in given:
        if all("Tensor" not in call.get(operand, "") for call in calls):
            raise ValueError(f"operand {operand!r} of {title} is no tensor")
        if operand not in arguments:
            raise ValueError(
                f"the overloads of {title} do not have {operand!r} at one place: register each of them, "
                "torch.ops.<namespace>.<name>.<overload>"
            )
    short = name or title.rpartition("::")[2]
    row = Row(
        "" if left else family, short, arguments,
        tuple(sorted((arguments.index(name), kind) for name, kind in given.items())),
        tuple((arguments.index(name), ((axis,), None)) for name, axis in (output_axes or {}).items()
              if name in arguments),
        function=target, names=(title,) if isinstance(target, OpOverloadPacket) else (),
        flops=_costs(title, target, flops, multiplies=family in MULTIPLY and not left), left=left, registered=True,
        fresh=_is_new(target),
        mutates=tuple(arguments.index(argument) for argument in mutates if argument in arguments),
    )  # fmt: skip
    present = table.form_of(target)
    if present is None:
        table.add(row)
    elif present.row != row:
        raise ValueError(f"{title} is in the list of operators already, as another {present.row.name!r}")
    return Registration(row)


def _calls(function: Any) -> tuple[str, Any, list[dict[str, str]]]:
    """Return an operator's name, the target in graphs, and the positional arguments of each overload with their types.

    The arguments of a Python function count as tensors.
    """
    function = getattr(function, "_opoverload", function)  # as torch.library.custom_op returns it
    if isinstance(function, str):
        namespace, _, name = function.partition("::")
        if not name or not hasattr(getattr(torch.ops, namespace), name):
            raise ValueError(f"there is no operator {function!r}: import what defines it first")
        function = getattr(getattr(torch.ops, namespace), name)
    if isinstance(function, OpOverload) and function._overloadpacket.overloads() == ["default"]:
        function = function._overloadpacket
    if isinstance(function, OpOverload):
        return function._schema.name, function, [_placed(function)]
    if isinstance(function, OpOverloadPacket):
        return function._qualified_op_name, function, [_placed(overload) for overload in _overloads_of(function)]
    title = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", function))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    placed = [given for given in parameters if given.kind in (given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD)]
    if not placed:
        raise ValueError(
            f"{title} does not say what its arguments are: pass an operator, or a function that is marked with "
            "cpt_fx.operators.whole"
        )
    if function not in _WHOLE:
        raise ValueError(
            f"{title} is not kept whole by torch.fx and Dynamo: mark a function that calls it with "
            "cpt_fx.operators.whole, and register that"
        )
    return title, function, [{given.name: "Tensor" for given in placed}]


def returns_one_tensor(target: Any) -> bool:
    """Return whether an operator returns a single tensor, whose gradient can be quantized; True for functions."""
    return all(
        [str(given.type) for given in overload._schema.returns] == ["Tensor"] for overload in _overloads_of(target)
    )


def _is_new(target: Any) -> bool:
    """Return whether a result is known to be a new tensor: no overload of the operator returns an alias."""
    overloads = _overloads_of(target)
    returns = (given for overload in overloads for given in overload._schema.returns)
    return bool(overloads) and all(given.alias_info is None for given in returns)


def _overloads_of(target: Any) -> list[OpOverload]:
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, overload) for overload in target.overloads()]
    return [target] if isinstance(target, OpOverload) else []


def _placed(overload: OpOverload) -> dict[str, str]:
    return {given.name: str(given.type) for given in overload._schema.arguments if not given.kwarg_only}


def _costs(
    title: str, target: Any, flops: Callable[..., int] | None, *, multiplies: bool
) -> dict[str, Callable[..., int]]:
    if not isinstance(target, (OpOverload, OpOverloadPacket)):
        if flops is not None:
            raise ValueError(f"{title} is a function: what it calls is counted, it needs no flops=")
        return {}
    composite = has_kernel(title, "CompositeImplicitAutograd")
    if flops is not None or not multiplies or composite:
        return {title: flops} if flops is not None else {}
    return {title: _Uncounted(title)}


@dataclass(frozen=True)
class _Uncounted:
    """Raises when the cost of an operator is needed that was registered without one."""

    title: str

    def __call__(self, *shapes: Any, **options: Any) -> int:
        raise ValueError(f"{self.title} does not say what it costs: pass flops= to cpt_fx.operators.register")


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a Python function that every frontend keeps as one call, so that it can be registered.

    Its code is not traced: torch.fx and Dynamo record the call, and between graphs it is quantized as one operator.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        if has_torch_function(given):
            return handle_torch_function(called, given, *args, **kwargs)
        result = function(*args, **kwargs)
        row = table.row_for(called)
        if row is not None and not isinstance(result, torch.Tensor):
            kind = type(result).__name__
            raise TypeError(f"{row.name} returns a {kind}: a function with a row returns one tensor")
        return result

    _WHOLE.add(called)
    return torch.compiler.allow_in_graph(called)  # type: ignore[no-any-return]
