"""A training step in ONNX Runtime next to one in PyTorch, eager and compiled: same model, batch, widths and optimizer.

    pip install -c constraints.txt ".[ort]"          # docs/export.md: in an environment of its own
    python benchmarks/ort_step.py

Contenders take turns, each with the same number of threads, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import about, add_output, origin, write
from harness.models import preset
from harness.nets import CifarResNet, EncoderLayer
from torch import nn
from torch.nn import functional as F

import cpt_fx
from cpt_fx.ort.environment import check_runtime

CLASSES, STEPS_OF_SCHEDULE, WARM = 10, 10_000, 4


class Classifier(nn.Module):
    """Encoder layers, a mean over the sequence, and a linear layer."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(EncoderLayer(width, 4 * width, width // 64) for _ in range(depth)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.head(self.layers(x).mean(1))


class Scores(nn.Module):
    """A classifier of the harness that returns only its logits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.classifier = preset(name, batch=1).model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # noqa: D102
        output = self.classifier(tokens)
        return output if isinstance(output, torch.Tensor) else output.logits


MODELS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        "784 to 512 to 512 to 10",
        lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
        (128, 784),
    ),
    "transformer": ("two encoder layers of width 256", lambda: Classifier(256, 2), (16, 64, 256)),
    "resnet20": ("ResNet-20 for CIFAR", lambda: CifarResNet(20), (32, 3, 32, 32)),
    "bert-small": ("BERT of 4 layers and width 256", lambda: Scores("bert-small"), (16, 128)),
}


def contenders(name: str, threads: int, folder: Path) -> tuple[dict[str, Callable[[], Any]], float]:
    """Return a training step for each way to run it, and the seconds of the export."""
    _, make, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(shape) if len(shape) != 2 or name == "mlp" else torch.randint(0, 1000, shape)
    plain, y = make(), torch.randint(0, CLASSES, shape[:1])
    steps = {"FP32, eager": in_torch(copy.deepcopy(plain), None, x, y)}
    for label, compiled in (("eager", False), ("compiled", True)):
        schedule = schedule_()
        model = cpt_fx.transform(copy.deepcopy(plain), schedule, example_inputs=(x,)).train()
        steps[label] = in_torch(torch.compile(model) if compiled else model, schedule, x, y)
    model = cpt_fx.transform(plain, schedule_(), example_inputs=(x,)).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    began = time.perf_counter()
    cpt_fx.export.ort_training(model, (x,), folder, loss="cross_entropy", optimizer=optimizer)
    exported = time.perf_counter() - began
    trainer = cpt_fx.ort.Trainer(folder, schedule_(), threads=threads)
    steps["ONNX Runtime"] = lambda: trainer.step(x, y)
    return steps, exported


def schedule_() -> cpt_fx.schedules.Schedule:
    return cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=STEPS_OF_SCHEDULE, cycles=STEPS_OF_SCHEDULE // 8)


def in_torch(model: Any, schedule: Any, x: torch.Tensor, y: torch.Tensor) -> Callable[[], Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()

    return step


def measure(name: str, rounds: int, threads: int) -> dict[str, Any]:
    """Time all contenders of a model, alternating."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        steps, exported = contenders(name, threads, Path(folder, "exported"))
        seconds: dict[str, list[float]] = {label: [] for label in steps}
        for step in steps.values():
            for _ in range(2 * WARM):
                step()
        for number in range(rounds):
            order = list(steps)
            shift = number % len(order)
            for label in [*order[shift:], *order[:shift]]:
                gc.collect()
                began = time.perf_counter()
                steps[label]()
                seconds[label].append(time.perf_counter() - began)
    return {"model": name, "seconds": seconds, "export": exported}


def ratio(ours: list[float], theirs: list[float]) -> str:
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    tenth = len(found) // 10
    return f"{median(found):.2f} ({found[tenth]:.2f} to {found[-1 - tenth]:.2f})"


def report(found: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# A step in ONNX Runtime, and in PyTorch",
        "",
        f"{origin(found)} {found['onnxruntime']}.",
        "",
        "Simulated low precision, default recipe, schedule CR from 3 to 8 bits, SGD with momentum; forward, backward "
        "and update. Ratios to PyTorch eager with the same quantizers: median of "
        f"{found['rounds']} rounds in one process, and where eight in ten lie. Each has the same number of "
        "threads. The seconds of the export include the steps that verify it.",
        "",
        "| model | batch | PyTorch eager, ms | PyTorch compiled | ONNX Runtime | FP32 eager | export, s |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        text, _, shape = MODELS[row["model"]]
        seconds = row["seconds"]
        base = seconds["eager"]
        cells = [ratio(seconds[label], base) for label in ("compiled", "ONNX Runtime", "FP32, eager")]
        cells = [text, "x".join(map(str, shape)), f"{1e3 * median(base):.1f}", *cells, f"{row['export']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    add_output(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = about(f"python benchmarks/ort_step.py --rounds {options.rounds}", options.threads)
    found |= {"rounds": options.rounds, "onnxruntime": check_runtime().found}
    found["rows"] = [measure(name, options.rounds, options.threads) for name in options.models]
    page = report(found)
    write(options.output, "ort_step", found, page)
    print(page, end="")


if __name__ == "__main__":
    main()
