"""Read the values of a tensor through NumPy, without a side effect on the tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


def array_of(tensor: Tensor) -> Array:
    """Return the values of a tensor as an array, which shares its memory where possible.

    `Tensor.numpy` would make that memory impossible to resize, but `fully_shard` frees gathered memory by resizing it.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()  # NumPy reads the memory only
    array: Array = np.from_dlpack(plain.clone() if plain._is_zerotensor() else plain)
    return array
