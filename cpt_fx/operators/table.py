"""Lookup tables of all rows by all names, for passes and frontends; registered rows are added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx

from cpt_fx.common.torch_private import OpOverload, OpOverloadPacket
from cpt_fx.operators.row import Call, Convert, Places, Row
from cpt_fx.operators.torch_private import VF, linalg, nn_functions, sparse


class Form(NamedTuple):
    """One spelling of an operator: its row, the function of its normal form, and how to convert other arguments."""

    row: Row
    target: Any
    """None if the call keeps its own target."""
    convert: Convert | None = None
    first: bool = False
    """Whether it returns several tensors, of which the function returns the first."""


FORMS: dict[Any, Form] = {}
"""Every spelling: functions, names of methods, and names of operators with `::`."""
ROWS: list[Row] = []
KERNELS: dict[str, Places | None] = {}
"""Positions of what operators below autograd multiply; None means all their tensors."""
FLOPS: dict[str, Callable[..., int]] = {}
WRITES = "it writes its result to a tensor it is given (out=), in a form that is not in the list of operators"

_OF_NUMPY = (("x", "input"), ("a", "input"), ("x1", "input"), ("x2", "other"))
"""NumPy's names of arguments, which functions of torch accept, too."""
_OPERATORS = (OpOverload, OpOverloadPacket)
_PLACES: tuple[tuple[str, Any, str], ...] = (
    ("", torch, ""), ("", VF, ""), ("", nn_functions, ""), ("linalg_", torch.linalg, ""),
    ("linalg_", linalg, "linalg_"), ("special_", torch.special, ""), ("sparse_", torch.sparse, ""),
    ("_sparse_", torch.sparse, ""), ("sparse_", sparse, "sparse_"),
)  # fmt: skip
"""Where functions of torch are: a prefix of the ATen name, the namespace, and the prefix used there instead."""


def spelled(name: str) -> Iterator[Any]:
    """Yield all spellings of an ATen name: functions, the tensor method and its name, and the name of the operator."""
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
    # Operators of other packages keep their own target, too.
    forms |= {name: Form(row, None) for name in row.names if "::" in name}
    if function is not None:
        forms[function] = Form(row, function)
    for key, convert in row.converts.items():
        forms[key] = Form(row, function, convert, key in row.firsts)
    return forms


def add(row: Row) -> None:
    """Add a row; raise if one of its names belongs to another row."""
    made = forms_of(row)
    for key in made:
        if key in FORMS:
            raise ValueError(f"{key} is in the list already, as {FORMS[key].row.name!r}")
    FORMS.update(made)
    ROWS.append(row)
    _add_kernels(row)


def remove(row: Row) -> None:
    """Remove a row."""
    for key in forms_of(row):
        del FORMS[key]
    ROWS.remove(row)
    # Rows may have a kernel in common.
    KERNELS.clear()
    FLOPS.clear()
    for other in ROWS:
        _add_kernels(other)


def _add_kernels(row: Row) -> None:
    # Rows omit the namespace `aten::`.
    found: dict[str, Places | None] = dict.fromkeys(row.names, None if row.left else row.factors)
    for name, places in {**found, **row.kernels}.items():
        full = name if "::" in name else f"aten::{name}"
        if places is not None or full not in KERNELS:  # what one row leaves may be the kernel of another
            KERNELS[full] = places
    FLOPS.update(row.flops)


def form_of(target: Any) -> Form | None:
    """Return the form of a function, an operator or the name of a method; None if it is not in the table."""
    form = FORMS.get(target)
    if form is not None or not isinstance(target, _OPERATORS):
        return form
    form = FORMS.get(_name(target))
    if form is None or not (isinstance(target, OpOverload) and target._overloadname.endswith("out")):
        return form
    # No function of torch takes `out` at that position: the operator keeps its target.
    return Form(form.row if form.convert is None else replace(form.row, operands=(), left=WRITES), target)


def writes(form: Form, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a spelling with other arguments is called with `out`, which the function may not take."""
    return form.convert is not None and kwargs.get("out") is not None


def _name(target: Any) -> str:
    return str(target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name)


def row_for(target: Any) -> Row | None:
    """Return the row of a function in normal form, if its operands are quantized."""
    form = form_of(target)
    return form.row if form is not None and form.convert is None and not form.row.left else None


def row_of(node: fx.Node) -> Row | None:
    """Return the row of a normalized node, if its operands are quantized."""
    return row_for(node.target) if node.op == "call_function" else None


def why_left(target: Any, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None) -> str:
    """Return why the products of a function, or of one call of it, stay in full precision, or an empty string."""
    form = form_of(target)
    if form is not None:
        if args is not None and form.row.when is not None and not form.row.when(*args, **(kwargs or {})):
            return ""
        return form.row.left or (WRITES if writes(form, kwargs or {}) else WHOLE if form.first else "")
    if isinstance(target, _OPERATORS):
        if KERNELS.get(name := _name(target), ()) != ():
            return "an operator from below autograd, whose operands are not quantized"
        namespace = name.partition("::")[0]
        return "" if namespace in _KNOWN_INSIDE else "a custom operator; what it multiplies is not seen"
    if type(target).__module__ == "torch._dynamo.utils":  # Dynamo's wrapper of a NumPy function
        name = target.__name__.removeprefix("wrapped_").strip("_").removeprefix("linalg.")
        return "a product of numpy, which the graph calls as a whole" if {name, f"aten::{name}"} & FORMS.keys() else ""
    return "a Python function the graph calls as a whole; what it multiplies is not seen" if is_opaque(target) else ""


WHOLE = "it returns several tensors, and more than the first is used"
_KNOWN_INSIDE = ("aten", "prims", "prim", "cpt_fx", "profiler", "_c10d_functional", "c10d", "inductor")
"""Namespaces in which every operator that multiplies has a row."""


def multiplies(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call in eager code multiplies, or may, so that it is to be quantized or listed."""
    form = FORMS.get(func)
    if form is None:
        return isinstance(func, _OPERATORS) and (form_of(func) is not None or bool(why_left(func)))
    return form.row.when is None or form.row.when(*args, **kwargs)


def is_opaque(target: Any) -> bool:
    """Return whether a target is a function, not torch's or ours, that a graph calls as a whole: its code is unseen."""
    if isinstance(target, torch.jit.ScriptFunction):
        return True
    package = (getattr(target, "__module__", None) or "").partition(".")[0]
    return isinstance(target, FunctionType) and package not in ("torch", "cpt_fx") and target not in FORMS


def respelled(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return the normal form of a call: its function, with operands by position; None if it has none."""
    form = form_of(target)
    if form is None or writes(form, kwargs):
        return None
    if form.convert is not None:
        target, args, kwargs = form.convert(*args, **kwargs)
    else:
        target = form.target or target
    row, args, kwargs = form.row, list(args), dict(kwargs)  # type: ignore[assignment]
    if row.left:
        return target, tuple(args), kwargs
    for other, name in (*row.keywords, *((other, name) for other, name in _OF_NUMPY if name in row.arguments)):
        if other in kwargs and other not in row.arguments:
            kwargs[name] = kwargs.pop(other)
    # Operands come first in every signature; what is given by keyword after them (stride=, alpha=) may stay so.
    while len(args) < len(row.arguments) and row.arguments[len(args)] in kwargs:
        args.append(kwargs.pop(row.arguments[len(args)]))  # type: ignore[attr-defined]
    if row.name == "einsum" and len(args) == 2 and isinstance(args[1], (list, tuple)):
        args[1:] = args[1]  # type: ignore[index]
    return target, tuple(args), kwargs


def factors(func: OpOverload) -> Places:
    """Return the positions in its schema of the tensors that an operator below autograd multiplies.

    Empty for one that multiplies nothing. A position may hold a list of tensors, all of which are multiplied, or None
    if it is optional.
    """
    row = FORMS[func].row if func in FORMS else None
    known = KERNELS.get(func._schema.name, ()) if row is None else None if row.left else row.factors
    if known is not None:
        return known
    return tuple(place for place, given in enumerate(func._schema.arguments) if "Tensor" in str(given.type))
