"""A whole schedule over the zoo of the tests, compiled: how often the compiler is called, and when.

    python benchmarks/compiled_zoo.py bert resnet gcn          # some models, with inductor
    python benchmarks/compiled_zoo.py --backend aot_eager      # all of them, with the fast compiler

Each model trains for twelve steps of a cycle from 3 to 8 bits, is evaluated, and trains on. A change of bits must not
compile anything, a change of mode at most once. Models of transformers may complete their configuration in the
first call, which causes a second capture.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import warnings
from pathlib import Path

import torch
from common import about, add_output, origin, write
from torch._dynamo.testing import CompileCounterWithBackend

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import cpt_fx  # noqa: E402
from cpt_fx.schedules import named  # noqa: E402
from tests.training import train_step  # noqa: E402
from tests.zoo import ANY_MODEL, Entry  # noqa: E402
from tests.zoo.any_model import missing  # noqa: E402

STEPS = 12
INTRODUCTION = (
    "Calls of the compiler: in the first and in the second training step, by twelve steps over a cycle from 3 to 8",
    "bits, by evaluation, and by training again after it. The target is `+0` for bits and at most one for each mode.",
)
HEAD = (
    "| model | first and second step | bits change | evaluation | training again | seconds |",
    "| --- | ---: | ---: | ---: | ---: | ---: |",
)


def compiled(entry: Entry, backend: str) -> tuple[list[int], list[int]]:
    """Return how many graphs were compiled after each training step, and after evaluating and training again."""
    torch._dynamo.reset()
    model, args, kwargs = entry.build()
    schedule = named("CR", q_min=3, q_max=8, total_steps=STEPS, cycles=2)
    result = cpt_fx.transform(model, schedule, capture="dynamo")
    counter = CompileCounterWithBackend(backend)
    module = torch.compile(result, backend=counter)
    steps, modes = [], []
    for step in range(STEPS):
        train_step(module, args, kwargs, seed=step)
        schedule.step()
        steps.append(counter.frame_count)
    for _ in range(2):
        with torch.no_grad():
            module.eval()(*args, **kwargs)
        modes.append(counter.frame_count)
        train_step(module.train(), args, kwargs)
        modes.append(counter.frame_count)
    return steps, modes


def row(name: str, backend: str) -> str | None:
    """Return a line of the table for a model of the zoo; None where it cannot be built here or is refused."""
    entry = ANY_MODEL[name]
    if missing(entry.needs) or entry.refused is not None:
        return None
    start = time.perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            steps, (evaluated, again, *later) = compiled(entry, backend)
    except Exception as error:
        return f"| {name} | {type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]} | | | | |"
    more = steps[-1] - steps[1]
    back = max(again, *later) - evaluated
    cells = (name, f"{steps[0]} + {steps[1] - steps[0]}", f"+{more}", f"+{evaluated - steps[-1]}", f"+{back}")
    return f"| {' | '.join(cells)} | {time.perf_counter() - start:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of models of the zoo; all of them by default")
    parser.add_argument("--backend", default="inductor")
    add_output(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    command = " ".join(["python benchmarks/compiled_zoo.py", *options.models, f"--backend {options.backend}"])
    found = about(command, torch.get_num_threads())
    lines = []
    for name in options.models or ANY_MODEL:
        line = row(name, options.backend)
        if line is not None:
            lines.append(line)
            print(line, flush=True)
    page = "\n".join(["# A whole schedule, compiled", "", origin(found), "", *INTRODUCTION, "", *HEAD, *lines]) + "\n"
    write(options.output, "compiled_zoo", found | {"rows": lines}, page)


if __name__ == "__main__":
    main()
