"""`cpt-fx demo`: train, compare, show, write the report."""

from __future__ import annotations

import argparse
from pathlib import Path

from cpt_fx.cli.common import Commands, UsageError, add_json, command, print_json, print_table, schedule_name

FAST_STEPS = 80


def add(commands: Commands) -> None:
    """Declare the subcommand."""
    made = command(
        commands,
        "demo",
        run,
        "train a small net under a schedule and under static q_max",
        "Train a small residual net on real images, once under a schedule and once under static q_max. Takes about a\n"
        "minute on two cores and downloads nothing; ends with a table and an HTML report.\n"
        'Needs scikit-learn and matplotlib: pip install "cpt_fx[demo]".',
        "cpt-fx demo --schedule RR --seed 1 --output report",
    )
    made.add_argument("--fast", action="store_true", help=f"{FAST_STEPS} steps: a few seconds, to see that it runs")
    made.add_argument(
        "--output", type=Path, default=Path("cpt-fx-demo"), metavar="DIR", help="where the report goes (%(default)s)"
    )
    made.add_argument("--schedule", type=schedule_name, default="CR", metavar="NAME", help="(default: %(default)s)")
    made.add_argument("--steps", type=int, metavar="N", help="training steps of each run (default: 1600)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: %(default)s)")
    add_json(made)


def run(options: argparse.Namespace) -> None:
    """Train both, then print what was measured."""
    if options.output.exists() and not options.output.is_dir():
        raise UsageError(f"--output must be a directory, {options.output} is a file")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from cpt_fx import demo
    from cpt_fx.inspection import inspect

    steps = FAST_STEPS if options.fast else demo.Settings.steps
    try:
        settings = demo.Settings(
            schedule=options.schedule, seed=options.seed, steps=steps if options.steps is None else options.steps
        )
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    columns = ("{task.description:<10}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, int] = {}

        def advance(name: str, count: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=settings.steps)
            bar.advance(tasks[name], count)  # type: ignore[arg-type]

        runs = demo.run_demo(settings, advance)
    inspection = inspect(runs[0].model)
    proof = inspection.verify()
    path = demo.write_report(runs, settings, inspection, proof, options.output)
    if options.json:
        print_json({"runs": [one.to_dict() for one in runs], "proof": proof.to_dict(), "report": str(path)})
        return
    print_table(("", *demo.headings(settings)), [(one.name, *demo.results(one)) for one in runs])
    print(f"proven for {runs[0].name}, with evaluations among the runs: {proof}")
    print(f"report: {path}")
