"""Memory for quantized tensors, taken again as soon as nobody holds it any more.

A quantized tensor lives for one product. Asking the system for its pages each time, and giving them back, takes longer
than quantizing: the C library returns large blocks at once, and touching them again is a page fault every 4 KiB.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

_WORTH_IT = 1 << 17
"""Bytes from which on the C library asks the system for pages of their own."""
_MOST = 4
"""Buffers kept per thread: a product's operands, and one to spare. More would show in the memory of a model."""


class _Mine(threading.local):
    """The buffers of one thread: two threads must not find the same one free."""

    def __init__(self) -> None:
        self.buffers: OrderedDict[int, Any] = OrderedDict()


_MINE = _Mine()


def empty_like(x: Tensor) -> Tensor:
    """Return a new contiguous tensor like a contiguous one, whose content is left to the caller."""
    size = x.numel() * x.element_size()
    if size < _WORTH_IT:
        return torch.empty_like(x)
    buffers = _MINE.buffers
    for key, storage in reversed(buffers.items()):
        # One use is ours. Another process that shares the memory is not counted.
        unused = storage.nbytes() == size and torch._C._storage_Use_Count(storage._cdata) == 1
        if unused and not storage.is_shared():
            buffers.move_to_end(key)
            return x.new_empty(0).set_(storage, 0, x.shape, x.stride())
    made = torch.empty_like(x)
    storage = made.untyped_storage()
    buffers[id(storage)] = storage
    if len(buffers) > _MOST:
        buffers.popitem(last=False)
    return made
