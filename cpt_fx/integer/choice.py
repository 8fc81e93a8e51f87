"""Where integer products pay: small ones stay in floating point, by a measurement that is made once and kept.

Both ways start from codes. On integers a product is one call, while floating point has to turn the codes back into
numbers first; so integers win except for small sizes, where calls cost more than arithmetic, and where kernels are
missing. What is measured is kept on disk: by kind, by sizes rounded to powers of two, by all else that decides speed.

`CPT_FX_INTEGER=always` or `never` (or `chosen`, in a `with` block) decides without measuring.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from cpt_fx import native
from cpt_fx.errors import check_choice
from cpt_fx.files import replace
from cpt_fx.integer import products, sizes
from cpt_fx.integer.codes import Codes
from cpt_fx.native.building import cache_folder

_LOG = logging.getLogger("cpt_fx")
_RULES = ("measured", "always", "never")
_ROUNDS = 5
_rule: str | None = None


@dataclass(frozen=True)
class Decision:
    """How fast a product of some size is on integers: so many times as fast as in floating point."""

    kind: str
    """The function of `products`: linear_forward, conv2d_grad_weight ..."""
    sizes: tuple[int, ...]
    """What was measured: the sizes of both operands, rounded."""
    ratio: float
    threads: int

    @property
    def worth(self) -> bool:
        """Whether such products run on integers."""
        return self.ratio > 1


def is_worth(kind: str, *shape: int) -> bool:
    """Whether a product runs faster on integers here. `shape`: of the first operand, of the second, the geometry.

    The geometry of a convolution is its stride, padding and dilation, two numbers each.
    """
    rule = _current_rule()
    if rule != "measured":
        return rule == "always"
    return _decided(kind, sizes.rounded(kind, shape), torch.get_num_threads(), _surroundings()).worth


def measured(kind: str, *shape: int) -> Decision | None:
    """Return what decides about a product, in the arguments of `is_worth`; None where a rule does."""
    if _current_rule() != "measured":
        return None
    return _decided(kind, sizes.rounded(kind, shape), torch.get_num_threads(), _surroundings())


def _current_rule() -> str:
    return _rule or check_choice("CPT_FX_INTEGER", os.environ.get("CPT_FX_INTEGER", "measured"), _RULES)


@contextmanager
def chosen(rule: str) -> Iterator[None]:
    """Decide by a rule inside a `with` block: "always" on integers, "never", or as "measured"."""
    global _rule
    before, _rule = _rule, check_choice("rule", rule, _RULES)
    try:
        yield
    finally:
        _rule = before


def decisions() -> list[Decision]:
    """Return what this process asked for so far, with the measured ratios."""
    return list(_asked.values())


def forget() -> None:
    """Drop all decisions, on disk too: the next products are measured anew."""
    _decided.cache_clear()
    _asked.clear()
    with suppress(OSError):
        _file().unlink(missing_ok=True)


_asked: dict[str, Decision] = {}


@cache
def _decided(kind: str, sizes: tuple[int, ...], threads: int, surroundings: str) -> Decision:
    key = f"{kind} {sizes} {threads} {surroundings}"
    ratio = _read().get(key)
    if ratio is None:
        ratio = round(_measure(kind, sizes), 3)
        _write(_read() | {key: ratio})
    decision = Decision(kind, sizes, ratio, threads)
    _LOG.debug("integer products: %s", asdict(decision))
    _asked[key] = decision
    return decision


def _surroundings() -> str:
    """What besides sizes and threads decides about speed."""
    kernels = "kernels" if native.load("integer_products.cpp") is not None else "no kernels"
    return f"{kernels}, torch {torch.__version__}, {_processor()}"


@cache
def _processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {os.cpu_count()}"


def _measure(kind: str, shape: tuple[int, ...]) -> float:
    """Return how many times as fast a product is on integers, interleaved with floating point, median of some runs."""
    a, b, options, named = sizes.arguments(kind, shape)
    product = getattr(products, kind)
    one = torch.ones(())
    left, right = Codes(_some_codes(a), one), Codes(_some_codes(b), one)

    def on_integers() -> None:
        product(left, right, *options, torch.float32, **named)

    def in_floating_point() -> None:
        product(left.dequantized(), right.dequantized(), *options, torch.float32, **named)

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        _seconds(on_integers), _seconds(in_floating_point)
        ratios = [_seconds(in_floating_point) / _seconds(on_integers) for _ in range(_ROUNDS)]
    return median(ratios)


def _some_codes(shape: tuple[int, ...]) -> Tensor:
    """Make codes without a random generator: whoever measures must not change anybody's random numbers."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.int32) % 255 - 127).to(torch.int8).view(shape)


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return max(time.perf_counter() - start, 1e-9)


def _file() -> Path:
    return cache_folder() / "integer_choice.json"


def _read() -> dict[str, float]:
    """Read the decisions on disk; a file that is not there, or broken, holds none."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}


def _write(found: dict[str, float]) -> None:
    """Replace the file as a whole, so that two processes never mix theirs; where nothing can be written, nothing is."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        replace(_file(), json.dumps(found, indent=1, sort_keys=True))
    except OSError as error:
        _LOG.debug("decisions about integer products are not kept: %s", error)
