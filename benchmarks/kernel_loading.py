"""How long it takes to load native kernels that are already built, after torch was imported.

    python benchmarks/kernel_loading.py --processes 20

Each measurement is a separate process. The output is the median and the range of wall time and CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

LOAD = """
import sys, time
import torch
clock, work = time.perf_counter(), time.process_time()
from cpt_fx import native
assert all(native.load(name) for name in sys.argv[1:]), native.status()
print(time.perf_counter() - clock, time.process_time() - work)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=20)
    options = parser.parse_args()
    names = sorted(path.name for path in (Path(__file__).parents[1] / "cpt_fx" / "native").glob("*.cpp"))
    command = [sys.executable, "-c", LOAD, *names]
    subprocess.run(command, check=True, capture_output=True)  # builds what is missing
    seen = []
    for _ in range(options.processes):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seen.append([1000 * float(seconds) for seconds in done.stdout.split()])
    for what, values in zip(("on the clock", "of the processor"), zip(*seen, strict=True), strict=True):
        middle, least, most = statistics.median(values), min(values), max(values)
        print(f"{len(names)} libraries, {what}: {middle:.1f} ms ({least:.1f} to {most:.1f})")


if __name__ == "__main__":
    main()
