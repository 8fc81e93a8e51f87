"""The cost of capture by Dynamo: the first call against Dynamo's own capture, every later call against torch.fx.

    python benchmarks/capture_cost.py            # table and JSON under benchmarks/results/
    python benchmarks/capture_cost.py --fast     # two models, to see that it works; writes nothing
    python benchmarks/capture_cost.py --json     # the numbers on standard output

Capture: `transform(model, schedule, capture="dynamo")` and the first call of the result, against the first call of
`torch.compile(model, backend="eager", fullgraph=True)` under the same options of Dynamo. Both are reset
before each run, and alternate. Later calls: a training step (forward, backward) through Dynamo and through torch.fx,
where that captures the model, and of the plain model. Tensors are small, so that overhead shows. Seconds are
CPU seconds of the single working thread, so that other load disturbs less; the JSON also holds wall time.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from transform_scaling import Block as ConvolutionBlock

import cpt_fx
from cpt_fx.capture.dynamo.engine import ONE_GRAPH, WHOLE_GRAPHS
from cpt_fx.study.training import processor

RATIO_LIMIT = 1.3
"""The largest allowed cost of a capture, in captures by Dynamo alone."""
DEPTHS = 40
"""The number of depths of Python's stack at which captures and steps run, one after the other.

CPython keeps its frames in chunks. A graph's code has a large frame; where the frame ends just before a chunk does,
every call in it allocates a chunk, and the same step takes half as long again. At which depth that happens is chance.
It affects Dynamo's own code as well: alone, it took between 0.69 and 0.85 s for one model.
"""

Inputs = dict[str, Tensor]


class Attention(nn.Module):
    """A transformer layer in plain operators, which torch.fx captures too."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then feed forward, each with a residual."""
        y = self.norm1(x)
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        weights = F.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def mlp(depth: int = 24) -> tuple[nn.Module, Inputs]:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), {"input": torch.randn(8, 32)}


def cnn(depth: int = 12) -> tuple[nn.Module, Inputs]:
    return nn.Sequential(*(ConvolutionBlock() for _ in range(depth))), {"input": torch.randn(4, 2, 8, 8)}


def attention(depth: int = 8) -> tuple[nn.Module, Inputs]:
    return nn.Sequential(*(Attention() for _ in range(depth))), {"input": torch.randn(2, 8, 32)}


def encoder(depth: int = 6) -> tuple[nn.Module, Inputs]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, depth), {"src": torch.randn(2, 8, 32)}


def bert(depth: int = 8) -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=depth, num_attention_heads=4, intermediate_size=64
    )
    return BertModel(config), {"input_ids": torch.randint(0, 64, (2, 8))}


def llama(depth: int = 8) -> tuple[nn.Module, Inputs]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=depth, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": torch.randint(0, 64, (2, 8))}


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "MLP, 24 layers": mlp,
    "convolutional net, 12 blocks": cnn,
    "attention in plain operators, 8 layers": attention,
    "nn.TransformerEncoder, 6 layers": encoder,
}
if importlib.util.find_spec("transformers"):
    MODELS |= {"BERT, 8 layers": bert, "Llama, 8 layers": llama}
FAST = ("MLP, 24 layers", "nn.TransformerEncoder, 6 layers")


def schedule() -> cpt_fx.schedules.Schedule:
    return cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=100_000)


def through_dynamo(model: nn.Module, inputs: Inputs) -> Callable[[], Any]:
    """Transform, and call once: graphs are captured and rewritten. Return a later call."""
    result = cpt_fx.transform(model, schedule(), capture="dynamo")
    result(**inputs)
    return lambda: result(**inputs)


def dynamo_alone(model: nn.Module, inputs: Inputs) -> Callable[[], Any]:
    """Let Dynamo capture the same model and run it unchanged. Return a later call."""
    options = {"recompile_limit": WHOLE_GRAPHS, "isolate_recompiles": True}
    compiled = torch.compile(model, backend="eager", fullgraph=True, **options)

    def call() -> Any:
        with dynamo_config.patch(ONE_GRAPH):
            return compiled(**inputs)

    call()
    return call


Seconds = tuple[float, float]
"""CPU and wall seconds."""


def timed(action: Callable[[], Any]) -> tuple[Seconds, Any]:
    """Run an action; return the time it took, and its result."""
    gc.collect()
    wall, start = time.perf_counter(), time.process_time()
    result = action()
    return (time.process_time() - start, time.perf_counter() - wall), result


def at_depth(depth: int, action: Callable[[], Any]) -> Any:
    """Run an action that many calls further down Python's stack."""
    return action() if depth == 0 else at_depth(depth - 1, action)


def in_turn(actions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Run all actions several times, alternating; return medians and spread."""
    taken: dict[str, list[Seconds]] = {name: [] for name in actions}
    for turn in range(repeats):
        for name, action in actions.items():
            taken[name].append(at_depth(turn % DEPTHS, partial(timed, action))[0])
    return {name: summary(pairs) for name, pairs in taken.items()}


def summary(pairs: list[Seconds]) -> dict[str, float]:
    cpu, wall = ([pair[place] for pair in pairs] for place in (0, 1))
    return {"cpu": statistics.median(cpu), "cpu_min": min(cpu), "cpu_max": max(cpu), "wall": statistics.median(wall)}


def measure_capture(build: Callable[[], tuple[nn.Module, Inputs]], repeats: int) -> dict[str, Any]:
    """Time the first call, in both ways."""
    model, inputs = build()
    ways = {"dynamo alone": dynamo_alone, "cpt_fx": through_dynamo}
    first: dict[str, list[Seconds]] = {name: [] for name in ways}
    later: dict[str, list[Seconds]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            torch._dynamo.reset()
            taken, again = at_depth(4 * turn % DEPTHS, partial(timed, partial(way, model, inputs)))
            if turn:  # the first turn fills caches that no reset empties
                first[name].append(taken)
                later[name].append(timed(again)[0])
    found: dict[str, Any] = {name: summary(pairs) for name, pairs in first.items()}
    for name in ways:
        found[name]["later_cpu"] = summary(later[name])["cpu"]
    # The ratio is taken within a turn, whose two runs were at one depth, and close in time.
    turns = list(zip(first["cpt_fx"], first["dynamo alone"], strict=True))
    less = list(zip(later["cpt_fx"], later["dynamo alone"], strict=True))
    found["ratio"] = statistics.median(ours[0] / alone[0] for ours, alone in turns)
    found["wall_ratio"] = statistics.median(ours[1] / alone[1] for ours, alone in turns)
    found["capture_ratio"] = statistics.median(
        (ours[0] - our_later[0]) / (alone[0] - later_alone[0])
        for (ours, alone), (our_later, later_alone) in zip(turns, less, strict=True)
    )
    return found


def measure_steps(build: Callable[[], tuple[nn.Module, Inputs]], repeats: int) -> dict[str, Any]:
    """Time training steps after the first: through Dynamo, through torch.fx, and of the plain model."""
    model, inputs = build()
    torch._dynamo.reset()
    ways = {"plain": model, "dynamo": cpt_fx.transform(model, schedule(), capture="dynamo")}
    with suppress(cpt_fx.CaptureError):
        ways["symbolic"] = cpt_fx.transform(model, schedule(), capture="symbolic")
    actions = {name: stepping(way, inputs) for name, way in ways.items()}
    for action in actions.values():
        for _ in range(3):
            action()
    return in_turn(actions, repeats)


def stepping(model: nn.Module, inputs: Inputs) -> Callable[[], None]:
    def step() -> None:
        result = model(**inputs)
        result = result if isinstance(result, Tensor) else result[0]
        result.square().mean().backward()

    return step


def measure(names: list[str], repeats: int, steps: int) -> list[dict[str, Any]]:
    through_dynamo(*mlp(1))  # imports
    rows = []
    for name in names:
        torch.manual_seed(0)
        rows.append({
            "model": name,
            "capture": measure_capture(MODELS[name], repeats),
            "step": measure_steps(MODELS[name], steps),
        })  # fmt: skip
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Compare with the target, in words."""
    return [
        f"{row['model']}: {row['capture']['ratio']:.2f} x Dynamo's own capture, at most {RATIO_LIMIT:g}: "
        f"{'met' if row['capture']['ratio'] <= RATIO_LIMIT else 'MISSED'}"
        for row in rows
    ]


def capture_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | Dynamo alone, s (median, min to max) | cpt_fx, s | ratio | ratio of wall time | less a later call |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        found = row["capture"]
        cells = [
            f"{one['cpu']:.2f} ({one['cpu_min']:.2f} to {one['cpu_max']:.2f})"
            for one in (found["dynamo alone"], found["cpt_fx"])
        ]
        ratios = [f"{found[key]:.2f}" for key in ("ratio", "wall_ratio", "capture_ratio")]
        lines.append(f"| {row['model']} | {' | '.join((*cells, *ratios))} |")
    return "\n".join(lines)


def step_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | plain, ms | torch.fx, ms | Dynamo, ms (median, min to max) | Dynamo against torch.fx |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        found = row["step"]
        plain, dynamo, symbolic = found["plain"], found["dynamo"], found.get("symbolic")
        cells = [
            f"{plain['cpu'] * 1e3:.1f}",
            f"{symbolic['cpu'] * 1e3:.1f}" if symbolic else "not captured",
            f"{dynamo['cpu'] * 1e3:.1f} ({dynamo['cpu_min'] * 1e3:.1f} to {dynamo['cpu_max'] * 1e3:.1f})",
            f"{dynamo['cpu'] / symbolic['cpu'] - 1:+.1%}" if symbolic else "",
        ]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(about: dict[str, Any]) -> str:
    """Return the page with everything measured."""
    lines = [
        "# Cost of capture by Dynamo",
        "",
        f"{about['machine']}. {about['versions']}. `{about['command']}`",
        "",
        "## The first call",
        "",
        f"{about['repeats']} runs each, in turn. CPU seconds of transform and first call, against the first call of "
        '`torch.compile(model, backend="eager", fullgraph=True)`. The first call also runs the model, with quantizers '
        "or without; the last column compares what is left of it without a later call. Ratios are medians of those of "
        "each turn, and each turn is at another depth of Python's stack.",
        "",
        capture_table(about["rows"]),
        "",
        *(f"* {verdict}" for verdict in about["verdicts"]),
        "",
        "## Every later call",
        "",
        f"{about['steps']} training steps each, in turn, forward and backward, with the quantizers of `default()`, not "
        "compiled, each step at another depth of Python's stack. CPU milliseconds. Tensors are small, so that overhead "
        "shows.",
        "",
        step_table(about["rows"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="captures of each kind")
    parser.add_argument("--steps", type=int, default=40, help="training steps of each kind")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--fast", action="store_true", help="two models, few repeats, nothing written")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    if arguments.fast:
        arguments.models, arguments.repeats, arguments.steps = list(FAST), 2, 5
    rows = measure(arguments.models, arguments.repeats, arguments.steps)
    versions = {"torch": torch.__version__}
    if importlib.util.find_spec("transformers"):
        versions["transformers"] = importlib.import_module("transformers").__version__
    about: dict[str, Any] = {
        "machine": f"{processor()}, {os.cpu_count()} cores, one thread",
        "versions": ", ".join([f"Python {platform.python_version()}", *map(" ".join, versions.items())]),
        "command": f"python benchmarks/capture_cost.py --repeats {arguments.repeats} --steps {arguments.steps}",
        "repeats": arguments.repeats,
        "steps": arguments.steps,
        "rows": rows,
        "verdicts": verdicts(rows),
    }
    text, page = json.dumps(about, indent=2) + "\n", report(about)
    if not arguments.fast:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "capture_cost.json").write_text(text, encoding="utf-8")
        (arguments.output / "capture_cost.md").write_text(page, encoding="utf-8")
    print(text if arguments.json else page, end="")


if __name__ == "__main__":
    main()
