"""Tensors under the transforms of torch.func (vmap, grad, jvp), which wrap the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cpt_fx.common import torch_private as private

_wraps, _unwrapped = private.functorch.is_functorch_wrapped_tensor, private.functorch.get_unwrapped
outside = private.temporarily_clear_interpreter_stack
"""Context that leaves all transforms: inside, random numbers may be drawn and unwrapped tensors written."""


def is_transformed() -> bool:
    """Return whether this code runs under a transform."""
    return bool(private.are_transforms_active())


def is_batched(tensor: Tensor) -> bool:
    """Return whether a tensor is batched at any level: it has no single value, nor memory that a kernel can read."""
    while _wraps(tensor):
        if private.functorch.is_batchedtensor(tensor):
            return True
        tensor = _unwrapped(tensor)
    return are_gradients(tensor)


def are_gradients(tensor: Tensor) -> bool:
    """Return whether a tensor stands for several gradients that autograd has batched."""
    return bool(private.functorch.is_legacy_batchedtensor(tensor))


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor inside all wrappers."""
    while _wraps(tensor):
        tensor = _unwrapped(tensor)
    return tensor


def each(function: Callable[[Tensor], Any], gradients: Tensor) -> Any:
    """Call a function with each of the gradients that autograd has batched: `is_grads_batched`, `vectorize=True`.

    Autograd uses an older vmap for it, which supports few operators and no random numbers.
    """
    level = private.vmapmode_increment_nesting() - 1
    for _ in range(2):
        private.vmapmode_decrement_nesting()
    try:
        rows = private.remove_batch_dim(gradients, level, 1, 0).unbind()
        made = [private.pytree.tree_flatten(function(row)) for row in rows]
    finally:
        private.vmapmode_increment_nesting()
    columns = zip(*(leaves for leaves, _ in made), strict=True)
    whole = [None if column[0] is None else private.add_batch_dim(torch.stack(column), 0, level) for column in columns]
    return private.pytree.tree_unflatten(whole, made[0][1])


def write(state: Tensor, value: Tensor, what: str) -> None:
    """Copy a value to one of our tensors, even from inside a transform if the value is not batched."""
    if not is_transformed() or _wraps(state):
        # fill_ with a tensor is an overload that fake tensors support on every device.
        state.fill_(value)
    elif is_batched(value):
        raise RuntimeError(
            f"{what} learns in training, and under vmap there is no single value to learn from. Use eval(), or, for "
            "an ensemble, give each model its own by torch.func.stack_module_state and functional_call"
        )
    else:
        with outside(), torch.no_grad():
            state.fill_(plain(value))
