"""Kernels are loaded from a private folder, sound, for the instructions at hand, and without inductor."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cpt_fx import native
from cpt_fx.formats import Rounding, Scheme
from cpt_fx.integer import products
from cpt_fx.integer.codes import quantize_codes
from cpt_fx.native import building
from cpt_fx.quantizers.numerics import Grid
from cpt_fx.quantizers.ops import FAKE_QUANTIZE
from tests.native.kernel_kinds import KINDS, kernels_of

NAME = str(Path(__file__).with_name("kernel.cpp"))
pytestmark = pytest.mark.skipif(native.status() != "used", reason=f"native kernels: {native.status()}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kernels go in this test: not made yet."""
    monkeypatch.setenv("CPT_FX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CPT_FX_NATIVE", raising=False)
    return tmp_path / "cache" / "cpt_fx" / "native"


def works(library: ctypes.CDLL) -> bool:
    """Whether it counts."""
    return bool(library.cpt_fx_next(2) == 3)


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


# Whose folder it is


def test_what_is_made_is_private(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert works(building.library(NAME))
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in libraries(folder)] == [0o700]


def refused(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Nothing is loaded; the log and the status say why and what to do."""
    with pytest.raises(PermissionError, match=reason) as error:
        building.library(NAME)
    assert "name another folder in CPT_FX_CACHE" in str(error.value)
    with caplog.at_level(logging.WARNING, "cpt_fx"):
        assert native._built.__wrapped__(NAME) is None
    assert "native kernels cannot be used (PermissionError" in caplog.text
    assert "PermissionError" in native._failures.pop()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    refused(caplog, f"has mode {mode:o}")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_folder_that_others_may_replace_is_refused(
    folder: Path, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True, mode=0o700)
    above = folder.parents[depth - 1]
    before = above.stat().st_mode
    above.chmod(0o777)
    refused(caplog, re.escape(str(above)))
    above.chmod(0o1777)  # as /tmp has it: who owns a file may replace it, nobody else
    folder.chmod(0o700)
    assert works(building.library(NAME))
    above.chmod(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("what", ["folder", "parent", "through a link"])
def test_the_folder_of_another_user_is_refused(
    folder: Path, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(parents=True)
    theirs = tmp_path / "theirs" if what == "through a link" else folder
    theirs.mkdir()
    if what == "through a link":
        folder.symlink_to(theirs)
    os.chown(theirs.parent if what == "parent" else theirs, 12345, 12345)
    refused(caplog, "belongs to user 12345")


def hostile(path: Path, marker: Path) -> None:
    """Build a library that leaves a mark when it is loaded."""
    code = f'#include <cstdio>\n__attribute__((constructor)) static void ran() {{ std::fopen("{marker}", "w"); }}'
    compiler = next(filter(shutil.which, building.COMPILERS))
    subprocess.run([compiler, "-xc++", "-", "-shared", "-fPIC", "-o", str(path)], input=code, text=True, check=True)


def test_the_library_of_another_never_runs(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    building.library(NAME)
    (sound,) = libraries(folder)
    marker = tmp_path / "marker"
    hostile(tmp_path / "hostile.so", marker)
    foreign = folder / f"{sound.stem.rpartition('-')[0]}-{building._digest(tmp_path / 'hostile.so')}.so"
    # In a folder that is open its name may be right; in a closed one its content is not what a name says.
    sound.unlink()
    shutil.copy(tmp_path / "hostile.so", foreign)
    folder.chmod(0o777)
    refused(caplog, "has mode 777")
    folder.chmod(0o700)
    foreign.chmod(0o777)  # left from the time when the folder was open
    assert works(building.library(NAME))
    (sound,) = libraries(folder)
    sound.unlink()  # this process has loaded it
    shutil.copy(tmp_path / "hostile.so", sound)
    assert works(building.library(NAME))
    assert not marker.exists() and len(libraries(folder)) == 1


# What is in it


@pytest.mark.parametrize("damage", ["empty", "half", "one bit", "text", "another kind", "a link"])
def test_what_is_not_sound_is_built_again(folder: Path, damage: str, tmp_path: Path) -> None:
    building.library(NAME)
    (sound,) = libraries(folder)
    content = sound.read_bytes()
    middle = len(content) // 2
    bad = {
        "empty": b"", "half": content[:middle], "text": b"#!/bin/sh\n",
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "another kind": b"\x7fELF" + bytes(5000), "a link": content,
    }[damage]  # fmt: skip
    sound.unlink()
    if damage == "a link":
        (tmp_path / "elsewhere.so").write_bytes(content)
        sound.symlink_to(tmp_path / "elsewhere.so")
    else:
        sound.write_bytes(bad)
    assert works(building.library(NAME))
    (again,) = libraries(folder)
    assert not again.is_symlink() and again.stem.endswith(building._digest(again))


def loads(seconds: float, done: Any) -> None:
    time.sleep(seconds)
    done.put(works(building.library(NAME)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("damaged", [False, True])
def test_many_processes_at_once(folder: Path, damaged: bool) -> None:
    if damaged:
        building.library(NAME)
        (sound,) = libraries(folder)
        sound.unlink()  # this process has loaded it
        sound.write_bytes(b"")
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    processes = [context.Process(target=loads, args=(0.0, done)) for _ in range(8)]
    for process in processes:
        process.start()
    assert [done.get(timeout=120) for _ in processes] == [True] * 8
    for process in processes:
        process.join()
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".so"]  # the lock, and one library


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_may_be_killed_at_any_moment(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    start = time.perf_counter()
    building.library(NAME)
    whole = time.perf_counter() - start
    for part in range(12):
        shutil.rmtree(folder)
        process = context.Process(target=loads, args=(0.0, done))
        process.start()
        time.sleep(whole * part / 10)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert all(path.stem.endswith(building._digest(path)) for path in libraries(folder))
        assert works(building.library(NAME))
        left = [path.name for path in folder.iterdir() if path.name.startswith("building-")]
        assert len(libraries(folder)) == 1
    # What killed ones left goes with the next build.
    libraries(folder)[0].unlink()
    building.library(NAME)
    assert not left or not list(folder.glob("building-*"))


@pytest.mark.slow
def test_loading_is_quick_and_imports_no_compiler(folder: Path) -> None:
    names = sorted(path.name for path in Path(building.__file__).parent.glob("*.cpp"))
    for name in names:
        building.library(name)
    code = f"""
import sys, time
import torch
start = time.process_time()
from cpt_fx import native
assert all(native.load(name) for name in {names}), native.status()
print(time.process_time() - start)
assert not any("inductor" in name or "dynamo" in name for name in set(sys.modules) - before), "a compiler"
""".replace("start = time", "before = set(sys.modules)\nstart = time", 1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.1


def test_without_a_compiler_the_log_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(building, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CXX", raising=False)
    assert native._built.__wrapped__(NAME) is None
    assert "no C++ compiler: none of no-such-compiler is on the path, and CXX is not set" in caplog.text
    native._failures.pop()


# Instruction sets

OLD = {"sse4_2": True, "avx": True}
HASWELL = {**OLD, "avx2": True, "fma3": True, "bmi2": True}
SKYLAKE_X = {**HASWELL, "avx512_f": True, "avx512_bw": True, "avx512_dq": True, "avx512_vl": True, "avx512_cd": True}
PROCESSORS: dict[str, tuple[dict[str, Any], str]] = {
    "x86-64 without AVX": ({"sse2": True}, "plain"),
    "Sandy Bridge": (OLD, "plain"),
    "AVX2 without FMA": ({**OLD, "avx2": True, "fma3": False}, "plain"),
    "Haswell, Zen 2": (HASWELL, "avx2"),
    "Knights Landing": ({**HASWELL, "avx512_f": True, "avx512_cd": True}, "avx2"),
    "Alder Lake": ({**HASWELL, "avx_vnni": True, "avx512_f": False}, "avx2"),
    "VNNI without AVX-512": ({**HASWELL, "avx512_vnni": True}, "avx2"),
    "Skylake-X": (SKYLAKE_X, "avx512"),
    "Ice Lake, Zen 4": ({**SKYLAKE_X, "avx512_vnni": True, "avx512_vbmi": True}, "avx512_vnni"),
    "Sapphire Rapids": ({**SKYLAKE_X, "avx512_vnni": True, "amx_tile": True, "amx_int8": True}, "amx"),
    "its tiles refused": ({**SKYLAKE_X, "avx512_vnni": True, "amx_tile": False, "amx_int8": True}, "avx512_vnni"),
    "ARM": ({"architecture": "aarch64", "neon": True, "dotprod": True}, "plain"),
    "unknown": ({}, "plain"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_gets_what_it_can_run(name: str) -> None:
    has, expected = PROCESSORS[name]
    assert building.instructions(has) == expected
    for kind, needed in building.SETS.items():
        if all(map(has.get, needed)):
            assert building.instructions(has, kind) == kind
        else:
            with pytest.raises(ValueError, match=f"CPT_FX_NATIVE={kind}: this processor runs plain"):
                building.instructions(has, kind)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="CPT_FX_NATIVE=yes: this processor runs plain, avx2 "):
        building.instructions(HASWELL, "yes")


def test_every_kind_gives_the_same_bits() -> None:
    """Those of torch's operators, rounding at random included."""

    def results() -> list[torch.Tensor]:
        torch.manual_seed(7)
        found = []
        grid = Grid(scheme=Scheme.SYMMETRIC, rounding=Rounding.STOCHASTIC)
        for shape in ((3, 5), (4, 7, 65), (2, 1003)):
            x = torch.randn(shape) * 3 + 0.5
            for scheme in ("affine", "affine_integer", "symmetric"):
                for rounding in ("nearest", "stochastic"):
                    for bits in (1, 8):
                        how = {"scheme": scheme, "rounding": rounding}
                        found.append(FAKE_QUANTIZE(x, torch.tensor(bits), **how))
                        found.append(FAKE_QUANTIZE(x, torch.tensor(bits), keep=[0], **how))
            one, two = (quantize_codes(x.flatten(0, -2), 8, grid) for _ in range(2))
            found += [one.values, one.scale, products.linear_forward(one, two), products.linear_grad_weight(one, two)]
            found.append(products.bias_grad(one))
        return found

    found = []
    for kind in KINDS:
        with kernels_of(kind):
            found.append(results())
    for kind, ours in zip(KINDS, found, strict=True):
        assert all(map(torch.equal, ours, found[0])), kind


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump to read instructions with")
@pytest.mark.parametrize("kind", KINDS[1:])
def test_objects_hold_no_other_instructions(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cpu.get_capabilities().get("architecture") != "x86_64":
        pytest.skip("these are instructions of x86-64")
    monkeypatch.setenv("CPT_FX_NATIVE", kind)
    for name in ("integer_products.cpp", "simulate.cpp"):
        building.library(name)
    assert len(libraries(folder)) == 2 and all(f"-{kind}-" in path.name for path in libraries(folder))
    read = subprocess.run(["objdump", "-d", *map(str, libraries(folder))], capture_output=True, text=True, check=True)
    found = {word for word in ("%ymm", "%zmm", "vpdpbusd", "tdpbssd") if word in read.stdout}
    assert found == {
        "plain": set(), "avx2": {"%ymm"}, "avx512": {"%ymm", "%zmm"}, "avx512_vnni": {"%ymm", "%zmm", "vpdpbusd"},
        "amx": {"%ymm", "%zmm", "tdpbssd"},
    }[kind]  # fmt: skip
