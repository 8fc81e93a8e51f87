"""Which differences of two runs are nothing but float rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cpt_fx.inspection.leaves import ABSENT, apart, unlike
from cpt_fx.trial import tensors_in

ROUNDING = 1e-5
"""How far numbers may be apart, relative to the largest of a tensor, where the order of sums is another one."""
SMALL = 0.01
"""Some gradients are nothing but rounding, such as that of a key's bias: this part of the largest one measures them."""
TURNS = 3
"""How often to ask what rounding does: by chance one number may stay as it is."""
_MOVED, _ECHO = 1e-6, 5.0
"""How much everything is scaled for that, and how many times what it does is rounding."""
GRADIENT = "the gradient of "

Found = dict[tuple[int, str], str]
"""The number of a mode and the name of each thing that differs there -> how."""
Runs = Sequence[Mapping[str, Any]]
"""What came out of a run in each mode, by name."""


def close_in(found: Found, ours: Runs, theirs: Runs) -> Found:
    """Return the differences that another order of sums explains."""
    near: Found = {}
    floors = [SMALL * largest(run[name] for name in run if name.startswith(GRADIENT)) for run in theirs if found]
    for (place, name), how in found.items():
        floor = floors[place] if name.startswith(GRADIENT) else 0.0
        near |= {(place, name): how} if is_close(ours[place].get(name), theirs[place].get(name), floor) else {}
    return near


def echoed_in(found: Found, ours: Runs, theirs: Runs, moved: Sequence[Runs], scale: float) -> Found:
    """Return the differences that are rounding beside the largest number of a run, and that rounding does make.

    The sum of what was normalized is nothing but rounding, and so is the loss of what is learned by heart: no part of
    such a number can be asked for. `moved` are runs of the plain model that differ from `theirs` by no more than
    rounding; `scale` is the largest number that it computes with. What rounding leaves alone is none.
    """
    near: Found = {}
    limits = [ROUNDING * max(scale, largest(run.values())) for run in theirs]
    for (place, name), how in found.items():
        mine, other, *more = values = [runs[place].get(name, ABSENT) for runs in (ours, theirs, *moved)]
        if _is_dense(other) and all(_is_alike(one, other) for one in values):
            echo = max(apart(one, other)[0] for one in more)
            near |= {(place, name): how} if apart(mine, other)[0] <= min(limits[place], _ECHO * echo) else {}
    return near


def scaled(tensors: Iterable[Tensor], seed: int) -> None:
    """Scale each tensor by a number close to 1: elements that are equal, and zeros, stay so."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in tensors:
            if _is_dense(one) and 0 not in one.stride() and not one.is_inference():
                one.mul_(1 + _MOVED * float(torch.randn((), generator=chance)))


def largest(values: Iterable[Any]) -> float:
    """Return the largest element of all dense tensors among some values."""
    dense = (one.detach() for one in tensors_in(list(values)) if _is_dense(one) and one.numel())
    return max((float(one.abs().max()) for one in dense), default=0.0)


def _is_dense(value: Any) -> bool:
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
    return is_strided and value.is_floating_point()


def _is_alike(ours: Any, theirs: Any) -> bool:
    """Whether nothing but numbers tells two tensors from each other."""
    both = isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    return both and not unlike(ours, theirs) and theirs.is_floating_point()


def is_close(ours: Any, theirs: Any, floor: float = 0.0) -> bool:
    """Whether two tensors of one kind are equal up to float rounding."""
    if not _is_alike(ours, theirs):
        return False
    ours, theirs = (one.to_dense() if one.layout is not torch.strided else one for one in (ours, theirs))
    far, most = apart(ours, theirs)
    return far <= max(ROUNDING, 8 * torch.finfo(ours.dtype).eps) * max(most, floor)
