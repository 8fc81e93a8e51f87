"""The page about all benchmarks, made from the results that `run.py` wrote. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common import origin, read
from harness.catalog import PRESETS
from harness.results import Result
from harness.table import LEGEND, markdown, scale
from harness.targets import TARGETS, Verdict

INTRODUCTION = """# Benchmarks

How long a training step takes and how much memory it needs, in FP32, bf16, simulated and integer low precision, and in
other packages, eager and compiled. This page is written by one command, which measures everything:

```bash
pip install -c constraints.txt ".[bench,transformers]"
python benchmarks/run.py
```

`python benchmarks/run.py --only resnet74` measures one part, `python benchmarks/compare.py` compares on a model of
yours ([docs/benchmarks.md](../docs/benchmarks.md)). Step times are ratios to FP32 eager in the same round; machines
differ, and are noisy: the spread says how much."""

WORDS = {True: "met", False: "**missed**", None: "not measured"}
SCRIPTS = (
    ("step_overhead", "What does a step cost more, against width, depth, batch and sequence length?"),
    ("transform_scaling", "Is `transform` linear in the size of the graph?"),
    ("capture_cost", "What does capture by Dynamo add to Dynamo's own time, and to later calls?"),
    ("recurrent_step", "What does a recurrent layer cost when it is decomposed, against torch's fused kernel?"),
    ("ort_step", "How long is a training step in ONNX Runtime, next to PyTorch eager and compiled?"),
    ("compiled_zoo", "Is a compiled graph compiled again when bits change, or modes?"),
    ("batch_norm", "How far do batch norm's running statistics lag behind low widths, and what do new ones give?"),
    ("kernel_loading", "How long do kernels that are built take to load?"),
    ("products", "How fast are products of codes, next to torch's and to what the processor can do?"),
)


def page(results: Path) -> str:
    """Return the page."""
    found = [Result.from_dict(data) for name in PRESETS if (data := read(results, f"bench_{name}")) is not None]
    parts = [INTRODUCTION, *_targets(found), *(text for result in found for text in _model(result))]
    return "\n\n".join([*parts, *_overhead(results), *_scripts(results)]) + "\n"


def _targets(found: list[Result]) -> Iterator[str]:
    """Yield for every target whether it is met; targets of models without a measurement are marked as such."""
    yield "## Targets"
    measured = {result.model: result.verdicts for result in found}
    for model in PRESETS:
        measured.setdefault(model, [Verdict(target=target, reason="") for target in TARGETS if model in target.models])
    rows = [
        f"| {model} | {verdict.target} | {verdict.measured} | {WORDS[verdict.met]} |"
        for model, verdicts in measured.items()
        for verdict in verdicts
    ]
    yield "\n".join(["| model | target | | |", "| --- | --- | --- | --- |", *rows])
    missed = sum(verdict.met is False for verdicts in measured.values() for verdict in verdicts)
    unknown = sum(verdict.met is None for verdicts in measured.values() for verdict in verdicts)
    yield f"{len(rows)} targets: {len(rows) - missed - unknown} met, {missed} missed, {unknown} not measured."


def _model(result: Result) -> Iterator[str]:
    yield f"## {result.model}"
    yield f"{result.about}. {result.machine.place}. `{result.machine.command}`"
    yield markdown(result)
    yield f"{scale(result)} [Charts](results/bench_{result.model}.html)."
    yield "\n".join(f"* {line}" for line in LEGEND)


def _overhead(results: Path) -> Iterator[str]:
    found = read(results, "step_overhead")
    if found is not None:
        yield "## Cost against work"
        yield f"{origin(found)} [The numbers](results/step_overhead.md)."
        yield "![Step time against width, depth, batch and sequence length](results/step_overhead.png)"


def _scripts(results: Path) -> Iterator[str]:
    yield "## Other measurements"
    rows = [f"| `{name}.py` | {question} | {_link(results, name)} |" for name, question in SCRIPTS]
    yield "\n".join(["| script | question | result |", "| --- | --- | --- |", *rows])


def _link(results: Path, name: str) -> str:
    return f"[results/{name}.md](results/{name}.md)" if (results / f"{name}.md").exists() else "not measured yet"
