"""One model under every way to train it, side by side: step time, memory and compilation.

    python benchmarks/compare.py                                          # a small residual net, all contenders
    python benchmarks/compare.py --model bert-layer --contenders eager    # no compilers: quick
    python benchmarks/compare.py --model mypackage.models:make --html bench.html

`docs/benchmarks.md` says what is measured, and how.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.catalog import CONTENDERS, GROUPS, PRESETS, Settings, chosen

from cpt_fx.cli.common import UsageError, add_json, print_json, print_table, schedule_name
from cpt_fx.cli.models import load

if TYPE_CHECKING:
    from harness.models import Workload
    from harness.results import Result

TEXT = """Time a training step of a model in FP32, in bf16 autocast, in simulated and integer low precision, and in
other packages that are installed, eager and compiled. Contenders take turns in one process; step times are ratios,
FP32 eager is 1. Next to them: peak memory, compile time, recompilations while widths change, the products that ran,
and the targets of this project. Compiling takes its time: minutes for a large model with all contenders.

models:
{models}
  package.module:callable takes no arguments and returns (model, example_inputs) or (model, example_inputs, loss)

contenders:
  {contenders}"""


def parser() -> argparse.ArgumentParser:
    """Return the parser. Nothing here imports torch, so that `--help` is quick."""
    models = "\n".join(f"  {name:<12} {preset.about}, batch {preset.batch}" for name, preset in PRESETS.items())
    eager = [name for name, contender in CONTENDERS.items() if not contender.compiled]
    made = argparse.ArgumentParser(
        description=TEXT.format(
            models=models, contenders=f"{', '.join(eager)};\n  each also with -compiled behind its name"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default="resnet20", metavar="NAME", help="one from above (default: %(default)s)")
    made.add_argument("--batch", type=int, metavar="N", help="batch of a named model (default: see above)")
    made.add_argument("--steps", type=int, default=Settings.steps, metavar="N", help="rounds (default: %(default)s)")
    made.add_argument("--threads", type=int, metavar="N", help="(default: one for each core)")
    made.add_argument(
        "--contenders", nargs="+", default=[], metavar="NAME",
        help=f"names from above, or {' or '.join(GROUPS)} for several; FP32 eager is always there (default: all)",
    )  # fmt: skip
    made.add_argument("--recipe", default=Settings.recipe, metavar="NAME", help="formats when simulated (%(default)s)")
    made.add_argument(
        "--schedule",
        type=_schedule,
        default=Settings.schedule,
        metavar="NAME",
        help='or "static" (default: %(default)s)',
    )
    made.add_argument(
        "--bits", type=int, nargs=2, default=(Settings.q_min, Settings.q_max), metavar=("LOW", "HIGH"),
        help="widths of the schedule (default: 3 8)",
    )  # fmt: skip
    made.add_argument("--backend", default=Settings.backend, metavar="NAME", help="compiler (default: %(default)s)")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts")
    add_json(made)
    return made


def measure(options: argparse.Namespace) -> None:
    """Compare, then print what was measured."""
    # Read when torch is loaded: without it, torch logs a line for every block allocated before the profiler started.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    low, high = options.bits
    named = options.model in PRESETS
    if not named and options.batch is not None:
        raise UsageError(f"--batch is for named models; the batch of {options.model} is what it returns")
    if not named and ":" not in options.model:
        raise UsageError(f"--model is {', '.join(PRESETS)} or package.module:callable, got {options.model!r}")
    if options.html is not None and options.html.is_dir():
        raise UsageError(f"--html must be a file, {options.html} is a folder")
    try:
        settings = Settings(
            steps=options.steps,
            threads=_cores() if options.threads is None else options.threads,
            contenders=chosen(options.contenders),
            recipe=options.recipe,
            schedule=options.schedule,
            q_min=low,
            q_max=high,
            backend=options.backend,
        )
        workload = _preset(options) if named else None
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    if workload is None:
        from harness.models import given

        workload = given(options.model, load(options.model))
    result = _compared(workload, settings, _command(options, settings))
    if options.html is not None:
        from harness.page import html

        options.html.write_text(html(result), encoding="utf-8")
        print(f"wrote {options.html}", file=sys.stderr)
    if options.json:
        print_json(result.to_dict())
    else:
        _print(result)


def _preset(options: argparse.Namespace) -> Workload:
    from harness.models import preset
    from harness.preparing import quiet

    with quiet():  # transformers imports other packages, which print warnings
        return preset(options.model, options.batch)


def _command(options: argparse.Namespace, settings: Settings) -> str:
    """Return the command that repeats this measurement, however it was started."""
    words = [
        "python",
        "benchmarks/compare.py",
        "--model",
        options.model,
        "--steps",
        settings.steps,
        "--threads",
        settings.threads,
    ]
    if options.batch is not None:
        words += ["--batch", options.batch]
    if options.contenders:
        words += ["--contenders", *options.contenders]
    for name, value, usual in (
        ("--recipe", [settings.recipe], [Settings.recipe]),
        ("--schedule", [settings.schedule], [Settings.schedule]),
        ("--bits", [settings.q_min, settings.q_max], [Settings.q_min, Settings.q_max]),
        ("--backend", [settings.backend], [Settings.backend]),
    ):
        words += [name, *value] if value != usual else []
    return shlex.join(map(str, words))


def _compared(workload: Workload, settings: Settings, command: str) -> Result:
    from harness.contenders import plan
    from harness.measuring import run
    from rich.console import Console

    from cpt_fx.recipes import resolve

    try:
        plan(settings)
        resolve(settings.recipe)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    with Console(stderr=True).status("starting") as status:
        return run(workload, settings, status.update, command)


def _print(result: Result) -> None:
    from harness.table import LEGEND, missing, scale, tables

    print(f"{result.about}\n{result.machine}")
    for headings, rows in tables(result):
        print_table(headings, rows)
    for sentence in missing(result):
        print(sentence)
    print(scale(result), *LEGEND, sep="\n")
    for verdict in result.verdicts:
        print(f"target, {verdict}")


def _schedule(text: str) -> str:
    return "static" if text.lower() == "static" else schedule_name(text)


def _cores() -> int:
    # The cores that this process may run on, which a container may limit.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script; the exit code is 1 for a failure, 2 for a wrong call."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        measure(options)
    except UsageError as error:
        made.error(str(error))
    except (ImportError, OSError, TypeError, ValueError, RuntimeError) as error:
        sys.exit(f"{made.prog}: error: {error}")


if __name__ == "__main__":
    main()
