"""Where kernels are built, cached and checked before they are loaded into this process.

A library is code, so it comes from a folder that nobody else can write to, and its name holds the hash of its content:
one that is truncated, or was replaced, is built again. It is built under a temporary name first, so that any number of
processes may do so at once, and may be killed meanwhile. Every instruction set has a library of its own, and what the
processor supports is detected each time: folders are copied between machines, and shared by them. The operating system
has to permit the registers of AMX, too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from cpt_fx.common.files import locked
from cpt_fx.common.resources import shipped

# No reordered sums and no fused multiply-add: results are equal to those of torch's operators.
FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-ffp-contract=off",
)
COMPILERS = ("g++", "c++", "clang++")
"""Tried in this order if CXX is not set."""
_THREADS = ("-Xpreprocessor", "-fopenmp", "-lomp") if sys.platform == "darwin" else ("-fopenmp",)
_SWITCHES = {
    "avx2": ["-mavx2"], "fma3": ["-mfma"], "avx512_f": ["-mavx512f", "-mprefer-vector-width=512"],
    "avx512_bw": ["-mavx512bw"], "avx512_dq": ["-mavx512dq"], "avx512_vl": ["-mavx512vl"],
    "avx512_vnni": ["-mavx512vnni"], "amx_tile": ["-mamx-tile"], "amx_int8": ["-mamx-int8"],
}  # fmt: skip
"""Compiler flags for each instruction set extension, by torch's name of it."""
_AVX2 = ("avx2", "fma3")
_AVX512 = (*_AVX2, "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")
_VNNI = (*_AVX512, "avx512_vnni")
SETS: dict[str, tuple[str, ...]] = {
    "plain": (), "avx2": _AVX2, "avx512": _AVX512, "avx512_vnni": _VNNI, "amx": (*_VNNI, "amx_tile", "amx_int8"),
}  # fmt: skip
"""The extensions that a library of each kind uses beyond the baseline of the architecture; best last."""
_ARCH_PRCTL, _GET_SUPPORTED, _REQUEST = 158, 0x1021, 0x1023
_TILE_CONFIGURATION, _TILE_DATA = 17, 18
"""Linux on x86-64: a system call, two of its commands, and the registers of AMX as its bits number them."""


@cache
def processor() -> dict[str, Any]:
    """Return the extensions that this process may use, by torch's names; `refused` says why tiles are not there."""
    has = dict(torch.cpu.get_capabilities())
    refused = _refusal_of_tiles() if has.get("amx_tile") and has.get("amx_int8") else ""
    return {**has, "amx_tile": False, "refused": refused} if refused else has


def _refusal_of_tiles() -> str:
    """Ask the system, once a process, for the registers of AMX; return why they must not be used."""
    if not sys.platform.startswith("linux"):
        return "tiles are used on Linux only"
    call, supported = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_uint64()
    # What the system enables (XCR0): a processor may have what a hypervisor or an old kernel keeps.
    call(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_GET_SUPPORTED), ctypes.byref(supported))
    if not supported.value >> _TILE_CONFIGURATION & supported.value >> _TILE_DATA & 1:
        return "the system has not enabled its registers"
    if call(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(_REQUEST), ctypes.c_long(_TILE_DATA)):
        return f"the system does not permit its registers: {os.strerror(ctypes.get_errno())}"
    return ""


def instructions(has: Mapping[str, Any], wanted: str = "") -> str:
    """Return the instruction set for a processor with these extensions: the best, or the wanted one if it has it."""
    runs = [name for name, needed in SETS.items() if all(has.get(instruction) for instruction in needed)]
    if not wanted:
        return runs[-1]
    if wanted not in runs:
        raise ValueError(f"CPT_FX_NATIVE={wanted}: this processor runs {', '.join(runs)} (0 switches kernels off)")
    return wanted


def wanted() -> str:
    """Return the instruction set that CPT_FX_NATIVE asks for; empty for the best."""
    named = os.environ.get("CPT_FX_NATIVE", "1")
    return "" if named == "1" else named


def described() -> str:
    """Return the instruction set in use, and why it is no better one."""
    has = processor()
    kind, best = instructions(has, wanted()), list(SETS)[-1]
    if kind == best:
        return kind
    if kind != instructions(has):
        return f"{kind}, as CPT_FX_NATIVE says"
    lacking = ", ".join(name for name in SETS[best] if not has.get(name))
    return f"{kind}, not {best}: {has.get('refused') or f'this processor has no {lacking}'}"


def library(name: str) -> ctypes.CDLL:
    """Return the library of a source file of this folder; build it if it is missing or damaged."""
    chosen = instructions(processor(), wanted())
    source = _text(name)
    flags = (*FLAGS, *chain.from_iterable(_SWITCHES[instruction] for instruction in SETS[chosen]))
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", ()) else ""
    key = hashlib.sha256(repr((source, flags, sys.platform, platform.machine(), libc)).encode()).hexdigest()[:16]
    folder, stem = _folder(), f"{Path(name).stem}-{chosen}-{key}"
    found = _found(folder, stem)
    if found is None:
        with locked(folder / "lock") as alone:
            for left in folder.glob("building-*") if alone else ():  # by processes that were killed
                shutil.rmtree(left, ignore_errors=True)
            found = _found(folder, stem) or _build(source, flags, folder, stem)
    return ctypes.CDLL(str(found))


def _text(name: str) -> str:
    """Return a source file with its headers inlined."""
    text = (shipped("native") / name).read_text(encoding="utf-8")
    return re.sub(r'#include "(\w+\.h)"', lambda header: _text(header[1]), text)


def _found(folder: Path, stem: str) -> Path | None:
    """Return the library whose content has the hash in its name."""
    for path in folder.glob(f"{stem}-*.so"):
        with suppress(FileNotFoundError):  # another process has removed it
            state = path.lstat()
            if stat.S_ISREG(state.st_mode) and not _open_to_others(state) and path.stem == f"{stem}-{_digest(path)}":
                return path
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _build(source: str, flags: tuple[str, ...], folder: Path, stem: str) -> Path:
    """Compile in a temporary folder, and move the result into place; remove damaged libraries."""
    for bad in folder.glob(f"{stem}-*.so"):
        bad.unlink()
    named = os.environ.get("CXX")
    compiler = named or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise FileNotFoundError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path, and CXX is not set")
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder) as place:
        made = Path(place) / "made.so"
        for threads in (_THREADS, ()):
            command = [*compiler.split(), "-xc++", "-", *flags, *threads, "-o", str(made)]
            done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=600, cwd=place)
            if done.returncode == 0:
                break
        else:
            raise RuntimeError(f"{compiler}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        made.chmod(0o700)
        return made.rename(folder / f"{stem}-{_digest(made)}.so")


def cache_folder() -> Path:
    """Return the folder of everything that this package caches, for all processes of a user."""
    folder = os.environ.get("CPT_FX_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "cpt_fx"


def _folder() -> Path:
    """Return the folder of libraries, which is made if it is missing; refuse one that another user can change."""
    if not hasattr(os, "geteuid"):
        raise OSError("this system does not tell who owns a folder that code is loaded from")
    folder = cache_folder() / "native"
    for place in (*reversed(folder.parents), folder):
        place.mkdir(mode=0o700, exist_ok=True)
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        state = place.stat()
        if _open_to_others(state) if place == folder else _replaceable(state):
            raise PermissionError(
                f"{place} belongs to user {state.st_uid} and has mode {stat.S_IMODE(state.st_mode):o}: code that is "
                f"loaded from {folder} could be another's. Make it yours and writable by you alone, or name another "
                "folder in CPT_FX_CACHE"
            )
    return folder


def _open_to_others(state: os.stat_result) -> bool:
    return state.st_uid != os.geteuid() or bool(state.st_mode & 0o022)


def _replaceable(state: os.stat_result) -> bool:
    """Return whether another user could replace a folder inside. The user's own group is trusted."""
    if state.st_uid not in (0, os.geteuid()):
        return True
    others = stat.S_IWOTH | (stat.S_IWGRP if state.st_gid not in (0, os.getegid()) else 0)
    return bool(state.st_mode & others) and not state.st_mode & stat.S_ISVTX
