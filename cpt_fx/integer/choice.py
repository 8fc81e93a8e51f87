"""Decide where integer products are faster, by measurements cached on disk: small ones stay in floating point.

Both ways start from codes. On integers a product is one call, while floating point has to dequantize the codes first;
so integers win except for small sizes, where calls cost more than arithmetic, and where kernels are missing. The key of
a measurement is the kind, the sizes rounded to powers of two, and everything else that affects speed: threads, kernels,
processor, torch. CPU time is measured, since other programs take the rest; more often where both ways are close. What
was measured is forgotten after a month.

`CPT_FX_INTEGER=always` or `never` (or `chosen`, in a `with` block) decides without measuring.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from cpt_fx import native
from cpt_fx.common.files import locked, replace
from cpt_fx.common.torch_private import disable_current_modes
from cpt_fx.errors import check_choice
from cpt_fx.integer.codes import Codes
from cpt_fx.integer.kernels import Geometry
from cpt_fx.integer.products import PRODUCTS, Options
from cpt_fx.native.building import cache_folder, processor

_LOG = logging.getLogger("cpt_fx")
_RULES = ("measured", "always", "never")
_ROUNDS, _MORE = 5, 20
_CLOSE = 1.25
"""A ratio, or its inverse, that more rounds might still turn."""
_DAYS = 30
_DAY = 86400
_MOST = 1 << 29
"""Most multiplications in a measured product: beyond that, the ratio no longer changes."""
_rule: str | None = None


class Choice(NamedTuple):
    """The speed of a product on integers relative to floating point: measured, or set by a rule."""

    ratio: float
    measured: bool = True

    @property
    def worth(self) -> bool:
        """Whether such products run on integers."""
        return self.ratio > 1


_RULED = {"always": Choice(math.inf, measured=False), "never": Choice(0, measured=False)}


def decide(kind: str, a: Sequence[int], b: Sequence[int], call: Options) -> Choice:
    """Decide whether a product of factors of two shapes runs on integers, by speed on this machine or by a rule."""
    rule = _rule or check_choice("CPT_FX_INTEGER", os.environ.get("CPT_FX_INTEGER", "measured"), _RULES)
    if rule in _RULED:
        return _RULED[rule]
    library = native.load("integer_products.cpp")
    kernels = "no kernels" if library is None else _name(library)
    return _decided(kind, rounded(kind, a, b, call), torch.get_num_threads(), f"{kernels}, {_machine()}")


@contextmanager
def chosen(rule: str) -> Iterator[None]:
    """Apply a rule inside a `with` block: "always" on integers, "never", or as "measured"."""
    global _rule
    before, _rule = _rule, check_choice("rule", rule, _RULES)
    try:
        yield
    finally:
        _rule = before


@cache
def _decided(kind: str, sizes: tuple[int, ...], threads: int, surroundings: str) -> Choice:
    key = f"{kind} {sizes} {threads} {surroundings}"
    found = _read().get(key)
    if found is None:
        # Outside of all dispatch modes: selective checkpointing would save these tensors as the model's.
        with disable_current_modes():
            found = (round(_measure(kind, sizes), 3), _today())
        _keep(key, found)
    ratio = found[0]
    _LOG.debug("integer products: %s: %s times as fast", key, ratio)
    return Choice(ratio)


@cache
def _name(library: ctypes.CDLL) -> str:
    """Return the name of a library of kernels without the hash of its content: instruction set, source and flags."""
    return Path(library._name).stem.rpartition("-")[0]


@cache
def _machine() -> str:
    # Of a home folder that two kinds of machine share, each reads its own.
    features = hashlib.sha256(repr(sorted(processor().items())).encode()).hexdigest()[:12]
    return f"torch {torch.__version__}, {platform.machine()} {os.cpu_count()} {features}"


def _measure(kind: str, shape: tuple[int, ...]) -> float:
    """Return the relative speed of a product on integers: the median over runs that alternate with floating point."""
    a, b, call = arguments(kind, shape)
    run = PRODUCTS[kind]
    one = torch.ones(())
    left, right = Codes(_some_codes(a), one), Codes(_some_codes(b), one)

    def on_integers() -> None:
        run(left, right, call)

    def in_floating_point() -> None:
        run(left.dequantized(), right.dequantized(), call)

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        _seconds(on_integers), _seconds(in_floating_point)
        ratios = [_seconds(in_floating_point) / _seconds(on_integers) for _ in range(_ROUNDS)]
        if 1 / _CLOSE < median(ratios) < _CLOSE:
            ratios += [_seconds(in_floating_point) / _seconds(on_integers) for _ in range(_MORE)]
    return median(ratios)


def rounded(kind: str, a: Sequence[int], b: Sequence[int], call: Options) -> tuple[int, ...]:
    """Return the sizes of a product, rounded to powers of two: products of about the same size are measured once.

    Those of matrices are (batches, rows, inner, columns). Those of a convolution are (images, channels, height, width,
    filters) and, not rounded, the height and width of the kernel, of its stride, its padding and its dilation.
    """
    if kind.startswith("conv2d"):
        return _of_convolution(dict(zip("".join(PRODUCTS[kind].letters), (*a, *b, *call.shape), strict=False)), call)
    size = dict.fromkeys("bric", 1)
    b = (*b, 1) if kind == "matmul_forward" and len(b) == 1 else b
    for letters, shape in zip(PRODUCTS[kind].letters, (a, b), strict=False):
        # Additional dims are batches or rows; a vector has fewer dims than letters.
        more = max(len(shape) - len(letters), 0)
        lengths = (math.prod(shape[: more + 1]), *shape[more + 1 :])
        for letter, length in zip(reversed(letters), reversed(lengths), strict=False):
            size[letter] = max(length, size[letter])
    sizes = [_power(length) for length in size.values()]
    # Shrink batches first, then rows, then columns: large products mostly have more of these.
    for place in (0, 1, 3):
        while math.prod(sizes) > _MOST and sizes[place] > 64 ** (place > 0):
            sizes[place] //= 2
    return tuple(sizes)


def _of_convolution(size: dict[str, int], call: Options) -> tuple[int, ...]:
    kernel, dilation = (size["k"], size["l"]), call.geometry.dilation
    # Large enough for the filter, whatever the rounding.
    high, wide = (max(_power(size["hw"[i]]), dilation[i] * (kernel[i] - 1) + 1) for i in (0, 1))
    images, channels, filters = (_power(size[letter]) for letter in "ncf")
    while images > 2 and images * channels * filters * high * wide * math.prod(kernel) > _MOST:
        images //= 2
    return (images, channels, high, wide, filters, *kernel, *itertools.chain(*call.geometry))


def arguments(kind: str, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Options]:
    """Return the shapes of two factors for rounded sizes, and the other options of the product."""
    size, geometry = dict(zip("bric", sizes, strict=False)), Geometry()
    if kind.startswith("conv2d"):
        size, geometry = dict(zip("nchwfkl", sizes, strict=False)), Geometry(sizes[7:9], sizes[9:11], sizes[11:])
        size["p"], size["q"] = geometry.output_size(sizes[2:4], sizes[5:7])
    a, b, result = (tuple(size[letter] for letter in letters) for letters in PRODUCTS[kind].letters)
    return a, b, Options(shape=result, geometry=geometry)


def _power(size: int) -> int:
    """Return the power of two nearest to a size, by ratio."""
    if size <= 1:
        return 1
    below = 1 << (size.bit_length() - 1)
    return below if size * size <= 2 * below * below else 2 * below


def _some_codes(shape: tuple[int, ...]) -> Tensor:
    """Return codes made without a random generator: a measurement must not change the user's random numbers."""
    return (torch.arange(math.prod(shape), dtype=torch.int32) % 255 - 127).to(torch.int8).view(shape)


def _seconds(run: Callable[[], None]) -> float:
    """Return the CPU time of this thread: it has its part in all work, and is busy while it waits for other threads."""
    start = time.thread_time()
    run()
    return max(time.thread_time() - start, 1e-9)


def _today() -> int:
    return int(time.time() // _DAY)


def _file() -> Path:
    return cache_folder() / "integer_choice.json"


def _read() -> dict[str, tuple[float, int]]:
    """Read the cached ratios with their days, but for old ones; a file that is missing or damaged holds none."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    kept = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        match value:
            case [float() as ratio, int() as day] if 0 < ratio < math.inf and abs(_today() - day) <= _DAYS:
                kept[key] = (ratio, day)
    return kept


def _keep(key: str, found: tuple[float, int]) -> None:
    """Add a ratio to the file, which is replaced as a whole; without write access, cache nothing."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with locked(_file().with_suffix(".lock")):  # else two processes would each write what they had read
            replace(_file(), json.dumps(_read() | {key: found}, indent=1, sort_keys=True))
    except OSError as error:
        _LOG.debug("decisions about integer products are not kept: %s", error)
