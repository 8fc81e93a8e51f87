"""How far batch norm's running statistics lag behind in a phase of low precision, and what new statistics gain.

    python benchmarks/batch_norm.py --fast            # one seed, less than a minute
    python benchmarks/batch_norm.py                   # the tables under benchmarks/results/

The residual net of `examples/digits.py` learns scikit-learn's digits with Adam (rate 0.003) in batches of 64. CR goes
from 3 to 8 bits in cycles of 100 steps; static runs have as many steps. Evaluation is as `model.eval()` has it, at 8
bits under CR and at the width itself in static runs, on 599 test images.

running: evaluation as it is. new: inside `cpt_fx.recalibrate`, with ten training batches. training mode: all test
images as one batch, at the width of training, with the statistics of that batch. running, FP32: the same weights and
statistics without quantizers.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import about, add_output, origin, write
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import cpt_fx
from cpt_fx.schedules import Schedule, Static, named

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from digits import make_model

CYCLE, BATCH = 100, 64
TABLE = (105, 110, 115, 120)
"""Steps after which the nets are evaluated for the first table: the second cycle, at 3 bits."""
CYCLIC = (*TABLE, *range(126, 3 * CYCLE + 1, 6))
"""The same for the second table: two cycles with all widths."""
STATIC = (*TABLE, 150, 200)
Data = tuple[Tensor, Tensor, Tensor, Tensor]
RECIPES: dict[str, Callable[[], Any]] = {
    "paper": cpt_fx.recipes.paper, "default": cpt_fx.recipes.default, "integer": cpt_fx.recipes.integer,
}  # fmt: skip
WIDTHS = (3, 4, 5, 6, 8)
KINDS = ("running", "new", "training mode", "running, FP32")


def schedules(fast: bool) -> dict[str, Schedule]:
    made: dict[str, Schedule] = {"CR 3 to 8": named("CR", q_min=3, q_max=8, total_steps=8 * CYCLE)}
    for width in (3, 8) if fast else WIDTHS:
        made[f"static {width}"] = Static(width, 8, total_steps=8 * CYCLE)
    return {**made, "full precision": Static(32, total_steps=8 * CYCLE)}


def data() -> Data:
    bunch = load_digits()
    images, labels = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(bunch.target)
    test = torch.arange(len(labels)) % 3 == 0
    return images[~test], labels[~test], images[test], labels[test]


def run(recipe: str, schedule: Schedule, seed: int, digits: Data, points: Iterable[int]) -> list[dict[str, float]]:
    """Train a net; return its accuracies after some of the steps, with the width of the step before."""
    torch.manual_seed(seed)
    model = cpt_fx.transform(make_model(), schedule, recipe=RECIPES[recipe]())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    images, labels, *test = digits
    order = torch.Generator().manual_seed(seed)
    few = [images[torch.randperm(len(images), generator=order)[:BATCH]] for _ in range(10)]
    found: list[dict[str, float]] = []
    for step in range(max(points)):
        chosen = torch.randint(len(images), (BATCH,), generator=order)
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
        width = schedule.current.weight
        schedule.step()
        if step + 1 in points:
            found.append({"step": step + 1, "width": width, **measured(model, test, few, width, step + 1 in TABLE)})
    return found


def measured(model: nn.Module, test: list[Tensor], few: list[Tensor], width: int, everything: bool) -> dict[str, float]:
    """Return the accuracies of a net as it is now, without changing it."""
    found = {}
    if everything:
        with cpt_fx.at_bits(copied := copy.deepcopy(model).train(), width):
            found["training mode"] = accuracy(copied, *test)
    model.eval()
    found["running"] = accuracy(model, *test)
    if everything:
        with cpt_fx.at_bits(model, 32):
            found["running, FP32"] = accuracy(model, *test)
    with cpt_fx.recalibrate(model, few):
        found["new"] = accuracy(model, *test)
    model.train()
    return found


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad(), torch.random.fork_rng():
        return float((model(images).argmax(1) == labels).float().mean())


def spread(values: list[float]) -> str:
    """Return the mean of some seeds, with the smallest and the largest."""
    ends = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{mean(values):.3f}{ends}"


def first_table(found: dict[str, dict[str, list[Any]]]) -> list[str]:
    """Return accuracies at 3 bits in the second cycle, by recipe and schedule; a seed counts with its mean."""
    lines = [f"| recipe | schedule | {' | '.join(KINDS)} |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for recipe, by_schedule in found.items():
        for schedule, seeds in by_schedule.items():
            cells = [[mean(one[kind] for one in seed if one["step"] in TABLE) for seed in seeds] for kind in KINDS]
            lines.append(f"| {recipe} | {schedule} | {' | '.join(map(spread, cells))} |")
    return lines


def second_table(found: dict[str, dict[str, list[Any]]]) -> list[str]:
    """Return what new statistics add to accuracy, by the width of the latest step."""
    widths = (3, 4, 5, 6, 7, 8)
    lines = [f"| recipe | schedule | {' | '.join(f'{w} bits' for w in widths)} |", f"| --- | --- |{' ---: |' * 6}"]
    for recipe, by_schedule in found.items():
        rows: dict[str, dict[int, list[float]]] = {"CR 3 to 8": {}, "static": {}}
        for schedule, seeds in by_schedule.items():
            row = rows["CR 3 to 8" if schedule.startswith("CR") else "static"]
            for one in (one for seed in seeds for one in seed if one["width"] in widths):
                row.setdefault(one["width"], []).append(one["new"] - one["running"])
        for schedule, row in rows.items():
            cells = [f"{mean(row[w]):+.3f} (up to {max(row[w]):+.3f})" if w in row else "" for w in widths]
            lines.append(f"| {recipe} | {schedule} | {' | '.join(cells)} |")
    return lines


def report(found: dict[str, Any]) -> str:
    count = len(found["seeds"])
    seeds = f"means of {count} seeds, with the smallest and the largest of them" if count > 1 else "one seed"
    lines = [
        "# Batch norm's statistics in a phase of low precision", "", origin(found), "",
        f"Accuracy on digits after {', '.join(map(str, TABLE))} steps, averaged: {seeds}.", "",
        *first_table(found["runs"]), "",
    ]  # fmt: skip
    if count > 1:
        lines += [
            "What new statistics add to accuracy, by the width of the latest step: under CR in its second and third "
            "cycle, in static runs at 105 to 200 steps. The mean, and the largest of single evaluations.", "",
            *second_table(found["runs"]), "",
        ]  # fmt: skip
    return "\n".join([*lines, f"Made in {found['seconds'] / 60:.1f} minutes."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="one seed and a part of the runs; nothing is written")
    add_output(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*cpt_fx.recalibrate")  # it is what is measured here
    seeds = range(1 if options.fast else options.seeds)
    began, digits = time.perf_counter(), data()
    runs: dict[str, dict[str, list[Any]]] = {}
    for recipe, name in track([(recipe, name) for recipe in RECIPES for name in schedules(options.fast)], "training"):
        if name == "full precision" and recipe != "paper":  # full precision has no recipe
            continue
        points = TABLE if options.fast else CYCLIC if name.startswith("CR") else STATIC
        made = [run(recipe, schedules(options.fast)[name], seed, digits, points) for seed in seeds]
        runs.setdefault(recipe, {})[name] = made
    seconds = round(time.perf_counter() - began)
    command = f"python benchmarks/batch_norm.py{' --fast' if options.fast else ''}"
    found = {**about(command, threads=1), "seeds": list(seeds), "seconds": seconds, "runs": runs}
    if not options.fast:
        write(options.output, "batch_norm", found, report(found))
    print(report(found))


if __name__ == "__main__":
    main()
