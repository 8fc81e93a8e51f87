"""Quantizers written a second time, slowly and literally, in numpy and plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


def groups(shape: Sequence[int], keep: Sequence[int]) -> Iterator[tuple[int | slice, ...]]:
    """The index of every range group: one for each combination of the kept dims."""
    kept = {dim % len(shape) for dim in keep} if shape else set()
    choices = [range(size) if dim in kept else (slice(None),) for dim, size in enumerate(shape)]
    yield from itertools.product(*choices)


def affine(x: Array, bits: int) -> Array:
    """One group, in the dtype of `x`: subtract, divide, clamp, round, multiply, add."""
    kind = x.dtype.type
    low, levels = x.min(), kind(2**bits - 1)
    scale = max(kind((x.max() - low) / levels), kind(1e-8))
    result: Array = np.rint(np.clip((x - low) / scale, kind(0), levels)) * scale + low
    return result


def affine_integer(x: Array, bits: int) -> Array:
    """One group: the range is stretched to hold zero, which falls on a whole code."""
    kind = x.dtype.type
    low, high, levels = min(x.min(), kind(0)), max(x.max(), kind(0)), kind(2**bits - 1)
    scale = max(kind((high - low) / levels), kind(1e-8))
    offset = min(np.rint(-low / scale), levels)
    result: Array = np.rint(np.clip(x / scale, -offset, levels - offset)) * scale
    return result


def symmetric(x: Array, bits: int) -> Array:
    """One group: codes from -(2**(bits-1) - 1) to its opposite; at one bit the two values -a and a."""
    kind = x.dtype.type
    amplitude = np.abs(x).max()
    reach, half = kind(2 ** (bits - 1) - 1), kind(0.5 if bits == 1 else 0)
    scale = kind(amplitude / (reach + half))
    divisor = max(scale, np.finfo(x.dtype).tiny)
    result: Array = (np.rint(np.clip(x / divisor - half, -reach - 2 * half, reach)) + half) * scale
    return result


UNIFORM = {"affine": affine, "affine_integer": affine_integer, "symmetric": symmetric}


def by_group(x: Tensor, bits: int, keep: Sequence[int], scheme: str) -> Tensor:
    """Loop over the groups, one at a time, in numpy."""
    values = x.numpy()
    result = np.empty_like(values)
    for index in groups(values.shape, keep):
        result[index] = UNIFORM[scheme](values[index], bits)
    return torch.from_numpy(result)


def float_values(exponent: int, mantissa: int, specials: str) -> list[float]:
    """Every finite value of a format with a sign, in increasing order, decoded code by code.

    The position of a value counted from zero is its code without the sign: "ties to even" means to even positions.
    """
    bias = 2 ** (exponent - 1) - 1
    magnitudes = []
    for field, fraction in itertools.product(range(2**exponent), range(2**mantissa)):
        last = field == 2**exponent - 1
        if specials == "ieee" and last and exponent > 1:
            continue
        if specials == "fn" and last and fraction == 2**mantissa - 1 and exponent + mantissa > 1:
            continue
        lead = math.ldexp(fraction, -mantissa) + (field > 0)
        magnitudes.append(math.ldexp(lead, max(field, 1) - bias))
    return magnitudes


def to_float_format(x: float, magnitudes: Sequence[float], mantissa: int) -> float:
    """The nearest value by search, saturating. Ties to the even code; between powers of two to the larger one."""
    size = abs(x)
    if size >= magnitudes[-1]:
        return math.copysign(magnitudes[-1], x)
    above = next(code for code, value in enumerate(magnitudes) if value > size)
    low, high = magnitudes[above - 1], magnitudes[above]
    if size - low != high - size:
        chosen = low if size - low < high - size else high
    elif mantissa or low == 0:
        chosen = low if (above - 1) % 2 == 0 else high
    else:
        chosen = high
    return math.copysign(chosen, x)


def mx_block(x: Sequence[float], exponent: int, mantissa: int, specials: str) -> list[float]:
    """One block by the OCP MX rule: shared exponent = floor(log2(largest)) - emax, elements saturate."""
    magnitudes = float_values(exponent, mantissa, specials)
    emax = math.frexp(magnitudes[-1])[1] - 1
    largest = max(abs(value) for value in x)
    if largest == 0:
        return list(x)
    scale = math.ldexp(1.0, math.frexp(largest)[1] - 1 - emax)
    return [to_float_format(value / scale, magnitudes, mantissa) * scale for value in x]
