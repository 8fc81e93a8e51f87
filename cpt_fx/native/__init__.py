"""Kernels in C++ for eager execution on CPU. Optional: torch operators compute the same bits.

They are built on first use, never at import, into a private folder of the user's cache (`building.py`); without a
compiler, or with `CPT_FX_NATIVE=0`, torch operators run instead, and `status()` says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from cpt_fx.native import building

_LOG = logging.getLogger("cpt_fx")
_switched_off = False
_PLAIN = (Tensor, torch.nn.Parameter)
_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int, "d": ctypes.c_double}
_FUNCTIONS = {
    "simulate.cpp": {"cpt_fx_quantize": "ppp lll ii p pi ppp d p i"},
    "integer_products.cpp": {"cpt_fx_product": "ppp ll lll pp ppp i i"},
    "integer_convolutions.cpp": {"cpt_fx_convolve": "ppp l pppp l p ll ppp i"},
    "integer_filters.cpp": {"cpt_fx_filters": "ppp ll ppp l pp i"},
}
"""The argument types of each function: pointers (`p`), integers of 64 bits (`l`) or of C's own size (`i`), doubles
(`d`). All return an int or nothing."""


def load(name: str) -> ctypes.CDLL | None:
    """Return the library built from a source file of this folder; None if kernels are off or cannot be built."""
    return None if _switched_off else _built(name)


def status() -> str:
    """Return in a few words whether kernels are used, and if not, why."""
    if _switched_off:
        return "switched off"
    if _built("simulate.cpp") is not None:
        return "used"
    return f"cannot be used: {_failures[-1]}" if _failures else "switched off by CPT_FX_NATIVE=0"


def kernels() -> str:
    """Return which kernels are used, and why no better ones."""
    return building.described() if (state := status()) == "used" else f"none, {state}"


@contextmanager
def disabled() -> Iterator[None]:
    """Run torch operators instead of kernels inside a `with` block."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


@cache
def _built(name: str) -> ctypes.CDLL | None:
    if os.environ.get("CPT_FX_NATIVE", "1") == "0":
        return None
    try:
        library = building.library(name)
        for function, arguments in _FUNCTIONS[name].items():
            getattr(library, function).argtypes = [_TYPES[letter] for letter in arguments.replace(" ", "")]
        return library
    except Exception as error:  # no compiler, an unsafe or read-only folder, an unsupported system
        _failures.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        _LOG.warning("native kernels cannot be used (%s): torch operators run instead, slower", _failures[-1])
        return None


_failures: list[str] = []


def reads(x: Tensor) -> bool:
    """Return whether kernels can read a tensor's memory: plain, in float32, on the CPU."""
    plain = x.dtype is torch.float32 and type(x) in _PLAIN and x.is_cpu
    return plain and not (x.is_neg() or x._is_zerotensor())


def address(x: Tensor | None) -> int | None:
    """Return the address of a tensor, or None for a null pointer."""
    return None if x is None else x.data_ptr()


def threads(count: int) -> int:
    """Return the number of threads for a kernel over so many elements, by torch's own rule for its operators."""
    return 1 if count < 32768 else torch.get_num_threads()
