"""The numbers of a tensor as NumPy sees them, with nothing done to the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def array_of(tensor: Tensor) -> NDArray[Any]:
    """Return the numbers of a tensor, on its memory where that can be.

    `Tensor.numpy` would forbid to resize that memory for ever, which is how `fully_shard` frees what it has gathered.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()  # what NumPy reads is the memory alone
    array: NDArray[Any] = np.from_dlpack(plain.clone() if plain._is_zerotensor() else plain)
    return array
