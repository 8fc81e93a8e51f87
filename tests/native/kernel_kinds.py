"""Every kind of kernel that the processor at hand runs, one at a time, and tiles of AMX that are emulated."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpt_fx import native
from cpt_fx.native import building

_HAS = building.processor()
KINDS = ["0", *(name for name, needed in building.SETS.items() if all(map(_HAS.get, needed)))]
"""What CPT_FX_NATIVE can be set to here; "0" are torch's operators, and the last one is what runs by default."""
EMULATED = ["emulated", "emulated_plain"]
"""Kernels for tiles that `emulated_tiles.h` stands in for: with the other extensions at hand, and without any."""
NO_EMULATION = "" if platform.machine() in ("x86_64", "AMD64") else "tiles are emulated on x86-64"
_HEADER = Path(__file__).with_name("emulated_tiles.h")


@contextmanager
def kernels_of(kind: str) -> Iterator[None]:
    """Run kernels for some instruction set inside a `with` block; skip the test where none can be built."""
    if kind != "0" and native.status() != "used":
        pytest.skip(f"native kernels: {native.status()}")
    with pytest.MonkeyPatch.context() as patch:
        if kind in EMULATED:
            _emulate(patch, kind)
        patch.setenv("CPT_FX_NATIVE", kind)
        _forget()
        try:
            assert native.status() == ("used" if kind != "0" else "switched off by CPT_FX_NATIVE=0")
            yield
        finally:
            patch.undo()
            _forget()


def _emulate(patch: pytest.MonkeyPatch, kind: str, *more: str) -> None:
    if NO_EMULATION:
        pytest.skip(NO_EMULATION)
    # The name of a library comes from its flags: the header's content is one of them.
    flags = ["-include", str(_HEADER), f"-DCPT_FX_HEADER={building._digest(_HEADER)}", *more]
    best = [name for name in KINDS if name not in ("0", "amx")][-1]
    others = building.SETS[best] if kind == "emulated" else ()
    patch.setitem(building._SWITCHES, "tiles", flags)
    patch.setitem(building.SETS, kind, (*others, "tiles"))
    patch.setattr(building, "processor", lambda: {**_HAS, "tiles": True})


def _forget() -> None:
    native._built.cache_clear()
    native._failures.clear()
