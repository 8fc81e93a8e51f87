"""Every kind of kernel that the processor at hand runs, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cpt_fx import native
from cpt_fx.native import building

_HAS = torch.cpu.get_capabilities()
KINDS = ["0", *(name for name, needed in building.SETS.items() if all(map(_HAS.get, needed)))]
"""What CPT_FX_NATIVE can be set to here; "0" are torch's operators, and the last one is what runs by default."""


@contextmanager
def kernels_of(kind: str) -> Iterator[None]:
    """Run kernels for some instruction set inside a `with` block; skip the test where none can be built."""
    if kind != "0" and native.status() != "used":
        pytest.skip(f"native kernels: {native.status()}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPT_FX_NATIVE", kind)
        _forget()
        try:
            assert native.status() == ("used" if kind != "0" else "switched off by CPT_FX_NATIVE=0")
            yield
        finally:
            patch.undo()
            _forget()


def _forget() -> None:
    native._built.cache_clear()
    native._failures.clear()
