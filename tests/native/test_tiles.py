"""Kernels on tiles of AMX give the bits of the others. The instructions are emulated: see `emulated_tiles.h`."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cpt_fx import native
from cpt_fx.integer import kernels
from cpt_fx.integer.codes import Codes
from cpt_fx.integer.kernels import LONGEST_SUM, Geometry
from cpt_fx.native import building
from tests.integer.fuzz_convolutions import drawn
from tests.native.kernel_kinds import EMULATED, KINDS, NO_EMULATION, kernels_of

pytestmark = [
    pytest.mark.skipif(native.status() != "used", reason=f"native kernels: {native.status()}"),
    pytest.mark.skipif(bool(NO_EMULATION), reason=NO_EMULATION),
]
Libraries = dict[str, ctypes.CDLL | None]
NAMES = [name for name in native._FUNCTIONS if name.startswith("integer")]


def loaded(kind: str) -> Libraries:
    with kernels_of(kind):
        return {name: native.load(name) for name in NAMES}


@pytest.fixture(scope="module")
def every() -> dict[str, Libraries]:
    """The libraries of every kind: on tiles, and those that they are compared with."""
    return {kind: loaded(kind) for kind in (*EMULATED, *KINDS[1:])}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def some_codes(*shape: int, seed: int) -> Tensor:
    """All codes, but sometimes only the largest: their sums are the largest too."""
    generator = torch.Generator().manual_seed(seed)
    if seed % 7 == 0:
        return torch.full(shape, 127 - 254 * (seed % 2), dtype=torch.int8)
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "part":
        return torch.cat((x, x), -1)[..., : x.shape[-1]]
    return x


def a_size(chance: random.Random) -> int:
    """Around the sizes of tiles and of pairs of them, more often than others."""
    return max(1, chance.choice((1, 16, 32, 64, 96)) + chance.choice((-1, 0, 0, 1, 2, chance.randrange(40))))


def a_matrix_product(chance: random.Random, seed: int) -> Callable[[], list[Tensor | None]]:
    rows, inner, columns = (a_size(chance) for _ in range(3))
    if chance.random() < 0.05:
        inner = chance.choice((4095, 4096, 4097, 8200, 9000))
    batch = chance.choice(((), (), (2,), (5,), (2, 3), (1, 3)))
    ours, theirs = batch, batch if chance.random() < 0.7 else batch[1:]
    layouts = [chance.choice(("rows", "columns", "part")) for _ in range(2)]
    a = laid_out(some_codes(*ours, rows, inner, seed=seed), layouts[0])
    b = laid_out(some_codes(*theirs, inner, columns, seed=seed + 1), layouts[1])
    scales = (torch.tensor(0.03), torch.tensor(0.7))
    bias = torch.randn(columns, generator=torch.Generator().manual_seed(seed)) if chance.random() < 0.5 else None
    return lambda: [kernels.product(a, b, None), kernels.product(a, b, scales, bias)]


def a_convolution(chance: random.Random, seed: int) -> Callable[[], list[Tensor | None]]:
    shape = drawn(chance)
    # In one dim, as a convolution of images of one row.
    numbers = zip((1, 1, 1, 0, 1), shape[3:8], strict=True)
    size, kernel, *place = ((fill, *of_dims)[-2:] for fill, of_dims in numbers)
    geometry = Geometry(*place)
    channels = shape.channels if chance.random() < 0.6 else chance.choice((16, 33, 64, 70, 128))
    filters = shape.filters if chance.random() < 0.6 else chance.choice((16, 17, 32, 45))
    scale = torch.tensor(0.03)
    x = Codes(some_codes(shape.images, channels, *size, seed=seed), scale)
    w = Codes(some_codes(filters, channels, *kernel, seed=seed + 1), scale)
    out = geometry.output_size(size, kernel)
    g = Codes(some_codes(shape.images, filters, *out, seed=seed + 2), scale)
    bias = torch.randn(filters, generator=torch.Generator().manual_seed(seed)) if shape.bias else None
    return lambda: [
        kernels.convolution(x, w, bias, out, geometry),
        kernels.convolution(g, w, None, size, geometry, turned=True),
        kernels.filters(g, x, kernel, geometry),
    ]


def products_of(*factors: tuple[Tensor, Tensor]) -> list[Tensor | None]:
    return [kernels.product(a, b, None) for a, b in factors]


def filters_of(g: Codes, x: Codes) -> list[Tensor | None]:
    return [kernels.filters(g, x, (1, 1), Geometry())]


def compare(every: dict[str, Libraries], run: Callable[[], list[Tensor | None]], what: object) -> None:
    expected: list[Tensor | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "threads", lambda count: torch.get_num_threads())  # however small
        for kind in reversed(every):  # VNNI first, or whatever is the best without tiles
            patch.setattr(native, "load", every[kind].get)
            found = run()
            assert all(part is not None for part in found)
            expected = expected or found
            assert all(map(torch.equal, found, expected)), (kind, what)  # type: ignore[arg-type]
    held = {kind: every[kind][NAMES[0]].cpt_fx_held_tiles() for kind in EMULATED}  # type: ignore[union-attr]
    assert not any(held.values()), held


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.long)])
def test_any_shape(count: int, every: dict[str, Libraries], threads: Callable[[int], None]) -> None:
    chance = random.Random(count)
    for seed in range(count):
        threads(chance.choice((1,) * 14 + (2, 3)))  # few on several: they wait long for each other on busy machines
        make = chance.choice((a_matrix_product, a_convolution))
        compare(every, make(chance, seed), (make.__name__, seed))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_the_longest_sum(every: dict[str, Libraries], layout: str) -> None:
    a, b = (torch.full(shape, 127, dtype=torch.int8) for shape in ((3, LONGEST_SUM), (LONGEST_SUM, 2)))
    compare(every, lambda: [kernels.product(laid_out(a, layout), laid_out(-b, layout), None)], layout)
    with kernels_of("emulated"):
        assert kernels.product(a, -b, None).eq(-127 * 127 * LONGEST_SUM).all()  # type: ignore[union-attr]


def test_large_products_on_many_threads(every: dict[str, Libraries], threads: Callable[[int], None]) -> None:
    for count in (1, 3):
        threads(count)
        a, b = some_codes(333, 300, seed=1), some_codes(300, 270, seed=2)
        few, many = some_codes(5, 3, 197, 64, seed=3), some_codes(5, 3, 64, 197, seed=4)
        turned = b.mT.contiguous().mT
        compare(every, partial(products_of, (a, b), (a, turned), (few, many)), count)
        # More places than are summed at once, and more images than are laid out at once.
        g, x = (Codes(some_codes(8, channels, 70, 70, seed=5), torch.tensor(0.1)) for channels in (60, 20))
        compare(every, partial(filters_of, g, x), count)


ALONE = """
import ctypes, mmap, sys
import torch
from cpt_fx.integer import kernels
from tests.native import kernel_kinds
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def at_the_end(x):
    # A copy whose last byte is the last one before memory that nobody may read.
    size = -(-x.numel() // 4096) * 4096
    place = mmap.mmap(-1, size + 4096)
    start = ctypes.addressof(ctypes.c_char.from_buffer(place))
    assert libc.mprotect(start + size, 4096, 0) == 0
    memory = torch.frombuffer(place, dtype=torch.int8, count=x.numel(), offset=size - x.numel())
    return memory.copy_(x.flatten()).view(x.shape)


def run(kind, sizes):
    with kernel_kinds.kernels_of(kind):
        for rows, inner, columns in sizes:
            a, b = torch.ones(rows, inner, dtype=torch.int8), torch.ones(columns, inner, dtype=torch.int8)
            for turned in (a, a.t()):
                for other in (b, b.t()):
                    left = at_the_end(turned.contiguous())
                    right = at_the_end(other.contiguous())
                    left, right = left if turned is a else left.t(), right.t() if other is b else right
                    assert kernels.product(left, right, None).eq(inner).all()
"""


def alone(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ALONE + code], capture_output=True, text=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are protected as Linux does it")
def test_nothing_is_read_behind_an_operand() -> None:
    done = alone(
        f"for kind in {EMULATED}: run(kind, [(32, 64, 32), (33, 65, 31), (64, 100, 16), (7, 3, 5), (40, 1, 9)])"
    )
    assert done.returncode == 0, done.stderr


def test_tiles_without_a_configuration_are_an_end() -> None:
    """What the processor would do, too: oneDNN releases what we might have left from an earlier call."""
    done = alone("""
emulate = kernel_kinds._emulate
kernel_kinds._emulate = lambda patch, kind: emulate(patch, kind, "-DCPT_FX_FORGET_CONFIGURATION")
run("emulated", [(1, 1, 1)])
""")
    assert done.returncode < 0 and "tiles: used without a configuration" in done.stderr


EMULATION = """
#include <csignal>
#include <sys/wait.h>
#include <unistd.h>
alignas(64) struct {
  uint8_t palette = 1, start = 0, zero[14] = {};
  uint16_t bytes[16] = {8, 12, 8, 12};
  uint8_t rows[16] = {3, 3, 3, 2};
} shapes;
template <typename F> bool ends(F run) {  // in a process of its own
  std::fflush(nullptr);
  const int child = fork();
  if (!child) { std::freopen("/dev/null", "w", stderr); run(); _exit(0); }
  int status;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}
int main() {
  if (!ends([&] { _tile_zero(0); })) return 1;
  if (!ends([&] { shapes.palette = 2; _tile_loadconfig(&shapes); })) return 2;
  if (!ends([&] { shapes.rows[0] = 17; _tile_loadconfig(&shapes); })) return 3;
  if (!ends([&] { shapes.zero[3] = 1; _tile_loadconfig(&shapes); })) return 4;
  _tile_loadconfig(&shapes);
  if (!ends([&] { _tile_zero(4); })) return 5;
  if (!ends([&] { _tile_dpbssd(0, 1, 1); }) || !ends([&] { _tile_dpbssd(0, 2, 1); })) return 6;
  if (!ends([&] { _tile_dpbssd(0, 3, 2); })) return 6;
  // 3 x 12 codes times 3 groups of 2 columns, from lines that are further apart than they are long.
  int8_t left[3][20], right[3][10];
  int32_t sums[4][5], start[3][2] = {{5, -5}, {7, -7}, {9, -9}};
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 20; ++j) left[i][j] = static_cast<int8_t>(7 * j + 50 * i - 128);
  for (int i = 0; i < 3; ++i)
    for (int j = 0; j < 10; ++j) right[i][j] = static_cast<int8_t>(11 * j + 40 * i - 100);
  for (auto& row : sums) for (int& sum : row) sum = 77;
  _tile_loadd(0, start, 8);
  _tile_loadd(1, left, 20);
  _tile_loadd(2, right, 10);
  _tile_dpbssd(0, 1, 2);
  _tile_stored(0, sums, 20);
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 5; ++j) {
      int expected = i < 3 && j < 2 ? start[i][j] : 77;
      if (i < 3 && j < 2)
        for (int k = 0; k < 12; ++k) expected += left[i][k] * right[k / 4][4 * j + k % 4];
      if (sums[i][j] != expected) return 7;
    }
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 64; ++j)
      if ((i >= 3 || j >= 8) && emulated::state.tiles[0].data[i][j]) return 8;
  _tile_release();
  return ends([&] { _tile_zero(0); }) ? 0 : 9;
}
"""


def test_the_emulation_faults_where_the_processor_does(tmp_path: Path) -> None:
    header, made = Path(__file__).with_name("emulated_tiles.h"), tmp_path / "made"
    compiler = next(filter(shutil.which, building.COMPILERS))
    command = [compiler, "-std=c++17", "-include", str(header), "-xc++", "-", "-o", str(made)]
    subprocess.run(command, input=EMULATION, text=True, check=True, capture_output=True)
    assert subprocess.run([made]).returncode == 0


# The real object, and the choice


TILES = {"tdpbssd", "tileloadd", "tilestored", "ldtilecfg", "tilerelease"}


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump to read instructions with")
def test_the_object_for_tiles_is_built_and_has_their_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = {name: True for needed in building.SETS.values() for name in needed}
    monkeypatch.setattr(building, "processor", lambda: has)
    monkeypatch.setenv("CPT_FX_CACHE", str(tmp_path))
    monkeypatch.delenv("CPT_FX_NATIVE", raising=False)
    for name in NAMES:
        building.library(name)
        (path,) = (tmp_path / "cpt_fx" / "native").glob(f"{Path(name).stem}-amx-*.so")
        text = subprocess.run(["objdump", "-d", str(path)], capture_output=True, text=True, check=True).stdout
        assert {word for word in TILES if word in text} == TILES, name


class Kernel:
    """A system that answers for its registers."""

    def __init__(self, supported: int, refusal: int) -> None:
        self.supported, self.refusal, self.asked = supported, refusal, 0

    def syscall(self, number: Any, command: Any, argument: Any) -> int:
        assert number.value == 158
        if command.value == 0x1021:
            argument._obj.value = self.supported
            return 0
        assert (command.value, argument.value) == (0x1023, 18)
        self.asked += 1
        ctypes.set_errno(self.refusal)
        return -1 if self.refusal else 0


@pytest.mark.parametrize(
    ("supported", "refusal", "expected"),
    [
        (0x602E7, 0, "amx"),
        (0x2E7, 0, "avx512_vnni, not amx: the system has not enabled its registers"),
        (0x202E7, 0, "avx512_vnni, not amx: the system has not enabled its registers"),
        (0x402E7, 0, "avx512_vnni, not amx: the system has not enabled its registers"),
        (0x602E7, 1, "avx512_vnni, not amx: the system does not permit its registers: Operation not permitted"),
    ],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="others are never asked")
def test_the_system_is_asked_once(monkeypatch: pytest.MonkeyPatch, supported: int, refusal: int, expected: str) -> None:
    system = Kernel(supported, refusal)
    has = {name: True for needed in building.SETS.values() for name in needed}
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: system)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.delenv("CPT_FX_NATIVE", raising=False)
    building.processor.cache_clear()
    try:
        assert [building.described() for _ in range(3)] == [expected] * 3
        assert system.asked == (supported == 0x602E7)
    finally:
        building.processor.cache_clear()


def test_the_choice_here_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CPT_FX_NATIVE", raising=False)
    native._built.cache_clear()
    best, said = KINDS[-1], native.kernels()
    assert said == best if best == "amx" else said.startswith(f"{best}, not amx: ")
    if not torch.cpu.get_capabilities().get("amx_tile"):
        assert "this processor has no" in said and "amx_tile, amx_int8" in said
    with kernels_of("plain"):
        assert native.kernels() == ("plain, as CPT_FX_NATIVE says" if best != "plain" else said)
    with native.disabled():
        assert native.kernels() == "none, switched off"
