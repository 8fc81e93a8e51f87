"""How fast products of 8-bit codes are: ours, torch's, and the limit of the processor, in one run.

    python benchmarks/products.py            # table and JSON under benchmarks/results/
    python benchmarks/products.py --fast     # one small size, to see that it works; writes nothing

Codes in, float32 out, with everything that our kernels pack, in GOPS (GFLOPS for floating point). All take turns; the
limit is that of one core, so products run on one thread. `FP32 oneDNN` multiplies tensors that are in oneDNN's layout
before, `F.linear` those of torch. Targets are printed as missed where they are missed.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import about, add_output, origin, write
from torch.nn import functional as F

from cpt_fx import native
from cpt_fx.integer import kernels

SIZES = ((256,) * 3, (512,) * 3, (1024,) * 3, (2048,) * 3, (2048, 768, 768), (2048, 3072, 768))
OURS, TORCH = "ours", "torch._int_mm"
OF_LIMIT, OF_TORCH = 0.4, 1.3
"""Targets on a processor with AMX: the part of the limit, and the multiple of torch's product of codes."""
SECONDS = 0.03
"""A measurement repeats a product for as long."""


def ways(rows: int, inner: int, columns: int) -> dict[str, Callable[[], Any]]:
    """Return the products to compare: rows x inner times inner x columns, the right one a weight of a linear layer."""
    a, w = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((rows, inner), (columns, inner)))
    scales = torch.tensor(0.01), torch.tensor(0.02)
    x, weight = a.float(), w.float()
    halves = x.bfloat16(), weight.bfloat16()
    theirs = x.to_mkldnn(), weight.to_mkldnn()
    return {
        OURS: lambda: kernels.product(a, w.T, scales),
        TORCH: lambda: torch._int_mm(a, w.T),
        "bf16 linear": lambda: F.linear(*halves),
        "FP32 linear": lambda: F.linear(x, weight),
        "FP32 oneDNN": lambda: F.linear(*theirs),
    }


def peak() -> Callable[[], float]:
    """Build the loop that measures the limit; return a function that gives it in GOPS."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "peak.so")
        flags = ["-mavx512f", "-mavx512vnni"] if "vnni" in native.kernels().partition(",")[0] else []
        if native.kernels().startswith("amx"):
            flags = ["-mamx-tile", "-mamx-int8"]
        source = Path(__file__).with_name("peak.cpp")
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", *flags, str(source), "-o", str(made)], check=True)
        run = ctypes.CDLL(str(made)).peak
    run.restype, run.argtypes = ctypes.c_double, [ctypes.c_int64]

    def measured() -> float:
        start = time.perf_counter()
        operations = run(2_000_000)
        return float(operations) / (time.perf_counter() - start) / 1e9

    return measured


def speed(product: Callable[[], Any], operations: float) -> float:
    """Return how many GOPS a product makes."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        product()
        count += 1
    return count * operations / (time.perf_counter() - start) / 1e9


def measure(sizes: tuple[tuple[int, ...], ...], rounds: int) -> list[dict[str, Any]]:
    """Measure all ways and the limit in turns, for every size."""
    limit, found = peak(), []
    for size in sizes:
        products = ways(*size)
        operations = 2.0 * size[0] * size[1] * size[2]
        seen: dict[str, list[float]] = {name: [] for name in (*products, "limit")}
        for product in products.values():
            product()
        for _ in range(rounds):
            for name, product in products.items():
                seen[name].append(speed(product, operations))
            seen["limit"].append(limit())
        found.append({"size": size, "gops": {name: quartiles(values) for name, values in seen.items()}})
    return found


def quartiles(values: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(middle, 1), round(low, 1), round(high, 1)]


def page(found: dict[str, Any]) -> str:
    """Return the result in Markdown."""
    names = list(found["rows"][0]["gops"])
    lines = [
        "# Products of codes", "",
        f"One thread, GOPS: median, and in brackets the quartiles. Kernels: {found['kernels']}. The limit is what the "
        "best instruction for products of codes does on registers, without loads and stores.", "",
        f"| rows x inner x columns | {' | '.join(names)} | ours, of the limit | of `{TORCH}` |",
        f"| --- |{' ---: |' * (len(names) + 2)}",
    ]  # fmt: skip
    for row in found["rows"]:
        gops = row["gops"]
        cells = [f"{middle:,.0f} ({low:,.0f} to {high:,.0f})" if middle else "–" for middle, low, high in gops.values()]
        ours, limit, theirs = (gops[name][0] for name in (OURS, "limit", TORCH))
        tiles = found["kernels"].startswith("amx")
        parts = [verdict(ours / limit, OF_LIMIT, tiles) if limit else "–", verdict(ours / theirs, OF_TORCH, tiles)]
        lines.append(f"| {' x '.join(map(str, row['size']))} | {' | '.join([*cells, *parts])} |")
    return "\n".join([*lines, "", origin(found), ""])


def verdict(ratio: float, target: float, tiles: bool) -> str:
    """Return a ratio; where there are tiles, for which the targets are, whether it meets its target."""
    return f"{ratio:.2f}" + (f", {'met' if ratio >= target else '**missed**'} ({target})" if tiles else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fast", action="store_true", help="one small size; writes nothing")
    add_output(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(SIZES[:1] if options.fast else SIZES, 3 if options.fast else options.rounds)
    found = about(f"python benchmarks/products.py --rounds {options.rounds}", 1)
    found |= {"kernels": native.kernels(), "rows": rows}
    print(page(found))
    if not options.fast:
        write(options.output, "products", found, page(found))


if __name__ == "__main__":
    main()
