"""Split values into comparable leaves, describe their differences, and find those that are only rounding."""

from __future__ import annotations

import copyreg
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from cpt_fx.common.torch_private import is_traceable_wrapper_subclass
from cpt_fx.ir.result import plain_class

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)
_CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Generator)
"""Types of objects that are not looked into: a run produces nothing inside them."""
_DEPTH, _ITEMS = 8, 1000
"""How deep to look into arbitrary objects, and how many items besides tensors to compare in each."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ABSENT: Any = object()
"""Stands for a missing leaf."""
ROUNDING = 1e-5
"""Allowed distance between values, relative to the largest in their tensor, if sums are computed in another order."""
SMALL = 0.01
"""Gradients are compared relative to at least this share of the largest: some (of a key's bias) are pure rounding."""
_MOVED, _ECHO = 1e-6, 5.0
"""Relative size of the perturbation that stands for rounding, and the multiple of its effect that is still allowed."""
_WANDERS = 100
"""Where runs of the plain model differ from each other, the result may differ by this many times as much."""
GRADIENT = "the gradient of "

Found = dict[tuple[int, str], str]
"""Number of the mode and name of the leaf that differs -> how it differs."""
Runs = Sequence[Mapping[str, Any]]
"""What a run produced in each mode, by name."""


def leaves(value: Any, path: str, known: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield everything that a value holds, with its path; containers and other objects also yield their type."""
    if isinstance(value, (Tensor, numpy.ndarray, *_PLAIN)):
        yield path, value
        return
    yield path, plain_class(type(value)) if isinstance(value, nn.Module) else type(value)
    is_deep = len(known) > _DEPTH and not isinstance(value, (list, tuple, Mapping))
    if id(value) in known or is_deep or isinstance(value, (nn.Module, *_CLOSED)):
        return
    for name, item in _items(value):
        yield from leaves(item, path + name, known | {id(value)})


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs = [(f".{key}" if str(key).isidentifier() else f"[{key!r:.40}]", value[key]) for key in value]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = [(f".{name}", item) for name, item in zip(value._fields, value, strict=False)]
    elif isinstance(value, (set, frozenset)):
        pairs = [(" (items)", len(value))]
    elif isinstance(value, (list, tuple, deque)):
        pairs = [(f"[{place}]", item) for place, item in enumerate(value)]
    else:
        slots = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
        held = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
        pairs = [(f".{name}", item) for name, item in held.items() if not name.startswith("__")]
    yield from (pair for place, pair in enumerate(pairs) if place < _ITEMS or isinstance(pair[1], Tensor))
    if len(pairs) > _ITEMS:
        yield " (items)", len(pairs)


def kept(value: Any) -> Any:
    """Return a leaf as it is now, unaffected by later writes."""
    if isinstance(value, Tensor):
        # Whether it requires a gradient is compared; the rest of its autograd history is dropped.
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy() if isinstance(value, numpy.ndarray) else value


def difference(ours: Any, theirs: Any) -> str:
    """Describe how two leaves differ; an empty string if they are bitwise equal, where a NaN equals a NaN."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _of_tensors(ours, theirs)
    if isinstance(ours, numpy.ndarray) and isinstance(theirs, numpy.ndarray):
        alike = ours.dtype == theirs.dtype and numpy.array_equal(ours, theirs, equal_nan=ours.dtype.kind in "fc")
        return "" if alike else "holds other values"
    if theirs is ABSENT:
        return "is there, and not in the plain model"
    if ours is ABSENT:
        return "is missing"
    if isinstance(ours, (float, complex)) and type(ours) is type(theirs):
        alike = ours == theirs or (ours != ours and theirs != theirs)
        return "" if alike else f"is {ours!r} instead of {theirs!r}"
    if type(ours) is type(theirs) and ours == theirs:
        return ""
    return f"is {_named(ours)} instead of {_named(theirs)}"


def _named(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {value.__name__}" if isinstance(value, type) else f"{value!r:.60}"


def unlike(ours: Tensor, theirs: Tensor) -> str:
    """Describe how two tensors differ in anything but their values; an empty string if they do not."""
    for what in ("shape", "dtype", "layout", "device", "requires_grad"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        if mine != other:
            mine, other = (tuple(mine), tuple(other)) if what == "shape" else (mine, other)
            return f"has {what}={mine} instead of {other}"
    if type(ours) is not type(theirs):
        return f"is a {type(ours).__name__} instead of a {type(theirs).__name__}"
    return ""


def _of_tensors(ours: Tensor, theirs: Tensor) -> str:
    if said := unlike(ours, theirs):
        return said
    parts = zip(_parts(ours.detach()), _parts(theirs.detach()), strict=False)
    return next((_how_far(mine, other) for mine, other in parts if not _is_equal(mine, other)), "")


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that a tensor consists of."""
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in _parts(each)]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), *_parts(tensor.values())]
    if tensor.layout is not torch.strided:
        return _parts(tensor.to_sparse())
    whole: Any = tensor
    if is_traceable_wrapper_subclass(whole):
        return [part for name in whole.__tensor_flatten__()[0] for part in _parts(getattr(whole, name))]
    tensor = tensor.as_subclass(Tensor)
    return [torch.view_as_real(tensor.resolve_conj())] if tensor.is_complex() else [tensor.resolve_neg()]


def _is_equal(ours: Tensor, theirs: Tensor) -> bool:
    bits = _WHOLE.get(ours.dtype.itemsize) if ours.is_floating_point() else None
    if bits is None:
        return torch.equal(ours, theirs)
    if torch.equal(ours.view(bits), theirs.view(bits)):
        return True
    # There are many bit patterns for NaN.
    ours, theirs = (torch.where(one.isnan(), torch.nan, one) for one in (ours, theirs))
    return torch.equal(ours.view(bits), theirs.view(bits))


def _how_far(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape:
        return f"holds {tuple(ours.shape)} values instead of {tuple(theirs.shape)}"
    if not ours.is_floating_point():
        return f"differs in {int((ours != theirs).sum())} of {ours.numel()} elements"
    far, largest = apart(ours, theirs)
    return f"is off by {far:.2g}, its largest element is {largest:.2g}" if far else "differs in the sign of a zero"


def apart(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the largest difference between elements of two tensors, and the largest element of the second."""
    if not theirs.numel():
        return 0.0, 0.0
    mine, other = ours.detach(), theirs.detach()
    if mine.dtype.itemsize < 4:
        mine, other = mine.float(), other.float()
    far, largest = float((mine - other).abs().max()), float(other.abs().max())
    if far < torch.inf and largest < torch.inf:
        return far, largest
    # Equal infinities do not differ, nor do two NaNs.
    alike = (mine == other) | (mine.isnan() & other.isnan())
    finite = other.abs()[other.isfinite()]
    far = float(torch.where(alike, 0.0, (mine - other).abs()).nan_to_num(nan=torch.inf).max())
    return far, float(finite.max()) if finite.numel() else 0.0


def close_in(found: Found, ours: Runs, theirs: Runs, unit: float = 0.0) -> Found:
    """Return the differences that another order of sums explains; `unit` is the coarsest eps in the computation."""
    floors = [SMALL * largest(run[name] for name in run if name.startswith(GRADIENT)) for run in theirs if found]

    def is_near(place: int, name: str) -> bool:
        floor = floors[place] if name.startswith(GRADIENT) else 0.0
        return is_close(ours[place].get(name), theirs[place].get(name), floor, unit)

    return {key: how for key, how in found.items() if is_near(*key)}


def echoed_in(found: Found, ours: Runs, theirs: Runs, moved: Sequence[Runs], computed_with: Iterable[Tensor]) -> Found:
    """Return the differences that are rounding relative to the largest value of a run, and that rounding can cause.

    Some values are rounding errors only, such as the sum of normalized values, or the loss of a sample that the model
    has memorized: a tolerance relative to the value itself does not help. `moved` are runs of the plain model
    perturbed by no more than rounding; `computed_with` are its parameters, whose largest value counts as well. A value
    that does not react to the perturbation must be equal.
    """
    near: Found = {}
    scale = largest(computed_with)
    limits = [ROUNDING * max(scale, largest(run.values())) for run in theirs]
    for (place, name), how in found.items():
        mine, other, *more = values = [runs[place].get(name, ABSENT) for runs in (ours, theirs, *moved)]
        if _is_dense(other) and all(_is_alike(one, other) for one in values):
            echo = max(apart(one, other)[0] for one in more)
            near |= {(place, name): how} if apart(mine, other)[0] <= min(limits[place], _ECHO * echo) else {}
    return near


def unsteady_in(found: Found, ours: Runs, theirs: Runs, again: Sequence[Runs]) -> Found:
    """Return the differences in values that also vary between runs of the plain model, if not by much more."""
    unsteady: Found = {}
    for (place, name), how in found.items():
        mine, other, *more = values = [runs[place].get(name, ABSENT) for runs in (ours, theirs, *again)]
        differs = any(one is not other and difference(one, other) for one in more)
        if differs and _is_dense(other) and all(_is_alike(one, other) for one in values):
            differs = apart(mine, other)[0] <= _WANDERS * max(apart(one, other)[0] for one in more)
        unsteady |= {(place, name): how} if differs else {}
    return unsteady


def scaled(tensors: Iterable[Tensor], seed: int) -> None:
    """Scale each tensor in place by a number close to 1, so that equal elements stay equal, and zeros zero."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in tensors:
            if _is_dense(one) and 0 not in one.stride() and not one.is_inference():
                one.mul_(1 + _MOVED * float(torch.randn((), generator=chance)))


def largest(values: Iterable[Any]) -> float:
    """Return the largest magnitude in all dense floating point tensors among some values."""
    dense = (one.detach() for one in values if _is_dense(one) and one.numel())
    return max((float(one.abs().max()) for one in dense), default=0.0)


def _is_dense(value: Any) -> bool:
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return is_strided and value.is_floating_point()


def _is_alike(ours: Any, theirs: Any) -> bool:
    """Whether two floating point tensors differ in nothing but their values."""
    both = isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    return both and not unlike(ours, theirs) and theirs.is_floating_point()


def is_close(ours: Any, theirs: Any, floor: float = 0.0, unit: float = 0.0) -> bool:
    """Whether two tensors of one kind are equal up to float rounding."""
    if not _is_alike(ours, theirs):
        return False
    ours, theirs = (one.to_dense() if one.layout is not torch.strided else one for one in (ours, theirs))
    far, most = apart(ours, theirs)
    return far <= max(ROUNDING, 8 * max(torch.finfo(ours.dtype).eps, unit)) * max(most, floor)
