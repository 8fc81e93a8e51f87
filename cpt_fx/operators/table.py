"""All rows by all names: what passes and frontends look up. Rows that come later are found in the same tables.

`register` is the public way to add one: an operator of your own is quantized, costed and shown as torch's own are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.overrides import handle_torch_function, has_torch_function

from cpt_fx.errors import check_choice, nearest
from cpt_fx.operators.row import MULTIPLY, Call, Convert, Places, Row
from cpt_fx.recipes import FAMILIES


class Form(NamedTuple):
    """One spelling of an operator: its row, the function it stands for, and how, if its arguments are others."""

    row: Row
    target: Any
    """None where it stays what it is."""
    convert: Convert | None = None
    first: bool = False
    """Whether it returns several tensors, of which the function returns the first."""


FORMS: dict[Any, Form] = {}
"""Every function, the name of every method, and of every operator with `::`."""
ROWS: list[Row] = []
KERNELS: dict[str, Places | None] = {}
"""What operators below autograd multiply; None for all their tensors."""
FLOPS: dict[str, Callable[..., int]] = {}
WRITES = "it writes its result to a tensor it is given (out=), in a form that is not in the list of operators"

_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_C: Any = torch._C
_PLACES: tuple[tuple[str, Any, str], ...] = (
    ("", torch, ""), ("", _C._VariableFunctions, ""), ("", _C._nn, ""), ("linalg_", torch.linalg, ""),
    ("linalg_", _C._linalg, "linalg_"), ("special_", torch.special, ""), ("sparse_", torch.sparse, ""),
    ("_sparse_", torch.sparse, ""), ("sparse_", _C._sparse, "sparse_"),
)  # fmt: skip
"""Where functions of torch lie: the beginning of ATen's name, and what stands there instead."""


def spelled(name: str) -> Iterator[Any]:
    """Find the functions of a name of ATen, and the names under which its methods and itself are looked up."""
    if "::" in name:
        yield name
        return
    for start, holder, instead in _PLACES:
        if name.startswith(start):
            found = getattr(holder, instead + name.removeprefix(start), None)
            if callable(found):
                yield found
    method = getattr(torch.Tensor, name, None)
    if callable(method):
        yield from (method, name)
    yield f"aten::{name}"


def forms_of(row: Row) -> dict[Any, Form]:
    """Return every spelling of a row."""
    spellings = [*row.others, *(found for name in row.names for found in spelled(name))]
    function = row.function
    if function is None and not row.left:
        function = next(found for found in spellings if not isinstance(found, str))
    forms = {key: Form(row, function) for key in spellings}
    # Operators of other packages stay what they are, too.
    forms |= {name: Form(row, None) for name in row.names if "::" in name}
    if function is not None:
        forms[function] = Form(row, function)
    for key, convert in row.converts.items():
        forms[key] = Form(row, function, convert, key in row.firsts)
    return forms


def add(row: Row) -> None:
    """Take in a row, or raise where one of its names is another's."""
    made = forms_of(row)
    for key in made:
        if key in FORMS:
            raise ValueError(f"{key} is in the list already, as {FORMS[key].row.name!r}")
    FORMS.update(made)
    ROWS.append(row)
    KERNELS.update(_kernels_of(row))
    FLOPS.update(row.flops)


def remove(row: Row) -> None:
    """Take a row out again."""
    for key in forms_of(row):
        del FORMS[key]
    for name in _kernels_of(row):
        KERNELS.pop(name, None)
    for name in row.flops:
        FLOPS.pop(name, None)
    ROWS.remove(row)


def _kernels_of(row: Row) -> dict[str, Places | None]:
    """Return what the operators of a row multiply; operators of ATen are named without their namespace."""
    own: Places | None = None if row.left else row.factors
    whole = {name if "::" in name else f"aten::{name}": own for name in row.names}
    return {**whole, **{f"aten::{name}": places for name, places in row.kernels.items()}}


def form_of(target: Any) -> Form | None:
    """Return what a function, or the name of a method, is to quantization."""
    form = FORMS.get(target)
    if form is not None or not isinstance(target, _OPERATORS):
        return form
    form = FORMS.get(_name(target))
    if form is None or not (isinstance(target, torch._ops.OpOverload) and target._overloadname.endswith("out")):
        return form
    # No function of torch takes `out` at such a place: the operator stays itself.
    return Form(form.row if form.convert is None else replace(form.row, operands=(), left=WRITES), target)


def _name(target: Any) -> str:
    return str(target._schema.name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name)


def row_for(target: Any) -> Row | None:
    """Return the row of a function in normal form, if its operands are quantized."""
    form = form_of(target)
    return form.row if form is not None and form.convert is None and not form.row.left else None


def row_of(node: fx.Node) -> Row | None:
    """Return the operator a normalized node is, if quantization knows it."""
    return row_for(node.target) if node.op == "call_function" else None


def why_left(target: Any, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None) -> str:
    """Return why what a function, or a call of it, multiplies stays in full precision, or an empty string."""
    form = form_of(target)
    if form is not None:
        if args is not None and form.row.when is not None and not form.row.when(*args, **(kwargs or {})):
            return ""
        return form.row.left or (WHOLE if form.first else "")
    if isinstance(target, _OPERATORS):
        if KERNELS.get(name := _name(target), ()) != ():
            return "an operator from below autograd, whose operands are not quantized"
        namespace = name.partition("::")[0]
        return "" if namespace in _KNOWN_INSIDE else "a custom operator; what it multiplies is not seen"
    if type(target).__module__ == "torch._dynamo.utils":  # a function of numpy, as Dynamo writes it
        name = target.__name__.removeprefix("wrapped_").strip("_").removeprefix("linalg.")
        return "a product of numpy, which the graph calls as a whole" if {name, f"aten::{name}"} & FORMS.keys() else ""
    return "a Python function the graph calls as a whole; what it multiplies is not seen" if is_opaque(target) else ""


WHOLE = "it returns several tensors, and more than the first is used"
_KNOWN_INSIDE = ("aten", "prims", "prim", "cpt_fx", "profiler", "_c10d_functional", "c10d", "inductor")
"""Namespaces whose operators that multiply all have a row."""


def multiplies(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call in eager code multiplies, or may: there is something to quantize, or to list."""
    form = FORMS.get(func)
    if form is None:
        return isinstance(func, _OPERATORS) and (form_of(func) is not None or bool(why_left(func)))
    return form.row.when is None or form.row.when(*args, **kwargs)


def is_opaque(target: Any) -> bool:
    """Whether a target is a function of somebody else's, kept whole in a graph: what is inside is not seen."""
    if isinstance(target, torch.jit.ScriptFunction):
        return True
    package = (getattr(target, "__module__", None) or "").partition(".")[0]
    return isinstance(target, FunctionType) and package not in ("torch", "cpt_fx") and target not in FORMS


def respelled(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return a call of an operator by its function, with its operands by position; None for other operators."""
    form = form_of(target)
    if form is None:
        return None
    if form.convert is not None:
        target, args, kwargs = form.convert(*args, **kwargs)
    else:
        target = form.target or target
    row, args, kwargs = form.row, list(args), dict(kwargs)  # type: ignore[assignment]
    if row.left:
        return target, tuple(args), kwargs
    for other, name in row.keywords:
        if other in kwargs:
            kwargs[name] = kwargs.pop(other)
    # Operands come first in every signature: whatever is given by keyword after them (stride=, alpha=) stays so.
    while len(args) < len(row.arguments) and row.arguments[len(args)] in kwargs:
        args.append(kwargs.pop(row.arguments[len(args)]))  # type: ignore[attr-defined]
    if row.name == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple)):
        args[1:] = args[1]  # type: ignore[index]
    return target, tuple(args), kwargs


def factors(func: torch._ops.OpOverload) -> Places:
    """Return the positions, in its schema, of the tensors that an operator multiplies, as it is seen below autograd.

    Empty for what multiplies nothing. A position may hold a list of tensors, all of which are multiplied; None may
    stand at one that is optional.
    """
    known: Places | None = ()
    if func in FORMS:
        known = None if FORMS[func].row.left else FORMS[func].row.factors
    else:
        known = KERNELS.get(func._schema.name, ())
    if known is not None:
        return known
    return tuple(place for place, given in enumerate(func._schema.arguments) if "Tensor" in str(given.type))


KINDS = ("input", "weight", "either", "bias")


@dataclass(frozen=True)
class Registration:
    """What `register` returns: `remove()` takes the operator out of the list again."""

    row: Row

    def remove(self) -> None:
        """Forget the operator. Models that were transformed before keep their quantizers."""
        if self.row in ROWS:
            remove(self.row)


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
    """Add an operator to the list, so that every frontend quantizes it, or says why it does not.

    Args:
        function: an operator made by `torch.library`, one of its overloads, its name ("mine::product"), or a Python
            function that is kept whole (`whole`).
        family: whose rule of the recipe its operands follow: "linear", "matmul", "conv", ...
        operands: the arguments that are multiplied, by name, each with its kind: "input", "weight", "bias", or
            "either" for one that may be an activation or a weight.
        output_axes: of weights, the dim that `group="channel"` gives a range each. Others have one range.
        name: what its layers are called; the operator's own name by default.
        flops: floating point operations of one call, from the shapes of its arguments and `out_shape`.
        mutates: arguments that a Python function overwrites. The schema of an operator says it itself.
        left: why it stays in full precision, instead of `operands`.

    Raises:
        ValueError: an operand is no argument of it, a family or kind is unknown, or it is registered as something else.
    """
    given = operands or {}
    if bool(given) is bool(left):
        raise ValueError("register needs either operands=, the arguments that are multiplied, or left=, a reason")
    check_choice("family", family, FAMILIES)
    for kind in given.values():
        check_choice("operands", kind, KINDS)
    title, target, calls = _calls(function)
    known = list(dict.fromkeys(argument for call in calls for argument in call))
    for argument in (*given, *(output_axes or {}), *mutates):
        if argument not in known:
            only = f"{', '.join(known)}.{nearest(argument, known)}"
            raise ValueError(f"{title} has no argument {argument!r} that has a position, only {only}")
    # What all overloads have at the same places.
    arguments = tuple(names[0] for names in takewhile(lambda names: len(set(names)) == 1, zip(*calls, strict=False)))
    for operand in given:
        if all("Tensor" not in call.get(operand, "") for call in calls):
            raise ValueError(f"operand {operand!r} of {title} is no tensor")
        if operand not in arguments:
            raise ValueError(
                f"the overloads of {title} do not have {operand!r} at one place: register each of them, "
                "torch.ops.<namespace>.<name>.<overload>"
            )
    types = max(calls, key=lambda call: sum("Tensor" in kind for kind in call.values()))
    lists = [name for name in given if types[name] == "List[Tensor]"]
    if len(lists) > 1:
        raise ValueError(f"{title} has more than one list of tensors among its operands")
    short = name or title.rpartition("::")[2]
    row = Row(
        "" if left else family, short, arguments,
        tuple(sorted((arguments.index(name), kind) for name, kind in given.items() if name not in lists)),
        tuple((arguments.index(name), ((axis,), None)) for name, axis in (output_axes or {}).items()
              if name in arguments),
        arguments.index(lists[0]) if lists else None, target,
        names=(title,) if isinstance(target, torch._ops.OpOverloadPacket) else (),
        flops=_costs(title, target, flops, multiplies=family in MULTIPLY and not left), left=left,
        mutates=tuple(arguments.index(argument) for argument in mutates if argument in arguments),
    )  # fmt: skip
    present = form_of(target)
    if present is None:
        add(row)
    elif present.row != row:
        raise ValueError(f"{title} is in the list of operators already, as another {present.row.name!r}")
    return Registration(row)


def _calls(function: Any) -> tuple[str, Any, list[dict[str, str]]]:
    """Return the name of an operator or function, what graphs call, and of each overload the arguments with a position.

    Each has its type; an argument of a Python function counts as a tensor.
    """
    function = getattr(function, "_opoverload", function)  # as torch.library.custom_op returns it
    if isinstance(function, str):
        namespace, _, name = function.partition("::")
        if not name or not hasattr(getattr(torch.ops, namespace), name):
            raise ValueError(f"there is no operator {function!r}: import what defines it first")
        function = getattr(getattr(torch.ops, namespace), name)
    if isinstance(function, torch._ops.OpOverload) and function._overloadpacket.overloads() == ["default"]:
        function = function._overloadpacket
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name, function, [_placed(function)]
    if isinstance(function, torch._ops.OpOverloadPacket):
        overloads = [getattr(function, overload) for overload in function.overloads()]
        return function._qualified_op_name, function, [_placed(overload) for overload in overloads]
    title = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", function))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"{title} does not say what its arguments are: pass an operator or a function") from None
    placed = (given for given in parameters if given.kind in (given.POSITIONAL_ONLY, given.POSITIONAL_OR_KEYWORD))
    return title, function, [{given.name: "Tensor" for given in placed}]


def _placed(overload: torch._ops.OpOverload) -> dict[str, str]:
    return {given.name: str(given.type) for given in overload._schema.arguments if not given.kwarg_only}


def _costs(
    title: str, target: Any, flops: Callable[..., int] | None, *, multiplies: bool
) -> dict[str, Callable[..., int]]:
    if not isinstance(target, _OPERATORS):
        if flops is not None:
            raise ValueError(f"{title} is a function: what it calls is counted, it needs no flops=")
        return {}
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(title, "CompositeImplicitAutograd")
    if flops is not None or not multiplies or composite:
        return {title: flops} if flops is not None else {}
    return {title: _Uncounted(title)}


@dataclass(frozen=True)
class _Uncounted:
    """Costs an operator that does not say what it costs."""

    title: str

    def __call__(self, *shapes: Any, **options: Any) -> int:
        raise ValueError(f"{self.title} does not say what it costs: pass flops= to cpt_fx.operators.register")


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a Python function that every frontend keeps as one call, so that it can be registered.

    Its code is not looked into: torch.fx and Dynamo record the call, and between graphs it is rewritten as a whole.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if has_torch_function(given):
            return handle_torch_function(called, given, *args, **kwargs)
        return function(*args, **kwargs)

    return torch.compiler.allow_in_graph(called)  # type: ignore[no-any-return]
