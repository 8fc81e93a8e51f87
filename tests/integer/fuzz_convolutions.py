"""Convolutions on integers against simulated ones, of shapes drawn at random: forward and both gradients.

    python -m tests.integer.fuzz_convolutions 10000   # with every kind of kernel that this processor runs, and without
    CPT_FX_NATIVE=plain python -m tests.integer.fuzz_convolutions 10000 --here

Both ways multiply the same grid points, so they differ by the rounding of float32 sums alone.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cpt_fx import native
from cpt_fx.integer.choice import chosen
from cpt_fx.integer.counts import COUNTS, ProductOutcome
from cpt_fx.integer.ops import INTEGER_CONV, TO_INTEGER
from cpt_fx.native.building import SETS, instructions, processor
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, QUANTIZE_GRADIENT

BITS = torch.tensor(8)
ROUNDING = 1e-5


class Shape(NamedTuple):
    """One convolution; lists have one number for each dim that the filter moves in."""

    images: int
    channels: int
    filters: int
    size: list[int]
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    bias: bool


def drawn(chance: random.Random) -> Shape:
    """Draw a shape: mostly small ones, where borders matter, and kernels of one pixel more often than others."""
    dims = chance.choice((1, 2))
    kernel = [chance.choice((1, 1, 1, 2, 3, 4, 5)) for _ in range(dims)]
    stride = [chance.choice((1, 1, 2, 3, 4)) for _ in range(dims)]
    padding = [chance.choice((0, 0, 1, 2, 3, 5)) for _ in range(dims)]
    dilation = [chance.choice((1, 1, 2, 3)) for _ in range(dims)]
    size = []
    for i in range(dims):
        least = max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i])
        size.append(least + chance.choice((0, 0, 1, 2, 3, 4, 7, 11, chance.randrange(70))))
    few, some = chance.choice((1, 1, 2, 3)), chance.choice((1, 2, 3, 4, 5, 9))
    return Shape(few, some, chance.choice((1, 2, 4, 6, 7, 13)), size, kernel, stride, padding, dilation,
                 chance.random() < 0.3)  # fmt: skip


def errors(shape: Shape, seed: int) -> list[float]:
    """Return how far the result, and the gradients of images, filters and bias, are from simulated ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape.images, shape.channels, *shape.size, generator=generator)
    w = torch.randn(shape.filters, shape.channels, *shape.kernel, generator=generator)
    bias = torch.randn(shape.filters, generator=generator) if shape.bias else None
    place = (shape.stride, shape.padding, shape.dilation)
    counts = torch.zeros(COUNTS, dtype=torch.int64)
    found = []
    for integer in (True, False):
        leaves = [part.clone().requires_grad_() for part in (x, w, *([] if bias is None else [bias]))]
        third = leaves[2] if bias is not None else None
        if integer:
            operands = [TO_INTEGER(part, BITS) for part in leaves[:2]]
            out = INTEGER_CONV(operands[0], BITS, operands[1], third, *place, rounding="nearest", counts=counts)
        else:
            convolve: Any = F.conv1d if len(shape.size) == 1 else F.conv2d
            values = [FAKE_QUANTIZE(part, BITS, scheme="symmetric") for part in leaves[:2]]
            out = QUANTIZE_GRADIENT(convolve(*values, third, *place), BITS, scheme="symmetric", rounding="nearest")
        out.backward(gradient := torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1)))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    if counts[:, ProductOutcome.INTEGER].tolist() != [1, 1, 1]:
        raise AssertionError(f"{shape}: not all of its products ran on integers")
    # A bias gets a plain sum, and that may be next to nothing.
    least = [0.0, 0.0, 0.0, float(gradient.abs().max())]
    return [_apart(one, two, size) for one, two, size in zip(*found, least, strict=False)]


def _apart(one: Tensor | None, two: Tensor | None, least: float) -> float:
    assert one is not None and two is not None and one.shape == two.shape
    size = max(float(two.abs().max()), least)
    return float((one - two).abs().max()) / size if size else float(one.abs().sum())


def wrong(count: int, seed: int) -> list[str]:
    """Try so many shapes; return a line for each that is wrong."""
    chance, lines = random.Random(seed), []
    for index in range(count):
        shape = drawn(chance)
        with chosen("always"):
            off = errors(shape, index)
        if not max(off) < ROUNDING:
            lines.append(f"{shape}: result, gradients of images, filters and bias off by {off}")
    return lines


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="in this process, with the kernels that it has")
    options = parser.parse_args()
    if options.here:
        lines = wrong(options.shapes, options.seed)
        print(*lines, f"{options.shapes} shapes, {len(lines)} wrong; native kernels: {native.status()}", sep="\n")
        raise SystemExit(bool(lines))
    has = processor()
    kinds = [name for name, needed in SETS.items() if all(map(has.get, needed))]
    print(f"this processor: {instructions(has)}", flush=True)
    failed = []
    for kind in (*kinds, "0"):
        print(f"CPT_FX_NATIVE={kind}:", flush=True)
        command = [
            sys.executable,
            "-m",
            "tests.integer.fuzz_convolutions",
            str(options.shapes),
            "--seed",
            str(options.seed),
        ]
        if subprocess.run([*command, "--here"], env={**os.environ, "CPT_FX_NATIVE": kind}).returncode:
            failed.append(kind)
    raise SystemExit(f"wrong with {failed}" if failed else 0)


if __name__ == "__main__":
    main()
