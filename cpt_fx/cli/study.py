"""`cpt-fx study`: run a comparison of schedules, or of critical learning periods; show its status; report on it."""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpt_fx.cli import common
from cpt_fx.cli.common import Commands, UsageError, command, print_json, print_table
from cpt_fx.study.cells import Cell, Setting, periods, plan
from cpt_fx.study.engines import Engine
from cpt_fx.study.records import said
from cpt_fx.study.running import Study, carry_out, describe, load

TRAIN = "the training function, as file.py:name or package.module:name"


def add(commands: Commands) -> None:
    """Declare the subcommand and its own subcommands."""
    top = command(commands, "study", run_study)
    actions = top.add_subparsers(title="actions", metavar="ACTION")
    made = command(actions, "run", run_run)
    _add_common(made)
    names = 'such as "CR,RR,static,static 6" (default: the ten, static q_max, static q_min, full precision)'
    made.add_argument("--schedules", type=_words, metavar="NAMES", help=names)
    pair = "q_min and q_max; may be repeated (default: 3,8)"
    made.add_argument("--bits", type=_pair, action="append", metavar="MIN,MAX", help=pair)
    made = command(actions, "critical", run_critical)
    _add_common(made)
    group = made.add_argument_group("experiments")
    group.add_argument("--q-min", type=int, default=3, metavar="BITS", help="low precision (default: %(default)s)")
    group.add_argument("--q-max", type=int, default=8, metavar="BITS", help="high precision (default: %(default)s)")
    group.add_argument("--experiments", type=_words, metavar="NAMES", help="some of the four (default: all)")
    lengths = "lengths (default: 0, and 1/8, 1/4, 1/2 of --steps)"
    group.add_argument("--deficits", type=_numbers, metavar="STEPS", help=lengths)
    equal = "runs with a deficit are no longer than others (default: longer by it, as published)"
    group.add_argument("--constant-length", action="store_false", dest="lengthen", help=equal)
    group.add_argument("--window", type=int, metavar="N", help="length of the window (default: 1/4 of --steps)")
    group.add_argument("--starts", type=_numbers, metavar="STEPS", help="where it begins (default: each 1/8, to 1/2)")
    group.add_argument("--delayed", type=_words, metavar="NAMES", help="schedules to delay (default: RR,RTH)")
    group.add_argument("--delays", type=_numbers, metavar="STEPS", help="how long (default: 1/8 and 1/4 of --steps)")
    made = command(actions, "report", run_report)
    _add_store(made)
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the report goes")
    made = command(actions, "status", run_status)
    _add_store(made)
    common.add_json(made)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, metavar="STORE", help="the file that a study is kept in")
    parser.add_argument("--name", metavar="NAME", help="one study of several in the store (default: all)")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("train", metavar="TRAIN", help=TRAIN)
    parser.add_argument("--store", type=Path, required=True, metavar="FILE", help="where results are kept (SQLite)")
    parser.add_argument("--name", metavar="NAME", help="of the study (default: that of the file or function)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a report there at the end")
    group = parser.add_argument_group("what is trained")
    group.add_argument("--steps", type=int, required=True, metavar="N", help="training steps of each run")
    group.add_argument("--seeds", type=_seeds, default=3, metavar="N", help="how many, or a list as in 0,1,5 (3)")
    group.add_argument("--cycles", type=int, default=8, metavar="N", help="cycles of a schedule (default: %(default)s)")
    group.add_argument("--q-grad", type=int, metavar="BITS", help="width of gradients (default: q_max)")
    given = "an argument of the training function; may be repeated"
    group.add_argument(
        "--set", type=_assignment, action="append", default=[], dest="options", metavar="NAME=VALUE", help=given
    )
    group.add_argument("--metric", metavar="NAME", help="what to compare of all it returns (default: the first)")
    group.add_argument(
        "--better", choices=("higher", "lower"), default="higher", help="which values are (default: %(default)s)"
    )
    group = parser.add_argument_group("where it is trained")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    group.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads of each (default: 1)")
    group.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS", help="on a Ray cluster (default address: the one at hand)"
    )
    group.add_argument("--gpus", type=float, default=0, metavar="N", help="GPUs that Ray reserves for each cell")
    group.add_argument("--quiet", action="store_true", help="show no progress")
    common.add_json(parser)


def run_study(options: argparse.Namespace) -> None:
    """Train one task under many schedules, and compare them.

    Train one task under many schedules, seeds and ranges of bits. Every result is kept in one file as it comes:
    a study that is stopped, or killed, goes on where it was when the same command is given again.

    example:
      cpt-fx study status study.sqlite
    """
    raise UsageError(f"name an action, as in `cpt-fx study status`\n{options.parser.format_usage()}")


def run_run(options: argparse.Namespace) -> None:
    """Compare schedules.

    Train a task under each schedule, for each pair of bits and each seed. The function takes the schedule and
    optionally the seed, trains a new model, and returns a number or a dict of numbers.

    example:
      cpt-fx study run my.py:train --store study.sqlite --steps 800 --seeds 3 --bits 3,8 --workers 2 --out report
    """
    _carry_out(options, plan, schedules=options.schedules, bits=options.bits or [(3, 8)])


def run_critical(options: argparse.Namespace) -> None:
    """Look for critical learning periods.

    Does low precision early in training do harm that lasts? Four experiments: low precision in the first steps
    (deficit); a window of it that moves along training (window); RTV against ETV, which cost the same but begin
    high and low (first-cycle); and schedules that start later, the remedy (delayed).

    example:
      cpt-fx study critical my.py:train --store study.sqlite --steps 800 --deficits 0,100,200 --seeds 3
    """
    given = ("q_min", "q_max", "experiments", "deficits", "lengthen", "window", "starts", "delayed", "delays")
    more = {name: getattr(options, name) for name in given if getattr(options, name) is not None}
    _carry_out(options, periods, **more)


def _carry_out(options: argparse.Namespace, planner: Callable[..., list[Cell]], **more: Any) -> None:
    """Run a study, write its report, and raise an error if cells failed."""
    common.check_folder("--out", options.out)
    names = [name for name, _ in options.options]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UsageError(f"--set gives {repeated[0]} more than once")
    given = {name: getattr(options, name) for name in ("name", "seeds", "cycles", "q_grad", "better", "metric")}
    with common.told_as_usage():
        engine = Engine(options.workers, options.threads, options.ray, options.gpus)
        setting = Setting(options.train, total_steps=options.steps, options=dict(options.options), **given)
        cells = planner(setting, **more)
    study = carry_out(setting, cells, options.store, engine, not options.quiet)
    files = {} if options.out is None else {key: str(path) for key, path in study.write(options.out).items()}
    count = _show(options, study, files=files)
    if not options.json:
        for path in files.values():
            print(f"wrote {path}")
    if count:
        raise RuntimeError(f"{count} cell{'s' * (count != 1)} failed; the same command tries again")


def run_report(options: argparse.Namespace) -> None:
    """Write tables and figures.

    Write what a store holds as CSV, Markdown, figures and one page of HTML. A study that still runs can be
    reported on as far as it is.

    example:
      cpt-fx study report study.sqlite --out report
    """
    common.check_folder("--out", options.out)
    for path in load(options.store, options.name).write(options.out).values():
        print(f"wrote {path}")


def run_status(options: argparse.Namespace) -> None:
    """How far a study is, and what failed.

    Show how many cells of each study are done, failed and open, and why cells failed.

    example:
      cpt-fx study status study.sqlite --json
    """
    _show(options, load(options.store, options.name))


def _show(options: argparse.Namespace, study: Study, **more: object) -> int:
    """Print the status of a study, and return how many cells failed."""
    found: dict[tuple[str, str], Counter[str]] = {}
    cells = study.cells
    for cell in cells:
        counts = found.setdefault((cell.study, cell.experiment), Counter())
        counts["open" if cell.record is None else cell.record.status] += 1
    failed = [cell.record for cell in cells if cell.record is not None and cell.record.status == "failed"]
    status: dict[str, Any] = {
        "store": str(study.store),
        "studies": [
            {"name": name, "experiment": experiment} | {key: counts[key] for key in ("done", "failed", "open")}
            for (name, experiment), counts in found.items()
        ],
        "failed": [
            {"name": one.study, "cell": describe(one), "reason": said(one.error), "traceback": one.error}
            for one in failed
        ],
    }
    if options.json:
        print_json(status | more)
        return len(failed)
    columns = ("done", "failed", "open")
    print_table(
        ("study", "experiment", *columns),
        [(one["name"], one["experiment"], *(str(one[key]) for key in columns)) for one in status["studies"]],
        words=2,
    )
    for one in status["failed"]:
        print(f"{one['name']}, {one['cell']}: {one['reason']}")
    if failed:
        print("--json shows the tracebacks")
    return len(failed)


# Parsing of options.


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, got {text!r}") from None


def _pair(text: str) -> tuple[int, int]:
    numbers = _numbers(text)
    if len(numbers) != 2:
        raise argparse.ArgumentTypeError(f"must be two widths, as in 3,8, got {text!r}")
    return numbers[0], numbers[1]


def _seeds(text: str) -> int | list[int]:
    numbers = _numbers(text)
    return numbers[0] if len(numbers) == 1 and "," not in text else numbers


def _assignment(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE; the value is a Python literal (a number, True, None, a list) if it looks like one, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"must look like name=value, got {text!r}")
    try:
        return name.strip().replace("-", "_"), ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name.strip().replace("-", "_"), value
