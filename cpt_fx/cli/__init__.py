"""The command `cpt-fx`; torch is imported only by the subcommands that need it, so that the others start at once."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from cpt_fx.cli import export, models, planning, study
from cpt_fx.cli.common import UsageError

DESCRIPTION = "Low-precision training as a compiler pass: plan a schedule, rewrite a model, look at the result."
EPILOG = """examples:
  cpt-fx demo                          train a small net under a schedule, and write a report
  cpt-fx schedules                     what the ten schedules are, and what they save
  cpt-fx inspect mymodel:make          what is quantized in a model of yours, and what is not
  cpt-fx study run my.py:train ...     train your own task under all ten, and compare them

cpt-fx COMMAND --help says more about each."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command."""
    top = argparse.ArgumentParser(
        prog="cpt-fx",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # From sys.modules: the package's top layer is above this one and cannot be imported from here.
    top.add_argument("--version", action="version", version=f"cpt-fx {vars(sys.modules['cpt_fx'])['__version__']}")
    top.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for add in (models.add_demo, planning.add, models.add, export.add, study.add):
        add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0, 1 for a failure, 2 for wrong usage, 130 if interrupted."""
    made = parser()
    options = made.parse_args(arguments)
    if not hasattr(options, "run"):
        made.print_help(sys.stderr)
        return 2
    # Show a warning as a sentence, without the file and source line that Python adds.
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"cpt-fx: warning: {_indented(message)}", file=sys.stderr)
        try:
            options.run(options)
            sys.stdout.flush()
        except UsageError as error:
            return _fail(error, 2, options.traceback)
        except BrokenPipeError:
            # The reader, such as `head`, has closed the pipe. Nothing more may be written, not even on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (ImportError, OSError, TypeError, ValueError, RuntimeError) as error:
            return _fail(error, 1, options.traceback)
        except KeyboardInterrupt:
            print("cpt-fx: interrupted", file=sys.stderr)
            return 130
    return 0


def _fail(error: BaseException, code: int, show_traceback: bool) -> int:
    if show_traceback:
        traceback.print_exception(error)
    print(f"cpt-fx: error: {_indented(error) or type(error).__name__}", file=sys.stderr)
    return code


def _indented(message: object) -> str:
    """Return the lines of a message, all but the first one indented by at least two."""
    first, *rest = [line.rstrip() for line in str(message).strip().splitlines() if line.strip()] or [""]
    return "\n".join((first, *(line if line.startswith("  ") else f"  {line}" for line in rest)))
