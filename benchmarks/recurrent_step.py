"""The cost of a training step of a decomposed recurrent layer, against torch's fused kernel.

    python benchmarks/recurrent_step.py            # table and JSON under benchmarks/results/
    python benchmarks/recurrent_step.py --fast     # one small size, to see that it works; writes nothing
    python benchmarks/recurrent_step.py --json     # the numbers on standard output

Torch has one kernel for all time steps of an LSTM or a GRU. To quantize the operands of its products, the layer is
decomposed: one product for the inputs of all steps, then a loop over the products of the state. A step here is forward
and backward of the layer alone, in five ways: torch's kernel; the layer decomposed at 32 bits, where every quantizer is
the identity; at 8 and at 5 bits; and the layer excluded, which keeps the kernel. They take turns; ratios are to torch's
kernel in the same turn. Seconds are CPU seconds of the single working thread, so that other load disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import about, add_output, origin, write
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Bits, Static

WAYS = ("fused", "decomposed, 32 bits", "8 bits", "5 bits", "excluded")
KINDS: dict[str, Callable[[int, int], nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}
SIZES = {
    "20 steps, batch 32, width 128": (20, 32, 128),
    "35 steps, batch 20, width 256": (35, 20, 256),
    "35 steps, batch 20, width 800": (35, 20, 800),
}
"""The first is the size in the King James study, the last the published size for PTB."""
FAST = {"5 steps, batch 4, width 16": (5, 4, 16)}


class Net(nn.Module):
    """A recurrent layer, and another layer to quantize, so that the recurrent one can be excluded."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of all steps."""
        return self.layer(x)[0], self.scale(x[:1, :1, :1])


def step_of(net: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a training step without its optimizer."""

    def step() -> None:
        y, other = net(x)
        (y.square().mean() + other.sum()).backward()
        for parameter in net.parameters():
            parameter.grad = None

    return step


def steps(kind: str, size: tuple[int, int, int]) -> dict[str, Callable[[], None]]:
    """Return a step for each way, all on the same input."""
    length, batch, width = size
    x = torch.randn(length, batch, width, requires_grad=True)
    made: dict[str, Callable[[], None]] = {}
    for way in WAYS:
        torch.manual_seed(0)
        net: nn.Module = Net(KINDS[kind](width, width))
        if way != "fused":
            bits = {"8 bits": Bits(8, 8, 8), "5 bits": Bits(5, 5, 8)}.get(way, Bits(32, 32, 32))
            chosen = {"exclude": "layer"} if way == "excluded" else {}
            net = cpt_fx.transform(net, Static(bits), recipe=cpt_fx.recipes.paper(), **chosen)
        made[way] = step_of(net, x)
    return made


def measure(kind: str, size: tuple[int, int, int], turns: int) -> dict[str, dict[str, float]]:
    """Time all ways, alternating; return medians, spread, and the ratio to torch's kernel."""
    made = steps(kind, size)
    for step in made.values():
        for _ in range(2):
            step()
    taken: dict[str, list[float]] = {way: [] for way in made}
    for _ in range(turns):
        for way, step in made.items():
            gc.collect()
            start = time.process_time()
            step()
            taken[way].append(time.process_time() - start)
    return {way: summary(seconds, taken["fused"]) for way, seconds in taken.items()}


def summary(seconds: list[float], fused: list[float]) -> dict[str, float]:
    """Return milliseconds, and the ratio of each turn, by median and quartiles."""
    ratios = [one / other for one, other in zip(seconds, fused, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "ms": 1e3 * statistics.median(seconds),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
    }


def page(found: dict[str, Any]) -> str:
    """Return the result in Markdown."""
    parts = [
        "# Recurrent layers, decomposed",
        "Forward and backward of one layer, relative to torch's fused kernel in the same turn: median, and in brackets "
        "the quartiles. `decomposed, 32 bits` is what decomposing costs by itself; `excluded` keeps torch's kernel.",
        origin(found),
    ]
    for kind, sizes in found["layers"].items():
        rows = [f"| nn.{kind} | fused, ms | {' | '.join(WAYS[1:])} |", f"| --- |{' ---: |' * len(WAYS)}"]
        for size, ways in sizes.items():
            cells = [f"{way['ratio']:.2f} ({way['ratio_low']:.2f}–{way['ratio_high']:.2f})" for way in
                     (ways[name] for name in WAYS[1:])]  # fmt: skip
            rows.append(f"| {size} | {ways['fused']['ms']:.2f} | {' | '.join(cells)} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="one small size, to see that it works; writes nothing")
    parser.add_argument("--json", action="store_true", help="print the numbers")
    parser.add_argument("--turns", type=int, default=41, help="steps of each way (default: %(default)s)")
    add_output(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes, turns = (FAST, 3) if options.fast else (SIZES, options.turns)
    layers = {kind: {name: measure(kind, size, turns) for name, size in sizes.items()} for kind in KINDS}
    found = {**about("python benchmarks/recurrent_step.py", 1), "turns": turns, "layers": layers}
    print(json.dumps(found, indent=2) if options.json else page(found))
    if not options.fast:
        write(options.output, "recurrent_step", found, page(found))


if __name__ == "__main__":
    main()
