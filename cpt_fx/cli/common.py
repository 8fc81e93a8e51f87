"""Shared by the subcommands: their declaration, their output, and the options that describe a schedule."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpt_fx.errors import check_choice
from cpt_fx.schedules import NAMES, Schedule, Static, named

if TYPE_CHECKING:
    from rich.text import Text

Commands = Any  # argparse has no public name for what add_subparsers returns


class UsageError(Exception):
    """Wrong usage of the command: exit code 2."""


@contextmanager
def told_as_usage() -> Iterator[None]:
    """Turn errors that a function raises about its arguments into `UsageError`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def check_folder(flag: str, path: Path | None) -> None:
    """Raise `UsageError` if a path that should be a directory is a file."""
    if path is not None and path.exists() and not path.is_dir():
        raise UsageError(f"{flag} must be a directory, {path} is a file")


def command(commands: Commands, name: str, run: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
    """Declare a subcommand; the docstring of `run` is its help: a summary for the list, a text and an example."""
    summary, text, example = (*cleandoc(run.__doc__ or "").split("\n\n"), "", "")[:3]
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=summary[:1].lower() + summary[1:].rstrip("."), description=text, epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.set_defaults(run=run, parser=made)
    return made


def print_json(data: object) -> None:
    """Print data as JSON, for a program to read."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str | Text]], words: int = 1) -> None:
    """Print a table for a person to read; the first `words` columns hold words, the others numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    show(table)


def answer(options: argparse.Namespace, data: Callable[[], object], shown: object) -> None:
    """Print data with --json, else an object that rich renders."""
    if options.json:
        print_json(data())
    else:
        show(shown)


def show(renderable: object) -> None:
    """Print an object that rich renders; outside of a terminal it is 160 columns wide."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 160).print(renderable)


def schedule_name(text: str) -> str:
    """Check the name of a schedule, as a type for argparse."""
    try:
        return check_choice("schedule", text.upper() if text.upper() in NAMES else text, NAMES)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="print data instead of a table")


def add_schedule(parser: argparse.ArgumentParser) -> None:
    """Add --schedule."""
    parser.add_argument("--schedule", type=schedule_name, default="CR", metavar="NAME", help="(default: %(default)s)")


def add_range(parser: argparse.ArgumentParser) -> None:
    """Add the options that every schedule has."""
    group = parser.add_argument_group("schedule")
    group.add_argument("--q-min", type=int, default=3, metavar="BITS", help="lowest width (default: %(default)s)")
    group.add_argument("--q-max", type=int, default=8, metavar="BITS", help="highest width (default: %(default)s)")
    group.add_argument("--q-grad", type=int, metavar="BITS", help="width of gradients (default: q_max)")
    group.add_argument("--steps", type=int, default=64_000, metavar="N", help="training steps (default: %(default)s)")
    group.add_argument("--cycles", type=int, default=8, metavar="N", help="cycles in them (default: %(default)s)")


def build_schedule(name: str, options: argparse.Namespace) -> Schedule:
    """Return the schedule that the options describe; "static" is q_max throughout."""
    with told_as_usage():
        if name == "static":
            return Static(options.q_max, options.q_grad, total_steps=options.steps)
        low, high, steps = options.q_min, options.q_max, options.steps
        return named(name, q_min=low, q_max=high, total_steps=steps, cycles=options.cycles, q_grad=options.q_grad)
