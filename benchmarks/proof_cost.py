"""The cost of a proof, `inspect(result).verify(*inputs)`, in training steps of the plain model.

Each turn takes a step of the plain model (forward, loss, backward, SGD with momentum, eager) and proves the result on
the same batch, one after the other, so that both run under the same load. `transform(..., example_inputs=...)` does the
same once, after the model was captured.

    python benchmarks/proof_cost.py --threads 1
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import about, add_output, origin, write
from harness.models import Workload, preset

import cpt_fx

MODELS = ("mlp", "resnet20", "bert-small")
LIMIT = 6.0
"""The number of plain steps that a proof may take."""


def stepping(work: Workload) -> Callable[[], None]:
    """Return a training step of the plain model."""
    optimizer = torch.optim.SGD(work.model.parameters(), lr=1e-4, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        work.loss(work.model(*work.inputs)).backward()
        optimizer.step()

    return step


def seconds(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def measure(name: str, repeats: int, capture: str) -> dict[str, Any]:
    """Return the cost of a proof in plain steps; the first turn is not counted."""
    work = preset(name)
    schedule = cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=1000)
    result = cpt_fx.transform(work.model, schedule, capture=capture)
    result(*work.inputs)  # a result that is never called triggers a reminder
    step = stepping(work)

    def prove() -> None:
        cpt_fx.inspect(result).verify(*work.inputs)

    turns = []
    for _ in range(repeats + 1):
        steps = [seconds(step) for _ in range(3)]
        turns.append((statistics.median(steps), seconds(prove)))
    ratios = [proof / plain for plain, proof in turns[1:]]
    return {
        "model": name,
        "about": work.about,
        "shapes": work.shapes,
        "step": statistics.median(plain for plain, _ in turns[1:]),
        "proof": statistics.median(proof for _, proof in turns[1:]),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def page(found: dict[str, Any]) -> str:
    """Return the result as a page."""
    rows = [
        f"| {row['model']} | {row['about']}, {row['shapes']} | {row['step'] * 1e3:.0f} | {row['proof'] * 1e3:.0f} "
        f"| {row['ratio']:.1f} ({row['least']:.1f} to {row['most']:.1f}) |"
        for row in found["rows"]
    ]
    verdicts = [
        f"* {row['model']}: {row['ratio']:.1f} plain steps, at most {LIMIT:g}: "
        f"{'met' if row['ratio'] <= LIMIT else 'MISSED'}"
        for row in found["rows"]
    ]
    return "\n".join([
        "# Cost of a proof",
        "",
        origin(found),
        "",
        "`inspect(result).verify(*inputs)` against a training step of the plain model: forward, loss, backward, SGD "
        "with momentum, eager. CPU time. Both take turns; the ratio is the median of those of each turn.",
        "",
        "| model | what | plain step, ms | proof, ms | plain steps (least to most) |",
        "| --- | --- | ---: | ---: | ---: |",
        *rows,
        "",
        *verdicts,
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--repeats", type=int, default=7, help="proofs of each model")
    parser.add_argument("--capture", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    add_output(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable(logging.WARNING)
    command = f"python benchmarks/proof_cost.py --repeats {arguments.repeats} --threads {arguments.threads}"
    found = about(command, arguments.threads)
    found["rows"] = [measure(name, arguments.repeats, arguments.capture) for name in arguments.models]
    text = page(found)
    if not arguments.dry:
        write(arguments.output, "proof_cost", found, text)
    print(text, end="")


if __name__ == "__main__":
    main()
