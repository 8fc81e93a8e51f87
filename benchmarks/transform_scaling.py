"""Time and memory of `transform` against the size of the graph.

    python benchmarks/transform_scaling.py            # table, JSON and plot under benchmarks/results/

Nets are generated: residual blocks of convolution, batch norm and relu with a linear gate. A size is the number of
nodes of the captured graph. Capture (torch.fx's own tracing, twice) is measured separately from the passes. All sizes
run several times, alternating; the table shows the median and the spread. Seconds are CPU seconds of the single working
thread, so that other load disturbs less. Memory is the peak of Python's allocations in the passes, by tracemalloc, in
a separate run.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch
from common import about, add_output, origin, write
from torch import Tensor, fx, nn

from cpt_fx.capture import trace_module
from cpt_fx.capture.captured import WHOLE
from cpt_fx.capture.session import Session
from cpt_fx.capture.tree import own_tree
from cpt_fx.pipeline import Pipeline
from cpt_fx.schedules import named

SIZES = (100, 300, 1_000, 3_000, 10_000, 20_000)
RATIO_LIMIT = 13.0
"""A graph ten times as large may take at most this many times as long."""
SECONDS_LIMIT = 5.0
"""The time that 10,000 nodes may take, without capture."""


class Block(nn.Module):
    """Seventeen nodes of an ordinary net, once traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(2)
        self.conv2 = nn.Conv2d(2, 2, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(2)
        self.gate = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions, a gate, a residual."""
        y = torch.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        gate = torch.sigmoid(self.gate(y.mean((2, 3))))
        return torch.relu(x + y * gate[:, :, None, None])


NODES_PER_BLOCK = 17


def captured_net(nodes: int) -> tuple[fx.GraphModule, float]:
    """Generate and capture a net of about `nodes` nodes; return its graph with the seconds that capture took."""
    net = nn.Sequential(*(Block() for _ in range(max(1, round(nodes / NODES_PER_BLOCK)))))
    start = time.process_time()
    session = Session(own_tree(net), Pipeline(()), "symbolic", strict=False)
    captured = trace_module(session, WHOLE).view
    return captured, time.process_time() - start


def passes() -> Pipeline:
    return Pipeline.standard(schedule=named("CR", q_min=3, q_max=8, total_steps=1_000))


def run(nodes: int) -> dict[str, float]:
    """Time one transformation."""
    captured, capture_seconds = captured_net(nodes)
    size = len(captured.graph.nodes)
    gc.collect()
    start = time.process_time()
    passes().run(captured)
    return {
        "nodes": size,
        "capture_seconds": capture_seconds,
        "seconds": time.process_time() - start,
        "nodes_after": len(captured.graph.nodes),
    }


def memory(nodes: int) -> float:
    """Return the peak of Python's allocations in the passes, in MiB."""
    captured, _ = captured_net(nodes)
    gc.collect()
    tracemalloc.start()
    passes().run(captured)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 2**20


def measure(sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Measure all sizes several times, alternating."""
    run(sizes[0])  # imports and caches
    runs: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for _ in range(repeats):
        for size in sizes:
            runs[size].append(run(size))
    rows = []
    for size in sizes:
        seconds = [one["seconds"] for one in runs[size]]
        rows.append(
            {
                "nodes": int(runs[size][0]["nodes"]),
                "nodes_after": int(runs[size][0]["nodes_after"]),
                "seconds": statistics.median(seconds),
                "seconds_min": min(seconds),
                "seconds_max": max(seconds),
                "capture_seconds": statistics.median(one["capture_seconds"] for one in runs[size]),
                "peak_mib": memory(size),
            }
        )
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Compare with the targets, in words."""
    lines = []
    by_size = {row["nodes"]: row for row in rows}
    for small, large in ((1_000, 10_000), (100, 1_000)):
        first, second = (by_size[min(by_size, key=lambda nodes: abs(nodes - size))] for size in (small, large))
        ratio = second["seconds"] / first["seconds"] * 10 / (second["nodes"] / first["nodes"])
        word = "met" if ratio <= RATIO_LIMIT else "MISSED"
        sizes = f"{first['nodes']:,} to {second['nodes']:,} nodes"
        lines.append(f"{sizes}: {ratio:.1f} x per tenfold size, at most {RATIO_LIMIT:g}: {word}")
    largest = by_size[min(by_size, key=lambda nodes: abs(nodes - 10_000))]
    word = "met" if largest["seconds"] < SECONDS_LIMIT else "MISSED"
    lines.append(f"{largest['nodes']:,} nodes: {largest['seconds']:.2f} s, under {SECONDS_LIMIT:g} s: {word}")
    return lines


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| nodes captured | nodes after | passes, s (median, min to max) | capture, s | peak memory, MiB |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        spread = f"{row['seconds_min']:.3f} to {row['seconds_max']:.3f}"
        lines.append(
            f"| {row['nodes']:,} | {row['nodes_after']:,} | {row['seconds']:.3f} ({spread}) | "
            f"{row['capture_seconds']:.3f} | {row['peak_mib']:.1f} |"
        )
    return "\n".join(lines)


def report(found: dict[str, Any]) -> str:
    """Return the page with everything measured."""
    lines = [
        "# Transform time against graph size",
        "",
        origin(found),
        "",
        table(found["rows"]),
        "",
        *(f"* {verdict}" for verdict in found["verdicts"]),
        "",
        "![Seconds and memory against nodes](transform_scaling.png)",
    ]
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw time and memory against size, with the line of linear growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    nodes = [row["nodes"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, key, title in ((left, "seconds", "passes, seconds"), (right, "peak_mib", "peak memory, MiB")):
        values = [row[key] for row in rows]
        axes.loglog(nodes, values, "o-", color="#2563eb", label="measured")
        anchor = len(nodes) // 2
        linear = [values[anchor] * size / nodes[anchor] for size in nodes]
        axes.loglog(nodes, linear, "--", color="#9ca3af", label="linear")
        axes.set_xlabel("nodes of the captured graph")
        axes.set_title(title)
        axes.grid(True, which="major", alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    add_output(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(tuple(options.sizes), options.repeats)
    command = f"python benchmarks/transform_scaling.py --repeats {options.repeats}"
    found = about(command, threads=1) | {"rows": rows, "verdicts": verdicts(rows)}
    page = report(found)
    write(options.output, "transform_scaling", found, page)
    plot(rows, options.output / "transform_scaling.png")
    print(page, end="")


if __name__ == "__main__":
    main()
