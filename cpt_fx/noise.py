"""The noise of stochastic rounding: a hash of a seed and of an element's place, the same in every kind of execution.

torch's own generators give different numbers in eager code, in compiled code and in kernels of our own, and the one on
CPU draws element after element on one core. Here the generator is asked for two numbers only, the seed; whoever rounds
an element computes its noise from there: torch operators, code that a compiler makes of them, or `native/noise.h`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Multipliers of published mixers, as signed numbers, since torch multiplies int32 with wrapping.
GOLDEN, FIRST, SECOND = 0x9E3779B9 - (1 << 32), 0x7FEB352D, 0x846CA68B - (1 << 32)
_UNIT = 2.0**-24


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed, two numbers of 32 bits, from the generator that `torch.manual_seed` sets."""
    return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=device)


def uniform(seed: Tensor, like: Tensor) -> Tensor:
    """Return numbers in [0, 1), multiples of 2**-24, shaped like a tensor: number i belongs to its element i."""
    count = like.numel()
    # Beyond 2**32 elements the numbers repeat; no index of 32 bits can tell such elements apart.
    places = torch.arange(count, dtype=torch.int64 if count >= 1 << 31 else torch.int32, device=like.device)
    mixed = places.to(torch.int32).view(like.shape) * GOLDEN + seed.select(0, 0)
    mixed = (mixed ^ (mixed >> 16)) * FIRST ^ seed.select(0, 1)
    mixed = (mixed ^ (mixed >> 15)) * SECOND
    # The upper 24 bits, a signed number: every operation more is one for each element.
    return (mixed >> 8).to(like.dtype) * _UNIT + 0.5
