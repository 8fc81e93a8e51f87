"""The noise of stochastic rounding: a hash of a seed and of an element's index, the same in every kind of execution.

torch's own generators give different numbers in eager code, in compiled code and in kernels of our own, and the one on
CPU draws element after element on one core. Here the generator draws only the seed, two numbers; torch operators,
compiled code, `native/simulate.cpp` and exported graphs all compute the noise of an element from the seed.
So the hash consists of sums and products that do not overflow an integer of 64 bits, and of divisions by powers of two:
signed overflow is undefined behaviour for compilers, and not every runtime has bitwise operators. Products of a number
with itself do the mixing: without them the hash would be a linear function.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS, FOLD, DROPPED = 30, 15, 6
"""Of a hash: its bits, the shift that folds its upper half onto the lower one, and the low bits too regular to use."""
MASK = (1 << BITS) - 1
STEP = 0x2545F491
"""The increment from one index to the next: odd, and not near a simple fraction of the range of the hash."""
ROUNDS = 2
_UNIT = 2.0 ** (DROPPED - BITS)


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed, two numbers of 30 bits, from the generator that `torch.manual_seed` sets."""
    return torch.randint(0, 1 << BITS, (2,), dtype=torch.int32, device=device)


def uniform(seed: Tensor, like: Tensor) -> Tensor:
    """Return numbers in [0, 1), multiples of 2**-24, shaped like a tensor: number i depends on the seed and i alone."""
    count = like.numel()
    places = torch.arange(count, dtype=torch.int64, device=like.device).view(like.shape)
    if count > MASK:
        # Beyond 2**30 elements the numbers repeat.
        places = places & MASK
    start, factor = (seed.to(torch.int64) & MASK).unbind()
    factor = (factor + (factor >> FOLD)) * 2 + 1
    mixed = (places * STEP + start).bitwise_and_(MASK)
    for _ in range(ROUNDS):
        # (mixed + (mixed >> FOLD)) * (2 * mixed + factor) & MASK, with one temporary: memory traffic takes the time.
        folded = (mixed >> FOLD).add_(mixed)
        mixed.mul_(2).add_(factor).mul_(folded).bitwise_and_(MASK)
    return mixed.bitwise_right_shift_(DROPPED).to(like.dtype).mul_(_UNIT)
