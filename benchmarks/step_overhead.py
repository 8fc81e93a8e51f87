"""The overhead of quantization in a training step, against width, depth, batch size and sequence length.

    python benchmarks/step_overhead.py               # table, JSON and plot under benchmarks/results/
    python benchmarks/step_overhead.py --compiled    # compiled contenders too: minutes for each size

Encoder layers of a transformer; one quantity varies, the others stay at their usual values. Every size is a separate
comparison, as in `compare.py`: contenders take turns, ratios are to FP32 eager in the same round.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import about, add_output, origin, write
from harness.catalog import Settings, chosen
from harness.measuring import run
from harness.models import Workload, mean_square
from harness.nets import EncoderLayer
from torch import nn

USUAL = {"width": 256, "depth": 2, "batch": 8, "sequence": 128}
SIZES = {
    "width": (64, 128, 256, 512, 1024),
    "depth": (1, 2, 4, 8),
    "batch": (1, 2, 4, 8, 16, 32),
    "sequence": (32, 64, 128, 256, 512),
}
EAGER = ("fp32", "simulated", "integer")
COMPILED = ("fp32-compiled", "simulated-compiled", "integer-compiled")
COLOURS = {"simulated": "#1f5fd0", "integer": "#c8500a", "simulated-compiled": "#1f5fd0", "integer-compiled": "#c8500a"}


def workload(width: int, depth: int, batch: int, sequence: int) -> Workload:
    """Return encoder layers of some size."""
    torch.manual_seed(0)
    layers = [EncoderLayer(width, 4 * width, max(width // 64, 1)) for _ in range(depth)]
    return Workload(
        name="encoder",
        about=f"{depth} encoder layers of width {width}",
        model=nn.Sequential(*layers),
        inputs=(torch.randn(batch, sequence, width),),
        loss=mean_square,
    )


def measure(quantities: list[str], settings: Settings) -> list[dict[str, Any]]:
    """Compare at every size of every quantity; the usual size is measured once."""
    rows: list[dict[str, Any]] = []
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    for quantity in quantities:
        for size in SIZES[quantity]:
            sizes = USUAL | {quantity: size}
            key = tuple(sizes.values())
            if key not in known:
                print(f"{quantity} {size}", flush=True)
                known[key] = run(workload(**sizes), settings).to_dict()
            for found in known[key]["contenders"]:
                if found["name"] in COLOURS:
                    rows.append({"quantity": quantity, "size": size, **_kept(found, known[key])})
    return rows


def _kept(found: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers to store for a contender; compiled ones are relative to compiled FP32."""
    ratio = found.get("step_ratio_to_compiled" if found["name"].endswith("-compiled") else "step_ratio")
    kept = {"contender": found["name"], "label": found["label"], "reason": found["reason"], "ratio": ratio}
    return kept | {"memory": found.get("memory_ratio")}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, one table line for each size."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = [f"| | size | {' | '.join(names)} |", f"| --- | ---: |{' ---: |' * len(names)}"]
    for quantity, size in dict.fromkeys((row["quantity"], row["size"]) for row in rows):
        cells = []
        for name in names:
            (row,) = (one for one in rows if (one["quantity"], one["size"], one["contender"]) == (quantity, size, name))
            ratio = row["ratio"]
            said = row["reason"] or "no ratio"
            cells.append(
                said if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
            )
        lines.append(f"| {quantity} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw one panel for each quantity, with the range that contains eight in ten rounds."""
    from matplotlib.figure import Figure

    quantities = list(dict.fromkeys(row["quantity"] for row in rows))
    figure = Figure(figsize=(10, 2.9 * -(-len(quantities) // 2) + 0.5), dpi=150, layout="constrained")
    panels = figure.subplots(-(-len(quantities) // 2), 2, squeeze=False, sharey=True)
    for quantity, axes in zip(quantities, panels.flat, strict=False):
        for name, colour in COLOURS.items():
            line = [row for row in rows if (row["quantity"], row["contender"]) == (quantity, name) and row["ratio"]]
            if line:
                _line(axes, line, colour, dashed=name.endswith("-compiled"))
        axes.axhline(1, color="#6b7280", linewidth=0.9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SIZES[quantity], [str(size) for size in SIZES[quantity]])
        axes.set_title(quantity, loc="left", fontsize="medium", fontweight="bold")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("step, of FP32")
        axes.label_outer()
        axes.tick_params(labelbottom=True)
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels.flat[len(quantities) :]:
        axes.set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize="small", frameon=False)
    figure.savefig(path)


def _line(axes: Any, line: list[dict[str, Any]], colour: str, *, dashed: bool) -> None:
    sizes = [row["size"] for row in line]
    ratios = [row["ratio"] for row in line]
    label = line[0]["label"] + (" (of compiled FP32)" if dashed else "")
    style = {"linestyle": "--", "marker": "s"} if dashed else {"linestyle": "-", "marker": "o"}
    axes.plot(sizes, [ratio["median"] for ratio in ratios], color=colour, label=label, markersize=4, **style)
    low, high = ([ratio[end] for ratio in ratios] for end in ("low", "high"))
    axes.fill_between(sizes, low, high, color=colour, alpha=0.13, linewidth=0)


def report(found: dict[str, Any]) -> str:
    """Return the page with everything measured."""
    usual = ", ".join(f"{name} {size}" for name, size in USUAL.items())
    lines = [
        "# Step time against the size of the work",
        "",
        origin(found),
        "",
        f"Encoder layers; usual sizes: {usual}. Ratios to FP32 eager, of compiled contenders to compiled FP32: median "
        f"of {found['steps']} rounds, and where eight in ten lie. Schedule CR, 3 to 8 bits.",
        "",
        "![Step time against width, depth, batch and sequence length](step_overhead.png)",
        "",
        table(found["rows"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="rounds at each size")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compiled", action="store_true", help="compiled contenders too")
    parser.add_argument("--quantities", nargs="+", choices=list(SIZES), default=list(SIZES), metavar="NAME")
    add_output(parser)
    options = parser.parse_args()
    names = chosen(EAGER + COMPILED * options.compiled)
    settings = Settings(steps=options.steps, threads=options.threads, contenders=names)
    command = f"python benchmarks/step_overhead.py --steps {options.steps}" + " --compiled" * options.compiled
    found = about(command, options.threads) | {"steps": options.steps, "usual": USUAL}
    found["rows"] = measure(options.quantities, settings)
    page = report(found)
    write(options.output, "step_overhead", found, page)
    plot(found["rows"], options.output / "step_overhead.png")
    print(page, end="")


if __name__ == "__main__":
    main()
