"""Two checkouts of cpt_fx side by side: how long a training step takes in each, taking turns within one run.

    git worktree add ../before v0.1.0
    python benchmarks/compare_checkouts.py ../before . --models mlp resnet20 bert-small

Each checkout runs in a process of its own, with the packages of this environment. All products that can run on integers
do so: otherwise a measurement decides once which of them are faster, and a moment of high load would change what is
compared. Seconds are CPU seconds, which other load disturbs less. The allocator keeps its memory: whether it returns
pages after a step, only to request them again in the next, differs by chance between processes, by up to half a step of
`bert-small`. The output is the median ratio of neighbouring steps, second to first, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

SHORT = ("mlp", "resnet20", "bert-small", "bert-layer")
CONTENDERS = ("simulated", "simulated-compiled", "integer")

WORKER = """
import sys
import time
from importlib import import_module
from importlib.util import find_spec

home = "harness" if find_spec("harness") else "cpt_fx.bench"  # where older checkouts have it
catalog, measuring, models, preparing = (
    import_module(f"{home}.{name}") for name in ("catalog", "measuring", "models", "preparing")
)
name, contender, batch = sys.argv[1:4]
settings = catalog.Settings(contenders=(contender,))
with preparing.bench(settings):
    trainee, row = preparing.prepare(contender, models.preset(name, int(batch) or None), settings)
    print("ready" if trainee is not None else row, flush=True)

    def step():
        global spent
        began = time.process_time()
        trainee.step()
        spent = time.process_time() - began

    for count, _ in enumerate(sys.stdin):
        measuring.seconds_of(step, count % 16)
        print(spent, flush=True)
"""


def start(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments],
        env={
            "CPT_FX_INTEGER": "always",
            "MALLOC_TRIM_THRESHOLD_": str(2**40),
            "MALLOC_MMAP_THRESHOLD_": str(2**40),
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(checkout.resolve() / part) for part in ("", "benchmarks")),
        },
        cwd=checkout,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    said = worker.stdout.readline().strip()
    if said != "ready":
        raise SystemExit(f"{checkout} cannot run {' '.join(arguments)}: {said}")
    return worker


def step(worker: subprocess.Popen[str]) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    print(file=worker.stdin, flush=True)
    return float(worker.stdout.readline())


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--models", nargs="+", default=SHORT)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=0, help="instead of the usual one of each model")
    options = parser.parse_args()
    for model in options.models:
        for contender in options.contenders:
            workers = [start(place, model, contender, str(options.batch)) for place in (options.before, options.after)]
            for worker in workers:
                for _ in range(3):
                    step(worker)
            ratios = []
            for index in range(options.steps):
                # The two take turns in going first.
                order = workers if index % 2 else workers[::-1]
                seconds = {id(worker): step(worker) for worker in order}
                ratios.append(seconds[id(workers[1])] / seconds[id(workers[0])])
            for worker in workers:
                worker.kill()
            low, high = interval(ratios)
            print(f"{model:12} {contender:20} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
